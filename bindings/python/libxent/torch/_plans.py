# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""What a call computes, as hashable values, the plans made for them, and the calls of those plans."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from .._call import Result
from .._library import InvalidArgument
from .._plan import Plan
from ._gather import Gather

_CACHE_SIZE = 128
_DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
}
_INDEX = {torch.int64: "int64", torch.int32: "int32"}


class Spec(NamedTuple):
    """The options of a Plan that do not follow from the tensors."""

    ignore_index: int | None = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    classes: int | None = None
    empty_mean_is_nan: bool = False
    overwrite: bool = False


class Wants(NamedTuple):
    """The outputs beside the loss."""

    lse: bool = False
    entropy: bool = False
    predicted: bool = False
    row_counts: bool = False


class Split(NamedTuple):
    """A vocabulary split over the ranks of a process group."""

    offsets: tuple[int, ...]
    rank: int
    gather: Gather


_plans: dict[tuple, Plan] = {}
_lock = threading.Lock()


def plan_for(logits: torch.Tensor, targets: torch.Tensor, spec: Spec, wants: Wants, split: Split | None) -> Plan:
    """A plan for logits [..., vocab]; batches of varying size share one, as the rows are rounded up."""
    vocab = logits.shape[-1]
    bits = max(targets.numel() - 1, 0).bit_length()
    key = (logits.device, logits.dtype, targets.dtype, bits, vocab, spec, wants[1:3], split and split[:2])
    plan = _plans.get(key)
    if plan is not None:
        return plan
    dtype, index = _DTYPES.get(logits.dtype), _INDEX.get(targets.dtype)
    if dtype is None:
        raise InvalidArgument(f"input: expected float32, float16, bfloat16 or, on the CPU, float64, got {logits.dtype}")
    if index is None:
        raise InvalidArgument(f"target: expected int64 or int32, got {targets.dtype}")
    options = spec._asdict()
    options["overwrite_logits"] = options.pop("overwrite")
    if split is not None:
        options["class_offsets"], options["rank"] = split[:2]
    plan = Plan(
        device=logits.device,
        logits_dtype=dtype,
        target_dtype=index,
        max_rows=1 << bits,
        vocab=vocab,
        entropy=wants.entropy,
        predicted=wants.predicted,
        **options,
    )
    with _lock:
        _plans[key] = plan
        while len(_plans) > _CACHE_SIZE:  # the oldest; a plan in use lives on in its call
            del _plans[next(iter(_plans))]
    return plan


def partial_width(spec: Spec, wants: Wants) -> int:
    """Numbers a row of a partial, as a plan's info has it: also known where no plan could be made."""
    return 3 + (spec.label_smoothing != 0) + wants.entropy + wants.predicted


def forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    denominator: Any,
    spec: Spec,
    wants: Wants,
    split: Split | None,
    keep: bool,
) -> Result:
    """keep: also the stats and the divisor, for `backward`."""
    plan = plan_for(logits, targets, spec, wants, split)
    function, source = plan.forward, logits
    if split is not None:
        plan.forward_partial(logits, targets, mask=mask, partial=split.gather.partial())
        function, source = plan.forward_combine, split.gather.partials()
    return function(
        source,
        targets,
        mask=mask,
        row_weights=row_weights,
        denominator=denominator,
        stats=True if keep else None,
        lse=wants.lse or None,
        entropy=wants.entropy or None,
        predicted=wants.predicted or None,
        row_counts=wants.row_counts or None,
    )


def backward(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    stats: torch.Tensor,
    divisor: torch.Tensor | None,
    spec: Spec,
    wants: Wants,
    split: Split | None,
    grad_logits: torch.Tensor,
) -> None:
    """Writes the gradient into `grad_logits`, which is the logits themselves in overwrite mode."""
    plan_for(logits, targets, spec, wants, split).backward(
        logits,
        targets,
        stats,
        divisor,
        mask=mask,
        row_weights=row_weights,
        grad_loss=grad_loss,
        grad_logits=grad_logits,
    )


def loss_and_grad(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    denominator: Any,
    spec: Spec,
    wants: Wants,
    grad_logits: torch.Tensor,
) -> Result:
    """The loss, and in `grad_logits` its gradient for an upstream gradient of 1."""
    return plan_for(logits, targets, spec, wants, None).loss_and_grad(
        logits,
        targets,
        mask=mask,
        row_weights=row_weights,
        denominator=denominator,
        grad_logits=grad_logits,
        lse=wants.lse,
        entropy=wants.entropy,
        predicted=wants.predicted,
        row_counts=wants.row_counts,
    )


def scale_grad(
    grad_loss: torch.Tensor,
    grad_logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    spec: Spec,
    wants: Wants,
) -> None:
    """Multiplies what `loss_and_grad` wrote by the upstream gradient that it did not know."""
    plan_for(grad_logits, targets, spec, wants, None).scale_grad(grad_logits, targets, grad_loss, mask=mask)
