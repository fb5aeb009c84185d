# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""What libxent needs of each array library. None is imported here: an array can only come from one that is.

The framework of the logits leads a call: it gives the stream, the workspace and the new outputs.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any, Callable

from . import _cuda, _dlpack
from ._dlpack import CPU, CUDA, DTYPES, NAMES, DType, Tensor
from ._library import InvalidArgument

LEGACY_STREAM = 1
Device = tuple[int, int]


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


_dtypes: dict[Any, DType] = {}  # of a framework's dtype objects, whose names are slow to ask for


def dtype_of(dtype: Any, name: str) -> DType:
    found = _dtypes.get(dtype)
    if found is None:
        text = _dlpack.dtype_name(dtype)
        if text not in DTYPES:
            raise InvalidArgument(f"{name}: element type {text} is not one that libxent knows")
        found = _dtypes[dtype] = DTYPES[text]
    return found


class Framework:
    """Any object with __dlpack__; the others refine it."""

    name = "DLPack"

    def tensor(self, obj: Any, name: str, writable: bool = False, stream: int | None = None) -> Tensor:
        """Borrows `obj`. `stream`: a CUDA producer must make its pending work precede that stream."""
        if not hasattr(obj, "__dlpack__") or not hasattr(obj, "__dlpack_device__"):
            raise InvalidArgument(f"{name}: expected an array with __dlpack__, got {type(obj).__name__}")
        on_device = int(obj.__dlpack_device__()[0]) != CPU
        capsule = _dlpack.export_capsule(obj, name, (stream or LEGACY_STREAM) if on_device else None)
        tensor = _dlpack.consume(capsule, name, writable=writable)
        tensor.owner, tensor.framework = obj, self
        return tensor

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> tuple[Tensor, Callable[[], Any]]:
        """New packed memory, and a function that gives the caller's array once it is written."""
        if device[0] != CPU:
            raise InvalidArgument(f"logits: {self.name} gives no memory on device {device}; pass the outputs yourself")
        return NUMPY.empty(shape, dtype, device)

    def scalar(self, value: int | float, dtype: DType, device: Device) -> Tensor:
        """A number as a tensor without dimensions."""
        holder = _SCALARS[NAMES[dtype]](value)
        if device[0] == CPU:
            return Tensor(ctypes.addressof(holder), dtype, device, (), None, holder)
        memory = _cuda.Memory(ctypes.sizeof(holder), device[1])
        memory.write(bytes(holder))
        return Tensor(memory.address, dtype, device, (), None, memory)

    def stream(self, device: int) -> int | None:
        """The CUDA stream to enqueue on; None is CUDA's legacy default stream."""
        return None

    def wrote(self, obj: Any) -> None:
        """An array of the caller was written to."""

    def finish(self, device: Device) -> None:
        """The call was enqueued."""


_SCALARS = {"float32": ctypes.c_float, "float64": ctypes.c_double, "int32": ctypes.c_int32, "int64": ctypes.c_int64}


class NumPy(Framework):
    name = "NumPy"

    def tensor(self, obj: Any, name: str, writable: bool = False, stream: int | None = None) -> Tensor:
        numpy = sys.modules["numpy"]
        if isinstance(obj, numpy.ma.MaskedArray):
            raise InvalidArgument(f"{name}: a numpy.ma.MaskedArray would lose its mask; pass .data and mask=")
        dtype = dtype_of(obj.dtype, name)
        if not obj.dtype.isnative:
            raise InvalidArgument(f"{name}: element type {obj.dtype.str} is not in native byte order")
        if writable and not obj.flags.writeable:
            raise InvalidArgument(f"{name}: the array is read-only, an output must be writable")
        return self._strided(obj, obj.__array_interface__["data"][0], dtype, (CPU, 0), name)

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
    def dtype(dtype: DType) -> Any:
        import numpy

        if NAMES[dtype] != "bfloat16":
            return numpy.dtype(NAMES[dtype])
        import ml_dtypes

        return numpy.dtype(ml_dtypes.bfloat16)


class CuPy(NumPy):
    name = "CuPy"

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

    def stream(self, device: int) -> int | None:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)


class Torch(Framework):
    name = "PyTorch"

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
        return Tensor(obj.data_ptr(), dtype_of(obj.dtype, name), device, obj.shape, obj.stride(), obj, self)

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

    def stream(self, device: int) -> int | None:
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)

    def wrote(self, obj: Any) -> None:
        # Autograd must see that a tensor it may have saved has changed.
        if not obj.is_inference():
            sys.modules["torch"].autograd.graph.increment_version(obj)


class Jax(Framework):
    """JAX arrays never change, so they are inputs only. Outputs are memory of our own, given to JAX when written.

    On CUDA, JAX shows no stream: a call waits for its inputs, runs on the legacy default stream and waits for it.
    """

    name = "JAX"

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


GENERIC, NUMPY, CUPY, TORCH, JAX = Framework(), NumPy(), CuPy(), Torch(), Jax()
_KNOWN = (("numpy", "ndarray", NUMPY), ("torch", "Tensor", TORCH), ("jax", "Array", JAX), ("cupy", "ndarray", CUPY))
_by_type: dict[type, Framework] = {}


def framework_of(obj: Any) -> Framework:
    kind = type(obj)
    found = _by_type.get(kind)
    if found is None:
        found = GENERIC
        for module_name, class_name, framework in _KNOWN:
            base = getattr(sys.modules.get(module_name), class_name, None)
            if base is not None and isinstance(obj, base):
                found = framework
                break
        _by_type[kind] = found
    return found
