# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Which classes a rank holds: of a process group, or of a DTensor."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .._library import InvalidArgument
from ._plans import Split

# Of each group, the widths of shards that its ranks were found to agree on.
_agreed: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()


def _check_equal(logits: torch.Tensor, group: Any) -> None:
    """Once for each group and width, as the host has to wait for it."""
    width = logits.shape[-1]
    agreed = _agreed.setdefault(group, set())
    if width in agreed:
        return
    mine = torch.tensor([width], device=logits.device)
    widths = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(widths, mine, group=group)
    found = [int(other) for other in widths]
    if any(other != width for other in found):
        raise InvalidArgument(f"process_group: its ranks hold {found} columns; say which classes with class_offsets")
    agreed.add(width)


def split_of(
    logits: torch.Tensor, group: Any, class_offsets: Sequence[int] | None, classes: int | None
) -> Split | None:
    """Without class_offsets every rank holds equally many columns, and what is beyond `classes` is padding."""
    if group is None:
        if class_offsets is not None:
            raise InvalidArgument("class_offsets: needs a process_group")
        return None
    ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    if rank < 0:
        raise InvalidArgument("process_group: this process is not one of its ranks")
    if class_offsets is None:
        if ranks == 1:
            return None
        _check_equal(logits, group)
        width = logits.shape[-1]
        total = width * ranks if classes is None else classes
        if not 0 < total <= width * ranks:
            raise InvalidArgument(f"classes: {total} do not fit into {ranks} ranks of {width} columns")
        class_offsets = [min(rank * width, total) for rank in range(ranks + 1)]
    elif len(class_offsets) != ranks + 1:
        raise InvalidArgument(
            f"class_offsets: expected {ranks + 1} offsets for {ranks} ranks, got {len(class_offsets)}"
        )
    offsets = tuple(int(offset) for offset in class_offsets)
    if classes is not None and classes != offsets[-1]:
        raise InvalidArgument(f"classes: {classes} differ from the last of class_offsets, {offsets[-1]}")
    return Split(offsets, rank, group)


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
