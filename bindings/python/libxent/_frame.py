# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Memory for the arguments of one C call, made once and used again: building ctypes objects costs more than the call.

A call takes a frame from the pool and gives it back, so that neither threads nor a call inside another (a producer's
__dlpack__, a finaliser) share one.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from . import _abi

TENSORS = 14  # as many as a call has
SCRATCH = 64 << 10
MAX_RANK = 9  # [8 leading dimensions, vocab]; more goes another way and is refused

_HEADER = struct.Struct("@PiiiBBHPPQ")  # a DLTensor
assert _HEADER.size == ctypes.sizeof(_abi.DLTensor)
_SIZES = tuple(struct.Struct(f"@{rank}q") for rank in range(MAX_RANK + 1))


class Layout:
    """An argument struct of 8-byte fields, written in one go. Fields that were appended later may follow `names`."""

    def __init__(self, kind: type[ctypes.Structure], names: str) -> None:
        self.kind, fields = kind, names.split()
        declared = [name for name, _ in kind._fields_[: len(fields)]]
        if declared != fields or getattr(kind, fields[-1]).offset != 8 * len(fields) - 8:
            raise ImportError(f"libxent: _frame.py does not fit {kind.__name__}: {declared}")
        self.size = 8 * len(fields)
        self.pack_into = struct.Struct(f"@{len(fields)}P").pack_into


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


class Frame:
    """`tensors`: addresses of DLTensors. `struct`: an xent_error at `address`. `word`: for a pointer as a result."""

    def __init__(self) -> None:
        tensors = TENSORS * _HEADER.size
        self._sizes = tensors  # offset of shapes and strides
        self._forward = tensors + TENSORS * 16 * MAX_RANK
        self._other = self._forward + ctypes.sizeof(_abi.ForwardArgs)
        other = max(map(ctypes.sizeof, (_abi.BackwardArgs, _abi.LossAndGradArgs, _abi.ScaleGradArgs)))
        self._buffer = bytearray(self._other + other)
        self._pin = ctypes.c_char.from_buffer(self._buffer)  # it stays where it is
        base = ctypes.addressof(self._pin)
        self.tensors = tuple(base + i * _HEADER.size for i in range(TENSORS))
        self._base = base
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
        rank = len(shape)
        at, strides_at = self._sizes + slot * 16 * MAX_RANK, 0
        _SIZES[rank].pack_into(self._buffer, at, *shape)
        if strides is not None:
            strides_at = at + 8 * MAX_RANK
            _SIZES[rank].pack_into(self._buffer, strides_at, *strides)
            strides_at += self._base
        place = slot * _HEADER.size
        _HEADER.pack_into(self._buffer, place, address, *device, rank, *dtype, 1, self._base + at, strides_at, 0)
        return self._base + place

    def workspace(self, size: int, alignment: int) -> int:
        """The address of so many bytes of host memory, at most SCRATCH, for this call."""
        if size + alignment > len(self._scratch):
            self._scratch_pin = None
            self._scratch = bytearray(size + alignment)
            self._scratch_pin = ctypes.c_char.from_buffer(self._scratch)
            self._scratch_address = ctypes.addressof(self._scratch_pin)
        return -(-self._scratch_address // alignment) * alignment

    def forward(self, *values: int) -> int:
        """The address of the arguments of xent_forward; `values` from `stream` on."""
        FORWARD.pack_into(self._buffer, self._forward, FORWARD.size, 0, *values)
        return self._base + self._forward

    def backward(self, *values: int) -> int:
        BACKWARD.pack_into(self._buffer, self._other, BACKWARD.size, 0, *values)
        return self._base + self._other

    def loss_and_grad(self, grad_loss: int, grad_logits: int) -> int:
        """Those of xent_loss_and_grad, for what `forward` wrote."""
        forward = self._base + self._forward
        LOSS_AND_GRAD.pack_into(self._buffer, self._other, LOSS_AND_GRAD.size, 0, forward, grad_loss, grad_logits)
        return self._base + self._other

    def scale_grad(self, *values: int) -> int:
        SCALE_GRAD.pack_into(self._buffer, self._other, SCALE_GRAD.size, 0, *values)
        return self._base + self._other


_pool: list[Frame] = []


def take() -> Frame:
    try:
        return _pool.pop()
    except IndexError:
        return Frame()


give_back = _pool.append
