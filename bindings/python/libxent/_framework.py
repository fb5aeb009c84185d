# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""What a call needs of an array library, and how DLPack gives it where the library does no better.

Apart from the libraries themselves, which refine it and know of each other.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Callable

from . import _cuda, _dlpack
from ._dlpack import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, DTYPES, NAMES, DType, Tensor
from ._library import InvalidArgument

if TYPE_CHECKING:
    from ._call import Call

LEGACY_STREAM = 1
Device = tuple[int, int]
seen_dtypes: dict[Any, DType] = {}  # of a framework's dtype objects, whose names are slow to ask for


def dtype_of(dtype: Any, name: str) -> DType:
    found = seen_dtypes.get(dtype)
    if found is None:
        text = _dlpack.dtype_name(dtype)
        if text not in DTYPES:
            raise InvalidArgument(f"{name}: element type {text} is not one that libxent knows")
        found = seen_dtypes[dtype] = DTYPES[text]
    return found


class Framework:
    """One array library.

    `tensor` checks an array and describes it; `put` does the same for a call whose logits are of this framework and may
    leave checks to the C library where that is faster: where the call then fails, `tensor` is asked for the reason.
    """

    name: str
    finishes = False  # `finish` does something
    usual_forward: Callable[..., tuple | None] | None = None  # as forward_of of _usual.py gives it

    def tensor(self, obj: Any, name: str, writable: bool = False, stream: int | None = None) -> Tensor:
        """Borrows `obj`. `stream`: a CUDA producer must make its pending work precede that stream."""
        if not hasattr(obj, "__dlpack__") or not hasattr(obj, "__dlpack_device__"):
            raise InvalidArgument(f"{name}: expected an array with __dlpack__, got {type(obj).__name__}")
        on_device = int(obj.__dlpack_device__()[0]) != CPU
        capsule = _dlpack.export_capsule(obj, name, (stream or LEGACY_STREAM) if on_device else None)
        tensor = _dlpack.consume(capsule, name, writable=writable)
        tensor.owner, tensor.framework = obj, self
        return tensor

    def put(self, call: Call, name: str, obj: Any, writable: bool = False) -> int:
        """The address of a DLTensor of `obj`, valid during the call."""
        tensor = self.tensor(obj, name, writable)
        call.held.append(tensor)
        return ctypes.addressof(tensor.dl)

    def new(self, call: Call, index: int, shape: tuple[int, ...], dtype: DType) -> int:
        """Makes output `index` of the call's results."""
        tensor, make = self.empty(shape, dtype, self._place(call))
        call.held.append(tensor)
        if call.later is None:
            call.later = {}
        call.later[index] = make
        return ctypes.addressof(tensor.dl)

    def workspace(self, call: Call, size: int, alignment: int) -> int:
        """The address of so many bytes, for the call alone."""
        tensor, _ = self.empty((size + alignment - 1,), DTYPES["uint8"], self._place(call))
        call.held.append(tensor)
        return -(-tensor.address // alignment) * alignment

    @staticmethod
    def _place(call: Call) -> Device:
        """The device of the leading array. The C library, which would refuse another than the plan's, comes later."""
        have, want = call.device, call.plan._device
        if want[0] in (CUDA, CUDA_MANAGED):
            fits = have[0] in (CUDA, CUDA_MANAGED) and have[1] == want[1]
        else:
            fits = have[0] in (want[0], CPU, CUDA_HOST)
        if not fits:
            raise InvalidArgument(f"{call.name}: is on device {have}; the plan's device is {want}")
        return have

    def connect(self) -> None:
        """Called when an array of the framework is first seen."""

    def facts(self, call: Call, obj: Any) -> tuple[tuple[int, ...], Device]:
        """(shape, device) of the logits, which were put already."""
        return call.held[0].shape, call.held[0].device

    def describe(self, obj: Any, name: str) -> tuple[tuple[int, ...], DType, Device]:
        """(shape, dtype, device) of an array that no call has taken yet."""
        tensor = self.tensor(obj, name)
        tensor.release()
        return tensor.shape, tensor.dtype, tensor.device

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> tuple[Tensor, Callable[[], Any]]:
        """New packed memory, and a function that gives the caller's array once it is written."""
        raise NotImplementedError

    def scalar(self, value: int | float, dtype: DType, device: Device) -> Tensor:
        """A number as a tensor without dimensions."""
        holder = _SCALARS[NAMES[dtype]](value)
        if device[0] == CPU:
            return Tensor(ctypes.addressof(holder), dtype, device, (), None, holder)
        memory = _cuda.Memory(ctypes.sizeof(holder), device[1])
        memory.write(bytes(holder))
        return Tensor(memory.address, dtype, device, (), None, memory)

    def stream(self, call: Call, device: int) -> int:
        """The CUDA stream to enqueue on; 0 is CUDA's legacy default stream."""
        return 0

    def wrote(self, arrays: list) -> None:
        """Arrays of the caller were written to."""

    def finish(self, device: Device) -> None:
        """The call was enqueued."""


_SCALARS = {"float32": ctypes.c_float, "float64": ctypes.c_double, "int32": ctypes.c_int32, "int64": ctypes.c_int64}
