# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Which classes a rank holds: of a process group, or of a DTensor."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from .._call import fitting
from .._dlpack import CUDA, CUDA_MANAGED, DTYPES, NAMES
from .._frameworks import framework_of
from .._library import InvalidArgument, integer
from ._gather import Gather, Layout
from ._plans import Spec, Split, Wants, partial_width

_UNEQUAL = (
    "process_group: its ranks hold {widths} columns, and were given {classes} as classes (0: none); these must be the "
    "same on all; say which classes a rank holds with class_offsets"
)
_NOT_CHUNKS = (
    "input: the ranks hold {widths} columns of DTensors that have {classes}; a DTensor is cut as torch.chunk does, "
    "here into {expected}; pass the local tensors with process_group and class_offsets"
)


def split_of(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: Any,
    class_offsets: Sequence[int] | None,
    spec: Spec,
    wants: Wants,
    of_dtensor: bool = False,
) -> Split | None:
    """Without class_offsets every rank holds equally many columns, and what is beyond the classes is padding.

    of_dtensor: class_offsets are those of its layout, which its local tensors need not keep to.
    """
    if group is None:
        if class_offsets is not None:
            raise InvalidArgument("class_offsets: needs a process_group")
        return None
    distributed = torch.distributed
    if not isinstance(group, distributed.ProcessGroup) and group != distributed.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument(
            f"process_group: expected a ProcessGroup of torch.distributed, got {type(group).__name__}"
        )
    ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    if rank < 0:
        raise InvalidArgument("process_group: this process is not one of its ranks")
    columns, classes, layout = logits.shape[-1], spec.classes, None
    if class_offsets is None:
        if ranks == 1:
            return None
        # A tag holds no more than 2^53, and so many are refused below.
        layout = Layout(columns, max(-1, min(classes or 0, 1 << 53)), (columns,) * ranks, _UNEQUAL)
        total = columns * ranks if classes is None else classes
        class_offsets = [min(rank * columns, total) for rank in range(ranks)] + [total]
    elif len(class_offsets) != ranks + 1:
        raise InvalidArgument(
            f"class_offsets: expected {ranks + 1} offsets for {ranks} ranks, got {len(class_offsets)}"
        )
    offsets = tuple(offset if type(offset) is int else integer("class_offsets", offset) for offset in class_offsets)
    total = offsets[-1]
    if of_dtensor:
        widths = tuple(stop - start for start, stop in zip(offsets, offsets[1:]))
        layout = Layout(columns, total, widths, _NOT_CHUNKS)
    gather = Gather(group, ranks, (targets.numel(), partial_width(spec, wants)), logits, layout)
    wrong = None
    if classes is not None and classes != total:
        wrong = f"classes: {classes} differ from the last of class_offsets, {total}"
    elif layout is not None and not of_dtensor and not 0 < total <= columns * ranks:
        wrong = f"classes: {total} do not fit into {ranks} ranks of {columns} columns"
    if wrong is not None:
        with gather:
            raise InvalidArgument(wrong)
    return Split(offsets, rank, gather)


def refuse_early(logits: torch.Tensor, targets: torch.Tensor, row_weights: Any, denominator: Any, spec: Spec) -> None:
    """What the plan would refuse only once the other ranks have this one's partial, and make a loss of it."""
    if row_weights is not None:
        shape, dtype, device = framework_of(row_weights).describe(row_weights, "row_weights")
        acc = "float64" if logits.dtype == torch.float64 else "float32"
        if tuple(shape) != tuple(targets.shape) or NAMES[dtype] != acc:
            raise InvalidArgument(
                f"row_weights: expected shape {tuple(targets.shape)} and {acc}, got shape {tuple(shape)} and "
                f"{NAMES[dtype]}"
            )
        _refuse_elsewhere("row_weights", device, logits)
    if denominator is None:
        return
    if spec.reduction == "none":
        raise InvalidArgument('denominator: was given; it needs reduction="sum" or "mean"')
    if isinstance(denominator, numbers.Real):
        is_integer = isinstance(denominator, numbers.Integral)
        fitting("denominator", denominator, DTYPES["int64" if is_integer else "float32"])
        return
    shape, dtype, device = framework_of(denominator).describe(denominator, "denominator")
    if math.prod(shape) != 1 or NAMES[dtype] not in ("float32", "int32", "int64"):
        raise InvalidArgument(
            f"denominator: expected one number of float32, int32 or int64, got shape {tuple(shape)} and {NAMES[dtype]}"
        )
    _refuse_elsewhere("denominator", device, logits)


def _refuse_elsewhere(name: str, device: tuple[int, int], logits: torch.Tensor) -> None:
    on_cuda = device[0] in (CUDA, CUDA_MANAGED)
    if on_cuda != logits.is_cuda or (on_cuda and device[1] != logits.device.index):
        raise InvalidArgument(f"{name}: is on device {device}, the logits are on {logits.device}")


def is_dtensor(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_of(logits: Any) -> tuple[torch.Tensor, Any, Sequence[int] | None]:
    """(local logits, process group, class offsets) of a DTensor: replicated, or split along its last dimension."""
    group, offsets = None, None
    for dim, placement in enumerate(logits.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or placement.dim not in (-1, logits.dim() - 1) or group is not None:
            raise InvalidArgument(
                "input: expected a DTensor that is replicated, or sharded along its last dimension by one dimension of "
                f"the mesh, got {tuple(logits.placements)}"
            )
        group, ranks, total = logits.device_mesh.get_group(dim), logits.device_mesh.size(dim), logits.shape[-1]
        step = -(-total // ranks)
        offsets = [min(rank * step, total) for rank in range(ranks + 1)]
    return logits.to_local(), group, offsets


def whole(tensor: Any, name: str) -> Any:
    """The values of a replicated DTensor, or of a collective under way; anything else as it is."""
    if not is_dtensor(tensor):
        return waited(tensor)
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise InvalidArgument(f"{name}: expected a tensor or a replicated DTensor, got {tuple(tensor.placements)}")
    return waited(tensor.to_local())


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        return tensor.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def is_under_way(tensor: Any) -> bool:
    """Whether it is what a functional collective returns before it has ended."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "trigger_wait")


def waited(tensor: Any) -> Any:
    """The result of a collective under way; anything else as it is."""
    return _Waited.apply(tensor) if is_under_way(tensor) else tensor
