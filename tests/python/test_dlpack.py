# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Import and export through DLPack: the pitfalls that producers and consumers are known for."""

import ctypes
import gc
import weakref

import libxent
import numpy as np
import pytest
from libxent import _abi, _dlpack
from libxent._frameworks import packed_strides

DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Producer:
    """A DLPack producer in Python whose every field the test chooses."""

    def __init__(
        self, array, *, versioned=True, version=(1, 0), flags=0, strides=True, offset=0, lanes=1, deleter=True
    ):
        self.array, self.versioned, self.version, self.flags = array, versioned, version, flags
        self.strides, self.offset, self.lanes = strides, offset, lanes
        self.calls, self.deleted, self.alive = [], 0, []
        self.deleter = ctypes.cast(DELETER(self._delete), ctypes.c_void_p) if deleter else None

    def _delete(self, _):
        self.deleted += 1

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, stream=None, **keywords):
        self.calls.append(keywords)
        if not self.versioned and keywords:
            raise TypeError("an old producer knows no max_version")
        rank = self.array.ndim
        shape = (ctypes.c_int64 * rank)(*self.array.shape)
        strides = (ctypes.c_int64 * rank)(*(s // self.array.itemsize for s in self.array.strides))
        tensor = _abi.DLTensor(
            data=self.array.ctypes.data - self.offset,
            device=_abi.DLDevice(1, 0),
            ndim=rank,
            dtype=_abi.DLDataType(*_dlpack.DTYPES[self.array.dtype.name], self.lanes),
            shape=ctypes.addressof(shape),
            strides=ctypes.addressof(strides) if self.strides else None,
            byte_offset=self.offset,
        )
        if self.versioned:
            record = _abi.DLManagedTensorVersioned(
                version=_abi.DLPackVersion(*self.version), deleter=self.deleter, flags=self.flags, dl_tensor=tensor
            )
            name = b"dltensor_versioned"
        else:
            record = _abi.DLManagedTensor(dl_tensor=tensor, deleter=self.deleter)
            name = b"dltensor"
        self.alive += [shape, strides, record, name]
        capsule = _dlpack._new_capsule(ctypes.addressof(record), name, None)
        self.capsules = [*getattr(self, "capsules", []), capsule]
        return capsule


@pytest.fixture
def problem(rng):
    return rng.standard_normal((4, 10), np.float32), rng.integers(0, 10, 4)


def is_capsule(capsule, name):
    return bool(_dlpack._is_valid(capsule, name))


@pytest.mark.parametrize("versioned", [True, False], ids=["versioned", "legacy"])
def test_capsule_is_renamed_and_its_deleter_called_once(problem, versioned):
    logits, targets = problem
    producer = Producer(logits, versioned=versioned)
    loss = libxent.cross_entropy(producer, targets)
    assert loss == libxent.cross_entropy(logits, targets)
    used = b"used_dltensor_versioned" if versioned else b"used_dltensor"
    assert len(producer.capsules) >= 1
    assert all(is_capsule(capsule, used) for capsule in producer.capsules)
    assert producer.deleted == len(producer.capsules)
    assert {"max_version": (1, 3)} in producer.calls
    del producer.capsules
    gc.collect()
    assert len(producer.alive) // 4 == producer.deleted


def test_deleter_is_called_after_a_refused_call_too(problem):
    logits, targets = problem
    producer = Producer(logits)
    with pytest.raises(libxent.InvalidArgument) as first:
        libxent.cross_entropy(producer, targets, label_smoothing=2.0)
    with pytest.raises(libxent.InvalidArgument) as second:
        libxent.cross_entropy(producer, targets[:3])
    # Not left to the garbage collector: the exceptions still hold the frames.
    assert producer.deleted == len(producer.capsules) >= 2
    assert first.tb and second.tb


def test_deleter_runs_only_after_the_call(problem, monkeypatch):
    logits, targets = problem
    producer = Producer(logits)
    seen = []
    plan = libxent.Plan(max_rows=4, vocab=10)
    real = libxent._plan.lib.xent_forward

    class Spy:
        def __getattr__(self, name):
            return getattr(libxent._library.lib, name)

        def xent_forward(self, *arguments):
            seen.append(producer.deleted)
            return real(*arguments)

    monkeypatch.setattr(libxent._plan, "lib", Spy())
    plan.forward(producer, targets)
    assert seen == [0] and producer.deleted == 1


def test_null_deleter(problem):
    logits, targets = problem
    assert libxent.cross_entropy(Producer(logits, deleter=False), targets) == libxent.cross_entropy(logits, targets)


def test_null_strides_are_packed(problem):
    logits, targets = problem
    assert libxent.cross_entropy(Producer(logits, strides=False), targets) == libxent.cross_entropy(logits, targets)


def test_byte_offset_is_added(problem):
    logits, targets = problem
    assert libxent.cross_entropy(Producer(logits, offset=64), targets) == libxent.cross_entropy(logits, targets)


def test_strides_are_honoured(problem):
    logits, targets = problem
    wide = np.full((4, 23), 99, np.float32)
    wide[:, 1:21:2] = logits
    assert libxent.cross_entropy(Producer(wide[:, 1:21:2]), targets) == libxent.cross_entropy(logits, targets)


def test_other_major_version_is_refused_and_deleted(problem):
    logits, targets = problem
    producer = Producer(logits, version=(2, 0))
    with pytest.raises(libxent.InvalidArgument, match=r"DLPack 2\.0"):
        libxent.cross_entropy(producer, targets)
    assert producer.deleted == 1


def test_newer_minor_version_is_taken(problem):
    logits, targets = problem
    assert libxent.cross_entropy(Producer(logits, version=(1, 9)), targets) == libxent.cross_entropy(logits, targets)


def test_lanes_are_refused(problem):
    logits, targets = problem
    with pytest.raises(libxent.InvalidArgument):
        libxent.cross_entropy(Producer(logits, lanes=2), targets)


def test_read_only_input_is_fine_and_read_only_output_is_not(problem):
    logits, targets = problem
    plan = libxent.Plan(max_rows=4, vocab=10)
    result = plan.forward(Producer(logits, flags=_dlpack.READ_ONLY), targets)
    producer = Producer(np.zeros_like(logits), flags=_dlpack.READ_ONLY)
    with pytest.raises(libxent.InvalidArgument, match="grad: the array is read-only"):
        plan.backward(logits, targets, result.stats, result.divisor, grad_logits=producer)
    assert producer.deleted == 1 and not producer.array.any()
    # Without the flag the same producer is an output.
    producer = Producer(np.zeros_like(logits))
    assert plan.backward(logits, targets, result.stats, result.divisor, grad_logits=producer) is producer
    assert producer.array.any()


def test_used_or_foreign_capsule_is_refused(problem):
    logits, targets = problem

    class Reuses:
        def __init__(self, capsule):
            self.capsule = capsule

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            return self.capsule

    producer = Producer(logits)
    capsule = producer.__dlpack__(max_version=(1, 0))
    _dlpack.consume(capsule, "logits").release()
    with pytest.raises(libxent.InvalidArgument, match="not a fresh DLPack capsule"):
        libxent.cross_entropy(Reuses(capsule), targets)
    with pytest.raises(libxent.InvalidArgument, match="not a fresh DLPack capsule"):
        libxent.cross_entropy(Reuses(None), targets)
    assert producer.deleted == 1


def test_negative_rank_is_refused(problem):
    producer = Producer(problem[0])
    capsule = producer.__dlpack__(max_version=(1, 0))
    producer.alive[2].dl_tensor.ndim = -1
    with pytest.raises(libxent.InvalidArgument, match="-1 dimensions"):
        _dlpack.consume(capsule, "logits")
    assert producer.deleted == 1


def test_export_error_names_the_argument(problem):
    _, targets = problem

    class Refuses:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            raise BufferError("not today")

    with pytest.raises(libxent.InvalidArgument, match=r"logits: Refuses cannot be exported.*not today"):
        libxent.cross_entropy(Refuses(), targets)


def test_device_that_is_not_the_plans(problem):
    class Elsewhere:
        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **_):
            producer = Producer(self.array)
            capsule = producer.__dlpack__(max_version=(1, 0))
            producer.alive[2].dl_tensor.device = _abi.DLDevice(2, 0)
            kept.append(producer)
            return capsule

    kept, (logits, targets) = [], problem
    plan = libxent.Plan(max_rows=4, vocab=10)
    for call in (plan.forward, plan.loss_and_grad):
        with pytest.raises(
            libxent.InvalidArgument, match=r"logits: .*is on device \(2, 0\); the plan's device is \(1, 0"
        ):
            call(Elsewhere(logits), targets)


def test_export_frees_its_memory(problem):
    """Consumed by a framework or dropped unread, the memory behind an Export goes when the last user goes."""
    for consume in (True, False):
        holder = np.arange(6, dtype=np.float32)
        gone = weakref.ref(holder)
        tensor = _dlpack.Tensor(
            holder.ctypes.data, _dlpack.DTYPES["float32"], (1, 0), (2, 3), packed_strides((2, 3)), holder
        )
        capsule = _dlpack.Export(tensor).__dlpack__()
        del holder, tensor
        assert gone() is not None
        if consume:
            imported = _dlpack.consume(capsule, "x")
            assert imported.shape == (2, 3) and gone() is not None
            imported.release()
            imported.release()
            assert gone() is None
        del capsule
        gc.collect()
        assert gone() is None
    assert not _dlpack._exported
