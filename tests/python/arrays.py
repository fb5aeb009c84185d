# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The array libraries under test: to and from NumPy, without libxent's help."""

import numpy as np
import pytest


class NumPy:
    name = "numpy"
    types = ("float32", "float64", "float16", "bfloat16")
    mutable = True

    def make(self, array):
        return array

    def numpy(self, array):
        assert isinstance(array, (np.ndarray, np.generic))
        return np.asarray(array)


class Torch:
    types = NumPy.types
    mutable = True

    def __init__(self, device):
        self.torch = pytest.importorskip("torch")
        self.device = device
        self.name = f"torch-{device}"
        if device == "cuda":
            self.types = ("float32", "float16", "bfloat16")
            if not self.torch.cuda.is_available():
                pytest.skip("PyTorch sees no CUDA device")

    def make(self, array):
        if array.dtype.name == "bfloat16":
            tensor = self.torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(self.torch.bfloat16)
            order = np.argsort([-stride for stride in array.strides], kind="stable")
            if not array.flags.c_contiguous and (np.diff(order) != 1).any():
                packed = self.torch.empty([array.shape[i] for i in order], dtype=self.torch.bfloat16)
                view = packed.permute(*np.argsort(order).tolist())
                tensor = view.copy_(tensor)
        else:
            tensor = self.torch.from_numpy(np.array(array, order="K", copy=True))
        return tensor.to(self.device)

    def numpy(self, tensor):
        assert isinstance(tensor, self.torch.Tensor) and tensor.device.type == self.device
        tensor = tensor.detach().cpu()
        if tensor.dtype == self.torch.bfloat16:
            import ml_dtypes

            return tensor.contiguous().view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()


class Jax:
    mutable = False

    def __init__(self, platform):
        self.jax = pytest.importorskip("jax")
        self.name = f"jax-{platform}"
        self.types = ("float32", "float16", "bfloat16")
        try:
            self.device = self.jax.devices(platform)[0]
        except RuntimeError:
            pytest.skip(f"JAX has no {platform} device")

    def make(self, array):
        if array.dtype == np.int64:
            array = array.astype(np.int32)  # JAX has no int64 unless told
        return self.jax.device_put(array, self.device)

    def numpy(self, array):
        assert isinstance(array, self.jax.Array) and array.devices() == {self.device}
        return np.asarray(array)


class CuPy:
    name = "cupy"
    types = ("float32", "float16")
    mutable = True

    def __init__(self):
        self.cupy = pytest.importorskip("cupy")
        try:
            self.cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            pytest.skip(f"CuPy sees no CUDA device: {error}")

    def make(self, array):
        return self.cupy.asarray(array)

    def numpy(self, array):
        assert isinstance(array, self.cupy.ndarray)
        return self.cupy.asnumpy(array)


MAKERS = {
    "numpy": NumPy,
    "torch-cpu": lambda: Torch("cpu"),
    "jax-cpu": lambda: Jax("cpu"),
    "torch-cuda": lambda: Torch("cuda"),
    "jax-cuda": lambda: Jax("cuda"),
    "cupy": CuPy,
}


def dtype(name):
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)
