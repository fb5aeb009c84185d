# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""What each array library asks to be watched for, beyond DLPack, and the table of their types."""

import ctypes
import gc
import sys
import weakref

import libxent
import numpy as np
import pytest
from libxent import _dlpack, _frameworks
from libxent._frameworks import JAX, NUMPY, TORCH, framework_of, packed_strides


@pytest.fixture
def problem(rng):
    return rng.standard_normal((4, 10), np.float32), rng.integers(0, 10, 4)


def test_objects_without_dlpack(problem):
    logits, targets = problem
    with pytest.raises(libxent.InvalidArgument, match="expected an array with __dlpack__, got list"):
        libxent.cross_entropy(logits.tolist(), targets)
    with pytest.raises(libxent.InvalidArgument, match=r"targets: .*got list"):
        libxent.cross_entropy(logits, targets.tolist())


def test_types_of_arrays_are_not_kept_for_ever(problem):
    logits, targets = problem
    want = libxent.cross_entropy(logits, targets)
    kinds = []

    class Array:
        def __init__(self, array):
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    for i in range(2 * _frameworks._TYPES):
        kind = type(f"Array{i}", (Array,), {})
        kinds.append(weakref.ref(kind))
        assert libxent.cross_entropy(kind(logits), targets) == want
    del kind
    gc.collect()
    assert len(_frameworks.by_type) <= _frameworks._TYPES
    assert sum(kind() is not None for kind in kinds) <= _frameworks._TYPES


def test_read_only_numpy(problem):
    logits, targets = problem
    logits.flags.writeable = False
    targets.flags.writeable = False
    _, grad = libxent.loss_and_grad(logits, targets)
    assert grad.flags.writeable
    before = logits.copy()
    with pytest.raises(libxent.InvalidArgument, match="read-only"):
        libxent.loss_and_grad(logits, targets, overwrite_logits=True)
    assert np.array_equal(logits, before)


def test_size_one_dimensions_may_carry_any_stride(rng):
    logits = rng.standard_normal((1, 10), np.float32)
    odd = np.lib.stride_tricks.as_strided(logits, shape=(1, 10), strides=(7, 4))
    assert libxent.cross_entropy(odd, np.array([3])) == libxent.cross_entropy(logits, np.array([3]))


def test_numpy_that_is_no_plain_array(problem):
    logits, targets = problem
    with pytest.raises(libxent.InvalidArgument, match="MaskedArray"):
        libxent.cross_entropy(np.ma.masked_array(logits), targets)
    with pytest.raises(libxent.InvalidArgument, match="byte order"):
        libxent.cross_entropy(logits.astype(logits.dtype.newbyteorder()), targets)
    with pytest.raises(libxent.InvalidArgument, match="logits: element type complex64"):
        libxent.cross_entropy(logits.astype(np.complex64), targets)
    packed = np.zeros(4, np.dtype([("x", np.float32, 10), ("pad", np.int8)]))
    with pytest.raises(libxent.InvalidArgument, match="not whole elements"):
        libxent.cross_entropy(packed["x"], targets)


def test_bool_is_bool(problem):
    logits, targets = problem
    mask = np.array([True, False, True, True])
    tensor = NUMPY.tensor(mask, "mask")
    assert tensor.dtype == (6, 8)
    got = libxent.cross_entropy(logits, targets, mask=mask, reduction="none")
    assert got[1] == 0 and (got[[0, 2, 3]] > 0).all()


def test_numpy_struct_outlives_what_is_read_of_it():
    """Its capsule owns the struct: with the capsule gone, anything may lie there."""

    class Lends:
        @property
        def __array_struct__(self):
            self.struct = (ctypes.c_size_t * 8)(*[0x1000] * 8)
            self.destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(
                lambda _: ctypes.memset(self.struct, 0, ctypes.sizeof(self.struct))
            )
            destructor = ctypes.cast(self.destructor, ctypes.c_void_p)
            return _dlpack._new_capsule(ctypes.addressof(self.struct), None, destructor)

    array = Lends()
    assert _dlpack.array_data(array) == 0x1000
    assert not any(array.struct), "the capsule is kept"


def test_torch_tensors_are_borrowed():
    torch = pytest.importorskip("torch")
    x = torch.randn(6, 5, requires_grad=True)[1:, ::2]
    tensor = framework_of(x).tensor(x, "x")
    assert framework_of(x) is TORCH
    assert tensor.address == x.data_ptr() and tensor.strides == (5, 2) and tensor.device == (1, 0)
    assert TORCH.tensor(torch.zeros(2, dtype=torch.bfloat16), "x").dtype == (4, 16)
    with pytest.raises(libxent.InvalidArgument, match="strided"):
        TORCH.tensor(torch.eye(3).to_sparse(), "x")
    with pytest.raises(libxent.InvalidArgument, match="strided"):
        TORCH.tensor(torch.zeros(3, dtype=torch.complex64).conj().imag, "x")
    with pytest.raises(libxent.InvalidArgument, match="meta"):
        TORCH.tensor(torch.zeros(3, device="meta"), "x")


def test_torch_is_not_imported_for_others(problem):
    import subprocess

    code = (
        "import numpy, sys, libxent; libxent.loss_and_grad(numpy.zeros((2, 3), numpy.float32), numpy.zeros(2, int));"
        "assert not {'torch', 'jax', 'cupy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_jax_arrays_are_inputs_only(problem):
    jax = pytest.importorskip("jax")
    logits, targets = problem
    x, t = jax.numpy.asarray(logits), jax.numpy.asarray(targets)
    assert framework_of(x) is JAX
    with pytest.raises(libxent.InvalidArgument, match="cannot be written to"):
        libxent.loss_and_grad(x, t, overwrite_logits=True)
    plan = libxent.Plan(max_rows=4, vocab=10, target_dtype="int32")
    with pytest.raises(libxent.InvalidArgument, match="loss: JAX arrays cannot be written to"):
        plan.forward(x, t, loss=jax.numpy.zeros(()))
    with pytest.raises(libxent.InvalidArgument, match="inside jit"):
        jax.jit(lambda y: libxent.cross_entropy(y, t))(x)
    assert np.array_equal(np.asarray(x), logits)


def test_jax_results_are_not_copies(problem):
    jax = pytest.importorskip("jax")
    shape = (16, 64)
    tensor, result = JAX.empty(shape, _dlpack.DTYPES["float32"], (1, 0))
    array = result()
    assert array.shape == shape and array.unsafe_buffer_pointer() == tensor.address
    x = jax.numpy.ones((3, 4), "bfloat16")
    assert framework_of(x).tensor(x, "x").address == x.unsafe_buffer_pointer()


def test_packed_strides():
    assert packed_strides((2, 3, 4)) == (12, 4, 1)
    assert packed_strides(()) == ()
    assert packed_strides((2, 0, 4)) == (4, 4, 1)
