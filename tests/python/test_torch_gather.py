# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""One collective a call over ranks: what goes into it, and who takes part in it, whatever is wrong on which rank."""

import contextlib
import gc
import itertools
import re

import conftest
import libxent
import numpy as np
import pytest

torch = pytest.importorskip("torch", minversion="2.4")

import libxent.torch as xt  # noqa: E402
from libxent.torch import _gather, _plans  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_cases import assert_grad, assert_loss, logits, targets, want  # noqa: E402
from torch_ranks import run  # noqa: E402


class Collectives(TorchDispatchMode):
    """Those that torch.distributed was asked for, as (name, bytes of this rank)."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.seen.append((function.name(), args[1].nbytes))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def one_gather(size=None):
    """Of so many bytes of each rank."""
    with Collectives() as collectives:
        yield
    ((name, sent),) = collectives.seen
    assert "allgather" in name
    assert size is None or sent == size


def refused(message):
    return pytest.raises(libxent.InvalidArgument, match=re.escape(message))


def dtensor(local, full, mesh):
    try:
        from torch.distributed.tensor import DTensor, Shard
    except ImportError:  # before PyTorch 2.5
        from torch.distributed._tensor import DTensor, Shard

    return DTensor.from_local(
        local, mesh, [Shard(full.dim() - 1)], run_check=False, shape=full.shape, stride=full.stride()
    )


def mesh_of(ranks, device):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (ranks,))


def _sizes(rank, ranks, device, seed):
    rng, group, mesh = np.random.default_rng(seed), torch.distributed.group.WORLD, mesh_of(ranks, device)
    columns, vocab = 7, 7 * ranks
    edges = [7 * r for r in range(ranks + 1)]
    for dtype, rows, options, width in (
        (torch.float32, (4, 2), {}, 3),
        (torch.bfloat16, (5,), {}, 3),  # 15 numbers: no whole tags
        (torch.float64, (5,), {}, 3),
        (torch.float64, (3,), {"label_smoothing": 0.1, "return_predicted": True}, 5),
        (torch.float16, (3,), {"label_smoothing": 0.1, "return_predicted": True, "return_entropy": True}, 6),
    ):
        if device == "cuda" and dtype == torch.float64:
            continue
        x, t = logits(rng, (*rows, vocab), dtype, device), targets(rng, rows, vocab, device=device)
        expected = want(x, t, label_smoothing=options.get("label_smoothing", 0.0))
        part = x.detach()[..., edges[rank] : edges[rank + 1]].contiguous().requires_grad_()
        partial = t.numel() * width * (8 if dtype == torch.float64 else 4)
        tagged = 16 + -(-partial // 16) * 16
        for given, where, size in (
            (part, {"process_group": group, "class_offsets": edges}, partial),
            (part, {"process_group": group}, tagged),
            (dtensor(part.detach(), x, mesh).requires_grad_(), {}, tagged),
        ):
            for _ in range(2):
                with one_gather(size):
                    got = xt.cross_entropy(given, t, **where, **options)
                loss = got.loss if isinstance(got, tuple) else got
                assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                assert_loss(loss, expected)
            (grad,) = torch.autograd.grad(loss, given)
            grad = grad if given is part else grad.to_local()
            parts = [torch.empty_like(grad) for _ in range(ranks)]
            torch.distributed.all_gather(parts, grad.contiguous())
            assert_grad(torch.cat(parts, -1), expected)
    # No rows: there is nothing to gather but the tag.
    part, t = torch.zeros(0, columns), torch.zeros(0, dtype=torch.int64)
    with one_gather(16):
        assert xt.cross_entropy(part, t, process_group=group) == 0
    with one_gather(16), refused("its ranks hold") if device == "cpu" or rank else contextlib.nullcontext():
        xt.cross_entropy(torch.zeros(0, columns + rank), t, process_group=group)
    with Collectives() as collectives:
        assert xt.cross_entropy(part, t, process_group=group, class_offsets=edges) == 0
    assert not collectives.seen


def _layouts(rank, ranks, device, host_waits):
    """Each of these calls gathers once, on every rank, and leaves the group as it was."""
    _gather._HOST_WAITS = ("cpu",) if host_waits else ()  # the latter as on CUDA
    group, mesh, last = torch.distributed.group.WORLD, mesh_of(ranks, device), rank == ranks - 1
    rows, columns, total = 6, 5, 5 * ranks
    t, size = torch.arange(rows), 16 + 80

    def loss(columns=columns, **options):
        return xt.cross_entropy(torch.zeros(rows, columns), t, process_group=group, **options)

    def of_dtensor(columns=columns, total=total, **options):
        return xt.cross_entropy(dtensor(torch.zeros(rows, columns), torch.zeros(rows, total), mesh), t, **options)

    def good():
        for call in (loss, of_dtensor):
            with one_gather(size):
                assert abs(call() - np.log(total)) < 1e-5

    chunks, grown, given = [columns] * ranks, [columns] * (ranks - 1) + [columns + 1], [total] * (ranks - 1)
    with one_gather(size), refused(f"ranks hold {grown} columns"):  # a layout that is new to all
        loss(columns + last)
    good()
    for call, known, message in (
        # Whether this rank's layout is that of the good calls; then the host need not look.
        (lambda: loss(columns + last), not last, f"ranks hold {grown} columns"),
        (lambda: loss(columns + last, weight=torch.ones(total)), not last, f"ranks hold {grown} columns"),
        # Of a DTensor's calls, where the mesh has this very group: that depends on the release.
        (
            lambda: loss(classes=total + last),
            not last and mesh.get_group() == group,
            f"given {[*given, total + 1]} as classes",
        ),
        (lambda: loss(classes=total + 1 if last else None), not last, f"given {[*[0] * (ranks - 1), total + 1]} as"),
        (lambda: loss(classes=-1 if last else None), not last, f"given {[*[0] * (ranks - 1), -1]} as classes"),
        (lambda: loss(classes=10**400 if last else None), not last, f"given {[*[0] * (ranks - 1), 2**53]} as classes"),
        (lambda: loss(classes=total + 1), False, f"classes: {total + 1} do not fit into {ranks} ranks of {columns}"),
        (lambda: loss(0), False, f"classes: 0 do not fit into {ranks} ranks of 0 columns"),
        (lambda: of_dtensor(columns + last), not last, f"hold {grown} columns of DTensors that have {[*given, total]}"),
        (lambda: of_dtensor(columns + last), not last, f"torch.chunk does, here into {chunks}"),
        (lambda: of_dtensor(columns - last), not last, f"ranks hold {[*chunks[1:], columns - 1]} columns"),
        (lambda: of_dtensor(total=total + last), not last, f"DTensors that have {[*given, total + 1]}"),
        (lambda: of_dtensor(classes=total - 1), False, f"classes: {total - 1} differ from the last of class_offsets"),
    ):
        if known and not host_waits:
            with one_gather(size):
                assert call().isnan()
        else:
            with one_gather(size), refused(message):
                call()
        good()


def _square(rank, ranks, device, seed):
    """A rank's part [2, 5, 5] is not taken for [N, C, d1], which the whole could not be."""
    rng = np.random.default_rng(seed)
    x, t = logits(rng, (2, 5, 5 * ranks), device=device), targets(rng, (2, 5), 5 * ranks, device=device)
    part = x.detach()[..., 5 * rank : 5 * rank + 5].contiguous()
    assert_loss(xt.cross_entropy(part, t, process_group=torch.distributed.group.WORLD), want(x, t))


def _recorded(ranks):
    """Where calls are noted down instead of run, there is nothing to gather."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    t, group = torch.arange(4), torch.distributed.group.WORLD

    def equal(x):
        return xt.cross_entropy(x, t, process_group=group)

    def offsets(x, step=5):
        return xt.cross_entropy(x, t, process_group=group, class_offsets=[step * r for r in range(ranks + 1)])

    x = torch.zeros(4, 5)
    for call in equal, lambda x: offsets(x):
        with FakeTensorMode(allow_non_fake_inputs=True), refused("not supported under FakeTensorMode"):
            call(x)
        with refused("not supported under FakeTensorMode"):
            make_fx(call)(x)
    with refused("class_offsets: expected an integer"):
        offsets(x, 5.5)


def _own_reasons(rank, ranks):
    """What one rank refuses for reasons of its own does not make the others wait."""
    group, last = torch.distributed.group.WORLD, rank == ranks - 1
    t, rows, total = torch.arange(4), 4, 5 * ranks
    overlapping, elsewhere = torch.zeros(5, requires_grad=True).expand(rows, 5), "meta" if last else None
    counted = {"reduction": "sum"}
    for options, message in (
        ({"mask": torch.ones(rows + last)}, "mask: shape"),
        ({"weight": torch.ones(total + last)}, "weight: expected one for each"),
        ({"row_weights": torch.ones(rows, requires_grad=last)}, "row_weights: it requires a gradient"),
        ({"overwrite_logits": True}, "overwrite_logits: the logits have shape"),
        ({"row_weights": torch.ones(rows + last)}, "row_weights: expected shape (4,) and float32, got shape (5,)"),
        ({"row_weights": torch.ones(rows, dtype=torch.float64 if last else None)}, "row_weights: expected shape (4,)"),
        ({"row_weights": torch.ones(rows, device=elsewhere)}, "row_weights: "),
        ({"row_weights": [1.0] * rows if last else torch.ones(rows)}, "row_weights: expected an array"),
        ({"denominator": torch.ones(1 + last), **counted}, "denominator: expected one number"),
        (
            {"denominator": torch.ones((), dtype=torch.float64 if last else None), **counted},
            "denominator: expected one",
        ),
        ({"denominator": torch.ones((), device=elsewhere), **counted}, "denominator: "),
        ({"denominator": 1e300 if last else 1, **counted}, "denominator: 1e+300 is beyond"),
        ({"denominator": 4 if last else None, "reduction": "none"}, "denominator: was given"),
    ):
        for where in ({}, {"class_offsets": list(range(0, total + 1, 5))}):
            x = overlapping if last and "overwrite_logits" in options else torch.zeros(rows, 5, requires_grad=True) * 1
            with one_gather(), refused(message) if last else contextlib.nullcontext():
                assert xt.cross_entropy(x, t, process_group=group, **where, **options).isnan().all()
    for good in ({"denominator": np.float64(2)}, {"denominator": torch.ones(1, dtype=torch.int32)}):
        with one_gather():
            assert xt.cross_entropy(x, t, process_group=group, **counted, **good).isfinite()


def _bounded():
    """Of the layouts no more are kept than so many, of a group that is gone none."""
    _gather._HOST_WAITS = ()
    _gather._KNOWN_OF_A_GROUP, kept = 3, _gather._KNOWN_OF_A_GROUP
    group, t = torch.distributed.new_group(), torch.arange(4)
    groups = len(_gather._known)
    for columns in (*range(4, 9), *range(4, 9)):
        loss = xt.cross_entropy(torch.zeros(4, columns), t, process_group=group)
        assert abs(loss - np.log(columns * group.size())) < 1e-5
        assert len(_gather._known[group]) <= 3
    assert len(_gather._known) == groups + 1
    torch.distributed.destroy_process_group(group)
    del group
    gc.collect()
    assert len(_gather._known) == groups
    _gather._KNOWN_OF_A_GROUP = kept


def _poison(rank, ranks, device, seed):
    """Where the host does not look, nothing that a row's outputs could be taken for comes of an unexpected tag."""
    _gather._HOST_WAITS = ()
    rng, group = np.random.default_rng(seed), torch.distributed.group.WORLD
    classes, t = 5 * (ranks - 1), torch.tensor([0, 4, -100, 3])  # the last rank has padding alone
    x, counts = logits(rng, (4, 5), device=device), t != -100
    for smoothing, softcap, *asked in itertools.product((0.0, 0.1), (0.0, 5.0), (False, True), (False, True)):
        options = {"label_smoothing": smoothing, "softcap": softcap, "reduction": "none", "return_lse": True}
        options.update(zip(("return_entropy", "return_predicted"), asked), process_group=group, classes=classes)
        for stranger in (None, 0, ranks - 1):
            if rank == stranger:
                with refused("ranks hold"):
                    xt.cross_entropy(torch.zeros(4, 6), t, **options)
                continue
            got = xt.cross_entropy(x, t, **options)
            (grad,) = torch.autograd.grad(got.loss.sum(), x)
            spoilt = counts & (stranger is not None)
            for output in (got.loss, got.lse, got.entropy):
                assert output is None or output.isnan().equal(spoilt)
            assert got.predicted is None or (got.predicted == -1).equal(spoilt | ~counts)
            held = 5 if rank < ranks - 1 else 0
            assert grad.isnan().equal(spoilt[:, None] & (torch.arange(5) < held))


def _all(rank, ranks, device, seed):
    """In one group, as processes are slow to start."""
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    _sizes(rank, ranks, device, seed)
    _square(rank, ranks, device, seed)
    _recorded(ranks)
    for host_waits in (True, False) if device == "cpu" else (False,):
        _layouts(rank, ranks, device, host_waits)
        _own_reasons(rank, ranks)
    _poison(rank, ranks, device, seed)
    _bounded()


needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="PyTorch sees fewer than 2 CUDA devices")


@pytest.mark.parametrize(
    ("backend", "device", "ranks"), [("gloo", "cpu", 3), pytest.param("nccl", "cuda", 2, marks=needs_gpus)]
)
def test_one_gather(backend, device, ranks):
    run(_all, ranks, device, conftest.SEED, backend=backend)


def test_width_of_a_partial():
    for smoothing, entropy, predicted in itertools.product((0.0, 1e-3), (False, True), (False, True)):
        options = {"label_smoothing": smoothing, "entropy": entropy, "predicted": predicted}
        plan = libxent.Plan(max_rows=1, vocab=3, class_offsets=[0, 3], **options)
        spec, wants = _plans.Spec(label_smoothing=smoothing), _plans.Wants(entropy=entropy, predicted=predicted)
        assert _plans.partial_width(spec, wants) == plan.info.partial_width
