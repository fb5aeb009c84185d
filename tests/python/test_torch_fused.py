# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""fused=True of libxent.torch: the gradient that forward makes, and what backward does with it."""

import libxent
import pytest

torch = pytest.importorskip("torch", minversion="2.4")

import libxent.torch as xt  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_cases import (  # noqa: E402
    DEVICES,
    UPSTREAMS,
    assert_grad,
    assert_loss,
    close,
    grad_of,
    logits,
    targets,
    want,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("layout", ["last", "second"])
def test_fused(rng, device, overwrite, reduction, layout):
    """Powers of two as upstream gradients, whose second rounding changes nothing."""
    shape, dim = ((4, 33, 5), 1) if layout == "second" else ((4, 5, 33), -1)
    x, t = logits(rng, shape, torch.bfloat16, device), targets(rng, (4, 5), 30, device=device)
    t[0, 0], t[0, 1] = -100, 31
    mask = torch.from_numpy(rng.random((4, 5)) < 0.8).to(device)
    options = {"mask": mask, "reduction": reduction, "classes": 30, "z_loss": 1e-3}
    for factor in (1.0, -0.25):
        x.grad = None
        y = x * 1
        seen = []
        y.register_hook(seen.append)
        got = xt.cross_entropy(y, t, fused=True, overwrite_logits=overwrite, return_lse=True, **options)
        assert y.equal(x) != overwrite
        upstream = torch.full_like(got.loss, factor)
        got.loss.backward(upstream, retain_graph=True)
        expected = want(x, t, dim, grad_loss=upstream if reduction == "none" else factor, **options)
        assert_loss(got.loss, expected)
        assert_grad(x.grad, expected, dim)
        assert (seen[0].data_ptr() == y.data_ptr()) == overwrite and seen[0].stride() == y.stride()
        with pytest.raises(RuntimeError, match="with fused=True backward runs once"):
            got.loss.backward(upstream)


@pytest.mark.parametrize("device", DEVICES)
def test_fused_scales_in_float32(rng, device):
    x, t = logits(rng, (64, 33), torch.bfloat16, device), targets(rng, (64,), 33, device=device)
    factor = 1 + 2**-9 + 2**-10
    (xt.cross_entropy(x, t, fused=True, reduction="sum") * factor).backward()
    (once,) = torch.autograd.grad(xt.cross_entropy(x, t, reduction="sum"), x)
    assert x.grad.equal((once.float() * factor).bfloat16())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["one", *UPSTREAMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_upstream_of_rows(rng, device, name, dtype):
    """Each row's gradient times its own upstream gradient, rounded once more, to the bit."""
    x, t = logits(rng, (4, 5, 33), dtype, device), targets(rng, (4, 5), 33, device=device)
    t[0, 0] = -100
    (once,) = torch.autograd.grad(xt.cross_entropy(x, t, reduction="none", fused=True).sum(), x)
    drawn = torch.from_numpy(rng.standard_normal((4, 5))).float().to(device)
    upstream = torch.ones_like(drawn) if name == "one" else UPSTREAMS[name](drawn)
    xt.cross_entropy(x, t, reduction="none", fused=True).backward(upstream)
    assert x.grad.equal((once.float() * upstream[..., None]).to(dtype)) and once.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_fused_float16_under_a_loss_scale(rng, device, overwrite, reduction):
    """Most of the gradient is too small for float16 before it is scaled."""
    x, t = logits(rng, (64, 4099), torch.float16, device, scale=1.0), targets(rng, (64,), 4099, device=device)
    scale = 2.0**15 if reduction == "mean" else 2.0**9
    loss = xt.cross_entropy(x * 1, t, reduction=reduction, fused=True, overwrite_logits=overwrite)
    upstream = torch.full_like(loss, scale)
    loss.backward(upstream)
    (unfused,) = torch.autograd.grad(xt.cross_entropy(x, t, reduction=reduction), x, upstream)
    assert x.grad.equal(unfused) and x.grad[t >= 0].ne(0).all()
    assert_grad(x.grad, want(x, t, reduction=reduction, grad_loss=upstream if reduction == "none" else scale))


def test_scale_grad_is_a_change_in_place(rng):
    x, t = logits(rng, (8, 21)).detach(), targets(rng, (8,), 21)
    plan = libxent.Plan(max_rows=8, vocab=21)
    grad = plan.loss_and_grad(x, t).grad
    before = grad._version
    assert plan.scale_grad(grad, t, torch.tensor(0.5)) is grad and grad._version == before + 1


def test_fused_without_leading_dimensions(rng):
    for factor in (1.0, 3.0):
        x, t = logits(rng, (21,)), torch.tensor(3)
        (xt.cross_entropy(x, t, fused=True) * factor).backward()
        (once,) = torch.autograd.grad(xt.cross_entropy(x, t), x)
        assert x.grad.equal(once * factor)


def test_fused_upstream_reaches_ignored_rows_as_nothing(rng):
    for bad in (float("nan"), float("inf")):
        x, t, mask = logits(rng, (4, 9)), torch.tensor([3, -100, 12, 4]), torch.tensor([1, 1, 1, 0])
        xt.cross_entropy(x, t, reduction="none", mask=mask, fused=True).backward(torch.tensor([1.0, bad, bad, bad]))
        assert not x.grad[1:].any() and x.grad[0].any()


def test_fused_logits_changed_between(rng):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    y = x * 1
    square = (y**2).sum()
    loss = xt.cross_entropy(y, t, fused=True, overwrite_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="without create_graph"):
        xt.cross_entropy(x, t, fused=True).backward(create_graph=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_fused_in_a_checkpoint(rng, overwrite):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)

    def region(x, t, loss, **options):
        y = x * 1.5
        cube = (y**3).mean() * 5
        return loss(y, t, **options) + cube

    total = checkpoint(region, x, t, xt.cross_entropy, use_reentrant=False, fused=True, overwrite_logits=overwrite)
    total.backward()
    close(x.grad, grad_of(lambda x, t: region(x, t, F.cross_entropy), x, t))
