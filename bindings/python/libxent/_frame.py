# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Memory for the arguments of one C call, made once and used again: building ctypes objects costs more than the call.

A call takes a frame from the pool and gives it back, so that neither threads nor a call inside another (a producer's
__dlpack__, a finaliser) share one.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

from . import _abi

TENSORS = 14  # as many as a call has
SCRATCH = 64 << 10
MAX_RANK = 9  # [8 leading dimensions, vocab]; more goes another way and is refused

_HEADER = ctypes.sizeof(_abi.DLTensor)
_SLOT = _HEADER + 16 * MAX_RANK
# A DLTensor and behind it its shape, or shape and strides.
_PACKED = tuple(struct.Struct(f"@PiiiBBHPPQ{rank}q").pack_into for rank in range(MAX_RANK + 1))
_STRIDED = tuple(struct.Struct(f"@PiiiBBHPPQ{2 * rank}q").pack_into for rank in range(MAX_RANK + 1))
assert struct.calcsize("@PiiiBBHPPQ") == _HEADER
_HEAD = 2  # fields that every argument struct begins with, struct_size and next: they stay as they are


class Layout:
    """An argument struct of 8-byte fields, written in one go. Fields that were appended later may follow `names`."""

    def __init__(self, kind: type[ctypes.Structure], names: str) -> None:
        self.kind, fields = kind, names.split()
        declared = [name for name, _ in kind._fields_[: len(fields)]]
        if declared != fields or getattr(kind, fields[-1]).offset != 8 * len(fields) - 8:
            raise ImportError(f"libxent: _frame.py does not fit {kind.__name__}: {declared}")
        self.size = 8 * len(fields)
        self.pack_into = struct.Struct(f"@{len(fields) - _HEAD}P").pack_into


FORWARD = Layout(
    _abi.ForwardArgs,
    "struct_size next stream workspace workspace_bytes logits targets mask row_weights denominator loss stats divisor "
    "lse entropy predicted row_counts",
)
BACKWARD = Layout(
    _abi.BackwardArgs,
    "struct_size next stream workspace workspace_bytes logits targets mask row_weights stats divisor grad_loss "
    "grad_logits",
)
LOSS_AND_GRAD = Layout(_abi.LossAndGradArgs, "struct_size next forward grad_loss grad_logits")
SCALE_GRAD = Layout(_abi.ScaleGradArgs, "struct_size next stream targets mask grad_loss grad_logits")
_LAYOUTS = (FORWARD, BACKWARD, LOSS_AND_GRAD, SCALE_GRAD)


class Arguments:
    """An argument struct of a frame, at `address`. `pack` writes all but its head."""

    def __init__(self, layout: Layout, buffer: bytearray, place: int, address: int) -> None:
        struct.pack_into("@PP", buffer, place, layout.size, 0)
        self.pack = functools.partial(layout.pack_into, buffer, place + 8 * _HEAD)
        self.address = address


class Frame:
    """`tensors`: addresses of DLTensors. `struct`: an xent_error at `address`. `word`: for a pointer as a result."""

    def __init__(self) -> None:
        place = TENSORS * _SLOT
        self._buffer = bytearray(place + sum(layout.size for layout in _LAYOUTS))
        self._pin = ctypes.c_char.from_buffer(self._buffer)  # it stays where it is
        base = ctypes.addressof(self._pin)
        structs = []
        for layout in _LAYOUTS:
            structs.append(Arguments(layout, self._buffer, place, base + place))
            place += layout.size
        self.forward, self.backward, self.loss_and_grad, self.scale_grad = structs
        self.tensors = tuple(base + i * _SLOT for i in range(TENSORS))
        self._scratch, self._scratch_pin, self._scratch_address = bytearray(), None, 0
        self.word = ctypes.c_void_p()
        self.word_address = ctypes.addressof(self.word)
        self.struct = _abi.Error(struct_size=ctypes.sizeof(_abi.Error))
        self.address = ctypes.addressof(self.struct)

    def pack(
        self,
        slot: int,
        address: int,
        dtype: tuple[int, int],
        device: tuple[int, int],
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> int:
        """Writes a DLTensor into a slot and gives its address. Strides are in elements; None: packed."""
        rank, place, at = len(shape), slot * _SLOT, self.tensors[slot]
        (code, bits), (kind, index), sizes = dtype, device, at + _HEADER
        if strides is None:
            _PACKED[rank](self._buffer, place, address, kind, index, rank, code, bits, 1, sizes, 0, 0, *shape)
        else:
            _STRIDED[rank](
                self._buffer, place, address, kind, index, rank, code, bits, 1, sizes, sizes + 8 * rank, 0,
                *shape, *strides,
            )  # fmt: skip
        return at

    def workspace(self, size: int, alignment: int) -> int:
        """The address of so many bytes of host memory, at most SCRATCH, for this call."""
        if size + alignment > len(self._scratch):
            self._scratch_pin = None
            self._scratch = bytearray(size + alignment)
            self._scratch_pin = ctypes.c_char.from_buffer(self._scratch)
            self._scratch_address = ctypes.addressof(self._scratch_pin)
        return -(-self._scratch_address // alignment) * alignment


_pool: list[Frame] = []


def take() -> Frame:
    try:
        return _pool.pop()
    except IndexError:
        return Frame()


give_back = _pool.append
