# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The short ways from arrays to C: frames used again, the C exchange API, and the refusals they must not lose."""

import ctypes
import itertools
import threading

import libxent
import numpy as np
import pytest
from libxent import _abi, _call, _dlpack, _frame, _frameworks
from libxent._frameworks import TORCH, framework_of


@pytest.fixture(params=["usual", "exchange", "by hand"])
def torch(request, monkeypatch):
    torch = pytest.importorskip("torch")
    assert framework_of(torch.zeros(1)) is TORCH
    if request.param != "by hand" and TORCH._export is None:
        pytest.skip("this PyTorch has no C exchange API")
    if request.param != "usual":
        monkeypatch.setattr(TORCH, "usual_forward", None, raising=False)
    if request.param == "by hand":
        monkeypatch.setattr(TORCH, "put", TORCH._put_by_hand, raising=False)
        monkeypatch.setattr(TORCH, "_stream", None)
    return torch


def test_layouts_of_torch(torch, rng):
    wide = rng.standard_normal((3, 5, 2, 23), np.float32)
    targets = rng.integers(0, 10, (5, 3))
    plan = libxent.Plan(max_rows=15, vocab=10, reduction="none")
    mask = rng.integers(0, 2, (5, 3)).astype(bool)
    weights = rng.random((5, 3), np.float32)
    view = np.moveaxis(wide[:, :, 1, 2:22:2], 0, 1)
    base, want = torch.from_numpy(wide), plan.forward(view, targets, mask=mask, row_weights=weights, lse=True)
    x = base[:, :, 1, 2:22:2].transpose(0, 1)
    for logits in (x, x.clone().requires_grad_(), torch.nn.Parameter(x)):
        got = plan.forward(
            logits, torch.from_numpy(targets), mask=torch.from_numpy(mask), row_weights=torch.from_numpy(weights),
            lse=True,
        )  # fmt: skip
        for name in ("loss", "stats", "lse"):
            assert np.array_equal(getattr(got, name).numpy(), getattr(want, name)), name


def test_what_a_dltensor_does_not_show_is_refused(torch):
    """A lazily negated tensor has the address of what it negates."""
    plan = libxent.Plan(max_rows=2, vocab=3, reduction="none")
    x, t, negated = (
        torch.zeros(2, 3),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.complex64).conj().imag,
    )
    assert negated.is_neg()
    with pytest.raises(libxent.InvalidArgument, match=r"row_weights: expected a strided tensor"):
        plan.forward(x, t, row_weights=negated)
    with pytest.raises(libxent.InvalidArgument, match=r"loss: expected a strided tensor"):
        plan.forward(x, t, loss=negated)
    matrix = torch.ones(2, 3, dtype=torch.complex64).conj().imag
    with pytest.raises(libxent.InvalidArgument, match=r"logits: expected a strided tensor"):
        plan.forward(matrix, t)


def test_refusals_name_the_array_and_its_framework(torch):
    plan = libxent.Plan(max_rows=2, vocab=3)
    x, t = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    for wrong, message in (
        (torch.zeros(2, 3, dtype=torch.complex64), "logits: element type complex64"),
        (torch.zeros(2, 3).to_sparse(), "logits: expected a strided tensor"),
        (torch.zeros(2, 3, device="meta"), "logits: expected a tensor on the CPU"),
        (torch.zeros(()), "logits: expected .*, got a tensor without dimensions"),
        (torch.zeros(2, 3, dtype=torch.float64), "logits: dtype is float64"),
        (torch.zeros((1,) * 9 + (2, 3)), "logits: ndim is 11"),
    ):
        with pytest.raises(libxent.InvalidArgument, match=message):
            plan.forward(wrong, t)
    with pytest.raises(libxent.InvalidArgument, match="targets: element type complex64"):
        plan.forward(x, torch.zeros(2, dtype=torch.complex64))
    stats, out = torch.full((2, 2), 7.0), torch.full((2, 3), 7.0)
    with pytest.raises(libxent.InvalidArgument, match="targets: shape"):
        plan.loss_and_grad(x, t[:1], stats=stats, grad_logits=out)
    assert (stats == 7).all() and (out == 7).all()


def test_written_tensors_change_their_version(torch):
    plan = libxent.Plan(max_rows=2, vocab=3)
    x, t = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    outputs = {"loss": torch.empty(()), "stats": torch.empty(2, 2), "divisor": torch.empty(())}
    before = {name: array._version for name, array in outputs.items()}
    result = plan.forward(x, t, **outputs)
    for name, array in outputs.items():
        assert getattr(result, name) is array and array._version > before[name]
    with torch.inference_mode():  # has no versions
        plan.forward(x, t, loss=torch.empty(()), stats=torch.empty(2, 2), divisor=outputs["divisor"])
    assert outputs["divisor"]._version > before["divisor"]


def test_what_is_usual_and_what_is_not(monkeypatch):
    """The same result, by the shortest way where no more is asked than loss, stats and divisor of plain tensors."""
    torch = pytest.importorskip("torch")
    assert framework_of(torch.zeros(1)) is TORCH
    if TORCH.usual_forward is None:
        pytest.skip("this PyTorch has no C exchange API")
    calls, real = [], _call.Call.run
    monkeypatch.setattr(_call.Call, "run", lambda *a: calls.append(a) or real(*a))
    x, t = torch.randn(2, 3, 40), torch.randint(0, 40, (2, 3))

    def both(is_usual, plan, logits, targets, **others):
        results = []
        for usual in (True, False):
            calls.clear()
            with monkeypatch.context() as patch:
                if not usual:
                    patch.setattr(TORCH, "usual_forward", None)
                outputs = {name: others[name] for name in ("loss", "stats", "divisor") if others.get(name) is not None}
                for array in outputs.values():
                    array.fill_(7)
                got = plan.forward(logits, targets, **others)
            assert len(calls) == (0 if usual and is_usual else 1)
            assert all(getattr(got, name) is array for name, array in outputs.items())
            results.append([None if a is None else a.clone() for a in got])
        for a, b in zip(*results):
            assert (a is None) == (b is None)
            assert a is None or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))

    class Sub(torch.Tensor):
        pass

    for reduction, dtype in itertools.product(("none", "sum", "mean"), (torch.float32, torch.bfloat16, torch.float64)):
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        plan = libxent.Plan(max_rows=6, vocab=40, reduction=reduction, logits_dtype=dtype)
        y = x.to(dtype)
        plan.forward(y, t)  # PyTorch is known from here on
        both(True, plan, y, t)
        both(True, plan, y, t, stats=None)
        both(True, plan, y.clone().requires_grad_(), t)
        both(True, plan, y.transpose(0, 1), t.T)
        loss = torch.empty((2, 3) if reduction == "none" else (), dtype=acc)
        both(True, plan, y, t, loss=loss, stats=torch.empty(6, 2, dtype=acc))
        if reduction == "mean":
            both(True, plan, y, t, loss=loss, stats=torch.empty(12, 4, dtype=acc)[::2, ::2], divisor=loss.clone())
        both(False, plan, y.as_subclass(Sub), t)
        both(False, plan, torch.nn.Parameter(y), t)
        both(False, plan, y, t.numpy())
        both(False, plan, y, t.as_subclass(Sub))
        both(False, plan, y, t, lse=True)
        both(False, plan, y, t, mask=t > 3)
        both(False, plan, y, t, row_weights=torch.rand(2, 3, dtype=acc))
        if reduction != "none":
            calls.clear()
            host = np.empty((), np.float64 if acc == torch.float64 else np.float32)
            assert plan.forward(y, t, loss=host).loss is host and len(calls) == 1
            assert host == plan.forward(y, t).loss.numpy()
    plan._handle.comm = object()  # of a plan over ranks, whose collective must not be entered twice
    both(False, plan, y, t)
    large = libxent.Plan(max_rows=20000, vocab=40)  # whose workspace is more than a frame has
    both(False, large, torch.randn(20000, 40), torch.randint(0, 40, (20000,)))
    large.close()
    calls.clear()
    with pytest.raises(libxent.InvalidArgument, match="plan: it was closed"):
        large.forward(torch.randn(2, 40), t[0])
    assert len(calls) == 1


def test_wrappers_without_memory_are_refused(torch):
    t = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError):
        torch.vmap(lambda y: libxent.cross_entropy(y, t))(torch.zeros(4, 2, 3))


def test_a_call_inside_a_call(rng):
    """A producer may do anything in __dlpack__, call libxent too."""
    logits, targets = rng.standard_normal((4, 10), np.float32), rng.integers(0, 10, 4)
    plan = libxent.Plan(max_rows=4, vocab=10)
    want = plan.forward(logits, targets, row_weights=np.arange(4, dtype=np.float32)).loss
    inner = []

    class Nested:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **keywords):
            inner.append(plan.forward(logits * 2, targets).loss)
            with pytest.raises(libxent.InvalidArgument):
                plan.forward(logits, targets[:2])
            return np.arange(4, dtype=np.float32).__dlpack__(**keywords)

    assert plan.forward(logits, targets, row_weights=Nested()).loss == want
    assert inner == [plan.forward(logits * 2, targets).loss]


def test_frames_are_used_again(rng):
    logits, targets = rng.standard_normal((4, 10), np.float32), rng.integers(0, 10, 4)
    plan = libxent.Plan(max_rows=4, vocab=10)
    plan.forward(logits, targets)
    held = len(_frame._pool)
    for _ in range(5):
        plan.forward(logits, targets)
        with pytest.raises(libxent.InvalidArgument, match="targets: shape"):
            plan.forward(logits, targets[:2])
        with pytest.raises(libxent.InvalidArgument, match="got list"):
            plan.forward(logits, [1, 2, 3, 4])
        with pytest.raises(libxent.InvalidArgument, match="got list"):
            plan.forward([[1.0]], targets)
    assert len(_frame._pool) == held


def test_threads_do_not_share_frames(rng):
    problems = [(rng.standard_normal((n, 10), np.float32), rng.integers(0, 10, n)) for n in (1, 3, 4, 7)]
    plan = libxent.Plan(max_rows=7, vocab=10, context=libxent.Context(threads=1))
    wanted = [plan.forward(*problem) for problem in problems]
    wrong = []

    def work(problem, want):
        for _ in range(300):
            got = plan.forward(*problem)
            if got.loss != want.loss or not np.array_equal(got.stats, want.stats):
                wrong.append(got)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(problems, wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_large_and_small_workspaces(rng):
    for rows in (1, 100, 8192, 8193, 20000):
        logits, targets = rng.standard_normal((rows, 3), np.float32), rng.integers(0, 3, rows)
        plan = libxent.Plan(max_rows=rows, vocab=3)
        each = libxent.Plan(max_rows=rows, vocab=3, reduction="none").forward(logits, targets).loss
        assert np.isclose(plan.forward(logits, targets).loss, each.mean(dtype=np.float64), rtol=1e-6)


def test_layouts_follow_the_header():
    fields = [name for name, _ in _abi.BackwardArgs._fields_]
    _frame.Layout(_abi.BackwardArgs, " ".join(fields[:-2]))
    fields[3], fields[5] = fields[5], fields[3]
    with pytest.raises(ImportError, match="BackwardArgs"):
        _frame.Layout(_abi.BackwardArgs, " ".join(fields))


class Api(ctypes.Structure):
    _fields_ = [("version", _abi.DLPackVersion), ("older", ctypes.c_void_p), ("functions", ctypes.c_void_p * 5)]


def with_api(api, name=b"dlpack_exchange_api"):
    return type("Array", (), {"__dlpack_c_exchange_api__": _dlpack._new_capsule(ctypes.addressof(api), name, None)})


def test_exchange_api_is_looked_up_by_version():
    some = (ctypes.c_void_p * 5)(1, 2, 3, 4, 5)
    good = Api(_abi.DLPackVersion(1, 3), None, some)
    exchange = _dlpack.exchange_of(with_api(good))
    assert [ctypes.cast(f, ctypes.c_void_p).value for f in (exchange.tensor, exchange.stream)] == [4, 5]
    newer = Api(_abi.DLPackVersion(2, 0), ctypes.addressof(good), (ctypes.c_void_p * 5)(6, 7, 8, 9, 10))
    exchange = _dlpack.exchange_of(with_api(newer))
    assert ctypes.cast(exchange.tensor, ctypes.c_void_p).value == 4
    assert _dlpack.exchange_of(with_api(Api(_abi.DLPackVersion(2, 0), None, some))) is None
    without = (ctypes.c_void_p * 5)(1, 2, 3, None, 5)
    assert _dlpack.exchange_of(with_api(Api(_abi.DLPackVersion(1, 2), None, without))) is None
    assert _dlpack.exchange_of(with_api(good, b"another")) is None
    assert _dlpack.exchange_of(int) is None


def test_numpy_takes_the_short_way_only_where_it_may(rng, monkeypatch):
    logits, targets = rng.standard_normal((4, 10), np.float32), rng.integers(0, 10, 4)
    want = libxent.cross_entropy(logits, targets)
    short = []
    real = _frame.Frame.pack
    monkeypatch.setattr(_frame.Frame, "pack", lambda *a: short.append(a) or real(*a))

    class Sub(np.ndarray):
        pass

    wide = np.zeros((4, 20), np.float32)
    wide[:, ::2] = logits
    for view, packed in (
        (logits, True),
        (wide[:, ::2], False),
        (np.asfortranarray(logits), False),
        (logits.view(Sub), False),
    ):
        short.clear()
        assert libxent.cross_entropy(view, targets) == want
        assert any(call[-1] == view.shape for call in short) == packed
    frozen = np.zeros((), np.float32)
    frozen.flags.writeable = False
    plan = libxent.Plan(max_rows=4, vocab=10)
    with pytest.raises(libxent.InvalidArgument, match="loss: the array is read-only"):
        plan.forward(logits, targets, loss=frozen)
    assert _frameworks.NUMPY._native
