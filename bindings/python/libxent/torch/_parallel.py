# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Which classes a rank holds: of a process group, or of a DTensor."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .._library import InvalidArgument
from ._plans import Split, all_gather

# Of each group, the layouts that its ranks were once found to agree on: in a tensor, what this rank sends, and what it
# expects of each.
_agreed: weakref.WeakKeyDictionary[Any, dict[tuple, torch.Tensor]] = weakref.WeakKeyDictionary()


def _differs(
    columns: int, classes: int, expected: Sequence[int], group: Any, device: torch.device, complaint: str
) -> torch.Tensor | None:
    """Raises on every rank where one holds other columns than `expected` has, or was given other classes.

    Every call gathers: what a rank remembers does not tell it what the others have, and ranks that decide differently
    would meet in different collectives. The host waits for the answer on the CPU, where it does so anyway, and on
    CUDA where the layout is new to this rank. Elsewhere a tensor [] of bool has the answer.
    """
    agreed = _agreed.setdefault(group, {})
    key = (columns, *expected, classes, device)
    known = agreed.get(key)
    if known is None:
        known = torch.tensor([(columns, classes), *((width, classes) for width in expected)], device=device)
    mine, wanted = known[0], known[1:]
    gathered = mine.new_empty(2 * len(expected))
    all_gather(gathered, mine, group)
    gathered = gathered.view(-1, 2)
    differs = (gathered != wanted).any()
    if device.type == "cuda" and key in agreed:
        return differs
    if differs:
        widths, others = gathered.t().tolist()
        raise InvalidArgument(complaint.format(widths=widths, classes=others))
    agreed[key] = known
    return None


def split_of(
    logits: torch.Tensor,
    group: Any,
    class_offsets: Sequence[int] | None,
    classes: int | None,
    of_dtensor: bool = False,
) -> Split | None:
    """Without class_offsets every rank holds equally many columns, and what is beyond `classes` is padding.

    of_dtensor: class_offsets are those of its layout, which its local tensors need not keep to.
    """
    if group is None:
        if class_offsets is not None:
            raise InvalidArgument("class_offsets: needs a process_group")
        return None
    ranks, rank, differs = torch.distributed.get_world_size(group), torch.distributed.get_rank(group), None
    if rank < 0:
        raise InvalidArgument("process_group: this process is not one of its ranks")
    if class_offsets is None:
        if ranks == 1:
            return None
        width = logits.shape[-1]
        complaint = (
            "process_group: its ranks hold {widths} columns, and were given {classes} as classes (0: none); these must "
            "be the same on all; say which classes a rank holds with class_offsets"
        )
        differs = _differs(width, classes or 0, (width,) * ranks, group, logits.device, complaint)
        total = width * ranks if classes is None else classes
        if not 0 < total <= width * ranks:
            raise InvalidArgument(f"classes: {total} do not fit into {ranks} ranks of {width} columns")
        class_offsets = [min(rank * width, total) for rank in range(ranks + 1)]
    elif len(class_offsets) != ranks + 1:
        raise InvalidArgument(
            f"class_offsets: expected {ranks + 1} offsets for {ranks} ranks, got {len(class_offsets)}"
        )
    offsets = tuple(int(offset) for offset in class_offsets)
    if of_dtensor:
        widths = tuple(stop - start for start, stop in zip(offsets, offsets[1:]))
        complaint = (
            "input: the ranks hold {widths} columns of DTensors that have {classes}; a DTensor is cut as torch.chunk "
            f"does, here into {list(widths)}; pass the local tensors with process_group and class_offsets"
        )
        differs = _differs(logits.shape[-1], offsets[-1], widths, group, logits.device, complaint)
    if classes is not None and classes != offsets[-1]:
        raise InvalidArgument(f"classes: {classes} differ from the last of class_offsets, {offsets[-1]}")
    return Split(offsets, rank, group, differs)


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
