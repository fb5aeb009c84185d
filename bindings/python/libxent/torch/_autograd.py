# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The loss as a node of autograd."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd import forward_ad

from .._library import InvalidArgument
from . import _plans
from ._plans import Spec, Split, Wants

DOUBLE_BACKWARD = (
    "libxent.torch.cross_entropy: second derivatives are not supported; the gradient was computed with "
    "create_graph=True and may be used, but not differentiated"
)


_AS_IT_IS = contextlib.nullcontext()
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
TELLS_OF_HOOKS = _top_hooks is not None


def _has_tangent(tensor: Any) -> bool:
    try:
        return isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None
    except RuntimeError:  # inside an operator that a dispatch mode runs: cross_entropy has looked before
        return False


def refuse_tangents(*tensors: Any) -> None:
    if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        raise InvalidArgument(
            "libxent.torch.cross_entropy: forward-mode AD (dual tensors) is not supported; use backward, or "
            "torch.nn.functional.cross_entropy"
        )


def saved_tensors_are_hooked() -> bool:
    """Whether autograd packs what it saves now (checkpointing, offloading), and so cannot see it change later."""
    if _top_hooks is not None:
        return _top_hooks(False) is not None
    # Older releases do not tell, but what they have packed takes no second hooks.
    with torch.enable_grad():
        node = torch.empty(0, requires_grad=True).sin().grad_fn
    try:
        node._raw_saved_self.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    except RuntimeError:
        return True
    return False


class _NotTwice(torch.autograd.Function):
    """Passes a gradient on, as something that depends on `sources` in a way that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(DOUBLE_BACKWARD)


def _in_memory(grad_loss: torch.Tensor) -> torch.Tensor:
    """The upstream gradient with its values in memory: autograd may negate lazily, or send zeros without memory."""
    if grad_loss._is_zerotensor():
        return torch.zeros(grad_loss.shape, dtype=grad_loss.dtype, device=grad_loss.device)
    return grad_loss.resolve_neg()


def _is_batched(grad_loss: torch.Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(grad_loss) or functorch.is_batchedtensor(grad_loss)


def _batched_backward(ctx: Any, grad_loss: torch.Tensor) -> torch.Tensor:
    """The gradients for several upstream gradients: PyTorch calls an operator once for each of them."""
    from . import _ops

    logits, targets, mask, row_weights, stats, divisor = ctx.saved_tensors
    spec, _, split = ctx.options
    if split is not None:
        raise RuntimeError(
            "libxent.torch.cross_entropy: with process_group a batch of upstream gradients (vmap, "
            "is_grads_batched=True, vectorize=True) is not supported; run backward for each of them"
        )
    divisor = stats.new_empty(0) if divisor is None else divisor
    spec = spec._replace(overwrite=False)
    return _ops.cross_entropy_backward(grad_loss, logits, targets, mask, row_weights, stats, divisor, *spec)


def _tell(wrappers: tuple) -> None:
    """The logits were written to: whoever saved a tensor that wraps them, with a version of its own, is to see it."""
    for wrapper in wrappers:
        torch.autograd.graph.increment_version(wrapper)


class CrossEntropy(torch.autograd.Function):
    """(loss, lse, entropy, predicted, row_counts); None for what was not asked for.

    wrappers  the tensors, such as DTensors, that the logits were taken out of
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        mask: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        denominator: Any,
        spec: Spec,
        wants: Wants,
        wrappers: tuple,
        split: Split | None,
    ) -> tuple:
        keep = ctx.needs_input_grad[0]
        result = _plans.forward(logits, targets, mask, row_weights, denominator, spec, wants, split, keep)
        if keep:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(logits, targets, mask, row_weights, result.stats, result.divisor)
            ctx.options = (spec, wants, split)
            # What autograd packs it does not check for changes, and it may hand the same logits to other nodes too:
            # they are then left alone.
            ctx.overwrite = spec.overwrite and not saved_tensors_are_hooked()
            ctx.wrappers = wrappers if ctx.overwrite else ()
            ctx.spent = False
        extras = (result.lse, result.entropy, result.predicted, result.row_counts)
        if True in wants:
            ctx.mark_non_differentiable(*(extra for extra in extras if extra is not None))
        return result.loss, *extras

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor | None, *_: Any) -> tuple:
        nothing = (None,) * 8
        if grad_loss is None:
            return (None, *nothing)
        if ctx.spent:
            raise RuntimeError(
                "libxent.torch.cross_entropy: with overwrite_logits=True backward runs once, and the logits now hold "
                "their gradient; leave it out to run backward again"
            )
        if _is_batched(grad_loss):
            return (_batched_backward(ctx, grad_loss), *nothing)
        logits, targets, mask, row_weights, stats, divisor = ctx.saved_tensors
        grad = logits.detach() if ctx.overwrite else torch.empty_like(logits, requires_grad=False)
        source, upstream = grad if ctx.overwrite else logits, _in_memory(grad_loss)
        records = torch.is_grad_enabled()
        with torch.no_grad() if records else _AS_IT_IS:
            _plans.backward(upstream, source, targets, mask, row_weights, stats, divisor, *ctx.options, grad)
        ctx.spent = ctx.overwrite  # not before: a call that fails has written nothing
        _tell(ctx.wrappers)
        ctx.wrappers = ()
        if records:
            grad = _NotTwice.apply(grad, logits, grad_loss)
        return (grad, *nothing)


class FusedCrossEntropy(torch.autograd.Function):
    """As CrossEntropy, but forward writes the gradient too, for an upstream gradient of 1."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        mask: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        denominator: Any,
        spec: Spec,
        wants: Wants,
        wrappers: tuple,
    ) -> tuple:
        over = spec.overwrite and not saved_tensors_are_hooked()
        grad = logits.detach() if over else torch.empty_like(logits, requires_grad=False)
        source = grad if over else logits
        result = _plans.loss_and_grad(source, targets, mask, row_weights, denominator, spec, wants, grad)
        if over:
            _tell(wrappers)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad, targets, mask)
        ctx.options, ctx.spent = (spec, wants), False
        extras = (result.lse, result.entropy, result.predicted, result.row_counts)
        if True in wants:
            ctx.mark_non_differentiable(*(extra for extra in extras if extra is not None))
        return result.loss, *extras

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor | None, *_: Any) -> tuple:
        nothing = (None,) * 7
        if grad_loss is None:
            return (None, *nothing)
        if ctx.spent or torch.is_grad_enabled():
            raise RuntimeError(
                "libxent.torch.cross_entropy: with fused=True backward runs once, and without create_graph, as it "
                "gives away the gradient that forward made; leave it out to run backward again"
            )
        if _is_batched(grad_loss):
            raise RuntimeError(
                "libxent.torch.cross_entropy: with fused=True backward runs once, and not for a batch of upstream "
                "gradients (vmap, is_grads_batched=True, vectorize=True); leave it out"
            )
        grad, targets, mask = ctx.saved_tensors
        _plans.scale_grad(_in_memory(grad_loss), grad, targets, mask, *ctx.options)
        ctx.spent = True
        return (grad, *nothing)


def check_overwritable(logits: torch.Tensor) -> None:
    if logits.is_contiguous():
        return
    reach = 0  # of the dimensions with smaller strides, from their first element to their last
    for stride, extent in sorted(zip(logits.stride(), logits.shape)):
        if extent > 1:
            if stride <= reach:
                raise InvalidArgument(
                    f"overwrite_logits: the logits have shape {tuple(logits.shape)} and strides {logits.stride()}, so "
                    "that several of them may share memory (expanded, unfolded); pass a tensor of its own memory"
                )
            reach += stride * (extent - 1)
