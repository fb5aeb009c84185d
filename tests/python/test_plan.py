# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Plan: forward and backward apart, outputs of the caller, many threads, many plans."""

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import libxent
import numpy as np
import pytest
import reference
from libxent import _functional


@pytest.fixture
def problem(rng):
    logits = rng.standard_normal((6, 4, 103), np.float32) * 3
    targets = rng.integers(0, 103, (6, 4))
    targets[2, 1] = -1
    return logits, targets


def test_forward_then_backward(problem):
    logits, targets = problem
    want = reference.cross_entropy(logits, targets, ignore_index=-1, label_smoothing=0.1)
    with libxent.Plan(max_rows=100, vocab=103, ignore_index=-1, label_smoothing=0.1) as plan:
        result = plan.forward(logits, targets, row_counts=True, lse=True)
        grad = plan.backward(logits, targets, result.stats, result.divisor)
        assert np.array_equal(grad, plan.backward(logits, targets, result.stats, result.divisor))
        both = plan.loss_and_grad(logits, targets)
    reference.assert_scalar_close(result.loss, want.loss, want, "loss")
    reference.assert_scalar_close(result.lse, want.lse, want, "lse")
    reference.assert_grad_close(grad, want)
    reference.assert_grad_close(both.grad, want)
    assert result.stats.shape == (24, 2) and result.divisor == 23 and result.row_counts.tolist() == [23, 1, 0]
    assert result.entropy is None and result.predicted is None and both.stats is None


def test_stats_are_the_maximum_and_the_sum(problem):
    logits, targets = problem
    stats = libxent.Plan(max_rows=24, vocab=103, reduction="sum").forward(logits, np.abs(targets)).stats
    x = logits.reshape(24, 103).astype(np.float64)
    assert np.array_equal(stats[:, 0], x.max(1))
    np.testing.assert_allclose(stats[:, 1], np.exp(x - x.max(1, keepdims=True)).sum(1), rtol=1e-6)


def test_without_stats(problem):
    logits, targets = problem
    result = libxent.Plan(max_rows=24, vocab=103).forward(logits, targets, stats=None)
    assert result.stats is None and result.divisor is None


def test_outputs_of_the_caller(problem):
    logits, targets = problem
    plan = libxent.Plan(max_rows=24, vocab=103, ignore_index=-1, reduction="none", entropy=True, predicted=True)
    want = plan.forward(logits, targets, lse=True, entropy=True, predicted=True, row_counts=True)
    given = {
        "loss": np.empty((4, 6), np.float32).T,
        "stats": np.empty((24, 4), np.float32)[:, ::2],
        "lse": np.empty((6, 4), np.float32),
        "entropy": np.empty((6, 4), np.float32),
        "predicted": np.empty((6, 4), np.int32),
        "row_counts": np.empty(3, np.int32),
    }
    result = plan.forward(logits, targets, **given)
    for name, array in given.items():
        assert getattr(result, name) is array
        assert np.array_equal(array, getattr(want, name)), name
    grad = np.full((6, 4, 200), 7, np.float32)
    got = plan.backward(logits, targets, result.stats, grad_logits=grad[..., 50:153])
    assert np.array_equal(got, plan.backward(logits, targets, want.stats))
    assert (grad[..., :50] == 7).all() and (grad[..., 153:] == 7).all()


def test_overwrite(problem):
    logits, targets = problem
    plan = libxent.Plan(max_rows=24, vocab=103, ignore_index=-1, overwrite_logits=True)
    want = plan.loss_and_grad(logits, targets, grad_logits=np.empty_like(logits)).grad
    result = plan.forward(logits, targets)
    assert plan.backward(logits, targets, result.stats, result.divisor) is logits
    assert np.array_equal(logits, want)


def test_overwrite_needs_its_option(problem):
    logits, targets = problem
    plan, before = libxent.Plan(max_rows=24, vocab=103, ignore_index=-1), logits.copy()
    with pytest.raises(libxent.InvalidArgument):
        plan.loss_and_grad(logits, targets, grad_logits=logits)
    assert np.array_equal(logits, before)


def test_denominator_with_backward(problem):
    logits, targets = problem
    want = reference.cross_entropy(logits, targets, ignore_index=-1, reduction="sum", denominator=5)
    plan = libxent.Plan(max_rows=24, vocab=103, ignore_index=-1, reduction="sum")
    result = plan.forward(logits, targets, denominator=5)
    assert result.divisor == 5
    reference.assert_scalar_close(result.loss, want.loss, want, "loss")
    reference.assert_grad_close(plan.backward(logits, targets, result.stats, result.divisor), want)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_scale_grad(problem, rng, reduction):
    logits, targets = problem
    plan = libxent.Plan(max_rows=24, vocab=103, ignore_index=-1, reduction=reduction)
    mask = rng.random((6, 4)) < 0.8
    once = plan.loss_and_grad(logits, targets, mask=mask).grad
    rows = rng.standard_normal((6, 4))
    upstreams = [1, 0.37, np.float32(-2), np.array([3], np.float16), np.array(1e-3)]
    if reduction == "none":
        upstreams += [rows, rows.astype(np.float32), np.broadcast_to(rows[:1], (6, 4))]
    for upstream in upstreams:
        grad = once.copy()
        assert plan.scale_grad(grad, targets, upstream, mask=mask) is grad
        factor = np.float32(upstream) if isinstance(upstream, (int, float)) else np.asarray(upstream)
        want = once * (factor[..., None] if factor.ndim == 2 else factor).astype(np.float64)
        assert np.array_equal(grad, want.astype(np.float32)), upstream
    grad = once.copy()
    plan.scale_grad(grad, targets, np.inf, mask=mask)
    assert (grad[~mask] == 0).all() and (grad[2, 1] == 0).all() and np.isinf(grad[mask & (targets >= 0)]).any()


def test_scale_grad_refuses(problem):
    logits, targets = problem
    plan = libxent.Plan(max_rows=24, vocab=103, ignore_index=-1)
    grad = plan.loss_and_grad(logits, targets).grad
    before = grad.copy()
    for given, text in [
        ((grad[..., :9], targets, 2), r"grad_logits: shape \[6, 4, 9\]; it must be \[\.\.\., vocab\] = \[6, 4, 103\]"),
        ((grad, targets[:3], 2), r"grad_logits: shape \[6, 4, 103\]; it must be"),
        ((grad, targets, None), "grad_loss: is NULL; it is required"),
        ((grad, targets, 1e300), "grad_loss: 1e\\+300 is beyond the range of float32"),
        ((grad, targets, np.ones((6, 4), np.float32)), "grad_loss: shape"),
        ((grad.astype(np.float64), targets, 2), "grad_logits: dtype is float64"),
    ]:
        with pytest.raises(libxent.InvalidArgument, match=text):
            plan.scale_grad(*given)
    grad.flags.writeable = False
    with pytest.raises(libxent.InvalidArgument, match="grad_logits: the array is read-only"):
        plan.scale_grad(grad, targets, 2)
    assert np.array_equal(grad, before)


def test_info():
    info = libxent.Plan(max_rows=1000, vocab=32768).info
    assert info.backend == "cpu"
    assert info.saved_bytes < 1000 * 32768 * 4 / 100
    assert info.alignment & (info.alignment - 1) == 0
    assert not info.graph_capture


def test_devices_and_types_by_any_name():
    for device in ("cpu", "cpu:0", (1, 0)):
        libxent.Plan(max_rows=1, vocab=2, device=device)
    for name in ("float64", np.float64, np.dtype("float64")):
        libxent.Plan(max_rows=1, vocab=2, logits_dtype=name, target_dtype=np.int32)
    torch = pytest.importorskip("torch")
    libxent.Plan(max_rows=1, vocab=2, device=torch.device("cpu"), logits_dtype=torch.bfloat16, target_dtype=torch.int64)
    jax = pytest.importorskip("jax")
    libxent.Plan(max_rows=1, vocab=2, logits_dtype=jax.numpy.bfloat16)


def test_closed_plan(problem):
    plan = libxent.Plan(max_rows=24, vocab=103)
    plan.close()
    plan.close()
    with pytest.raises(libxent.InvalidArgument, match="closed"):
        plan.forward(*problem)


def test_context_may_go_first(problem):
    logits, targets = problem
    context = libxent.Context(threads=1)
    assert context.backends == ("cpu",)
    plan = libxent.Plan(max_rows=24, vocab=103, ignore_index=-1, context=context)
    del context
    gc.collect()
    got = plan.forward(logits, targets).loss
    assert got == libxent.Plan(max_rows=24, vocab=103, ignore_index=-1).forward(logits, targets).loss


def test_one_plan_on_many_threads(problem):
    logits, targets = problem
    plan = libxent.Plan(max_rows=24, vocab=103, ignore_index=-1)
    want = plan.loss_and_grad(logits, targets)

    def work(_):
        got = plan.loss_and_grad(logits, targets)
        return got.loss == want.loss and np.array_equal(got.grad, want.grad)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))


def test_closing_under_running_calls(problem):
    """Calls that hold the plan finish; later ones are refused."""
    logits, targets = problem
    plan = libxent.Plan(max_rows=24, vocab=103, ignore_index=-1)
    want = plan.forward(logits, targets).loss
    running = threading.Barrier(5)

    def work(_):
        running.wait()
        while True:
            try:
                if plan.forward(logits, targets).loss != want:
                    return False
            except libxent.InvalidArgument as error:
                return "closed" in str(error)

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(work, index) for index in range(4)]
        running.wait()
        plan.close()
        assert all(result.result() for result in results)


def test_functions_on_many_threads(rng):
    seeds = rng.integers(0, 2**32, 8)

    def work(index):
        local = np.random.default_rng(seeds[index])
        for turn in range(30):
            logits = local.standard_normal((1 + turn, 5 + index), np.float32)
            targets = local.integers(0, 5 + index, 1 + turn)
            want = reference.cross_entropy(logits, targets)
            loss, grad = libxent.loss_and_grad(logits, targets)
            reference.assert_scalar_close(loss, want.loss, want, "loss")
            reference.assert_grad_close(grad, want)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_plans_are_found_again(rng):
    def run(rows, **options):
        libxent.cross_entropy(np.zeros((rows, 97), np.float32), np.zeros(rows, int), **options)
        return len(_functional._plans)

    _functional._plans.clear()
    assert run(1000) == 1
    assert run(513) == 1 and run(1024) == 1
    assert run(1025) == 2
    assert run(1000, label_smoothing=0.1) == 3
    assert run(1000, ignore_index=None) == 4
    for rows in range(200):
        run(1000, z_loss=rows * 1e-6)
    assert len(_functional._plans) == _functional._CACHE_SIZE


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
def test_nothing_leaks(problem):
    logits, targets = problem
    plan = libxent.Plan(max_rows=24, vocab=103)
    arrays = [logits, targets]
    for library in ("torch", "jax"):
        try:
            module = __import__(library)
        except ImportError:
            continue
        if library == "torch":
            arrays.append(module.from_numpy(logits))
        else:
            arrays.append(module.device_put(logits, module.devices("cpu")[0]))

    def once():
        for x in (logits, *arrays[2:]):
            libxent.loss_and_grad(x, targets)
            plan.forward(x, targets)
        libxent.Plan(max_rows=24, vocab=103, context=libxent.Context(threads=2)).forward(logits, targets)
        with pytest.raises(libxent.InvalidArgument):
            plan.forward(logits, targets[:2])

    for _ in range(20):
        once()
    gc.collect()
    references = [sys.getrefcount(array) for array in arrays]
    before = resident_bytes()
    for _ in range(300):
        once()
    gc.collect()
    assert [sys.getrefcount(array) for array in arrays] == references
    # A leaked gradient a turn would be 300 * 10 kB, for each library; a leaked pool of threads far more.
    assert resident_bytes() - before < 2 * 2**20


def test_after_fork():
    """In a process of its own: other tests load libraries that do not survive a fork."""
    code = (
        "import os, numpy, libxent\n"
        "x, t = numpy.random.standard_normal((600, 5000)).astype('float32'), numpy.arange(600)\n"
        "loss, grad = libxent.loss_and_grad(x, t)\n"
        "child = os.fork()\n"
        "again = libxent.loss_and_grad(x, t)\n"
        "same = loss == again[0] and numpy.array_equal(grad, again[1])\n"
        "if child == 0: os._exit(0 if same else 1)\n"
        "assert same and os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_option_in_an_array_that_changes(problem):
    logits, targets = problem
    torch = pytest.importorskip("torch")
    z_loss = torch.tensor(0.0)
    first = libxent.cross_entropy(logits, targets, ignore_index=-1, z_loss=z_loss)
    z_loss.fill_(1.0)
    second = libxent.cross_entropy(logits, targets, ignore_index=-1, z_loss=z_loss)
    assert first == libxent.cross_entropy(logits, targets, ignore_index=-1)
    assert second == libxent.cross_entropy(logits, targets, ignore_index=-1, z_loss=1.0)
    vocab, valid = logits.shape[-1], np.zeros_like(targets)
    for name, before, after in (("ignore_index", 0, 1), ("classes", vocab, vocab - 1)):
        for make in (torch.tensor, np.array):
            option = make(before)
            first = libxent.cross_entropy(logits, valid, **{name: option})
            option[...] = after
            second = libxent.cross_entropy(logits, valid, **{name: option})
            assert first == libxent.cross_entropy(logits, valid, **{name: before})
            assert second == libxent.cross_entropy(logits, valid, **{name: after}) != first


@pytest.mark.parametrize(
    "option, plain",
    [
        ({"ignore_index": np.array(1)}, {"ignore_index": 1}),
        ({"ignore_index": np.int32(1)}, {"ignore_index": 1}),
        ({"reduction": np.str_("sum")}, {"reduction": "sum"}),
        ({"empty_mean_is_nan": np.array(True)}, {"empty_mean_is_nan": True}),
        ({"softcap": np.float32(5)}, {"softcap": 5.0}),
    ],
    ids=str,
)
def test_options_by_other_types(problem, option, plain):
    logits, targets = problem[0], np.zeros_like(problem[1])
    assert libxent.cross_entropy(logits, targets, **option) == libxent.cross_entropy(logits, targets, **plain)


@pytest.mark.parametrize(
    "option, message",
    [
        ({"classes": 6.0}, "classes: expected an integer, got 6.0"),
        ({"ignore_index": [1]}, r"ignore_index: expected an integer, got \[1\]"),
        ({"ignore_index": "1"}, "ignore_index: expected an integer, got '1'"),
        ({"reduction": ["sum"]}, r"reduction: expected .*got \['sum'\]"),
        ({"reduction": None}, "reduction: expected .*got None"),
        ({"z_loss": None}, "z_loss: expected a number, got None"),
        ({"softcap": "5"}, "softcap: expected a number, got '5'"),
    ],
    ids=str,
)
def test_options_are_refused_whatever_was_made_before(problem, option, message):
    logits, targets = problem
    libxent.cross_entropy(logits, np.zeros_like(targets), classes=6)
    for call in (libxent.cross_entropy, libxent.loss_and_grad):
        with pytest.raises(libxent.InvalidArgument, match=message):
            call(logits, np.zeros_like(targets), **option)
