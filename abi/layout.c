/* SPDX-FileCopyrightText: the libxent authors
 * SPDX-License-Identifier: Apache-2.0 */

/* Pins size and offsets of every public struct and the value of every constant: compiling is the test, as C11 and as
 * C++17. A released line never changes; a grown struct changes its SIZE and adds FIELDs at its end. LP64 only: the
 * rule is the same elsewhere, the numbers are not. DLPack's structs are part of libxent's ABI. */

#include <xent/dlpack_util.h>
#include <xent/xent.h>
#include <xent/xent_plugin.h>

#ifdef __cplusplus
#define CHECK(condition) static_assert(condition, #condition)
#else
#define CHECK(condition) _Static_assert(condition, #condition)
#endif
#define SIZE(type, bytes) CHECK(sizeof(type) == bytes)
#define FIELD(type, name, at) CHECK(offsetof(type, name) == at)
#define VALUE(name, value) CHECK(name == value)

CHECK(sizeof(void *) == 8 && sizeof(size_t) == 8 && sizeof(xent_status) == 4);

SIZE(xent_error, 512);
FIELD(xent_error, struct_size, 0);
FIELD(xent_error, status, 8);
FIELD(xent_error, native_code, 12);
FIELD(xent_error, message, 16);

SIZE(xent_context_desc, 40);
FIELD(xent_context_desc, struct_size, 0);
FIELD(xent_context_desc, next, 8);
FIELD(xent_context_desc, log, 16);
FIELD(xent_context_desc, log_user, 24);
FIELD(xent_context_desc, threads, 32);
FIELD(xent_context_desc, flags, 36);

SIZE(xent_comm_desc, 72);
FIELD(xent_comm_desc, struct_size, 0);
FIELD(xent_comm_desc, next, 8);
FIELD(xent_comm_desc, device, 16);
FIELD(xent_comm_desc, rank, 24);
FIELD(xent_comm_desc, ranks, 28);
FIELD(xent_comm_desc, user, 32);
FIELD(xent_comm_desc, all_gather, 40);
FIELD(xent_comm_desc, async_error, 48);
FIELD(xent_comm_desc, release, 56);
FIELD(xent_comm_desc, flags, 64);
FIELD(xent_comm_desc, reserved, 68);

SIZE(xent_plan_desc, 128);
FIELD(xent_plan_desc, struct_size, 0);
FIELD(xent_plan_desc, next, 8);
FIELD(xent_plan_desc, device, 16);
FIELD(xent_plan_desc, logits_dtype, 24);
FIELD(xent_plan_desc, target_dtype, 28);
FIELD(xent_plan_desc, max_rows, 32);
FIELD(xent_plan_desc, vocab, 40);
FIELD(xent_plan_desc, classes, 48);
FIELD(xent_plan_desc, ignore_index, 56);
FIELD(xent_plan_desc, flags, 64);
FIELD(xent_plan_desc, reduction, 68);
FIELD(xent_plan_desc, label_smoothing, 72);
FIELD(xent_plan_desc, z_loss, 80);
FIELD(xent_plan_desc, softcap, 88);
FIELD(xent_plan_desc, logit_scale, 96);
FIELD(xent_plan_desc, class_offsets, 104);
FIELD(xent_plan_desc, rank, 112);
FIELD(xent_plan_desc, ranks, 116);
FIELD(xent_plan_desc, comm, 120);

SIZE(xent_plan_info, 64);
FIELD(xent_plan_info, struct_size, 0);
FIELD(xent_plan_info, forward_workspace_bytes, 8);
FIELD(xent_plan_info, backward_workspace_bytes, 16);
FIELD(xent_plan_info, loss_and_grad_workspace_bytes, 24);
FIELD(xent_plan_info, saved_bytes, 32);
FIELD(xent_plan_info, alignment, 40);
FIELD(xent_plan_info, backend_name, 48);
FIELD(xent_plan_info, capabilities, 56);
FIELD(xent_plan_info, partial_width, 60);

SIZE(xent_forward_args, 136);
FIELD(xent_forward_args, struct_size, 0);
FIELD(xent_forward_args, next, 8);
FIELD(xent_forward_args, stream, 16);
FIELD(xent_forward_args, workspace, 24);
FIELD(xent_forward_args, workspace_bytes, 32);
FIELD(xent_forward_args, logits, 40);
FIELD(xent_forward_args, targets, 48);
FIELD(xent_forward_args, mask, 56);
FIELD(xent_forward_args, row_weights, 64);
FIELD(xent_forward_args, denominator, 72);
FIELD(xent_forward_args, loss, 80);
FIELD(xent_forward_args, stats, 88);
FIELD(xent_forward_args, divisor, 96);
FIELD(xent_forward_args, lse, 104);
FIELD(xent_forward_args, entropy, 112);
FIELD(xent_forward_args, predicted, 120);
FIELD(xent_forward_args, row_counts, 128);

SIZE(xent_backward_args, 104);
FIELD(xent_backward_args, struct_size, 0);
FIELD(xent_backward_args, next, 8);
FIELD(xent_backward_args, stream, 16);
FIELD(xent_backward_args, workspace, 24);
FIELD(xent_backward_args, workspace_bytes, 32);
FIELD(xent_backward_args, logits, 40);
FIELD(xent_backward_args, targets, 48);
FIELD(xent_backward_args, mask, 56);
FIELD(xent_backward_args, row_weights, 64);
FIELD(xent_backward_args, stats, 72);
FIELD(xent_backward_args, divisor, 80);
FIELD(xent_backward_args, grad_loss, 88);
FIELD(xent_backward_args, grad_logits, 96);

SIZE(xent_loss_and_grad_args, 40);
FIELD(xent_loss_and_grad_args, struct_size, 0);
FIELD(xent_loss_and_grad_args, next, 8);
FIELD(xent_loss_and_grad_args, forward, 16);
FIELD(xent_loss_and_grad_args, grad_loss, 24);
FIELD(xent_loss_and_grad_args, grad_logits, 32);

SIZE(xent_scale_grad_args, 56);
FIELD(xent_scale_grad_args, struct_size, 0);
FIELD(xent_scale_grad_args, next, 8);
FIELD(xent_scale_grad_args, stream, 16);
FIELD(xent_scale_grad_args, targets, 24);
FIELD(xent_scale_grad_args, mask, 32);
FIELD(xent_scale_grad_args, grad_loss, 40);
FIELD(xent_scale_grad_args, grad_logits, 48);

SIZE(xent_partial_args, 72);
FIELD(xent_partial_args, struct_size, 0);
FIELD(xent_partial_args, next, 8);
FIELD(xent_partial_args, stream, 16);
FIELD(xent_partial_args, workspace, 24);
FIELD(xent_partial_args, workspace_bytes, 32);
FIELD(xent_partial_args, logits, 40);
FIELD(xent_partial_args, targets, 48);
FIELD(xent_partial_args, mask, 56);
FIELD(xent_partial_args, partial, 64);

SIZE(xent_combine_args, 32);
FIELD(xent_combine_args, struct_size, 0);
FIELD(xent_combine_args, next, 8);
FIELD(xent_combine_args, forward, 16);
FIELD(xent_combine_args, partials, 24);

SIZE(xent_host_api, 32);
FIELD(xent_host_api, struct_size, 0);
FIELD(xent_host_api, abi_minor, 8);
FIELD(xent_host_api, threads, 12);
FIELD(xent_host_api, host, 16);
FIELD(xent_host_api, log, 24);

SIZE(xent_view, 152);
FIELD(xent_view, data, 0);
FIELD(xent_view, dtype, 8);
FIELD(xent_view, rank, 12);
FIELD(xent_view, shape, 16);
FIELD(xent_view, stride, 80);
FIELD(xent_view, col_stride, 144);

SIZE(xent_options, 144);
FIELD(xent_options, struct_size, 0);
FIELD(xent_options, device, 8);
FIELD(xent_options, logits_dtype, 16);
FIELD(xent_options, target_dtype, 20);
FIELD(xent_options, max_rows, 24);
FIELD(xent_options, vocab, 32);
FIELD(xent_options, columns, 40);
FIELD(xent_options, classes, 48);
FIELD(xent_options, class_begin, 56);
FIELD(xent_options, ignore_index, 64);
FIELD(xent_options, has_ignore_index, 72);
FIELD(xent_options, reduction, 76);
FIELD(xent_options, overwrite, 80);
FIELD(xent_options, empty_mean_is_nan, 84);
FIELD(xent_options, entropy, 88);
FIELD(xent_options, predicted, 92);
FIELD(xent_options, label_smoothing, 96);
FIELD(xent_options, z_loss, 104);
FIELD(xent_options, softcap, 112);
FIELD(xent_options, logit_scale, 120);
FIELD(xent_options, class_offsets, 128);
FIELD(xent_options, rank, 136);
FIELD(xent_options, ranks, 140);

SIZE(xent_problem, 2328);
FIELD(xent_problem, struct_size, 0);
FIELD(xent_problem, options, 8);
FIELD(xent_problem, stream, 16);
FIELD(xent_problem, workspace, 24);
FIELD(xent_problem, workspace_bytes, 32);
FIELD(xent_problem, rows, 40);
FIELD(xent_problem, logits, 48);
FIELD(xent_problem, targets, 200);
FIELD(xent_problem, mask, 352);
FIELD(xent_problem, row_weights, 504);
FIELD(xent_problem, denominator, 656);
FIELD(xent_problem, loss, 808);
FIELD(xent_problem, stats, 960);
FIELD(xent_problem, divisor, 1112);
FIELD(xent_problem, lse, 1264);
FIELD(xent_problem, entropy, 1416);
FIELD(xent_problem, predicted, 1568);
FIELD(xent_problem, row_counts, 1720);
FIELD(xent_problem, grad_loss, 1872);
FIELD(xent_problem, grad_logits, 2024);
FIELD(xent_problem, partial, 2176);

SIZE(xent_backend_api, 120);
FIELD(xent_backend_api, struct_size, 0);
FIELD(xent_backend_api, abi_minor, 8);
FIELD(xent_backend_api, device_type, 12);
FIELD(xent_backend_api, name, 16);
FIELD(xent_backend_api, version, 24);
FIELD(xent_backend_api, self, 32);
FIELD(xent_backend_api, probe, 40);
FIELD(xent_backend_api, plan_create, 48);
FIELD(xent_backend_api, plan_destroy, 56);
FIELD(xent_backend_api, forward, 64);
FIELD(xent_backend_api, backward, 72);
FIELD(xent_backend_api, loss_and_grad, 80);
FIELD(xent_backend_api, partial, 88);
FIELD(xent_backend_api, combine, 96);
FIELD(xent_backend_api, release, 104);
FIELD(xent_backend_api, scale_grad, 112);

SIZE(DLTensor, 48);
FIELD(DLTensor, data, 0);
FIELD(DLTensor, device, 8);
FIELD(DLTensor, ndim, 16);
FIELD(DLTensor, dtype, 20);
FIELD(DLTensor, shape, 24);
FIELD(DLTensor, strides, 32);
FIELD(DLTensor, byte_offset, 40);

SIZE(DLDevice, 8);
FIELD(DLDevice, device_type, 0);
FIELD(DLDevice, device_id, 4);

SIZE(DLDataType, 4);
FIELD(DLDataType, code, 0);
FIELD(DLDataType, bits, 1);
FIELD(DLDataType, lanes, 2);

VALUE(XENT_OK, 0);
VALUE(XENT_INVALID_ARGUMENT, 1);
VALUE(XENT_INVALID_STRUCT, 2);
VALUE(XENT_UNSUPPORTED, 3);
VALUE(XENT_WORKSPACE_TOO_SMALL, 4);
VALUE(XENT_OUT_OF_MEMORY, 5);
VALUE(XENT_DEVICE_ERROR, 6);
VALUE(XENT_COMM_ERROR, 7);
VALUE(XENT_PLUGIN_ERROR, 8);
VALUE(XENT_INTERNAL, 9);
VALUE(XENT_LOG_DEBUG, 0);
VALUE(XENT_LOG_INFO, 1);
VALUE(XENT_LOG_WARNING, 2);
VALUE(XENT_LOG_ERROR, 3);
VALUE(XENT_COMM_GRAPH_CAPTURE, 1);
VALUE(XENT_REDUCTION_NONE, 0);
VALUE(XENT_REDUCTION_SUM, 1);
VALUE(XENT_REDUCTION_MEAN, 2);
VALUE(XENT_PLAN_IGNORE_INDEX, 1);
VALUE(XENT_PLAN_OVERWRITE_LOGITS, 2);
VALUE(XENT_PLAN_EMPTY_MEAN_IS_NAN, 4);
VALUE(XENT_PLAN_ENTROPY, 8);
VALUE(XENT_PLAN_PREDICTED, 16);
VALUE(XENT_CAP_GRAPH_CAPTURE, 1);
VALUE(XENT_CAP_ONE_PASS, 2);
VALUE(XENT_PLUGIN_ABI_MINOR, 1);
VALUE(XENT_MAX_LEADING_DIMS, 8);
VALUE(XENT_ABI_VERSION, 0);
