/* SPDX-FileCopyrightText: the libxent authors
 * SPDX-License-Identifier: Apache-2.0 */

/* xent/xent_plugin.h - what libxent asks of a backend plugin.
 *
 * A plugin is a shared library that exports one function, xent_plugin_entry_v1. The symbol carries
 * the major version of this interface, so a host never calls an entry it does not understand; the
 * minor version grows by appending. The host zero-fills `out` and sets out->struct_size to the size
 * it knows; the plugin fills what fits and sets struct_size to what it filled. Tables, options and
 * problems are append-only.
 *
 * The core has checked every tensor before a backend sees it: a backend receives resolved options
 * and views, never descriptors, DLTensors or communicators, and checks nothing again. With a
 * communicator in the plan the core itself runs partial, all-gather and combine. What it must compute is in
 * xent.h and holds bit by bit: results of a row must not depend on the other rows, on the number of
 * threads or on addresses. Entries may be called from many threads at once. Nothing may throw across
 * this boundary.
 */
#ifndef XENT_XENT_PLUGIN_H
#define XENT_XENT_PLUGIN_H

#include <xent/xent.h>

#define XENT_PLUGIN_ABI_MINOR 1
#define XENT_PLUGIN_ENTRY_NAME "xent_plugin_entry_v1"
#define XENT_MAX_LEADING_DIMS 8

#ifdef __cplusplus
extern "C" {
#endif

/* Lives as long as the context that loads the backend. */
typedef struct xent_host_api {
  size_t struct_size;
  uint32_t abi_minor;
  int32_t threads; /* xent_context_desc::threads, as given */
  void *host;
  void (*log)(void *host, int32_t level, const char *message); /* never NULL */
} xent_host_api;

/* A checked tensor. Leading dimensions of size 1 are dropped and neighbours merged as far as the
 * strides allow; row r is the r-th index in row-major order of what is left. Strides are in elements
 * and may be 0 (inputs) or negative; byte_offset is applied. `data` NULL: an absent optional tensor,
 * or no rows. A tensor of one value for the whole call has rank 0; one value a row whatever the row
 * (a scalar grad_loss) has rank 0 too. */
typedef struct xent_view {
  void *data;
  DLDataType dtype;
  int32_t rank; /* leading dimensions left, 0 .. XENT_MAX_LEADING_DIMS */
  int64_t shape[XENT_MAX_LEADING_DIMS];
  int64_t stride[XENT_MAX_LEADING_DIMS];
  int64_t col_stride; /* logits, grad_logits: vocabulary axis; stats: its two numbers; row_counts: its three;
                         partial: its partial_width */
} xent_view;

/* The plan's options, resolved: defaults filled in, flags turned into values. */
typedef struct xent_options {
  size_t struct_size;
  DLDevice device;
  DLDataType logits_dtype;
  DLDataType target_dtype;
  int64_t max_rows;
  int64_t vocab;       /* columns of the logits; 0 only where the vocabulary is split */
  int64_t columns;     /* of them real, 0 .. vocab; the first ones */
  int64_t classes;     /* K >= 1: columns, or those of all ranks together */
  int64_t class_begin; /* the class of column 0 */
  int64_t ignore_index;
  int32_t has_ignore_index;
  int32_t reduction;
  int32_t overwrite;
  int32_t empty_mean_is_nan;
  int32_t entropy;
  int32_t predicted;
  double label_smoothing;
  double z_loss;
  double softcap; /* 0: off */
  double logit_scale;
  const int64_t *class_offsets; /* [ranks + 1]; NULL where the vocabulary is not split */
  int32_t rank;
  int32_t ranks; /* 0: the vocabulary is not split */
} xent_options;

/* One call. A backend reads what its operation names. */
typedef struct xent_problem {
  size_t struct_size;
  const xent_options *options;
  void *stream;
  void *workspace;
  size_t workspace_bytes; /* at least what plan_create asked for */
  int64_t rows;
  xent_view logits, targets, mask, row_weights, denominator;
  xent_view loss, stats, divisor, lse, entropy, predicted, row_counts;
  xent_view grad_loss; /* data NULL: 1 */
  xent_view grad_logits;
  xent_view partial; /* row r of `partial`; row rank * rows + r of the partials that `combine` reads */
} xent_problem;

typedef struct xent_backend_api {
  size_t struct_size;
  uint32_t abi_minor;
  int32_t device_type; /* DLDeviceType served */
  const char *name;    /* "cpu", "cuda", "vendor.device"; static storage */
  const char *version; /* static storage */
  void *self;
  /* 0: cannot run this plan here; `why` (never NULL, `why_bytes` long) may then say why. Otherwise a
   * preference, the highest wins, the first loaded among equals: the CPU's own is 1, CUDA's 100. A backend
   * serves the plans of the contexts that it was loaded into, and no others. Must not touch device memory. */
  int32_t (*probe)(void *self, const xent_options *options, char *why, size_t why_bytes);
  /* `options` outlives the plan. Fills workspace sizes, saved_bytes, alignment and capabilities. */
  xent_status (*plan_create)(void *self, const xent_options *options, void **plan, xent_plan_info *info,
                             xent_error *err);
  void (*plan_destroy)(void *self, void *plan);
  xent_status (*forward)(void *self, void *plan, const xent_problem *problem, xent_error *err);
  xent_status (*backward)(void *self, void *plan, const xent_problem *problem, xent_error *err);
  /* Writes all that `forward` writes (stats and divisor too, where they are asked for) and grad_logits. */
  xent_status (*loss_and_grad)(void *self, void *plan, const xent_problem *problem, xent_error *err);
  /* Both, or neither where the backend serves no split vocabulary. `partial` reads logits, targets and
   * mask and writes 3 + (label_smoothing != 0) + entropy + predicted numbers of acc a row; `combine`
   * reads those of all ranks and everything that `forward` reads but the logits, and writes what
   * `forward` writes. Over several ranks `forward` and `loss_and_grad` are not called. The workspace of
   * both is `forward`'s. */
  xent_status (*partial)(void *self, void *plan, const xent_problem *problem, xent_error *err);
  xent_status (*combine)(void *self, void *plan, const xent_problem *problem, xent_error *err);
  void (*release)(void *self); /* optional; called once, when the context and all its plans are gone */
  /* Since minor 1, optional: the contract of xent_scale_grad, with targets, mask, grad_loss and grad_logits. */
  xent_status (*scale_grad)(void *self, void *plan, const xent_problem *problem, xent_error *err);
  /* append here and raise XENT_PLUGIN_ABI_MINOR */
} xent_backend_api;

/* Returns XENT_OK, or a status with `err` filled; then `out` is not used. */
typedef xent_status (*xent_plugin_entry_fn)(const xent_host_api *host, xent_backend_api *out, xent_error *err);

#ifdef __cplusplus
}
#endif
#endif /* XENT_XENT_PLUGIN_H */
