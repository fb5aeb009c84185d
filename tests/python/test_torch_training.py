# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""libxent.torch in what surrounds a training step: autocast, loss scaling, CUDA graphs, memory, DDP and FSDP."""

import pytest

torch = pytest.importorskip("torch", minversion="2.4")

import libxent.torch as xt  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch_cases import DEVICES, assert_grad, assert_loss, logits, targets, want  # noqa: E402
from torch_ranks import run  # noqa: E402

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_changes_nothing(rng, device, dtype, compiled):
    """Logits keep their type, the loss is float32, and the gradient is rounded once."""
    x, t = logits(rng, (6, 33), dtype, device), targets(rng, (6,), 33, device=device)
    function = torch.compile(xt.cross_entropy, fullgraph=True, backend="aot_eager") if compiled else xt.cross_entropy
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = function(x, t)
    loss.backward()
    assert loss.dtype == torch.float32 and x.grad.dtype == dtype
    expected = want(x, t)
    assert_loss(loss, expected)
    assert_grad(x.grad, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_linear_layer_under_autocast(rng, device):
    torch.manual_seed(int(rng.integers(2**31)))
    head = torch.nn.Linear(16, 101, device=device)
    x, t = torch.randn(24, 16, device=device), targets(rng, (24,), 101, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = head(x)
        assert y.dtype == torch.bfloat16
        # The same logits for both: two matrix products may be rounded differently. In float32, as PyTorch rounds the
        # log-probabilities of bfloat16 logits to bfloat16 on CUDA, under autocast too.
        loss, other = xt.cross_entropy(y, t), F.cross_entropy(y.float(), t)
    torch.testing.assert_close(loss, other, rtol=1e-6, atol=1e-6)
    y.retain_grad()
    loss.backward(retain_graph=True)
    expected = want(y, t)
    assert_loss(loss, expected)
    assert_grad(y.grad, expected)
    (weight_grad,) = torch.autograd.grad(y, head.weight, y.grad)
    assert torch.equal(head.weight.grad, weight_grad)


@pytest.mark.parametrize("device", DEVICES)
def test_loss_scaling(rng, device):
    x, t = logits(rng, (6, 33), torch.float16, device), targets(rng, (6,), 33, device=device)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
    scaler.scale(xt.cross_entropy(x, t)).backward()
    assert_grad(x.grad, want(x, t, grad_loss=2.0**12))


@needs_cuda
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cuda_graph(rng, overwrite, reduction):
    """Captured once, replayed with new logits, targets, masks and upstream gradients."""
    shape, device = (7, 5, 1031), "cuda"
    x, t = logits(rng, shape, torch.bfloat16, device), targets(rng, shape[:-1], 1031, device=device)
    mask = torch.ones(shape[:-1], dtype=torch.bool, device=device)
    upstream = torch.ones(shape[:-1] if reduction == "none" else (), device=device)
    options = {"mask": mask, "reduction": reduction, "label_smoothing": 0.1, "overwrite_logits": overwrite}

    def step():
        got = xt.cross_entropy(x * 1, t, return_row_counts=True, **options)
        (grad,) = torch.autograd.grad(got.loss, x, upstream)
        return got.loss.detach(), got.row_counts, grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, counts, grad = step()
    del options["overwrite_logits"]
    for _ in range(3):
        with torch.no_grad():
            x.copy_(logits(rng, shape, torch.bfloat16, device))
            t.copy_(targets(rng, shape[:-1], 1031, device=device))
            mask.copy_(torch.from_numpy(rng.random(shape[:-1]) < 0.7))
            upstream.copy_(torch.from_numpy(rng.standard_normal(tuple(upstream.shape))))
        graph.replay()
        expected = want(x, t, grad_loss=upstream if reduction == "none" else upstream.item(), **options)
        assert_loss(loss, expected)
        assert_grad(grad, expected)
        assert counts.tolist() == expected.row_counts


@needs_cuda
def test_other_streams_and_no_synchronisation(rng):
    x, t = logits(rng, (64, 32000), torch.bfloat16, "cuda"), targets(rng, (64,), 32000, device="cuda")
    xt.cross_entropy(x, t).backward()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            x.mul_(0.5)
        x.grad = None
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = xt.cross_entropy(x, t)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not stream.query()
    torch.cuda.synchronize()
    assert_loss(loss, want(x, t))
    assert_grad(x.grad, want(x, t))


@needs_cuda
@pytest.mark.parametrize("mode", ["default", "overwrite", "fused", "fused overwrite"])
def test_memory(rng, mode):
    """Beside the logits: 8 bytes a row are kept, and the peak is the gradient or nothing."""
    rows, vocab = 2048, 32000
    t = targets(rng, (rows,), vocab, device="cuda")
    options = {"overwrite_logits": "overwrite" in mode, "fused": "fused" in mode}
    size = rows * vocab * 2
    for measured in (False, True):  # the first one loads kernels and fills caches
        x = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
        y = x.view_as(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = xt.cross_entropy(y, t, **options)
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
        if measured:
            gradient = 0 if options["overwrite_logits"] else -(-size >> 21) << 21  # as the allocator counts it
            small = 64 * rows + (1 << 20)
            assert kept <= (gradient if options["fused"] else 0) + 8 * rows + 4096
            assert gradient <= peak <= gradient + small
        del x, y, loss


def _data_parallel(rank, ranks):
    kinds = ["ddp"]
    try:
        from torch.distributed.fsdp import fully_shard

        kinds.append("fsdp")
    except ImportError:  # before PyTorch 2.6
        pass
    for kind in kinds:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 53))
        x, t = torch.randn(ranks, 12, 8), torch.randint(0, 53, (ranks, 12))
        t[0, :7] = -100
        total = (t != -100).sum()
        F.cross_entropy(model(x.flatten(0, 1)), t.flatten()).backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        if kind == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (ranks,)))
        # The mean over the tokens of all ranks: the gradients of the ranks are averaged.
        options = {"reduction": "sum", "denominator": total / ranks, "overwrite_logits": True}
        xt.cross_entropy(model(x[rank]), t[rank], **options).backward()
        for p, grad in zip(model.parameters(), expected):
            got = p.grad.full_tensor() if kind == "fsdp" else p.grad
            torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-6)


def test_data_parallel():
    run(_data_parallel, 2)
