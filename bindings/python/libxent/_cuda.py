# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Device memory through the CUDA driver, for arrays of frameworks that lend no allocator (JAX).

Everything happens in the device's primary context, which the CUDA runtime and JAX use too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from ._library import Error


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Error.of(f"the CUDA driver cannot be loaded: {error}", "XENT_UNSUPPORTED") from None
    _check(driver, driver.cuInit(0), "cuInit")
    return driver


def _check(driver: ctypes.CDLL, code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise Error.of(f"{what}: {(text.value or b'unknown error').decode()}", "XENT_DEVICE_ERROR", code)


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    driver, handle, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _check(driver, driver.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    return context


@contextlib.contextmanager
def _current(device: int) -> Iterator[ctypes.CDLL]:
    driver = _driver()
    _check(driver, driver.cuCtxPushCurrent_v2(_primary_context(device)), "cuCtxPushCurrent")
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class Memory:
    """`size` bytes on a device, freed with the object; freeing waits for work that uses them."""

    def __init__(self, size: int, device: int) -> None:
        self.address, self.device = 0, device
        pointer = ctypes.c_uint64()
        with _current(device) as driver:
            code = driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
            _check(driver, code, f"cuMemAlloc of {size} bytes")
        self.address = pointer.value

    def write(self, data: bytes) -> None:
        with _current(self.device) as driver:
            code = driver.cuMemcpyHtoD_v2(ctypes.c_uint64(self.address), data, ctypes.c_size_t(len(data)))
            _check(driver, code, "cuMemcpyHtoD")

    def __del__(self) -> None:
        if self.address:
            with _current(self.device) as driver:
                driver.cuMemFree_v2(ctypes.c_uint64(self.address))
            self.address = 0


def synchronize(device: int) -> None:
    """Waits for the legacy default stream, and so for all that it waits for."""
    with _current(device) as driver:
        _check(driver, driver.cuStreamSynchronize(None), "cuStreamSynchronize")
