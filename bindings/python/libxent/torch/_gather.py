# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The one collective of a call over ranks."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from .._library import InvalidArgument

# A tag is one number of two exact parts, 16 bytes: one small kernel compares it whole.
_TAG = torch.complex128
_HOST_WAITS = ("cpu",)  # devices whose answer is there when the gather returns

# Of each group, on the other devices: the tags of the layouts that its ranks were once found to agree on. None is
# forgotten for a newer one, as a CUDA graph may read it.
_KNOWN_OF_A_GROUP = 1024
_known: weakref.WeakKeyDictionary[Any, dict[tuple, torch.Tensor]] = weakref.WeakKeyDictionary()


class Layout(NamedTuple):
    """What a rank holds, and what it takes all ranks to hold."""

    columns: int
    classes: int
    expected: tuple[int, ...]  # columns of each rank; all have the same classes
    complaint: str  # with {widths}, {classes} and {expected}


class Gather:
    """The all-gather of the partials [rows, width] of a call.

    With a layout, a tag of columns and classes goes before each partial. What a rank remembers, or refuses, does not
    tell it what the others do: so each takes part in every call, with as many bytes, and whoever finds a tag that it
    did not expect raises. The host looks at the tags on the CPU, where it waits anyway, and on CUDA where the layout
    is new to this rank; elsewhere an unexpected tag makes NaN of the partial behind it, and so of every row that
    counts.

    As a context, it takes part for a rank that raises before its turn, with a partial of NaN.
    """

    __slots__ = ("_device", "_dtype", "_group", "_head", "_layout", "_over", "_ranks", "_sent", "_shape")

    def __init__(
        self, group: Any, ranks: int, shape: tuple[int, int], like: torch.Tensor, layout: Layout | None
    ) -> None:
        """`like`: the logits."""
        self._group, self._ranks, self._shape, self._layout = group, ranks, shape, layout
        self._device = like.device
        # Of acc, and how many of its numbers a tag takes.
        self._dtype, self._head = (torch.float64, 2) if like.dtype == torch.float64 else (torch.float32, 4)
        self._sent: torch.Tensor | None = None
        self._over = False

    def partial(self) -> torch.Tensor:
        """Where this rank's partial is to be written."""
        rows, width = self._shape
        layout = self._layout
        if layout is None:
            self._sent = torch.empty(rows, width, dtype=self._dtype, device=self._device)
            return self._sent
        # As many tags as hold it, so that every rank's is aligned in what is gathered, and nothing is left unwritten.
        units, tag = 1 - (-rows * width // self._head), complex(layout.columns, layout.classes)
        self._sent = torch.full((units,), tag, dtype=_TAG, device=self._device).view(self._dtype)
        return self._sent.as_strided((rows, width), (width, 1), self._head)

    def partials(self) -> torch.Tensor:
        """Those of all ranks, [ranks, rows, width], once this rank's is written."""
        sent, (rows, width), ranks = self._sent, self._shape, self._ranks
        self._sent, self._over = None, True
        if self._layout is None:
            gathered = sent.new_empty(ranks * rows, width)
            if rows:
                all_gather(gathered, sent, self._group)
            return gathered.view(ranks, rows, width)
        size = sent.numel()
        gathered = sent.new_empty(ranks * size)
        all_gather(gathered, sent, self._group)
        partials = gathered.as_strided((ranks, rows, width), (size, width, 1), self._head)
        self._check(gathered.view(_TAG).as_strided((ranks, 1, 1), (size // self._head, 1, 1)), partials)
        return partials

    def _check(self, tags: torch.Tensor, partials: torch.Tensor) -> None:
        columns, classes, expected, complaint = self._layout
        waits = self._device.type in _HOST_WAITS
        if not waits:
            known, key = _known.setdefault(self._group, {}), (columns, classes, expected, self._device)
            wanted = known.get(key)
            if wanted is not None:
                partials.masked_fill_(tags != wanted, float("nan"))
                return
        found, wanted = tags.flatten().tolist(), [complex(width, classes) for width in expected]
        if found != wanted:
            widths, others = [int(tag.real) for tag in found], [int(tag.imag) for tag in found]
            raise InvalidArgument(complaint.format(widths=widths, classes=others, expected=list(expected)))
        if not waits and len(known) < _KNOWN_OF_A_GROUP:
            known[key] = torch.tensor(wanted, dtype=_TAG, device=self._device).view(-1, 1, 1)

    def __enter__(self) -> Gather:
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        if kind is None or self._over or not issubclass(kind, Exception):
            return
        self.partial().fill_(float("nan"))
        self.partials()


def all_gather(gathered: torch.Tensor, tensor: torch.Tensor, group: Any) -> None:
    gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
    gather(gathered, tensor, group=group)
