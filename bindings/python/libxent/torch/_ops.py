# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The same as operators of torch.library, for everything that traces: torch.compile, torch.export, fake tensors.

An operator returns a fixed number of tensors; what was not asked for has no elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from .._library import InvalidArgument
from . import _plans
from ._autograd import DOUBLE_BACKWARD, refuse_tangents, saved_tensors_are_hooked
from ._plans import Spec, Wants

_SPEC = (
    "int? ignore_index, str reduction, float label_smoothing, float z_loss, float softcap, float logit_scale, "
    "int? classes, bool empty_mean_is_nan, bool overwrite"
)
_WANTS = "bool want_lse, bool want_entropy, bool want_predicted, bool want_row_counts"
_N_SPEC = len(Spec._fields)
_N_TENSORS = 5  # of the inputs of forward
_MAY_WRITE_TO_LEAVES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)


def _acc(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


@torch.library.custom_op(
    "libxent::cross_entropy",
    mutates_args=(),
    schema="(Tensor logits, Tensor targets, Tensor? mask, Tensor? row_weights, Tensor? denominator, "
    f"{_SPEC}, {_WANTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    denominator: torch.Tensor | None,
    *options: Any,
) -> tuple:
    """(loss, stats, divisor, lse, entropy, predicted, row_counts)"""
    refuse_tangents(logits, row_weights, denominator)
    spec, wants = Spec(*options[:_N_SPEC]), Wants(*options[_N_SPEC:])
    if spec.overwrite and saved_tensors_are_hooked():
        raise InvalidArgument(
            "overwrite_logits: under torch.compile not supported together with hooks on saved tensors around it "
            "(checkpointing, offloading), which may hand the logits to others too; leave it out"
        )
    result = _plans.forward(logits, targets, mask, row_weights, denominator, spec, wants, None, True)
    acc, index = _acc(logits), targets.dtype
    return tuple(
        logits.new_empty(0, dtype=dtype) if output is None else output
        for output, dtype in (
            (result.loss, acc),
            (result.stats, acc),
            (result.divisor, acc),
            (result.lse, acc),
            (result.entropy, acc),
            (result.predicted, index),
            (result.row_counts, index),
        )
    )


@cross_entropy.register_fake
def _(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    denominator: torch.Tensor | None,
    *options: Any,
) -> tuple:
    spec, wants = Spec(*options[:_N_SPEC]), Wants(*options[_N_SPEC:])
    acc, index, lead = _acc(logits), targets.dtype, logits.shape[:-1]
    divides = spec.reduction == "mean" or denominator is not None

    def new(shape: Any, dtype: torch.dtype, wanted: bool = True) -> torch.Tensor:
        return logits.new_empty(shape if wanted else (0,), dtype=dtype)

    return (
        new(lead if spec.reduction == "none" else (), acc),
        new((targets.numel(), 2), acc),
        new((), acc, divides),
        new(lead, acc, wants.lse),
        new(lead, acc, wants.entropy),
        new(lead, index, wants.predicted),
        new((3,), index, wants.row_counts),
    )


@torch.library.custom_op(
    "libxent::cross_entropy_backward",
    mutates_args=(),
    schema="(Tensor grad_loss, Tensor logits, Tensor targets, Tensor? mask, Tensor? row_weights, Tensor stats, "
    f"Tensor divisor, {_SPEC}) -> Tensor",
)
def cross_entropy_backward(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    stats: torch.Tensor,
    divisor: torch.Tensor,
    *options: Any,
) -> torch.Tensor:
    # Packed, whatever the strides are: a compiler may have laid the logits out otherwise than it told the fake below.
    grad = logits.new_empty(logits.shape)
    _plans.backward(
        grad_loss,
        logits,
        targets,
        mask,
        row_weights,
        stats,
        None if divisor.dim() else divisor,
        Spec(*options),
        Wants(),
        None,
        grad,
    )
    return grad


@cross_entropy_backward.register_fake
def _(grad_loss: torch.Tensor, logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape)


@torch.library.custom_op(
    "libxent::cross_entropy_backward_over",
    mutates_args=("logits",),
    schema="(Tensor grad_loss, Tensor(a!) logits, Tensor targets, Tensor? mask, Tensor? row_weights, Tensor stats, "
    f"Tensor divisor, {_SPEC}) -> ()",
)
def cross_entropy_backward_over(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    stats: torch.Tensor,
    divisor: torch.Tensor,
    *options: Any,
) -> None:
    """The gradient over the logits. A compiler that needs their values later copies them first."""
    divisor = None if divisor.dim() else divisor
    spec = Spec(*options)
    _plans.backward(grad_loss, logits, targets, mask, row_weights, stats, divisor, spec, Wants(), None, logits)


@cross_entropy_backward_over.register_fake
def _(*_: Any) -> None:
    return None


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    logits, targets, mask, row_weights, _, *options = inputs
    _, stats, divisor, *extras = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats, divisor, *extras)
    ctx.save_for_backward(logits, targets, mask, row_weights, stats, divisor)
    ctx.options = tuple(options[:_N_SPEC])


def _overwritten(logits: torch.Tensor) -> torch.Tensor | None:
    """What backward writes to in overwrite mode; None: to new memory.

    Logits that a graph computes it may return too, and then it cannot be cut into forward and backward if backward
    writes to them. A copy is written to: that is elided where the compiler finds that nobody else needs their memory.

    Before PyTorch 2.12 no graph can be traced whose backward writes to an input that is a leaf, or to a view of it:
    "a leaf Variable that requires grad is being used in an in-place operation".
    """
    base = logits if logits._base is None else logits._base
    if isinstance(base, FunctionalTensor):
        traced = torch._from_functional_tensor(base.elem)
        if not traced.requires_grad:  # as nothing does at this level that the graph computes
            return logits.detach().clone()
        if traced.is_leaf and not _MAY_WRITE_TO_LEAVES:
            return None
    return logits.detach()


def _backward(ctx: Any, grad_loss: torch.Tensor | None, *_: Any) -> tuple:
    nothing = (None,) * (_N_TENSORS - 1 + _N_SPEC + len(Wants._fields))
    if grad_loss is None:
        return (None, *nothing)
    logits, targets, mask, row_weights, stats, divisor = ctx.saved_tensors
    rest = (targets, mask, row_weights, stats, divisor, *ctx.options)
    grad = _overwritten(logits) if ctx.options[-1] else None
    if grad is None:
        return (cross_entropy_backward(grad_loss, logits, *rest), *nothing)
    if torch.is_grad_enabled():
        raise RuntimeError("libxent.torch.cross_entropy: create_graph is not supported with overwrite_logits here")
    cross_entropy_backward_over(grad_loss, grad, *rest)
    return (grad, *nothing)


cross_entropy.register_autograd(_backward, setup_context=_setup_context)


def _backward_twice(ctx: Any, *_: Any) -> tuple:
    raise RuntimeError(DOUBLE_BACKWARD)


cross_entropy_backward.register_autograd(_backward_twice)


def traced_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    denominator: torch.Tensor | None,
    spec: Spec,
    wants: Wants,
) -> tuple:
    """As CrossEntropy.apply."""
    loss, _, _, *extras = cross_entropy(logits, targets, mask, row_weights, denominator, *spec, *wants)
    return loss, *(extra if wanted else None for extra, wanted in zip(extras, wants))
