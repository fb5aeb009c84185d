/* SPDX-FileCopyrightText: the libxent authors
 * SPDX-License-Identifier: Apache-2.0 */

/* xent/xent.h - softmax cross-entropy for large vocabularies.
 *
 * The forward pass reads the logits once and keeps two numbers a row; the backward pass reads them
 * once more and writes the gradient, into a buffer of its own or over the logits. Where the upstream
 * gradient is known in advance, xent_loss_and_grad does both in one call.
 *
 *     xent_context_create -> xent_plan_create -> xent_forward -> xent_backward
 *                         -> xent_plan_destroy -> xent_context_destroy
 *
 * The vocabulary may be split over ranks ("vocab-parallel", see xent_plan_desc::ranks): each rank
 * holds some columns of the same rows, one all-gather of 12 to 24 bytes a row joins them in forward,
 * and backward needs none.
 *
 * What is computed. For a row with logits x over K classes and target t:
 *
 *     z_i  = logit_scale * x_i                                 without softcap
 *     z_i  = softcap * tanh(logit_scale * x_i / softcap)       with softcap
 *     lse  = log sum_i exp(z_i)
 *     l    = (1 - s) * (lse - z_t) + s * (lse - (1/K) * sum_i z_i) + z_loss * lse^2,   s: smoothing
 *     loss = w * l                                             w: the row's weight, 1 without weights
 *     dx_i = g * w * dz_i/dx_i * (p_i * (1 + 2 * z_loss * lse) - s/K - (1 - s) * [i = t])
 *
 * g is the upstream gradient times the factor of the reduction. Arithmetic is float32 (float64 for
 * float64 logits); the gradient is rounded once, when it is stored.
 *
 * Rows that do not count. A row is ignored where its target equals ignore_index or its mask is 0:
 * its loss and gradient are exactly 0 whatever it holds. A target outside [0, K) of a row that is
 * not ignored reads nothing out of bounds: the row's loss is NaN, its gradient 0, and row_counts
 * tells how many there were.
 *
 * Contract shared by every function below
 *   - It never throws, aborts, prints, installs handlers or changes the caller's current device.
 *   - Bad arguments give a status and a message naming the argument, the value and the rule; then no
 *     output is written, no device work starts and nothing is left to free. After DEVICE_ERROR,
 *     COMM_ERROR and INTERNAL the outputs are undefined.
 *   - `err` may be NULL. Otherwise set err->struct_size; it is written on failure only.
 *   - Structs carry their size in struct_size = sizeof(the struct) and must be zeroed first. Zero
 *     means "default" in every field. A struct that is longer than the library knows is accepted
 *     when the bytes beyond are zero and refused with XENT_INVALID_STRUCT otherwise, so an option
 *     is never silently ignored.
 *   - Destroy functions return void and accept NULL; any order of destruction is legal.
 *   - forward, backward, loss_and_grad and scale_grad allocate nothing, never synchronise and create
 *     no stream: they enqueue on the caller's stream and may be captured in a CUDA graph, also on
 *     first use.
 *   - The same inputs give the same bits in every run, and the results of a row do not depend on the
 *     other rows, on its position or address, or on the number of threads.
 *
 * Threads: a context and a plan may be used from many threads at once. Two calls that run
 * concurrently must not share a workspace or an output.
 */
#ifndef XENT_XENT_H
#define XENT_XENT_H

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#define XENT_VERSION_MAJOR 0
#define XENT_VERSION_MINOR 1
#define XENT_VERSION_PATCH 0
#define XENT_ABI_VERSION 0 /* equals the SONAME; moves only when an old binary would break */

#if defined(__GNUC__)
#define XENT_API __attribute__((visibility("default")))
#else
#define XENT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ---------------------------------------------------------------------------------- */

/* A fixed-width integer, not an enum: the width of a C enum is the compiler's choice. Values never
 * change; new ones may be added, so treat an unknown status as a failure. */
typedef int32_t xent_status;
enum {
  XENT_OK = 0,
  XENT_INVALID_ARGUMENT = 1,
  XENT_INVALID_STRUCT = 2, /* struct_size below the minimum, or an unknown field is set */
  XENT_UNSUPPORTED = 3,    /* well formed, but no backend here implements it */
  XENT_WORKSPACE_TOO_SMALL = 4,
  XENT_OUT_OF_MEMORY = 5,
  XENT_DEVICE_ERROR = 6, /* xent_error::native_code holds the cudaError_t */
  XENT_COMM_ERROR = 7,   /* xent_error::native_code holds the ncclResult_t, or what the callback set */
  XENT_PLUGIN_ERROR = 8,
  XENT_INTERNAL = 9
};

typedef struct xent_error {
  size_t struct_size; /* set by the caller: sizeof(xent_error) */
  xent_status status;
  int32_t native_code;
  char message[496]; /* NUL-terminated UTF-8, truncated if needed */
} xent_error;

/* The SONAME number of the library that runs, to compare with XENT_ABI_VERSION. */
XENT_API uint32_t xent_abi_version(void);
/* "major.minor.patch" of the library that runs. Static storage. */
XENT_API const char *xent_version_string(void);
/* "XENT_OK" and so on; "XENT_UNKNOWN" for a value without a name. Static storage. */
XENT_API const char *xent_status_name(xent_status status);

/* ---- Context: backends, CPU threads and the log sink ------------------------------------------ */

typedef struct xent_context xent_context;

enum { XENT_LOG_DEBUG = 0, XENT_LOG_INFO = 1, XENT_LOG_WARNING = 2, XENT_LOG_ERROR = 3 };

typedef struct xent_context_desc {
  size_t struct_size;
  const void *next; /* must be NULL */
  /* Called with a NUL-terminated message; from any thread that calls libxent. NULL: silent. */
  void (*log)(void *user, int32_t level, const char *message);
  void *log_user;
  int32_t threads; /* of the CPU backend, the caller's included, at most 4096; 0: all cores this process may use */
  uint32_t flags;  /* must be 0 */
} xent_context_desc;

/* `desc` NULL: all defaults. On success *out owns one reference. */
XENT_API xent_status xent_context_create(const xent_context_desc *desc, xent_context **out, xent_error *err);
/* Plans and communicators keep their context alive, so a context may be destroyed before them. */
XENT_API void xent_context_destroy(xent_context *ctx);

/* Loads a backend plugin. `path` with a '/' is a file; without, "cuda" means libxent_cuda.so in the
 * folders of XENT_PLUGIN_PATH (ignored in set-uid programs), then in the folder xent/ beside the
 * library. The current directory is never searched. The CUDA backend is loaded by itself when a
 * plan first asks for a CUDA device. A backend stays loaded until the process ends. */
XENT_API xent_status xent_backend_load(xent_context *ctx, const char *path, xent_error *err);
XENT_API size_t xent_backend_count(const xent_context *ctx);
/* NULL when index >= xent_backend_count(ctx). Lives as long as the context. */
XENT_API const char *xent_backend_name(const xent_context *ctx, size_t index);

/* ---- Communicator: the all-gather of a split vocabulary --------------------------------------- */

typedef struct xent_comm xent_comm;

enum { XENT_COMM_GRAPH_CAPTURE = 1u << 0 }; /* all_gather may be captured in a CUDA graph */

/* A communicator made of callbacks: MPI, threads of one process, a framework's process group. A
 * callback that fails returns a status other than XENT_OK and may fill `err` (never NULL, set up);
 * the call that needed it then gives XENT_COMM_ERROR. all_gather and async_error may also end their
 * thread (pthread_exit): the call then never returns, and other threads find the communicator spent. */
typedef struct xent_comm_desc {
  size_t struct_size;
  const void *next; /* must be NULL */
  DLDevice device;  /* whose memory all_gather moves. All zero: {kDLCPU, 0} */
  int32_t rank;     /* of the caller, 0 .. ranks - 1 */
  int32_t ranks;    /* 1 .. 65536 */
  void *user;
  /* Each rank gives `bytes` at `send`; every rank gets all of them, ranks * bytes in rank order, at
   * `recv`. The two do not overlap. CUDA: ordered on `stream`, without a host synchronisation where
   * the calls shall have none. CPU: `stream` is NULL, and the data are there when it returns. Waits no
   * longer than the communicator's own timeout. */
  xent_status (*all_gather)(void *user, const void *send, void *recv, size_t bytes, void *stream, xent_error *err);
  /* Optional: reports a failure that showed after all_gather had returned. Must not wait. */
  xent_status (*async_error)(void *user, xent_error *err);
  void (*release)(void *user); /* optional; called once, when the communicator and its plans are gone */
  uint32_t flags;              /* XENT_COMM_* */
  uint32_t reserved;           /* must be 0 */
} xent_comm_desc;

/* After its first failure a communicator is spent: every call of its plans gives XENT_COMM_ERROR. Make
 * a new communicator and a new plan with it. */
XENT_API xent_status xent_comm_create(xent_context *ctx, const xent_comm_desc *desc, xent_comm **out, xent_error *err);
/* Wraps a borrowed ncclComm_t, which must outlive the plans that use it. `nccl_library` is a dlopen
 * handle of the libnccl that made it; NULL: the one that this process has loaded. Rank, number of
 * ranks and device are asked of NCCL. May be captured in a CUDA graph. Not to be used while a group
 * of ncclGroupStart is open. */
XENT_API xent_status xent_comm_from_nccl(xent_context *ctx, void *nccl_comm, void *nccl_library, xent_comm **out,
                                         xent_error *err);
/* Plans keep their communicator alive. */
XENT_API void xent_comm_destroy(xent_comm *comm);

/* ---- Plan: what to compute -------------------------------------------------------------------- */

typedef struct xent_plan xent_plan;

enum { XENT_REDUCTION_NONE = 0, XENT_REDUCTION_SUM = 1, XENT_REDUCTION_MEAN = 2 };

enum {
  XENT_PLAN_IGNORE_INDEX = 1u << 0,      /* ignore_index is meaningful (0 is a valid class) */
  XENT_PLAN_OVERWRITE_LOGITS = 1u << 1,  /* the gradient may be written over the logits */
  XENT_PLAN_EMPTY_MEAN_IS_NAN = 1u << 2, /* MEAN over no rows: NaN as PyTorch, not 0; gradients stay 0 */
  XENT_PLAN_ENTROPY = 1u << 3,           /* the entropy output may be asked for */
  XENT_PLAN_PREDICTED = 1u << 4          /* the argmax output may be asked for */
};

typedef struct xent_plan_desc {
  size_t struct_size;
  const void *next;        /* must be NULL */
  DLDevice device;         /* all zero: {kDLCPU, 0} */
  DLDataType logits_dtype; /* float32, float16, bfloat16; on the CPU also float64. All zero: float32 */
  DLDataType target_dtype; /* int32 or int64. All zero: int64 */
  int64_t max_rows;        /* a call may use any 0 <= rows <= max_rows */
  int64_t vocab;           /* columns of the logits, >= 1 (split: >= 0), padding included */
  int64_t classes;         /* real classes K <= vocab; the columns beyond get gradient 0. 0: vocab. Split: 0,
                              or K = class_offsets[ranks] */
  int64_t ignore_index;    /* any int64; needs XENT_PLAN_IGNORE_INDEX */
  uint32_t flags;          /* XENT_PLAN_* */
  int32_t reduction;       /* XENT_REDUCTION_* */
  double label_smoothing;  /* s in [0, 1] */
  double z_loss;           /* weight of lse^2, >= 0 */
  double softcap;          /* > 0, or 0: off; logit_scale / softcap must be a normal number of the arithmetic */
  double logit_scale;      /* > 0; 0 means 1 */
  /* A vocabulary split over ranks. Rank r holds the classes [class_offsets[r], class_offsets[r + 1]) in
   * its first columns, in order; shards may be uneven or empty, and columns beyond are padding. All but
   * vocab, rank and comm must be the same on every rank, and so must be the rows, targets, masks,
   * weights and denominators of a call: targets are global. Logits of K or more columns are refused
   * where a rank holds only some of the classes: they are gathered already. */
  const int64_t *class_offsets; /* [ranks + 1], from 0 to K, not decreasing; copied. NULL: not split */
  int32_t rank;                 /* 0 .. ranks - 1 */
  int32_t ranks;                /* 0: not split. At most 65536 */
  xent_comm *comm;              /* of the same rank, ranks and device; kept alive. NULL: not split, or the caller runs
                                   the all-gather between xent_forward_partial and xent_forward_combine */
} xent_plan_desc;

enum {
  XENT_CAP_GRAPH_CAPTURE = 1u << 0, /* calls may be captured in a CUDA graph */
  XENT_CAP_ONE_PASS = 1u << 1       /* loss_and_grad reads the logits from memory once */
};

typedef struct xent_plan_info { /* the caller sets struct_size; the library fills what fits */
  size_t struct_size;
  size_t forward_workspace_bytes; /* for max_rows rows, like the next two; of partial and combine too */
  size_t backward_workspace_bytes;
  size_t loss_and_grad_workspace_bytes;
  size_t saved_bytes;       /* what must live between forward and backward, logits and targets apart */
  size_t alignment;         /* of the workspace, in bytes */
  const char *backend_name; /* lives as long as the plan */
  uint32_t capabilities;    /* XENT_CAP_* */
  int32_t partial_width;    /* split: numbers a row of a partial, 3 to 6. Not split: 0 */
} xent_plan_info;

/* Checks the description, picks the backend and loads all that the plan may launch: slow, may
 * allocate, thread-safe. A plan never changes afterwards. */
XENT_API xent_status xent_plan_create(xent_context *ctx, const xent_plan_desc *desc, xent_plan **out, xent_error *err);
XENT_API void xent_plan_destroy(xent_plan *plan);
XENT_API xent_status xent_plan_get_info(const xent_plan *plan, xent_plan_info *info, xent_error *err);

/* ---- Execution --------------------------------------------------------------------------------- */

/* Tensors are borrowed for the call; the memory they point to must stay valid until the work
 * enqueued on `stream` has run. [...] is any shape of up to 8 dimensions with `rows` elements, the
 * same for all tensors of a call. Strides are free (NULL: packed; 0 and negative ones too), any
 * byte_offset and any alignment that the element type allows. "acc" is float32, or float64 for
 * float64 logits. [] is a tensor without dimensions, or of shape [1]. Outputs must not overlap each
 * other, themselves or an input, but for the overwrite named at grad_logits. */

typedef struct xent_forward_args {
  size_t struct_size;
  const void *next; /* must be NULL */
  void *stream;     /* CUDA: CUstream, NULL is the legacy default stream. CPU: must be NULL */
  void *workspace;  /* on the plan's device, aligned to xent_plan_info::alignment; contents arbitrary */
  size_t workspace_bytes;
  const DLTensor *logits;      /* in  [..., vocab]; never written */
  const DLTensor *targets;     /* in  [...] target_dtype; global where the vocabulary is split */
  const DLTensor *mask;        /* in  [...] bool, uint8, int32, int64 or float32, optional: 0 means ignored */
  const DLTensor *row_weights; /* in  [...] acc, optional */
  const DLTensor *denominator; /* in  [] float32, int32 or int64, optional: divides SUM or MEAN; 0 gives 0 */
  const DLTensor *loss;        /* out [] (SUM, MEAN) or [...] (NONE), acc */
  const DLTensor *stats;       /* out [rows, 2] acc: maximum and sum of exponentials; optional: NULL where
                                  no backward follows */
  const DLTensor *divisor;     /* out [] acc, optional: what was divided by, for backward. Refused where
                                  nothing is divided (no MEAN and no denominator) */
  const DLTensor *lse;         /* out [...] acc, optional, like all that follow; 0 for ignored rows */
  const DLTensor *entropy;     /* out [...] acc, in nats; needs XENT_PLAN_ENTROPY; 0 for ignored rows */
  const DLTensor *predicted;   /* out [...] int32 or int64: lowest index of the largest logit; needs
                                  XENT_PLAN_PREDICTED; -1 for ignored rows and rows without a finite softmax;
                                  global where the vocabulary is split */
  const DLTensor *row_counts;  /* out [3] int32 or int64: counted, ignored, out of range */
} xent_forward_args;

typedef struct xent_backward_args {
  size_t struct_size;
  const void *next;
  void *stream;
  void *workspace;
  size_t workspace_bytes;
  const DLTensor *logits; /* as in forward, like the next three */
  const DLTensor *targets;
  const DLTensor *mask;
  const DLTensor *row_weights;
  const DLTensor *stats;       /* in  [rows, 2] acc, written by forward */
  const DLTensor *divisor;     /* in  [] acc, written by forward: required with MEAN, optional with SUM (what
                                  a denominator was), refused with NONE */
  const DLTensor *grad_loss;   /* in  [] any float type; NONE also [...]. NULL: 1 */
  const DLTensor *grad_logits; /* out [..., vocab] of the logits' type or float32: disjoint from the logits, or
                                  exactly their storage and strides (needs XENT_PLAN_OVERWRITE_LOGITS) */
} xent_backward_args;

/* Over more than one rank, forward and loss_and_grad need a communicator in the plan and are called by
 * every rank in the same order; what they write, the gradient apart, has the same bits on every rank.
 * A rank that does not call leaves the others waiting for the communicator's timeout. backward needs
 * none: each rank writes the gradient of its own columns. One rank computes as if there were no split. */
XENT_API xent_status xent_forward(const xent_plan *plan, const xent_forward_args *args, xent_error *err);
XENT_API xent_status xent_backward(const xent_plan *plan, const xent_backward_args *args, xent_error *err);

/* Loss and gradient together, for callers who know grad_loss already: the last layer of a training
 * step. Workspace and stream are those of `forward`. */
typedef struct xent_loss_and_grad_args {
  size_t struct_size;
  const void *next;
  const xent_forward_args *forward;
  const DLTensor *grad_loss;   /* as in xent_backward_args */
  const DLTensor *grad_logits; /* as in xent_backward_args */
} xent_loss_and_grad_args;

XENT_API xent_status xent_loss_and_grad(const xent_plan *plan, const xent_loss_and_grad_args *args, xent_error *err);

typedef struct xent_scale_grad_args {
  size_t struct_size;
  const void *next;
  void *stream;
  const DLTensor *targets; /* as in forward, like the next */
  const DLTensor *mask;
  const DLTensor *grad_loss;   /* in  [] any float type; NONE also [...]. Required */
  const DLTensor *grad_logits; /* in and out [..., vocab] of the logits' type or float32 */
} xent_scale_grad_args;

/* Multiplies a gradient that xent_loss_and_grad wrote for a grad_loss of NULL by the one that turned out
 * since, in place: what a framework's backward does where forward has made the gradient already. Each row
 * that counts is multiplied by its grad_loss, in float32 (float64 for float64 logits, and where grad_loss is
 * float64), and rounded again: the value was rounded when it was stored, so it is rounded twice, where
 * xent_backward with grad_loss rounds once (a power of two changes nothing short of the type's ends). Rows
 * that are ignored or whose target is out of range stay as they are, 0, whatever their grad_loss is, and so
 * do padding columns; in a row that counts 0 times infinity is NaN, also where a divisor of 0 made the 0.
 * Where a grad_loss is 1 nothing of its rows is read or written, and of a scalar 1 that one read is all: a
 * few microseconds, and no read on the host. Otherwise the gradient is read once and written once. It needs
 * no workspace and, over ranks, no communication: each rank scales its own columns. XENT_UNSUPPORTED where
 * the plan's backend has no such function. */
XENT_API xent_status xent_scale_grad(const xent_plan *plan, const xent_scale_grad_args *args, xent_error *err);

/* A split vocabulary with the caller's own collective (torch.distributed, XLA, MPI), in place of
 * xent_forward: each rank writes its partial, the caller all-gathers them in rank order, every rank
 * combines all of them. What a partial holds is the business of one build of the library: the ranks run
 * the same one on the same kind of device. Its numbers may be any bits; they are to be copied, not
 * computed with. */
typedef struct xent_partial_args {
  size_t struct_size;
  const void *next;
  void *stream; /* as in xent_forward_args, like the next five */
  void *workspace;
  size_t workspace_bytes;
  const DLTensor *logits;
  const DLTensor *targets;
  const DLTensor *mask;
  const DLTensor *partial; /* out [rows, partial_width] acc */
} xent_partial_args;

typedef struct xent_combine_args {
  size_t struct_size;
  const void *next;
  const xent_forward_args *forward; /* as for xent_forward, but for logits: NULL. [...] is the targets' shape */
  const DLTensor *partials;         /* in [ranks, rows, partial_width] acc */
} xent_combine_args;

XENT_API xent_status xent_forward_partial(const xent_plan *plan, const xent_partial_args *args, xent_error *err);
XENT_API xent_status xent_forward_combine(const xent_plan *plan, const xent_combine_args *args, xent_error *err);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* XENT_XENT_H */
