# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The array libraries that libxent knows. None is imported here: an array can only come from one that is.

The framework of the logits leads a call: it gives the stream, the workspace and the new outputs.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

from . import _cuda, _dlpack, _usual
from ._dlpack import CPU, CUDA, DTYPES, NAMES, DType, Tensor, array_data
from ._frame import MAX_RANK
from ._framework import Device, Framework, dtype_of, seen_dtypes
from ._library import Error, InvalidArgument

if TYPE_CHECKING:
    from ._call import Call

_HOST = (CPU, 0)


class Generic(Framework):
    """Any object with __dlpack__. Its new outputs are NumPy arrays."""

    name = "DLPack"

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> tuple[Tensor, Callable[[], Any]]:
        if device[0] != CPU:
            raise InvalidArgument(f"logits: {self.name} gives no memory on device {device}; pass the outputs yourself")
        return NUMPY.empty(shape, dtype, device)


class NumPy(Framework):
    name = "NumPy"

    def __init__(self) -> None:
        self._plain: type | None = None  # numpy.ndarray
        self._native: dict[Any, DType] = {}  # of dtypes that `tensor` has taken

    def tensor(self, obj: Any, name: str, writable: bool = False, stream: int | None = None) -> Tensor:
        numpy = sys.modules["numpy"]
        if isinstance(obj, numpy.ma.MaskedArray):
            raise InvalidArgument(f"{name}: a numpy.ma.MaskedArray would lose its mask; pass .data and mask=")
        dtype = dtype_of(obj.dtype, name)
        if not obj.dtype.isnative:
            raise InvalidArgument(f"{name}: element type {obj.dtype.str} is not in native byte order")
        if writable and not obj.flags.writeable:
            raise InvalidArgument(f"{name}: the array is read-only, an output must be writable")
        self._plain, self._native[obj.dtype] = numpy.ndarray, dtype
        return self._strided(obj, obj.__array_interface__["data"][0], dtype, (CPU, 0), name)

    def put(self, call: Call, name: str, obj: Any, writable: bool = False) -> int:
        flags, dtype, shape = obj.flags, self._native.get(obj.dtype), obj.shape
        fast = type(obj) is self._plain and dtype is not None and flags.c_contiguous and len(shape) <= MAX_RANK
        if not fast or (writable and not flags.writeable):
            return super().put(call, name, obj, writable)
        slot = len(call.taken)
        call.taken.append((name, obj, writable))
        return call.frame.pack(slot, array_data(obj), dtype, _HOST, shape)

    def new(self, call: Call, index: int, shape: tuple[int, ...], dtype: DType) -> int:
        import numpy

        array = call.results[index] = numpy.empty(shape, self.dtype(dtype))
        return self.put(call, "output", array)

    def facts(self, call: Call, obj: Any) -> tuple[tuple[int, ...], Device]:
        return obj.shape, _HOST

    def describe(self, obj: Any, name: str) -> tuple[tuple[int, ...], DType, Device]:
        dtype = self._native.get(obj.dtype) if type(obj) is self._plain else None
        return super().describe(obj, name) if dtype is None else (obj.shape, dtype, _HOST)

    def _strided(self, obj: Any, address: int, dtype: DType, device: Device, name: str) -> Tensor:
        size = obj.itemsize
        if obj.size and any(stride % size for stride, extent in zip(obj.strides, obj.shape) if extent > 1):
            raise InvalidArgument(f"{name}: strides {obj.strides} bytes are not whole elements of {size} bytes")
        return Tensor(address, dtype, device, obj.shape, [stride // size for stride in obj.strides], obj, self)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> tuple[Tensor, Callable[[], Any]]:
        import numpy

        array = numpy.empty(shape, self.dtype(dtype))
        return self.tensor(array, "output"), lambda: array

    @staticmethod
    @functools.cache
    def dtype(dtype: DType) -> Any:
        import numpy

        if NAMES[dtype] != "bfloat16":
            return numpy.dtype(NAMES[dtype])
        import ml_dtypes

        return numpy.dtype(ml_dtypes.bfloat16)


class CuPy(NumPy):
    name = "CuPy"

    put, new, facts, describe = Framework.put, Framework.new, Framework.facts, Framework.describe

    def tensor(self, obj: Any, name: str, writable: bool = False, stream: int | None = None) -> Tensor:
        if stream is not None:
            return Framework.tensor(self, obj, name, writable, stream)
        return self._strided(obj, obj.data.ptr, dtype_of(obj.dtype, name), (CUDA, obj.device.id), name)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> tuple[Tensor, Callable[[], Any]]:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device[1]):
            array = cupy.empty(shape, self.dtype(dtype))
        return self.tensor(array, "output"), lambda: array

    def scalar(self, value: int | float, dtype: DType, device: Device) -> Tensor:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device[1]):
            return self.tensor(cupy.full((), value, self.dtype(dtype)), "scalar")

    def stream(self, call: Call, device: int) -> int:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)


class Torch(Framework):
    name = "PyTorch"

    def __init__(self) -> None:
        self._torch: Any = None
        self._export: Callable | None = None  # of the C exchange API, like _stream
        self._stream: Callable | None = None
        self._devices: dict[Any, Device] = {}  # of devices that `tensor` has taken
        self._types: dict[DType, Any] = {}

    def connect(self) -> None:
        if self._torch is not None:
            return
        torch = sys.modules["torch"]
        self._increment = torch.autograd.graph.increment_version
        exchange = _dlpack.exchange_of(torch.Tensor)
        if exchange is None:  # before PyTorch 2.10
            self.put = self._put_by_hand
        else:
            self._export = exchange.tensor
            self.put = self._put_by(exchange.tensor, torch.Tensor.is_neg)
            self.usual_forward = _usual.forward_of(torch, exchange)
            # Without CUDA in it, what PyTorch would answer is not our concern: the call will be refused.
            self._stream = exchange.stream if torch.version.cuda is not None else None
        self._types = {dtype: getattr(torch, name) for name, dtype in DTYPES.items() if hasattr(torch, name)}
        self._torch = torch

    def tensor(self, obj: Any, name: str, writable: bool = False, stream: int | None = None) -> Tensor:
        torch = sys.modules["torch"]
        if stream is not None:
            return super().tensor(obj.detach(), name, writable, stream)
        if obj.layout is not torch.strided or obj.is_conj() or obj.is_neg():
            raise InvalidArgument(f"{name}: expected a strided tensor without lazy conjugation, got {obj.layout}")
        kind = obj.device.type
        if kind == "cpu":
            device = (CPU, 0)
        elif kind == "cuda" and torch.version.hip is None:
            device = (CUDA, obj.device.index)
        else:
            raise InvalidArgument(f"{name}: expected a tensor on the CPU or on a CUDA device, got device {obj.device}")
        self._devices[obj.device] = device
        return Tensor(obj.data_ptr(), dtype_of(obj.dtype, name), device, obj.shape, obj.stride(), obj, self)

    def _put_by(self, export: Callable, is_neg: Callable) -> Callable[..., int]:
        """`put` through the C exchange API; what it needs is bound, as looking it up would take as long as using it."""
        refuse = super().put

        def put(call: Call, name: str, obj: Any, writable: bool = False) -> int:
            # A lazy negation is the one thing that a DLTensor does not show and the C library cannot refuse.
            if not is_neg(obj):
                taken = call.taken
                address = call.frame.tensors[len(taken)]
                taken.append((name, obj, writable))
                try:
                    if export(obj, address) == 0:
                        return address
                except Exception:  # not strided, without storage, ...
                    pass
            return refuse(call, name, obj, writable)  # as it does, most likely

        return put

    def _put_by_hand(self, call: Call, name: str, obj: Any, writable: bool = False) -> int:
        dtype, device = seen_dtypes.get(obj.dtype), self._devices.get(obj.device)
        plain = obj.layout is self._torch.strided and not obj.is_neg() and obj.dim() <= MAX_RANK
        if dtype is None or device is None or not plain:
            return Framework.put(self, call, name, obj, writable)
        slot = len(call.taken)
        call.taken.append((name, obj, writable))
        return call.frame.pack(slot, obj.data_ptr(), dtype, device, obj.shape, obj.stride())

    def new(self, call: Call, index: int, shape: tuple[int, ...], dtype: DType) -> int:
        # Given by name the shape is parsed in two thirds of the time.
        array = self._torch.empty(size=shape, dtype=self._types[dtype], device=call.logits.device)
        call.results[index] = array
        return self.put(call, "output", array)

    def workspace(self, call: Call, size: int, alignment: int) -> int:
        logits = call.logits
        item = logits.element_size()
        memory = logits.new_empty(-(-size // item))
        address = memory.data_ptr()
        if address % alignment:  # PyTorch's own allocators align further than any backend asks
            memory = logits.new_empty(-(-(size + alignment) // item))
            address = -(-memory.data_ptr() // alignment) * alignment
        call.memory = memory
        return address

    def facts(self, call: Call, obj: Any) -> tuple[tuple[int, ...], Device]:
        device = self._devices.get(obj.device)
        return tuple(obj.shape), device or self.tensor(obj, "logits").device  # what is cut off a torch.Size is slow

    def describe(self, obj: Any, name: str) -> tuple[tuple[int, ...], DType, Device]:
        dtype, device = seen_dtypes.get(obj.dtype), self._devices.get(obj.device)
        return super().describe(obj, name) if dtype is None or device is None else (obj.shape, dtype, device)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> tuple[Tensor, Callable[[], Any]]:
        torch = sys.modules["torch"]
        array = torch.empty(shape, dtype=getattr(torch, NAMES[dtype]), device=self._device(device))
        return self.tensor(array, "output"), lambda: array

    def scalar(self, value: int | float, dtype: DType, device: Device) -> Tensor:
        if device[0] == CPU:
            return super().scalar(value, dtype, device)
        torch = sys.modules["torch"]
        return self.tensor(
            torch.full((), value, dtype=getattr(torch, NAMES[dtype]), device=self._device(device)), "scalar"
        )

    @staticmethod
    def _device(device: Device) -> str:
        return "cpu" if device[0] == CPU else f"cuda:{device[1]}"

    def stream(self, call: Call, device: int) -> int:
        if self._stream is None:
            return int(self._torch.cuda.current_stream(device).cuda_stream) if self._torch.cuda.is_available() else 0
        frame = call.frame
        if self._stream(CUDA, device, frame.word_address):
            raise Error(f"PyTorch gave no stream of device {device}")
        return frame.word.value or 0

    def wrote(self, arrays: list) -> None:
        # Autograd must see that tensors it may have saved have changed; those of inference mode have no version.
        try:
            self._increment(arrays)
        except Exception:  # before PyTorch 2.6: one tensor at a time, and none of inference mode
            for array in arrays:
                if not array.is_inference():
                    self._increment(array)


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class Jax(Framework):
    """JAX arrays never change, so they are inputs only. Outputs are memory of our own, given to JAX when written.

    On CUDA, JAX shows no stream: a call waits for its inputs, runs on the legacy default stream and waits for it.
    """

    name = "JAX"
    finishes = True

    def tensor(self, obj: Any, name: str, writable: bool = False, stream: int | None = None) -> Tensor:
        jax = sys.modules["jax"]
        if isinstance(obj, jax.core.Tracer):
            raise InvalidArgument(f"{name}: a JAX array inside jit, grad or vmap has no memory; call outside of them")
        if writable:
            raise InvalidArgument(f"{name}: JAX arrays cannot be written to, an output must be writable")
        return super().tensor(obj.block_until_ready(), name, stream=stream)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> tuple[Tensor, Callable[[], Any]]:
        size = math.prod(shape) * dtype.bits // 8
        if device[0] == CPU:
            import numpy

            holder: Any = numpy.empty(size + 63, numpy.uint8)  # JAX copies what is not aligned to 64 bytes
            address = -(-holder.__array_interface__["data"][0] // 64) * 64
        else:
            holder = _cuda.Memory(size, device[1])
            address = holder.address
        tensor = Tensor(address, dtype, device, shape, packed_strides(shape), holder, self)

        def result() -> Any:
            import jax.dlpack

            return jax.dlpack.from_dlpack(_dlpack.Export(tensor))

        return tensor, result

    def finish(self, device: Device) -> None:
        if device[0] != CPU:
            _cuda.synchronize(device[1])


GENERIC, NUMPY, CUPY, TORCH, JAX = Generic(), NumPy(), CuPy(), Torch(), Jax()
_KNOWN = (("numpy", "ndarray", NUMPY), ("torch", "Tensor", TORCH), ("jax", "Array", JAX), ("cupy", "ndarray", CUPY))
by_type: dict[type, Framework] = {}  # as framework_of has found them, read without it where time counts
_TYPES = 128  # at most, as types can be made without end and would be kept alive


def framework_of(obj: Any) -> Framework:
    kind = type(obj)
    found = by_type.get(kind)
    if found is None:
        found = GENERIC
        for module_name, class_name, framework in _KNOWN:
            base = getattr(sys.modules.get(module_name), class_name, None)
            if base is not None and isinstance(obj, base):
                found = framework
                break
        found.connect()
        if len(by_type) >= _TYPES:  # weak keys would cost every call
            by_type.clear()
        by_type[kind] = found
    return found
