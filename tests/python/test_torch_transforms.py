# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""libxent.torch where PyTorch looks on: dispatch modes, function transforms, batches of upstream gradients."""

import functools

import libxent
import pytest

torch = pytest.importorskip("torch", minversion="2.4")

import libxent.torch as xt  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.utils import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_cases import assert_grad, assert_loss, close, grad_of, logits, targets, want  # noqa: E402

HANDLED = [{}, {"overwrite_logits": True}, {"fused": True}, {"fused": True, "overwrite_logits": True}]


@pytest.mark.parametrize("options", HANDLED, ids=str)
def test_under_a_dispatch_mode(rng, options):
    x, t, w = logits(rng, (8, 21)), targets(rng, (8,), 21), logits(rng, (21, 21), scale=0.1)
    with FlopCounterMode(display=False) as mode:
        xt.cross_entropy(x @ w, t, **options).backward()
    assert mode.get_total_flops() == 3 * 2 * 8 * 21 * 21
    close(x.grad, grad_of(lambda x, t: F.cross_entropy(x @ w.double(), t), x, t))


@pytest.mark.skipif(not hasattr(checkpoint, "create_selective_checkpoint_contexts"), reason="PyTorch before 2.5")
@pytest.mark.parametrize("options", HANDLED, ids=str)
def test_in_a_selective_checkpoint(rng, options):
    x, t, w = logits(rng, (8, 21)), targets(rng, (8,), 21), logits(rng, (21, 21), scale=0.1)

    def region(x):
        y = x @ w
        return xt.cross_entropy(y, t, **options) + (y**2).mean()

    saved = functools.partial(checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    checkpoint.checkpoint(region, x, use_reentrant=False, context_fn=saved).backward()

    def plain(x, t):
        y = x @ w.double()
        return F.cross_entropy(y, t) + (y**2).mean()

    close(x.grad, grad_of(plain, x, t))


@pytest.mark.parametrize("options", HANDLED, ids=str)
def test_vmap(rng, options):
    x, t = logits(rng, (3, 8, 21)), targets(rng, (3, 8), 21)
    losses = torch.vmap(functools.partial(xt.cross_entropy, **options))(x * 1, t)
    losses.backward(torch.tensor([1.0, -2.0, 3.0]))
    expected = torch.vmap(F.cross_entropy)(x.detach(), t)
    close(losses, expected)
    close(x.grad, grad_of(lambda x, t: torch.vmap(F.cross_entropy)(x, t) @ torch.tensor([1.0, -2, 3]).double(), x, t))
    # One of them the same for all slices.
    close(torch.vmap(lambda t: xt.cross_entropy(x[0], t))(t), torch.vmap(lambda t: F.cross_entropy(x[0], t))(t))
    close(torch.vmap(lambda x: xt.cross_entropy(x, t[0]))(x), torch.vmap(lambda x: F.cross_entropy(x, t[0]))(x))


@pytest.mark.parametrize("overwrite", [False, True])
def test_batched_upstream_gradients(rng, overwrite):
    x, t = logits(rng, (4, 21)), targets(rng, (4,), 21)
    upstreams = torch.from_numpy(rng.standard_normal((3, 4))).float()

    def batched(function, x, vmap, **options):
        losses = function(x * 1, t, reduction="none", **options)
        if vmap:
            return torch.vmap(lambda u: torch.autograd.grad(losses, x, u, retain_graph=True)[0])(upstreams)
        return torch.autograd.grad(losses, x, upstreams, is_grads_batched=True)[0]

    for vmap in (False, True):
        close(batched(xt.cross_entropy, x, vmap, overwrite_logits=overwrite), batched(F.cross_entropy, x, vmap))
    jacobian = torch.autograd.functional.jacobian
    got = jacobian(lambda x: xt.cross_entropy(x * 1, t, overwrite_logits=overwrite), x, vectorize=True)
    close(got, jacobian(lambda x: F.cross_entropy(x, t), x))
    with pytest.raises(RuntimeError, match="fused=True backward runs once, and not for a batch"):
        batched(xt.cross_entropy, x, False, fused=True)


def test_functionalize(rng):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    for options in HANDLED:
        x.grad = None
        loss = torch.func.functionalize(lambda x, o=options: xt.cross_entropy(x * 1, t, **o))(x)
        loss.backward()
        assert_loss(loss, want(x, t))
        assert_grad(x.grad, want(x, t))


def test_logits_that_are_zeros_without_memory():
    t = torch.tensor([3, 1])
    close(xt.cross_entropy(torch._efficientzerotensor((2, 21)), t), torch.tensor(21.0).log())


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad,
        torch.func.jacrev,
        torch.func.jacfwd,
        torch.func.hessian,
        lambda f: lambda x: torch.func.vjp(f, x),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
        lambda f: torch.vmap(torch.func.grad(f)),
    ],
    ids=["grad", "jacrev", "jacfwd", "hessian", "vjp", "jvp", "vmap of grad"],
)
def test_function_transforms_are_refused(rng, transform):
    x, t = logits(rng, (8, 21)).detach(), targets(rng, (8,), 21)
    for options in HANDLED:
        with pytest.raises(libxent.InvalidArgument, match=r"torch\.cross_entropy: torch\.func\.grad, vjp, jvp"):
            transform(lambda x, o=options: xt.cross_entropy(x, t if x.dim() == 2 else t[0], **o))(x)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("transform", ["grad", "jvp", "jacfwd", "vmap of grad"])
def test_function_transforms_in_a_graph_are_refused(rng, transform, backend):
    x, t = logits(rng, (8, 21)).detach(), targets(rng, (8,), 21, ignored=0.0)
    torch._dynamo.reset()

    def call(x):
        if transform == "jvp":
            return torch.func.jvp(lambda x: xt.cross_entropy(x, t), (x,), (x,))[1]
        if transform == "vmap of grad":
            return torch.vmap(torch.func.grad(lambda x: xt.cross_entropy(x, t[0])))(x)
        return getattr(torch.func, transform)(lambda x: xt.cross_entropy(x, t))(x)

    with pytest.raises(libxent.InvalidArgument, match=r"torch\.func\.grad, vjp, jvp"):
        torch.compile(call, backend=backend)(x)
    compiled = torch.compile(lambda x: torch.vmap(lambda x: xt.cross_entropy(x, t[0]))(x), backend=backend)
    close(compiled(x), torch.vmap(lambda x: F.cross_entropy(x, t[0]))(x))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_are_refused(rng):
    rows = [logits(rng, (2, 21)).detach(), logits(rng, (3, 21)).detach()]
    t = targets(rng, (5,), 21)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(rows, layout=layout)
        with pytest.raises(libxent.InvalidArgument, match="input: nested tensors are not supported"):
            xt.cross_entropy(nested, t)


@pytest.mark.parametrize("records", [True, False])
def test_forward_mode_is_refused(rng, records):
    x, t, ones = logits(rng, (8, 21)).detach(), targets(rng, (8,), 21), torch.ones(8)
    refused = pytest.raises(libxent.InvalidArgument, match="forward-mode AD")
    torch._dynamo.reset()
    compiled = torch.compile(xt.cross_entropy, backend="aot_eager")
    compiled(x, t)
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(records):
        make_dual = torch.autograd.forward_ad.make_dual
        dual = make_dual(x, torch.ones_like(x))
        for options in HANDLED:
            with refused:
                xt.cross_entropy(dual, t, **options)
            with refused, FlopCounterMode(display=False):
                xt.cross_entropy(dual, t, **options)
        if records:  # without, some compilers drop the tangent before the operator sees it
            with pytest.raises((libxent.InvalidArgument, NotImplementedError), match="forward"):
                compiled(dual, t)
        for factors in (
            {"weight": make_dual(torch.ones(21), torch.ones(21))},
            {"row_weights": make_dual(ones, ones)},
            {"denominator": make_dual(ones[0], ones[0])},
        ):
            with refused:
                xt.cross_entropy(x, t, **factors)
        close(xt.cross_entropy(x, t), F.cross_entropy(x, t))  # without a tangent


def test_lazily_negated_logits(rng):
    x, t = logits(rng, (8, 21)), targets(rng, (8,), 21)
    for options in HANDLED:
        x.grad = None
        y = torch._neg_view(-x)
        assert y.is_neg()
        loss = xt.cross_entropy(y, t, **options)
        loss.backward()
        close(loss, F.cross_entropy(x.detach(), t))
        close(x.grad, grad_of(F.cross_entropy, x, t))
