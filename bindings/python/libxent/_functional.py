# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""cross_entropy and loss_and_grad: no plan in sight, they are kept and found again by their options."""

from __future__ import annotations

import collections
import math
import sys
import threading
from typing import Any

from ._call import Result
from ._dlpack import CUDA, CUDA_MANAGED, NAMES
from ._framework import dtype_of
from ._frameworks import TORCH, framework_of
from ._library import InvalidArgument, integer, real
from ._plan import Plan, reduction_of

_CACHE_SIZE = 64
_OPTIONS = (
    "ignore_index",
    "reduction",
    "label_smoothing",
    "z_loss",
    "softcap",
    "logit_scale",
    "classes",
    "empty_mean_is_nan",
    "entropy",
    "predicted",
    "overwrite_logits",
)
_plans: collections.OrderedDict[tuple, Plan] = collections.OrderedDict()
_lock = threading.Lock()


def _plan_for(
    logits: Any,
    targets: Any,
    *,
    ignore_index: Any,
    reduction: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    logit_scale: Any,
    classes: Any,
    empty_mean_is_nan: Any,
    entropy: Any,
    predicted: Any,
    overwrite_logits: Any = False,
) -> Plan:
    shape, dtype, device = framework_of(logits).describe(logits, "logits")
    if not shape:
        raise InvalidArgument("logits: expected [..., vocab], got a tensor without dimensions")
    target_dtype = getattr(targets, "dtype", None)
    if target_dtype is None:
        raise InvalidArgument(f"targets: expected an array of int32 or int64, got {type(targets).__name__}")
    # An array would be found again by its identity, whatever has been written to it since, and 6.0 where 6 was.
    if type(ignore_index) is not int and ignore_index is not None:
        ignore_index = integer("ignore_index", ignore_index)
    if type(classes) is not int and classes is not None:
        classes = integer("classes", classes)
    if type(reduction) is not str:
        reduction = reduction_of(reduction)
    if type(label_smoothing) is not float:
        label_smoothing = real("label_smoothing", label_smoothing)
    if type(z_loss) is not float:
        z_loss = real("z_loss", z_loss)
    if type(softcap) is not float:
        softcap = real("softcap", softcap)
    if type(logit_scale) is not float:
        logit_scale = real("logit_scale", logit_scale)
    flags = (bool(empty_mean_is_nan), bool(entropy), bool(predicted), bool(overwrite_logits))
    # Rounded up, so that batches of varying size share a plan.
    max_rows = 1 << max(math.prod(shape[:-1]) - 1, 0).bit_length()
    index, vocab = dtype_of(target_dtype, "targets"), shape[-1]
    options = (ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, classes, *flags)
    key = (device, dtype, index, max_rows, vocab, *options)
    with _lock:
        plan = _plans.get(key)
        if plan is not None:
            _plans.move_to_end(key)
            return plan
    device_type, device_id = device
    plan = Plan(
        device=(CUDA, device_id) if device_type in (CUDA, CUDA_MANAGED) else "cpu",
        logits_dtype=NAMES.get(dtype),
        target_dtype=NAMES[index],
        max_rows=max_rows,
        vocab=vocab,
        **dict(zip(_OPTIONS, options)),
    )
    with _lock:
        _plans[key] = plan
        _plans.move_to_end(key)
        while len(_plans) > _CACHE_SIZE:
            _plans.popitem(last=False)
    return plan


def _refuse_autograd(logits: Any, row_weights: Any) -> None:
    for name, array in (("logits", logits), ("row_weights", row_weights)):
        if array is None or framework_of(array) is not TORCH:
            continue
        if array.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise InvalidArgument(
                f"{name}: the tensor requires a gradient, which this function does not record; use "
                f"libxent.loss_and_grad, or pass {name}.detach()"
            )


def cross_entropy(
    logits: Any,
    targets: Any,
    *,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    mask: Any = None,
    row_weights: Any = None,
    denominator: Any = None,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    classes: int | None = None,
    empty_mean_is_nan: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_predicted: bool = False,
    return_row_counts: bool = False,
) -> Any | Result:
    """Softmax cross-entropy of `logits` against class indices. Defaults are those of PyTorch's cross_entropy.

    logits           [..., vocab] float32, float16, bfloat16, on the CPU also float64; the vocabulary is last
    targets          [...] int32 or int64
    ignore_index     rows with this target do not count; None: all count
    reduction        "mean", "sum" or "none"
    label_smoothing  in [0, 1]
    mask             [...] bool, uint8, int32, int64 or float32: rows where it is 0 do not count
    row_weights      [...] float32 (float64 for float64 logits): factors of the losses; "mean" divides by their sum
    denominator      an integer, another number (taken as float32), or [] float32, int32 or int64: divides "sum" or
                     "mean" instead
    z_loss           weight of lse^2
    softcap          logits become softcap * tanh(logits / softcap); 0: off
    logit_scale      logits are multiplied by it first
    classes          real classes, where the last columns are padding. Default: vocab
    empty_mean_is_nan  "mean" over no rows is NaN, as in PyTorch; otherwise 0

    Returns the loss, [] for "sum" and "mean" and [...] for "none", float32 (float64 for float64 logits), in the library
    of the logits; with any return_* a Result that holds it with lse, entropy (nats), predicted and row_counts.
    A target outside [0, classes) that is not ignored gives NaN.

    Raises InvalidArgument (a ValueError) for bad arguments, also for PyTorch tensors that require a gradient: none is
    recorded. Raises Error where the device cannot be used.
    """
    _refuse_autograd(logits, row_weights)
    plan = _plan_for(
        logits,
        targets,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        classes=classes,
        empty_mean_is_nan=empty_mean_is_nan,
        entropy=return_entropy,
        predicted=return_predicted,
    )
    result = plan.forward(
        logits,
        targets,
        mask=mask,
        row_weights=row_weights,
        denominator=denominator,
        stats=None,
        lse=return_lse,
        entropy=return_entropy,
        predicted=return_predicted,
        row_counts=return_row_counts,
    )
    return result if return_lse or return_entropy or return_predicted or return_row_counts else result.loss


def loss_and_grad(
    logits: Any,
    targets: Any,
    *,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    mask: Any = None,
    row_weights: Any = None,
    denominator: Any = None,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    classes: int | None = None,
    empty_mean_is_nan: bool = False,
    grad_loss: Any = None,
    grad_dtype: Any = None,
    overwrite_logits: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_predicted: bool = False,
    return_row_counts: bool = False,
) -> tuple[Any, Any] | Result:
    """The loss of cross_entropy and its gradient with respect to the logits, [..., vocab].

    grad_loss         upstream gradient: a number, [] or, for "none", [...] of any float type. Default: 1
    grad_dtype        type of the gradient: the logits' (default) or "float32"
    overwrite_logits  write the gradient over the logits, which are then also the gradient returned: no second buffer

    The rest is as in cross_entropy. Returns (loss, grad), with any return_* a Result whose first fields these are.
    PyTorch tensors that require a gradient are taken as they are: give the result to `logits.backward(grad)`.
    """
    plan = _plan_for(
        logits,
        targets,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        classes=classes,
        empty_mean_is_nan=empty_mean_is_nan,
        entropy=return_entropy,
        predicted=return_predicted,
        overwrite_logits=overwrite_logits,
    )
    result = plan.loss_and_grad(
        logits,
        targets,
        mask=mask,
        row_weights=row_weights,
        denominator=denominator,
        grad_loss=grad_loss,
        grad_dtype=grad_dtype,
        lse=return_lse,
        entropy=return_entropy,
        predicted=return_predicted,
        row_counts=return_row_counts,
    )
    extras = return_lse or return_entropy or return_predicted or return_row_counts
    return result if extras else (result.loss, result.grad)
