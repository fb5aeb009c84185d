# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""A vocabulary split over real processes, through torch.distributed with gloo, against the whole one in float64."""

import ctypes
import datetime
import gc
import subprocess
import sys
import time
import weakref

import libxent
import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from torch_ranks import run  # noqa: E402

CLASSES = 203
OFFSETS = {2: [0, 150, 203], 3: [0, 70, 70, 203], 4: [0, 1, 100, 200, 203]}


@pytest.fixture
def seed(rng):
    return int(rng.integers(2**32))


def problem(seed):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((3, 7, CLASSES)) * 4
    logits[1, 2, :70] = -np.inf  # a whole shard
    targets = rng.integers(70, CLASSES, (3, 7))
    targets[0, 1], targets[2, 3] = -100, CLASSES
    weights = rng.uniform(0.5, 2, (3, 7)).astype(np.float32)
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(targets), torch.tensor(weights)


def whole(logits, targets, weights):
    """loss (none), predicted and gradient of the sum, by PyTorch in float64."""
    x = logits.double().reshape(-1, CLASSES).requires_grad_()
    t = targets.reshape(-1).clone()
    bad = t == CLASSES
    t[bad] = -100
    loss = torch.nn.functional.cross_entropy(x, t, reduction="none") * weights.double().reshape(-1)
    loss.sum().backward()
    loss = loss.detach()
    loss[bad] = float("nan")
    return loss.reshape(targets.shape), x.grad.reshape(logits.shape)


def shard(logits, offsets, rank, padding):
    part = logits[..., offsets[rank] : offsets[rank + 1]]
    return torch.cat([part, torch.full((*part.shape[:-1], padding), float("nan"))], dim=-1)


def options(offsets, rank, vocab, **more):
    return dict(
        max_rows=21,
        vocab=vocab,
        class_offsets=offsets,
        rank=rank,
        ignore_index=-100,
        reduction="none",
        predicted=True,
        entropy=True,
        **more,
    )


def gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tensor)
    return torch.stack(parts)


def gloo_gather(send, recv, size, stream):
    view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(send))
    parts = gathered(torch.from_numpy(view.copy()))
    ctypes.memmove(recv, parts.data_ptr(), parts.numel())


def _forward_backward(rank, ranks, seed, door):
    offsets, (logits, targets, weights) = OFFSETS[ranks], problem(seed)
    mine = shard(logits, offsets, rank, padding=rank)
    asked = {"row_weights": weights, "lse": True, "entropy": True, "predicted": True, "row_counts": True}
    comm = None if door == "partial" else libxent.Communicator(rank, ranks, gloo_gather)
    with libxent.Plan(**options(offsets, rank, mine.shape[-1], comm=comm)) as plan:
        assert plan.info.partial_width == 5
        if door == "partial":
            partial = plan.forward_partial(mine, targets)
            assert partial.shape == (21, 5) and partial.dtype == torch.float32
            result = plan.forward_combine(gathered(partial), targets, **asked)
            grad = plan.backward(mine, targets, result.stats, row_weights=weights)
        elif door == "comm":
            result = plan.forward(mine, targets, **asked)
            grad = plan.backward(mine, targets, result.stats, row_weights=weights)
        else:
            result = plan.loss_and_grad(mine, targets, **asked)
            grad = result.grad
    want_loss, want_grad = whole(logits, targets, weights)
    torch.testing.assert_close(result.loss.double(), want_loss, rtol=1e-6, atol=1e-6, equal_nan=True)
    width = offsets[rank + 1] - offsets[rank]
    assert not grad[..., width:].any()
    torch.testing.assert_close(
        grad[..., :width].double(), want_grad[..., offsets[rank] : offsets[rank + 1]], rtol=1e-5, atol=1e-6
    )
    counted = (targets != -100).nonzero(as_tuple=True)
    assert torch.equal(result.predicted[counted], logits.argmax(-1)[counted])
    assert result.row_counts.tolist() == [19, 1, 1]
    for output in (result.loss, result.lse, result.entropy, result.predicted, result.row_counts):
        everyone = gathered(output).numpy()
        assert all(np.array_equal(part.view(np.uint8), everyone[0].view(np.uint8)) for part in everyone)


def _every_door(rank, ranks, seed):
    for door in ("partial", "comm", "loss_and_grad"):
        _forward_backward(rank, ranks, seed, door)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_processes(ranks, seed):
    run(_every_door, ranks, seed)


def _dies(rank, ranks, seed):
    logits, targets, _ = problem(seed)
    offsets = OFFSETS[ranks]
    group = torch.distributed.new_group(timeout=datetime.timedelta(seconds=3))

    def gather(send, recv, size, stream):
        view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(send))
        parts = [torch.empty(size, dtype=torch.uint8) for _ in range(ranks)]
        torch.distributed.all_gather(parts, torch.from_numpy(view.copy()), group=group)
        whole = torch.cat(parts)
        ctypes.memmove(recv, whole.data_ptr(), whole.numel())

    mine = shard(logits, offsets, rank, padding=0)
    plan = libxent.Plan(**options(offsets, rank, mine.shape[-1], comm=libxent.Communicator(rank, ranks, gather)))
    first = plan.loss_and_grad(mine, targets)
    assert first.loss.shape == targets.shape
    if rank == ranks - 1:
        return  # without a word
    start = time.monotonic()
    with pytest.raises(libxent.Error) as failure:
        plan.loss_and_grad(mine, targets)
    assert time.monotonic() - start < 60
    assert failure.value.status == "XENT_COMM_ERROR"
    assert f"rank {rank} of {ranks}" in str(failure.value) and "all_gather" in str(failure.value)
    start = time.monotonic()
    with pytest.raises(libxent.Error, match="made anew"):
        plan.forward(mine, targets)
    assert time.monotonic() - start < 1


def test_a_process_that_dies(seed):
    # Its peers see the closed connection, or the group's timeout.
    run(_dies, 3, seed)


def test_one_process_plays_every_rank(seed):
    """NumPy, and a plain concatenation in place of a collective."""
    logits, targets, _ = (part.numpy() for part in problem(seed))
    offsets = OFFSETS[4]
    plans = [libxent.Plan(**options(offsets, r, offsets[r + 1] - offsets[r])) for r in range(4)]
    parts = [logits[..., offsets[r] : offsets[r + 1]] for r in range(4)]
    partials = np.stack([p.forward_partial(x, targets) for p, x in zip(plans, parts)])
    results = [p.forward_combine(partials, targets) for p in plans]
    grads = [p.backward(x, targets, r.stats) for p, x, r in zip(plans, parts, results)]
    with libxent.Plan(max_rows=21, vocab=CLASSES, ignore_index=-100, reduction="none") as plan:
        want = plan.loss_and_grad(logits, targets)
    for result in results:
        np.testing.assert_allclose(result.loss, want.loss, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(grads, axis=-1), want.grad, rtol=1e-5, atol=1e-6)


def test_what_is_refused():
    good = options([0, 3, 8], 1, 5)
    libxent.Plan(**good)
    for change, text in [
        ({"class_offsets": [0, 5, 3]}, "must not decrease"),
        ({"class_offsets": [1, 3, 8]}, r"\[0\] is 1; it must be 0"),
        ({"class_offsets": [0]}, "at least 2 offsets, got 1"),
        ({"class_offsets": [0, 2.5, 8]}, "class_offsets: expected an integer"),
        ({"class_offsets": None}, "class_offsets: expected one more offset than ranks"),
        ({"rank": 2}, "rank: is 2"),
        ({"vocab": 4}, "rank 1 holds 5 classes, but its vocab is 4"),
        ({"vocab": 8}, "gathered already"),
        ({"comm": 3}, "comm: expected a Communicator"),
        ({"comm": libxent.Communicator(0, 2, gloo_gather)}, "comm: is rank 0 of 2; the plan is rank 1 of 2"),
    ]:
        with pytest.raises(libxent.InvalidArgument, match=text):
            libxent.Plan(**{**good, **change})
    with pytest.raises(libxent.InvalidArgument, match="rank: is 2"):
        libxent.Communicator(2, 2, gloo_gather)
    plan = libxent.Plan(**good)
    logits, targets = np.zeros((2, 5), np.float32), np.array([0, 7])
    with pytest.raises(libxent.InvalidArgument, match="it has no communicator"):
        plan.forward(logits, targets)
    with pytest.raises(libxent.InvalidArgument, match=r"partials: shape \[1, 2, 5\]; it must be .* = \[2, 2, 5\]"):
        plan.forward_combine(np.zeros((1, 2, 5), np.float32), targets)
    with libxent.Plan(max_rows=2, vocab=5) as unsplit:
        assert unsplit.info.partial_width == 0
        with pytest.raises(libxent.InvalidArgument, match="its vocabulary is not split"):
            unsplit.forward_partial(logits, targets)


def test_a_partial_into_memory_of_the_caller():
    plan = libxent.Plan(**options([0, 3, 8], 1, 5))
    logits, targets = np.arange(10, dtype=np.float32).reshape(2, 5), np.array([0, 7])
    want = plan.forward_partial(logits, targets)
    wide = np.full((2, 7), 9, np.float32)
    view = wide[:, 1:6]
    assert plan.forward_partial(logits, targets, partial=view) is view
    assert view.tobytes() == want.tobytes() and (wide[:, [0, 6]] == 9).all()
    given = torch.zeros(2, 5)
    version = given._version
    assert plan.forward_partial(torch.from_numpy(logits), torch.from_numpy(targets), partial=given) is given
    assert given.numpy().tobytes() == want.tobytes() and given._version > version
    read_only = np.zeros((2, 5), np.float32)
    read_only.flags.writeable = False
    for wrong, text in (
        (np.zeros((2, 4), np.float32), r"partial: shape \[2, 4\]; it must be \[rows, partial_width\] = \[2, 5\]"),
        (np.zeros((2, 5)), "partial: dtype is float64"),
        (read_only, "partial: the array is read-only"),
        (logits, "partial: overlaps logits"),
    ):
        with pytest.raises(libxent.InvalidArgument, match=text):
            plan.forward_partial(logits, targets, partial=wrong)


def with_communicator(all_gather):
    """A plan of rank 0 of 2, and what its calls take."""
    plan = libxent.Plan(**options([0, 3, 8], 0, 3, comm=libxent.Communicator(0, 2, all_gather)))
    return plan, np.zeros((2, 3), np.float32), np.array([0, 7])


def test_communicators_live_as_long_as_their_plans():
    def all_gather(*_):
        pass

    alive = weakref.ref(all_gather)
    plan, logits, targets = with_communicator(all_gather)
    del all_gather
    gc.collect()
    assert alive() is not None
    plan.forward(logits, targets)
    plan.close()
    gc.collect()
    assert alive() is None


def test_communicators_and_plans_that_hold_each_other_are_collected():
    def all_gather(*_):
        pass

    alive = weakref.ref(all_gather)
    all_gather.plan = with_communicator(all_gather)[0]
    del all_gather
    gc.collect()
    assert alive() is None


def test_what_all_gather_may_be():
    for wrong in (5, None, "gather"):
        with pytest.raises(libxent.InvalidArgument, match=f"all_gather: expected a function, got {wrong!r}"):
            libxent.Communicator(0, 2, wrong)
    for wrong in ("abcd", b"abcd", 1.5, None, [1]):
        with pytest.raises(libxent.InvalidArgument, match="nccl_comm: expected an address as an integer"):
            libxent.Communicator.from_nccl(wrong)
    for wrong in (0, -1, 2**64, ctypes.c_void_p()):
        with pytest.raises(libxent.InvalidArgument, match=r"nccl_comm: .* is no address"):
            libxent.Communicator.from_nccl(wrong)
    with pytest.raises(libxent.InvalidArgument, match=r"library: expected an address as an integer, got 'libnccl.so'"):
        libxent.Communicator.from_nccl(1, library="libnccl.so")


class Speechless(Exception):
    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize("error, text", [(OSError("gone"), "OSError: gone"), (Speechless(), "Speechless")], ids=repr)
def test_what_all_gather_raises_is_the_cause(capfd, error, text):
    def all_gather(*_):
        raise error

    plan, logits, targets = with_communicator(all_gather)
    with pytest.raises(libxent.Error, match=f"all_gather: {text} ") as caught:
        plan.forward(logits, targets)
    assert caught.value.__cause__ is error and caught.value.status == "XENT_COMM_ERROR"
    with pytest.raises(libxent.Error, match=f"made anew.*{text}") as caught:
        plan.forward(logits, targets)
    assert caught.value.__cause__ is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt("now"), SystemExit(3)], ids=repr)
def test_interrupts_leave_the_call_as_they_are(error):
    def all_gather(*_):
        raise error

    plan, logits, targets = with_communicator(all_gather)
    with pytest.raises(type(error)) as caught:
        plan.forward(logits, targets)
    assert caught.value is error
    with pytest.raises(libxent.Error, match="made anew"):
        plan.forward(logits, targets)


@pytest.mark.parametrize("work", ["plan.forward(x, t)", "make()"])
def test_exit_under_threads_that_gather(work):
    """Python ends such threads where they take the interpreter again: in all_gather, inside the library."""
    code = (
        "import threading, time, numpy, libxent\n"
        "x, t = numpy.zeros((4, 6), numpy.float32), numpy.zeros(4, int)\n"
        "def make():\n"
        "    comm = libxent.Communicator(0, 2, lambda *_: time.sleep(1e-3))\n"
        "    return libxent.Plan(max_rows=4, vocab=6, class_offsets=[0, 6, 12], comm=comm)\n"
        "plan = make()\n"
        "def run():\n"
        f"    while True: {work}\n"
        "for _ in range(3): threading.Thread(target=run, daemon=True).start()\n"
        "time.sleep(0.1)\n"
    )
    for _ in range(3):
        got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (got.returncode, got.stderr) == (0, "")
