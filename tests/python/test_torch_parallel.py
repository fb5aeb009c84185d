# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""A vocabulary split over the ranks of a process group, and DTensor logits, against the unsplit reference."""

import copy
import io
import itertools
import pickle

import conftest
import libxent
import numpy as np
import pytest

torch = pytest.importorskip("torch", minversion="2.4")

import libxent.torch as xt  # noqa: E402
from libxent.torch import compat  # noqa: E402
from torch_cases import assert_grad, assert_loss, logits, targets, want  # noqa: E402
from torch_ranks import run  # noqa: E402

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
except ImportError:  # before PyTorch 2.5
    from torch.distributed._tensor import DTensor, Replicate, Shard, distribute_tensor

needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="PyTorch sees fewer than 2 CUDA devices")
BACKENDS = [("gloo", "cpu", 3), pytest.param("nccl", "cuda", 2, marks=needs_gpus)]
EXTRAS = {"return_lse": True, "return_entropy": True, "return_predicted": True, "return_row_counts": True}


def same_on_every_rank(tensor, ranks):
    found = [torch.empty_like(tensor) for _ in range(ranks)]
    torch.distributed.all_gather(found, tensor.contiguous())
    assert all(other.cpu().numpy().tobytes() == tensor.cpu().numpy().tobytes() for other in found)


def start(rank, device, seed):
    """The same random numbers on every rank."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    return np.random.default_rng(seed), f"cuda:{rank}" if device == "cuda" else "cpu"


def mine(full, offsets, rank, padding=0):
    """This rank's columns as a tensor of their own, with columns of padding that hold NaN."""
    part = full.detach()[..., offsets[rank] : offsets[rank + 1]]
    return torch.cat([part, part.new_full((*part.shape[:-1], padding), float("nan"))], -1).requires_grad_()


def _options(rank, ranks, device, seed):
    rng, device = start(rank, device, seed)
    vocab = 64 * ranks
    uneven = (0, 7, *(7 + (vocab - 7) * i // (ranks - 1) for i in range(1, ranks)))
    empty = (0, *([vocab] * ranks))
    group = torch.distributed.group.WORLD
    for dtype, reduction, offsets, padding in (
        (torch.float32, "mean", None, 0),
        (torch.bfloat16, "none", uneven, 5),
        (torch.float16, "sum", empty, 1),
    ):
        x, t = logits(rng, (4, 6, vocab), dtype, device), targets(rng, (4, 6), vocab, device=device)
        weights = torch.from_numpy(rng.random((4, 6))).float().to(device)
        mask = torch.from_numpy(rng.random((4, 6)) < 0.8).to(device)
        upstream = torch.from_numpy(rng.standard_normal((4, 6) if reduction == "none" else ())).float().to(device)
        options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0, "mask": mask}
        options["row_weights"] = weights
        if reduction == "sum":
            options["denominator"] = 7
        expected = want(x, t, grad_loss=upstream if reduction == "none" else float(upstream), **options)
        edges = offsets or tuple(64 * r for r in range(ranks + 1))
        for overwrite in (False, True):
            part = mine(x, edges, rank, padding)
            got = xt.cross_entropy(
                part * 1, t, process_group=group, class_offsets=offsets, overwrite_logits=overwrite, **EXTRAS, **options
            )
            got.loss.backward(upstream)
            assert_loss(got.loss, expected)
            for output in got:
                same_on_every_rank(output.detach(), ranks)
            assert got.row_counts.tolist() == expected.row_counts
            assert (got.predicted.cpu().numpy() == expected.predicted).all()
            width = edges[rank + 1] - edges[rank]
            if width:
                whole = torch.zeros_like(x)
                whole[..., edges[rank] : edges[rank + 1]] = part.grad[..., :width]
                for other in set(range(ranks)) - {rank}:
                    columns = slice(edges[other], edges[other + 1])
                    whole[..., columns] = torch.from_numpy(expected.grad[..., columns].astype(np.float64)).to(dtype)
                assert_grad(whole, expected)
            assert not part.grad[..., width:].any()
    # Padding of equal shards: the last classes of the last rank are none.
    x, t = logits(rng, (9, vocab), torch.float32, device), targets(rng, (9,), vocab - 3, device=device)
    part = mine(x, tuple(64 * r for r in range(ranks + 1)), rank)
    weight = torch.from_numpy(rng.random(vocab - 3)).float().to(device)
    loss = xt.cross_entropy(part, t, weight, process_group=group, classes=vocab - 3)
    picked = torch.where(t >= 0, weight[t.clamp(0)], 1)
    assert_loss(loss, want(x, t, classes=vocab - 3, row_weights=picked))
    # Nothing recorded, twice the same loss, and a backward that may run again.
    with torch.no_grad():
        again = xt.cross_entropy(part, t, weight, process_group=group, classes=vocab - 3)
    assert again.equal(loss) and again.grad_fn is None
    (first,) = torch.autograd.grad(loss, part, retain_graph=True)
    (second,) = torch.autograd.grad(loss, part)
    assert first.equal(second)
    empty_rows = xt.cross_entropy(part[:0], t[:0], process_group=group)
    assert empty_rows == 0


def _refused(rank, ranks, device, seed):
    rng, device = start(rank, device, seed)
    group = torch.distributed.group.WORLD
    x, t = logits(rng, (6, 8 + rank), torch.float32, device), targets(rng, (6,), 8, device=device)
    for arguments, message in (
        ({}, r"\[8, 9(, 10)?\] columns"),
        ({"class_offsets": [0, 8]}, f"expected {ranks + 1} offsets"),
        ({"class_offsets": [0, 8, 17, 27][: ranks + 1], "classes": 12}, "classes: 12"),
        ({"fused": True}, "fused"),
    ):
        with pytest.raises(libxent.InvalidArgument, match=message):
            xt.cross_entropy(x, t, process_group=group, **arguments)
    with pytest.raises(libxent.InvalidArgument, match="needs a process_group"):
        xt.cross_entropy(x, t, class_offsets=[0, 8])


def _widths(rank, ranks, device, seed):
    """Ranks whose widths differ all raise, whatever each of them has seen before, and the group lives on."""
    rng, device = start(rank, device, seed)
    group = torch.distributed.group.WORLD
    t = targets(rng, (6,), 5 * ranks, device=device)

    def loss(columns, **options):
        return xt.cross_entropy(torch.zeros(6, columns, device=device), t, process_group=group, **options)

    for columns in (5, 6, 5):
        torch.testing.assert_close(loss(columns).cpu(), torch.tensor(float(columns * ranks)).log())
    if device == "cpu":  # on CUDA ranks that have seen their own width would not wait to raise
        for mine in (5 + rank, 5 + rank % 2, 7 - rank):
            with pytest.raises(libxent.InvalidArgument, match=r"process_group: its ranks hold \[\d"):
                loss(mine)
        with pytest.raises(libxent.InvalidArgument, match=rf"were given \[{5 * ranks - 1}, {5 * ranks}.*\] as classes"):
            loss(5, classes=min(5 * ranks - 1 + rank, 5 * ranks))
    else:
        assert loss(5 + rank % 2).isnan()
    torch.testing.assert_close(loss(5).cpu(), torch.tensor(5.0 * ranks).log())


def _compat(rank, ranks, device, seed):
    rng, device = start(rank, device, seed)
    group, vocab = torch.distributed.group.WORLD, 32 * ranks
    edges = tuple(32 * r for r in range(ranks + 1))
    x, t = logits(rng, (4, 6, vocab), torch.bfloat16, device), targets(rng, (4, 6), vocab, device=device)
    part = mine(x, edges, rank)
    loss = compat.parallel_cross_entropy(part, t, 0.1, True, group)
    assert_loss(loss, want(x, t, label_smoothing=0.1))
    t = t.clamp(0)
    for formula, smoothing in (("megatron", 0.2 * vocab / (vocab - 1)), ("pytorch", 0.2)):
        part.grad = None
        loss = compat.vocab_parallel_cross_entropy(part, t, 0.2, group, smoothing_formula=formula)
        expected = want(x, t, label_smoothing=smoothing, reduction="none")
        assert_loss(loss, expected)
        loss.sum().backward()
        gathered = [torch.empty_like(part) for _ in range(ranks)]
        torch.distributed.all_gather(gathered, part.grad)
        assert_grad(torch.cat(gathered, -1), expected)


def _dtensor(rank, ranks, device, seed):
    from torch.distributed.device_mesh import init_device_mesh

    rng, device = start(rank, device, seed)
    mesh = init_device_mesh(device[:4].rstrip(":"), (ranks,))
    vocab = 20 * ranks - 1  # the last shard is smaller
    x, t = logits(rng, (4, 6, vocab), torch.float32, device), targets(rng, (4, 6), vocab, device=device)
    expected = want(x, t, label_smoothing=0.1)
    for placement, labels in ((Shard(2), t), (Shard(-1), distribute_tensor(t, mesh, [Replicate()])), (Replicate(), t)):
        split = distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
        loss = xt.cross_entropy(split, labels, label_smoothing=0.1)
        assert type(loss) is torch.Tensor
        assert_loss(loss, expected)
        loss.backward()
        assert_grad(split.grad.full_tensor(), expected)
        module = compat.MaskedCrossEntropy()
        assert_loss(module(split, t), want(x, t, reduction="sum"))
    for bad, name in ((distribute_tensor(x.detach(), mesh, [Shard(0)]), "input"), (split, "target")):
        labels = distribute_tensor(t, mesh, [Shard(0)]) if name == "target" else t
        with pytest.raises(libxent.InvalidArgument, match=f"{name}: expected"):
            xt.cross_entropy(bad, labels)
    with pytest.raises(libxent.InvalidArgument, match="a DTensor says itself"):
        xt.cross_entropy(split, t, process_group=mesh.get_group(0))
    # Shards that are not cut as the layout says, and of shapes that the ranks do not agree on.
    shards = [vocab - 17 * (ranks - 1), *([17] * (ranks - 1))]
    for explicit in (True, False):
        local = x.detach().split(shards, -1)[rank].contiguous()
        shape = {"shape": x.shape, "stride": x.stride()} if explicit else {}
        uneven = DTensor.from_local(local, mesh, [Shard(2)], run_check=False, **shape)
        with pytest.raises(libxent.InvalidArgument, match=rf"input: the ranks hold \[{shards[0]}, 17.*torch.chunk"):
            xt.cross_entropy(uneven, t)
    assert_loss(xt.cross_entropy(split, t, label_smoothing=0.1), expected)


def _under_way(rank, ranks, device, seed):
    """Results of functional collectives that nobody has waited for, as they are and in DTensors."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    rng, device = start(rank, device, seed)
    group, mesh = torch.distributed.group.WORLD, init_device_mesh(device[:4].rstrip(":"), (ranks,))
    vocab = 20 * ranks
    x, t = logits(rng, (6, vocab), torch.float32, device), targets(rng, (6,), vocab, device=device)
    weights = torch.from_numpy(rng.random(6)).float().to(device)
    expected, edges = want(x, t, row_weights=weights), tuple(20 * r for r in range(ranks + 1))

    def late(tensor):
        result = functional.all_reduce(tensor.detach(), "max", group)
        assert type(result) is functional.AsyncCollectiveTensor
        return result

    options = {"row_weights": late(weights), "mask": late(torch.ones_like(t))}
    for place, part in ((Replicate(), x), (Shard(1), mine(x, edges, rank))):
        for inside, overwrite in itertools.product((False, True), (False, True)):
            leaf = functional.AsyncCollectiveTensor(part.detach().clone())
            if inside:
                leaf = DTensor.from_local(leaf, mesh, [place], run_check=False)
            leaf = leaf.detach().requires_grad_()
            where = {"process_group": group} if part is not x and not inside else {}
            loss = xt.cross_entropy(leaf.view_as(leaf), late(t), overwrite_logits=overwrite, **where, **options)
            assert type(loss) is torch.Tensor
            assert_loss(loss, expected)
            (grad,) = torch.autograd.grad(loss, leaf)
            grad = grad.to_local() if inside else grad
            found = [torch.empty_like(grad) for _ in range(ranks)]
            torch.distributed.all_gather(found, grad.contiguous())
            assert_grad(grad if part is x else torch.cat(found, -1), expected)
    with torch.no_grad():
        loss = xt.cross_entropy(x, t, reduction="sum", denominator=late(torch.tensor(3, device=device)))
        assert_loss(loss, want(x, t, reduction="sum", denominator=3))
        assert_loss(xt.cross_entropy(x, DTensor.from_local(t, mesh, [Replicate()])), want(x, t))


def _overwritten(rank, ranks, device, seed):
    """Whoever saved a tensor that wraps the logits sees that they were overwritten."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    rng, device = start(rank, device, seed)
    mesh = init_device_mesh(device[:4].rstrip(":"), (ranks,))
    x, t = logits(rng, (2 * ranks, 5 * ranks), device=device), targets(rng, (2 * ranks,), 5 * ranks, device=device)
    for fused in (False, True):
        for wrapped in (
            distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_() * 1,
            distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() * 1,
            functional.AsyncCollectiveTensor(x.detach().clone()).requires_grad_(),
        ):
            if fused and hasattr(wrapped, "placements"):
                continue
            square = (wrapped**2).sum()
            loss = xt.cross_entropy(wrapped, t, overwrite_logits=True, fused=fused)
            loss.backward(retain_graph=True)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                square.backward()


def _copies(rank, ranks, device, seed):
    weight = torch.ones(8 * ranks)
    for group in (torch.distributed.group.WORLD, torch.distributed.new_group()):
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), xt.CrossEntropyLoss(weight, process_group=group, z_loss=1e-3)
        )
        for twin in (copy.copy(model[1]), copy.deepcopy(model)[1], copy.deepcopy(model[1])):
            assert twin.options == model[1].options and twin.options["process_group"] is group
            assert twin.weight.equal(weight) and type(twin) is xt.CrossEntropyLoss
        assert copy.deepcopy(model)[1].weight is not model[1].weight
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(TypeError, match="a loss with a process_group cannot be pickled"):
                save(model)
        patched = compat.patch_causal_lm(Patched(), process_group=group)
        assert copy.deepcopy(patched).loss_function.options["process_group"] is group
    model[1].options.pop("process_group")
    assert pickle.loads(pickle.dumps(model))[1].options == {"z_loss": 1e-3}


class Patched:
    loss_function = None


def _cuda_graph(rank, ranks, device, seed):
    rng, device = start(rank, device, seed)
    group, vocab = torch.distributed.group.WORLD, 1000 * ranks
    edges = tuple(1000 * r for r in range(ranks + 1))
    x, t = logits(rng, (64, vocab), torch.bfloat16, device), targets(rng, (64,), vocab, device=device)
    part = mine(x, edges, rank)

    def step():
        loss = xt.cross_entropy(part, t, process_group=group)
        return loss, torch.autograd.grad(loss, part)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, grad = step()
    for _ in range(2):
        x = logits(rng, (64, vocab), torch.bfloat16, device)
        t.copy_(targets(rng, (64,), vocab))
        with torch.no_grad():
            part.copy_(x[:, edges[rank] : edges[rank + 1]])
        graph.replay()
        assert_loss(loss, want(x, t))
        gathered = [torch.empty_like(grad) for _ in range(ranks)]
        torch.distributed.all_gather(gathered, grad)
        assert_grad(torch.cat(gathered, -1), want(x, t))


def _conveniences(*arguments):
    """In one group, as processes are slow to start."""
    for case in (_refused, _widths, _compat, _dtensor, _under_way, _overwritten, _copies):
        case(*arguments)


@pytest.mark.parametrize(("backend", "device", "ranks"), BACKENDS)
def test_options(backend, device, ranks):
    run(_options, ranks, device, conftest.SEED, backend=backend)


def test_refusals_drop_ins_and_dtensors():
    run(_conveniences, 2, "cpu", conftest.SEED)


@needs_gpus
def test_refusals_drop_ins_and_dtensors_on_gpus():
    run(_conveniences, 2, "cuda", conftest.SEED, backend="nccl")


@needs_gpus
def test_cuda_graph():
    run(_cuda_graph, 2, "cuda", conftest.SEED, backend="nccl")


def _one(rank, ranks):
    x, t = torch.randn(6, 9, requires_grad=True), torch.randint(9, (6,))
    group = torch.distributed.group.WORLD
    expected = xt.cross_entropy(x, t)
    assert xt.cross_entropy(x, t, process_group=group).equal(expected)
    assert compat.parallel_cross_entropy(x[None], t[None], 0.0, True, group).equal(expected)


def test_a_group_of_one_is_no_split():
    run(_one, 1)
