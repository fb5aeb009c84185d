# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Which classes a rank holds: of a process group, or of a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
    ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
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
    """The values of a replicated DTensor; anything else as it is."""
    if not is_dtensor(tensor):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise InvalidArgument(f"{name}: expected a tensor or a replicated DTensor, got {tuple(tensor.placements)}")
    return tensor.to_local()
