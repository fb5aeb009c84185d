# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Backward of libxent.torch: repeatable, guarded where it overwrites, right for every upstream gradient."""

import gc

import libxent
import pytest

torch = pytest.importorskip("torch", minversion="2.4")

import libxent.torch as xt  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from libxent.torch import _plans  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_cases import DEVICES, UPSTREAMS, assert_grad, close, grad_of, logits, targets, want  # noqa: E402


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", UPSTREAMS)
def test_upstream_of_rows(rng, device, name):
    x, t = logits(rng, (4, 5, 33), device=device), targets(rng, (4, 5), 33, device=device)
    upstream = UPSTREAMS[name](torch.from_numpy(rng.standard_normal((4, 5))).float().to(device))
    xt.cross_entropy(x, t, reduction="none").backward(upstream)
    assert_grad(x.grad, want(x, t, reduction="none", grad_loss=upstream))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_upstream_scalar(rng, device, reduction):
    x, t = logits(rng, (20, 33), torch.bfloat16, device), targets(rng, (20,), 33, device=device)
    factor = float(rng.standard_normal())
    (xt.cross_entropy(x, t, reduction=reduction) * factor).backward()
    assert_grad(x.grad, want(x, t, reduction=reduction, grad_loss=float(torch.tensor(factor))))


def test_upstream_reaches_ignored_rows_as_nothing(rng):
    x, t = logits(rng, (4, 9)), torch.tensor([3, -100, 1, -100])
    upstream = torch.tensor([1.0, float("nan"), 2.0, float("inf")])
    xt.cross_entropy(x, t, reduction="none").backward(upstream)
    assert not x.grad[1].any() and not x.grad[3].any() and x.grad[0].any()


@pytest.mark.parametrize("device", DEVICES)
def test_backward_again(rng, device):
    x, t = logits(rng, (8, 21), device=device), targets(rng, (8,), 21, device=device)
    loss = xt.cross_entropy(x, t)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x, retain_graph=True)
    (third,) = torch.autograd.grad(loss * 2, x)
    assert first.equal(second) and third.equal(first * 2)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_several_losses_on_the_same_logits(rng):
    x, t, u = logits(rng, (8, 21)), targets(rng, (8,), 21), targets(rng, (8,), 21)

    def total(x, t, loss):
        y = x * 1.5
        return loss(y, t) + loss(y, u, label_smoothing=0.1) + (y**2).mean() + loss(y[1:], t[1:], reduction="sum")

    total(x, t, xt.cross_entropy).backward()
    close(x.grad, grad_of(total, x, t, loss=F.cross_entropy))


def test_a_leaf_twice(rng):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    for _ in range(2):
        xt.cross_entropy(x, t).backward()
    close(x.grad, 2 * grad_of(F.cross_entropy, x, t))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["last", "second", "sliced"])
def test_overwrite(rng, device, layout):
    shape, dim = ((4, 33, 5), 1) if layout == "second" else ((4, 5, 33), -1)
    x, t = logits(rng, shape, torch.bfloat16, device), targets(rng, (4, 5), 33, device=device)
    keep = x * 1
    y = keep[:, :-1] if layout == "sliced" else keep
    t = t[:, :-1] if layout == "sliced" else t
    before = y.detach().clone()
    seen = []
    y.register_hook(seen.append)
    loss = xt.cross_entropy(y, t, overwrite_logits=True, label_smoothing=0.1)
    assert y.equal(before)
    loss.backward(retain_graph=True)
    assert seen[0].data_ptr() == y.data_ptr() and seen[0].stride() == y.stride()
    expected = want(before, t, dim, label_smoothing=0.1)
    assert_grad(y, expected, dim)
    assert_grad(x.grad[:, :-1] if layout == "sliced" else x.grad, expected, dim)
    if layout == "sliced":
        assert keep[:, -1].equal(x.detach()[:, -1]) and not x.grad[:, -1].any()
    with pytest.raises(RuntimeError, match="backward runs once"):
        loss.backward()


def test_overwrite_is_seen_by_whoever_saved_the_logits(rng):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    y = x * 1
    square = (y**2).sum()
    loss = xt.cross_entropy(y, t, overwrite_logits=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_overwrite_twice_on_the_same_logits(rng):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    y = x * 1
    for second in (y, y[:4], y.view(-1).view(8, 21), y.detach().requires_grad_()):
        loss = xt.cross_entropy(y, t, overwrite_logits=True)
        other = xt.cross_entropy(second, t[: len(second)], overwrite_logits=True)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward(retain_graph=True)


def test_logits_changed_between(rng):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    for overwrite in (False, True):
        y = x * 1
        loss = xt.cross_entropy(y, t, overwrite_logits=overwrite)
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_other_inputs_changed_between(rng):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    for changed in ("target", "mask", "row_weights"):
        given = {"target": t.clone(), "mask": torch.ones(8, dtype=torch.bool), "row_weights": torch.ones(8)}
        loss = xt.cross_entropy(x, **given)
        given[changed].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_overwrite_of_expanded_logits_is_refused(rng):
    x, t = logits(rng, (1, 21)), targets(rng, (8,), 21)
    with pytest.raises(libxent.InvalidArgument, match="expanded"):
        xt.cross_entropy(x.expand(8, 21), t, overwrite_logits=True)
    xt.cross_entropy(x.expand(8, 21), t).backward()
    close(x.grad, grad_of(lambda x, t: F.cross_entropy(x.expand(8, 21), t), x, t))


@pytest.mark.parametrize("fused", [False, True])
def test_overwrite_of_overlapping_logits_is_refused_before_anything_is_done(rng, fused):
    x, t = logits(rng, (28,)), targets(rng, (8,), 21)
    before = x.detach().clone()
    for wrong in (x.unfold(0, 21, 1), x.as_strided((2, 8, 21), (0, 1, 1))[0]):
        with pytest.raises(libxent.InvalidArgument, match=r"overwrite_logits: .* strides \(1, 1\)"):
            xt.cross_entropy(wrong, t, overwrite_logits=True, fused=fused)
    assert x.equal(before)
    xt.cross_entropy(x.unfold(0, 21, 1), t, fused=fused).backward()
    close(x.grad, grad_of(lambda x, t: F.cross_entropy(x.unfold(0, 21, 1), t), x, t))


@pytest.mark.parametrize("options", [{"overwrite_logits": True}, {"fused": True}], ids=str)
def test_a_backward_that_fails_may_be_called_again(rng, monkeypatch, options):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    expected = grad_of(F.cross_entropy, x, t)
    loss = xt.cross_entropy(x * 1, t, **options)

    def fail(*_):
        raise libxent.Error("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(_plans, "scale_grad" if "fused" in options else "backward", fail)
        with pytest.raises(libxent.Error, match="no memory"):
            loss.backward(retain_graph=True)
    loss.backward()
    close(x.grad, expected)


@pytest.mark.parametrize("options", [{}, {"overwrite_logits": True}, {"fused": True}], ids=str)
def test_upstream_without_values_in_memory(rng, options):
    """Negated lazily, or zeros without memory."""
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    for upstream in (torch._neg_view(torch.tensor(2.0)), torch._efficientzerotensor(())):
        x.grad, y = None, x * 1
        xt.cross_entropy(y, t, **options).backward(upstream)
        close(x.grad, float(upstream) * grad_of(F.cross_entropy, x, t))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_checkpoint(rng, reentrant, overwrite):
    """The region saves the logits twice, and hands both the same tensor when it computes it again."""
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)

    def region(x, t, loss, **options):
        y = x * 1.5
        return (y**3).mean() * 5, loss(y, t, **options)

    options = {"overwrite_logits": True} if overwrite else {}
    cube, loss = checkpoint(region, x, t, xt.cross_entropy, use_reentrant=reentrant, **({} if reentrant else options))
    if reentrant and overwrite:
        pytest.skip("reentrant checkpointing takes no keywords")
    (loss + cube).backward()
    close(x.grad, grad_of(lambda x, t: sum(region(x, t, F.cross_entropy)), x, t))


def test_overwrite_of_a_checkpoint_s_logits(rng):
    """The loss stands outside of the region that makes the logits and saves them."""
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    y = checkpoint(lambda x: (x * 0.5).tanh(), x, use_reentrant=False)
    xt.cross_entropy(y, t, overwrite_logits=True).backward()
    close(x.grad, grad_of(lambda x, t: F.cross_entropy((x * 0.5).tanh(), t), x, t))


def test_overwrite_of_a_checkpoint_s_input_is_an_error(rng):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    y = x * 1
    cube = checkpoint(lambda y: (y**3).mean(), y, use_reentrant=False)
    loss = xt.cross_entropy(y, t, overwrite_logits=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cube.backward()


def test_offloaded_logits(rng):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    for overwrite in (False, True):
        x.grad = None
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            y = x * 1
            cube = (y**3).mean()
            loss = xt.cross_entropy(y, t, overwrite_logits=overwrite)
        (loss + cube).backward()
        close(x.grad, grad_of(lambda x, t: F.cross_entropy(x, t) + (x**3).mean(), x, t))


@pytest.mark.parametrize("overwrite", [False, True])
def test_double_backward_is_refused(rng, overwrite):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    y = x * 2
    loss = xt.cross_entropy(y, t, overwrite_logits=overwrite)
    (grad,) = torch.autograd.grad(loss, y, create_graph=True)
    assert grad.requires_grad
    close(grad, grad_of(F.cross_entropy, x.detach() * 2, t))
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        (grad**2).sum().backward()
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.autograd.gradgradcheck(lambda x: xt.cross_entropy(x, t), logits(rng, (8, 21), torch.float64))


@pytest.mark.parametrize("overwrite", [False, True])
def test_derivatives_of_the_gradient_by_its_upstream_are_refused(rng, overwrite):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    for factor in (torch.ones((), requires_grad=True), torch.ones(8, requires_grad=True)):
        reduction = "none" if factor.dim() else "mean"
        loss = xt.cross_entropy(x * 1, t, reduction=reduction, overwrite_logits=overwrite)
        (grad,) = torch.autograd.grad((loss * factor).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives are not supported"):
            torch.autograd.grad(grad.sum(), factor, allow_unused=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.autograd.functional.jvp(lambda x: xt.cross_entropy(x * 1, t, overwrite_logits=overwrite), x, x.detach())


OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.3},
    "z-loss": {"z_loss": 0.1},
    "softcap": {"softcap": 2.0, "logit_scale": 0.7},
    "padded": {"classes": 9},
    "denominator": {"denominator": 3.5},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(11,), (4, 11), (2, 11, 3)], ids=str)
def test_gradcheck(rng, name, shape):
    options = {**OPTIONS[name], "class_dim": 0 if len(shape) == 1 else 1}
    x = logits(rng, shape, torch.float64, scale=1.0)
    t = targets(rng, shape[:0] if len(shape) == 1 else (shape[0], *shape[2:]), 9)
    if len(shape) == 1:
        t.fill_(3)
    weights = torch.from_numpy(rng.random(tuple(t.shape)))
    assert torch.autograd.gradcheck(lambda x: xt.cross_entropy(x, t, row_weights=weights, **options), (x,))


def test_without_gradient_nothing_is_kept(rng):
    t = targets(rng, (64,), 999)
    x = logits(rng, (64, 999))
    for loss in (
        xt.cross_entropy(x.detach(), t),
        torch.no_grad()(xt.cross_entropy)(x, t),
        torch.inference_mode()(xt.cross_entropy)(x, t),
    ):
        assert loss.grad_fn is None and not loss.requires_grad
        gc.collect()
    loss = xt.cross_entropy(x, t)
    saved = [s for s in loss.grad_fn.saved_tensors if s is not None]
    assert sum(s.numel() * s.element_size() for s in saved if s.data_ptr() not in (x.data_ptr(), t.data_ptr())) == (
        64 * 8 + 4
    )


def test_loss_that_is_not_used(rng):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    got = xt.cross_entropy(x, t, return_lse=True)
    assert not got.lse.requires_grad
    (x.sum() + 0 * got.lse.sum()).backward()
    assert x.grad.eq(1).all()


def test_threads_share_plans(rng):
    import concurrent.futures

    problems = [(logits(rng, (rows, 50)), targets(rng, (rows,), 50)) for rows in rng.integers(1, 40, 24).tolist()]

    def work(problem):
        x, t = problem
        xt.cross_entropy(x, t, reduction="sum").backward()
        return x.grad

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for (x, t), grad in zip(problems, pool.map(work, problems)):
            close(grad, grad_of(F.cross_entropy, x, t, reduction="sum"))
