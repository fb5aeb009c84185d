# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""A vocabulary split over GPUs, joined by NCCL: a process a GPU. Needs two."""

import libxent
import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

import nccl_ranks  # noqa: E402
from torch_ranks import run  # noqa: E402

ROWS, CLASSES = 300, 5003


@pytest.fixture
def seed(rng):
    return int(rng.integers(2**31))


def offsets_of(ranks):
    return [0, *(CLASSES * r // ranks + 17 * r for r in range(1, ranks)), CLASSES]


def problem(seed, dtype, smoothing):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(ROWS, CLASSES, generator=generator) * 3).to(dtype)
    if smoothing == 0:
        logits[5, : CLASSES // 2 + 50] = -torch.inf  # the whole first shard of two
    targets = torch.randint(CLASSES // 2 + 100, CLASSES, (ROWS,), generator=generator)
    targets[::7] = -100
    return logits, targets


def whole(logits, targets, smoothing):
    x = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x, targets, ignore_index=-100, label_smoothing=smoothing)
    loss.backward()
    return loss.detach(), x.grad


def check(rank, ranks, logits, targets, loss, grad, smoothing):
    offsets = offsets_of(ranks)
    want_loss, want = whole(logits, targets, smoothing)
    torch.testing.assert_close(loss.cpu().double(), want_loss, rtol=1e-6, atol=1e-6)
    want = want[:, offsets[rank] : offsets[rank + 1]]
    rtol = 2.0**-8 if grad.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(grad.cpu().double(), want, rtol=rtol, atol=1e-8)
    # The same bits everywhere.
    mine = loss.detach().cpu().view(1)
    everyone = [torch.empty_like(mine) for _ in range(ranks)]
    torch.distributed.all_gather(everyone, mine)
    assert all(torch.equal(other, mine) for other in everyone)


def _steps(rank, ranks, seed):
    torch.cuda.set_device(rank)
    offsets = offsets_of(ranks)
    nccl = nccl_ranks.Nccl(rank, ranks)
    comm = libxent.Communicator.from_nccl(nccl.comm.value)
    for dtype, smoothing in [(torch.float32, 0.0), (torch.bfloat16, 0.1)]:
        logits, targets = problem(seed, dtype, smoothing)
        mine = logits[:, offsets[rank] : offsets[rank + 1]].cuda()
        on_gpu = targets.cuda()
        plan = libxent.Plan(
            device=f"cuda:{rank}",
            logits_dtype=dtype,
            max_rows=ROWS,
            vocab=mine.shape[1],
            class_offsets=offsets,
            rank=rank,
            comm=comm,
            ignore_index=-100,
            label_smoothing=smoothing,
        )
        assert plan.info.graph_capture
        result = plan.forward(mine, on_gpu)
        grad = plan.backward(mine, on_gpu, result.stats, result.divisor)
        check(rank, ranks, logits, targets, result.loss, grad, smoothing)
        both = plan.loss_and_grad(mine, on_gpu)
        assert torch.equal(both.loss, result.loss) and torch.equal(both.grad, grad)

        # A graph of the whole step, replayed with new contents.
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                both = plan.loss_and_grad(mine, on_gpu)
        for step in range(1, 4):
            logits, targets = problem(seed + step, dtype, smoothing)
            mine.copy_(logits[:, offsets[rank] : offsets[rank + 1]])
            on_gpu.copy_(targets)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            check(rank, ranks, logits, targets, both.loss, both.grad, smoothing)
        del graph
        plan.close()
    other = (rank + 1) % ranks
    with pytest.raises(libxent.InvalidArgument, match=f"comm: is rank {rank} of {ranks}; the plan is rank {other}"):
        libxent.Plan(device=f"cuda:{rank}", max_rows=1, vocab=CLASSES - 1, class_offsets=offsets, rank=other, comm=comm)
    with pytest.raises(libxent.InvalidArgument, match=f"comm: gathers on CUDA:{rank}"):
        libxent.Plan(max_rows=1, vocab=CLASSES - 1, class_offsets=offsets, rank=rank, comm=comm)
    del comm
    nccl.close()


@pytest.mark.parametrize("ranks", [r for r in (2, 4, 8) if r <= torch.cuda.device_count()])
def test_nccl(ranks, seed):
    if nccl_ranks.library() is None:
        pytest.skip("PyTorch has loaded no libnccl.so")
    run(_steps, ranks, seed)
