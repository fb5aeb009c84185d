# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Finds and loads libxent, and turns its failures into exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import pathlib
import re
import threading
from typing import Any

from . import _abi


class Error(RuntimeError):
    """A call of libxent failed.

    status       name of the status, such as "XENT_UNSUPPORTED"
    native_code  cudaError_t of a device error, else 0
    """

    # Without a constructor of its own: torch.compile traces only such exceptions to where they are raised.
    status: str = "XENT_INTERNAL"
    native_code: int = 0

    @classmethod
    def of(cls, message: str, status: str, native_code: int = 0) -> Error:
        error = cls(message)
        error.status, error.native_code = status, native_code
        return error


class InvalidArgument(Error, ValueError):
    """An argument was refused; nothing was written. The message names the argument, its value and the rule."""

    status = "XENT_INVALID_ARGUMENT"


_INVALID = (_abi.XENT_INVALID_ARGUMENT, _abi.XENT_INVALID_STRUCT, _abi.XENT_WORKSPACE_TOO_SMALL)


_CALLS = (
    "xent_forward",
    "xent_backward",
    "xent_loss_and_grad",
    "xent_scale_grad",
    "xent_forward_partial",
    "xent_forward_combine",
)


def _candidates() -> list[str]:
    chosen = os.environ.get("LIBXENT_LIBRARY")
    if chosen:
        return [chosen]
    here = pathlib.Path(__file__).resolve().parent
    soname = f"libxent.so.{_abi.XENT_ABI_VERSION}"
    beside = [str(here / name) for name in (soname, "libxent.so") if (here / name).exists()]
    return [*beside, soname]


def _load() -> ctypes.CDLL:
    failures = []
    for path in _candidates():
        try:
            loaded = ctypes.CDLL(path)
        except OSError as error:
            failures.append(str(error))
            continue
        for name, (result, arguments) in _abi.FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype = result
            # An address does: to check the type of a pointer takes longer than the rest of a call.
            function.argtypes = [ctypes.c_void_p] * len(arguments) if name in _CALLS else arguments
        found = loaded.xent_abi_version()
        if found != _abi.XENT_ABI_VERSION:
            raise ImportError(f"libxent: {path} has ABI {found}, this package needs {_abi.XENT_ABI_VERSION}")
        return loaded
    raise ImportError(
        "libxent: the library was not found; set LIBXENT_LIBRARY to its path. Tried: " + "; ".join(failures)
    )


lib = _load()


class _ErrorSlot(threading.local):
    """An xent_error for each thread: it is written on failure only, so it may be used again."""

    def __init__(self) -> None:
        self.struct = _abi.Error(struct_size=ctypes.sizeof(_abi.Error))
        self.reference = ctypes.byref(self.struct)


error_slot = _ErrorSlot()


class _Raised(threading.local):
    """What a callback raised on this thread, until the call that it failed has returned."""

    error: BaseException | None = None


raised = _Raised()


def _in_python(message: str) -> str:
    """Options by their names here: reduction="sum" for XENT_REDUCTION_SUM, entropy=True for XENT_PLAN_ENTROPY."""
    message = message.replace("XENT_REDUCTION_SUM or _MEAN", 'reduction="sum" or "mean"')
    message = re.sub(r"XENT_REDUCTION_([A-Z]+)", lambda found: f'reduction="{found[1].lower()}"', message)
    return re.sub(r"XENT_PLAN_([A-Z_]+)", lambda found: f"{found[1].lower()}=True", message)


def check(status: int, slot: Any = error_slot) -> None:
    """Raises where `status` is not XENT_OK; `slot` was passed to the call on this thread."""
    if status == _abi.XENT_OK:
        return
    message = _in_python(slot.struct.message.decode("utf-8", "replace"))
    kind = InvalidArgument if status in _INVALID else Error
    cause = None
    if status == _abi.XENT_COMM_ERROR:
        cause, raised.error = raised.error, None
    try:
        if cause is not None and not isinstance(cause, Exception):
            raise cause  # KeyboardInterrupt and SystemExit are nobody's failure
        raise kind.of(message, lib.xent_status_name(status).decode(), slot.struct.native_code) from cause
    finally:
        del cause  # else its traceback held this frame, and the frame it


def integer(name: str, value: Any, bits: int = 64) -> int:
    """`value` as an int of so many bits: ctypes would cut off what does not fit."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name}: expected an integer, got {value!r}") from None
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise InvalidArgument(f"{name}: {number} does not fit in {bits} bits")
    return number


def real(name: str, value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise InvalidArgument(f"{name}: expected a number, got {value!r}")
    try:  # not contextlib.suppress, which torch.compile traces in new releases only
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InvalidArgument(f"{name}: expected a number, got {value!r}") from None


class Context:
    """Backends and CPU threads. Most programs use the default one and never name it.

    threads  of the CPU backend, the calling thread included. 0: all cores this process may use.

    May be shared between threads; plans keep what they need of it alive.
    """

    def __init__(self, threads: int = 0) -> None:
        self._handle: ctypes.c_void_p | None = None
        desc = _abi.ContextDesc(struct_size=ctypes.sizeof(_abi.ContextDesc), threads=integer("threads", threads, 32))
        handle = ctypes.c_void_p()
        check(lib.xent_context_create(ctypes.byref(desc), ctypes.byref(handle), error_slot.reference))
        self._handle = handle

    def load_backend(self, path: str) -> None:
        """Loads a backend plugin: "cuda", or the path of a file. Raises Error where it cannot run here."""
        encoded = os.fsencode(path)
        if b"\0" in encoded:
            raise InvalidArgument(f"path: {path!r} has a null character in it")
        check(lib.xent_backend_load(self._handle, encoded, error_slot.reference))

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the backends loaded so far. CUDA is loaded when a plan first asks for it."""
        count = lib.xent_backend_count(self._handle)
        return tuple(lib.xent_backend_name(self._handle, index).decode() for index in range(count))

    def __reduce__(self) -> Any:
        raise TypeError("libxent: a Context cannot be copied or pickled")  # two would destroy the same one

    def __del__(self, destroy=lib.xent_context_destroy) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle is not None:
            destroy(handle)


_default: Context | None = None
_default_lock = threading.Lock()


def default_context() -> Context:
    """The context of every plan that names none: all cores, made on first use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = Context()
    return _default


def version() -> str:
    """Version of the loaded library, "major.minor.patch"."""
    return lib.xent_version_string().decode()


def backends() -> tuple[str, ...]:
    """Names of the backends in the default context; tries to load CUDA, so ("cpu",) means that it cannot run here."""
    context = default_context()
    if "cuda" not in context.backends:
        with contextlib.suppress(Error):  # Plan(device="cuda") tells why
            context.load_backend("cuda")
    return context.backends
