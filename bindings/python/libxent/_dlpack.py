# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""DLPack from and to Python objects, with the standard library alone.

A `Tensor` holds the DLTensor of one call. It borrows: whoever owns the memory must outlive it, and a
capsule that was consumed is given back by `release`, after the call that used it has returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from . import _abi
from ._library import Error, InvalidArgument

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
MAX_VERSION = (1, 3)
READ_ONLY = 1 << 0


class DType(NamedTuple):
    """(code, bits) of DLDataType; lanes are 1."""

    code: int
    bits: int


DTYPES = {
    "float16": DType(2, 16),
    "float32": DType(2, 32),
    "float64": DType(2, 64),
    "bfloat16": DType(4, 16),
    "int8": DType(0, 8),
    "int16": DType(0, 16),
    "int32": DType(0, 32),
    "int64": DType(0, 64),
    "uint8": DType(1, 8),
    "uint16": DType(1, 16),
    "uint32": DType(1, 32),
    "uint64": DType(1, 64),
    "bool": DType(6, 8),
}
NAMES = {value: name for name, value in DTYPES.items()}


def dtype_name(dtype: Any) -> str:
    """'float32' of "float32", numpy.float32, numpy.dtype("float32"), torch.float32, jax.numpy.float32, ..."""
    if isinstance(dtype, str):
        return dtype
    for attribute in ("name", "__name__"):
        name = getattr(dtype, attribute, None)
        if isinstance(name, str):
            return name
    return str(dtype).rpartition(".")[2]  # torch.float32


class Tensor:
    """A DLTensor and what keeps it alive. Strides are in elements."""

    __slots__ = ("dl", "extents", "framework", "managed", "owner", "shape", "strides")

    def __init__(
        self,
        address: int | None,
        dtype: DType,
        device: tuple[int, int],
        shape: Sequence[int],
        strides: Sequence[int] | None,
        owner: Any,
        framework: Any = None,
        lanes: int = 1,
        byte_offset: int = 0,
    ) -> None:
        rank = len(shape)
        self.shape = tuple(shape)
        self.strides = None if strides is None else tuple(strides)
        self.extents = (ctypes.c_int64 * (2 * rank))(*self.shape, *(self.strides or ()))
        self.owner = owner
        self.managed: Managed | None = None
        self.framework = framework
        base = ctypes.addressof(self.extents) if rank else None
        self.dl = _abi.DLTensor(
            data=address or None,
            device=_abi.DLDevice(*device),
            ndim=rank,
            dtype=_abi.DLDataType(dtype.code, dtype.bits, lanes),
            shape=base,
            strides=base + 8 * rank if rank and strides is not None else None,
            byte_offset=byte_offset,
        )

    @property
    def device(self) -> tuple[int, int]:
        return self.dl.device.device_type, self.dl.device.device_id

    @property
    def dtype(self) -> DType:
        return DType(self.dl.dtype.code, self.dl.dtype.bits)

    @property
    def address(self) -> int:
        return (self.dl.data or 0) + self.dl.byte_offset

    def pointer(self) -> Any:
        return ctypes.pointer(self.dl)

    def release(self) -> None:
        """Gives a consumed capsule back to its producer; may be called again."""
        if self.managed is not None:
            self.managed.release()


# Capsules keep the address of their name, so the names live as long as the process.
def _forever(name: bytes) -> ctypes.c_char_p:
    holder = ctypes.c_char_p(name)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(name))
    return holder


_VERSIONED = _forever(b"dltensor_versioned")
_USED_VERSIONED = _forever(b"used_dltensor_versioned")
_LEGACY = _forever(b"dltensor")
_USED_LEGACY = _forever(b"used_dltensor")

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.restype, _set_name.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
_deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)  # keeps the GIL, which many producers expect


class Managed:
    """A consumed DLManagedTensor[Versioned]: its deleter is called exactly once."""

    __slots__ = ("_address", "_delete")

    def __init__(self, address: int, deleter: int | None) -> None:
        self._address = address
        self._delete: Callable[[int], None] | None = _deleter(deleter) if deleter else None

    def release(self) -> None:
        delete, self._delete = self._delete, None
        if delete is not None:
            delete(self._address)

    __del__ = release


def export_capsule(obj: Any, name: str, stream: int | None) -> Any:
    """obj.__dlpack__(...) of a producer of any age."""
    keywords: dict[str, Any] = {} if stream is None else {"stream": stream}
    try:
        try:
            return obj.__dlpack__(max_version=MAX_VERSION, **keywords)
        except TypeError:  # older than DLPack 1.0
            return obj.__dlpack__(**keywords)
    except Error:
        raise
    except Exception as error:
        raise InvalidArgument(f"{name}: {type(obj).__name__} cannot be exported through DLPack: {error}") from error


def consume(capsule: Any, name: str, *, writable: bool = False) -> Tensor:
    """Takes over a DLPack capsule of either generation."""
    if _is_valid(capsule, _VERSIONED):
        struct: Any = _abi.DLManagedTensorVersioned
        old, new = _VERSIONED, _USED_VERSIONED
    elif _is_valid(capsule, _LEGACY):
        struct = _abi.DLManagedTensor
        old, new = _LEGACY, _USED_LEGACY
    else:
        raise InvalidArgument(f"{name}: __dlpack__ gave {capsule!r}, not a fresh DLPack capsule")
    address = _get_pointer(capsule, old)
    record = struct.from_address(address)
    _set_name(capsule, new)
    managed = Managed(address, record.deleter)
    try:
        if struct is _abi.DLManagedTensorVersioned:
            version = record.version
            # Beyond the major version only the deleter may be touched.
            if version.major != MAX_VERSION[0]:
                raise InvalidArgument(f"{name}: DLPack {version.major}.{version.minor} is not understood, only 1.x")
            if writable and record.flags & READ_ONLY:
                raise InvalidArgument(f"{name}: the array is read-only, an output must be writable")
        dl = record.dl_tensor
        rank = dl.ndim
        if rank < 0 or (rank > 0 and not dl.shape):
            raise InvalidArgument(f"{name}: the DLPack tensor has {rank} dimensions and shape {dl.shape}")
        shape = (ctypes.c_int64 * rank).from_address(dl.shape)[:] if rank else ()
        strides = (ctypes.c_int64 * rank).from_address(dl.strides)[:] if rank and dl.strides else None
        tensor = Tensor(
            dl.data,
            DType(dl.dtype.code, dl.dtype.bits),
            (dl.device.device_type, dl.device.device_id),
            shape,
            strides,
            None,
            lanes=dl.dtype.lanes,
            byte_offset=dl.byte_offset,
        )
    except BaseException:
        managed.release()
        raise
    tensor.managed = managed
    return tensor


def array_data(array: Any) -> int:
    """The address of a NumPy array's data: `array.__array_interface__["data"][0]` at half the cost."""
    capsule = array.__array_struct__  # owns what is read here: a name keeps it, whatever the collector runs meanwhile
    return _word_at(_get_pointer(capsule, None) + _DATA).value


_word_at = ctypes.c_size_t.from_address
_DATA = 40  # of PyArrayInterface: five ints and their padding, shape, strides

# ---- The C exchange API of DLPack 1.3, which some frameworks offer beside __dlpack__ ----

_EXCHANGE = b"dlpack_exchange_api"


class Exchange:
    """The functions of one array type. All raise what the framework raises.

    tensor(obj, address)                    writes a DLTensor that borrows all it points to from `obj`, with no copy and
                                            no synchronisation
    stream(device_type, device_id, address) writes the current stream, a pointer
    """

    def __init__(self, tensor: Callable, stream: Callable) -> None:
        self.tensor, self.stream = tensor, stream


def exchange_of(kind: type) -> Exchange | None:
    """The exchange API of an array type, or None where it has none that is understood."""
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or not _is_valid(capsule, _EXCHANGE):
        return None
    address: int | None = _get_pointer(capsule, _EXCHANGE)
    while address:
        version = _abi.DLPackVersion.from_address(address)
        older, _, _, _, tensor, stream = (ctypes.c_void_p * 6).from_address(address + ctypes.sizeof(version))
        if version.major == MAX_VERSION[0]:
            if not tensor or not stream:
                return None
            code, place = ctypes.c_int, ctypes.c_void_p
            return Exchange(
                ctypes.PYFUNCTYPE(code, ctypes.py_object, place)(tensor),
                ctypes.PYFUNCTYPE(code, ctypes.c_int32, ctypes.c_int32, place)(stream),
            )
        address = older
    return None


# ---- Export: memory that libxent's Python side allocated, for frameworks whose arrays cannot be written to ----

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_get_pointer_raw = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid_raw = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_exported: dict[int, tuple] = {}  # address of a live DLManagedTensor -> what it needs


# A consumer may let go of an array after this module's names are gone, as the interpreter ends: what the callbacks
# need is bound to them, and they themselves are never freed.
@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _drop_exported(address, pop=_exported.pop):
    pop(address, None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop_capsule(capsule, pop=_exported.pop, is_valid=_is_valid_raw, get_pointer=_get_pointer_raw, name=_LEGACY):
    if is_valid(capsule, name):
        pop(get_pointer(capsule, name), None)


for _callback in (_drop_exported, _drop_capsule):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_callback))


class Export:
    """Wraps a packed Tensor of ours as a producer of legacy DLPack capsules, which every consumer takes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.device

    def __dlpack__(self, **_: Any) -> Any:
        record = _abi.DLManagedTensor(dl_tensor=self._tensor.dl, deleter=ctypes.cast(_drop_exported, ctypes.c_void_p))
        address = ctypes.addressof(record)
        _exported[address] = (record, self._tensor)
        return _new_capsule(address, _LEGACY, ctypes.cast(_drop_capsule, ctypes.c_void_p))
