# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The operators of libxent.torch: torch.library's own checks, torch.compile in one graph, torch.export."""

import libxent
import numpy as np
import pytest

torch = pytest.importorskip("torch", minversion="2.4")

import libxent.torch as xt  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from libxent.torch._autograd import TELLS_OF_HOOKS  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch_cases import DEVICES, TYPES, assert_grad, assert_loss, logits, supported, targets, want  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


SPEC = (-100, "mean", 0.1, 1e-3, 20.0, 0.5, 30, False, False)
NONE = (-100, "none", 0.0, 0.0, 0.0, 1.0, None, False, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_opcheck(rng, device, dtype):
    supported(device, dtype)
    x, t = logits(rng, (6, 33), dtype, device), targets(rng, (6,), 30, device=device)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.from_numpy(rng.random(6)).to(acc).to(device)
    mask, denominator = weights > 0.3, torch.tensor(5.0, device=device)
    forward, backward = torch.ops.libxent.cross_entropy, torch.ops.libxent.cross_entropy_backward
    over = torch.ops.libxent.cross_entropy_backward_over
    for arguments in (
        (x, t, None, None, None, *SPEC, False, False, False, False),
        (x, t, mask, weights, denominator, *SPEC, True, True, True, True),
        (x, t, None, weights, None, *NONE, True, False, True, False),
        (x.detach(), t.int(), mask, None, None, *NONE, False, True, False, True),
    ):
        torch.library.opcheck(forward, arguments)
        loss, stats, divisor, *_ = forward(*arguments)
        upstream = torch.ones_like(loss).detach()
        tensors = (upstream, arguments[0].detach(), *arguments[1:4], stats.detach(), divisor.detach())
        torch.library.opcheck(backward, (*tensors, *arguments[5:14]))
        torch.library.opcheck(over, (*tensors, *arguments[5:13], True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("class_dim", [-1, 1])
def test_full_graph(rng, device, backend, class_dim):
    x = logits(rng, (3, 5, 67) if class_dim == -1 else (3, 67, 5), torch.bfloat16, device)
    t = targets(rng, (3, 5), 67, device=device)
    weights = torch.from_numpy(rng.random((3, 5))).float().to(device)

    def step(x, t, weights):
        got = xt.cross_entropy(
            x, t, row_weights=weights, label_smoothing=0.1, denominator=7, return_lse=True, return_predicted=True
        )
        return got.loss * -1.5, got.lse, got.predicted

    loss, lse, predicted = torch.compile(step, fullgraph=True, backend=backend)(x, t, weights)
    assert loss.requires_grad and not lse.requires_grad
    loss.backward()
    expected = want(x, t, class_dim, row_weights=weights, label_smoothing=0.1, denominator=7, grad_loss=-1.5)
    assert_loss(loss / -1.5, expected)
    assert_grad(x.grad, expected, class_dim)
    torch.testing.assert_close(lse.cpu().double(), torch.from_numpy(expected.lse), rtol=2e-6, atol=2e-6)
    assert (predicted.cpu().numpy() == expected.predicted).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_around_it(rng, device):
    """The compiler lays the logits out and frees them as it likes."""
    torch.manual_seed(int(rng.integers(2**31)))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 101)).to(device)
    module = xt.CrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3)
    x, t = torch.randn(24, 16, device=device), targets(rng, (24,), 101, device=device)

    def step(x, t):
        return module(model(x).transpose(0, 1).contiguous().transpose(0, 1), t)

    step(x, t).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(step, fullgraph=True)(x, t).backward()
    for p, grad in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dynamic", [True, None])
def test_rows_do_not_recompile(rng, reduction, dynamic):
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(
        lambda x, t: xt.cross_entropy(x, t, reduction=reduction), fullgraph=True, dynamic=dynamic, backend=counter
    )
    compiled = []
    for rows in (5, 17, 64, 100, 3):
        x, t = logits(rng, (2, rows, 33)), targets(rng, (2, rows), 33)
        loss = step(x, t)
        loss.sum().backward()
        expected = want(x, t, reduction=reduction)
        assert_loss(loss, expected)
        assert_grad(x.grad, expected)
        compiled.append(counter.frame_count)
    # Without `dynamic`, the second size is what makes the shape dynamic.
    first = 0 if dynamic else 1
    assert compiled[first:] == [compiled[first]] * len(compiled[first:])


@pytest.mark.parametrize("denominator", [7, 2.5, np.float32(2.5), np.int64(7), torch.tensor(3)], ids=repr)
def test_denominators_compile(rng, denominator):
    x, t = logits(rng, (6, 33)), targets(rng, (6,), 33)
    step = torch.compile(lambda x, t: xt.cross_entropy(x, t, denominator=denominator), backend="aot_eager")
    assert_loss(step(x, t), want(x, t, denominator=denominator))
    sized = torch.compile(lambda x, t: xt.cross_entropy(x, t, denominator=x.shape[0]), fullgraph=True, dynamic=True)
    assert_loss(sized(x, t), want(x, t, denominator=6))


def test_class_weights_compile(rng):
    x, t, weight = logits(rng, (9, 5)), targets(rng, (9,), 5), torch.from_numpy(rng.random(5)).float()
    step = torch.compile(xt.cross_entropy, fullgraph=True, backend="aot_eager")
    expected = F.cross_entropy(x.double(), t, weight.double())
    torch.testing.assert_close(step(x, t, weight).double(), expected, rtol=2e-6, atol=2e-6)


needs_tells = pytest.mark.skipif(not TELLS_OF_HOOKS, reason="this PyTorch does not tell of hooks on saved tensors")


@needs_tells
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_overwrite(rng, device, backend):
    """Over logits made inside and outside of the graph, also where others need their values in backward."""
    w, h = torch.randn(16, 33, device=device), torch.randn(24, 16, device=device)
    t = targets(rng, (24,), 33, device=device)

    def inside(w, loss, **options):
        return loss((h @ w).clamp(-9, 9), t, **options)

    def needed_before(w, loss, **options):
        y = h @ w
        return loss(y, t, label_smoothing=0.1, **options) + (y**2).mean()

    def outside(w, loss, **options):
        return loss(w[:16], t[:16] % 16, **options)

    for function in (inside, outside, needed_before):
        double = w.double().requires_grad_()
        h, kept = h.double(), h
        expected = function(double, F.cross_entropy)
        (grad,) = torch.autograd.grad(expected, double)
        h = kept
        leaf = (w * 1).requires_grad_()
        compiled = torch.compile(
            lambda w, f=function: f(w, xt.cross_entropy, overwrite_logits=True), fullgraph=True, backend=backend
        )
        try:
            loss = compiled(leaf)
        except Exception as error:  # the trace sees that the values are needed
            assert function is needed_before and "modified by an inplace operation" in str(error), error
            continue
        loss.backward()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(leaf.grad.double(), grad, rtol=1e-4, atol=1e-5)


@needs_tells
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_overwrite_of_the_graph_s_input(rng, backend):
    x, t = logits(rng, (6, 33)), targets(rng, (6,), 33)
    expected = want(x, t)
    step = torch.compile(lambda y: xt.cross_entropy(y, t, overwrite_logits=True), fullgraph=True, backend=backend)
    y = x * 1
    square = (y**2).sum()
    loss = step(y)
    loss.backward(retain_graph=True)
    assert_grad(x.grad, expected)
    assert_grad(y, expected)  # nothing was copied
    for again in (loss, square):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            again.backward()
    with torch.no_grad():
        assert_loss(step(x), expected)


@needs_tells
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_overwrite_of_logits_that_the_graph_returns(rng, backend):
    w, t = logits(rng, (6, 33)), targets(rng, (6,), 33)
    expected = want(w * 2, t)

    def step(w, wrap):
        y = w * 2
        return xt.cross_entropy(y, t, overwrite_logits=True), wrap(y)

    for wrap in (lambda y: y, lambda y: y[1:], lambda y: y.detach()):
        torch._dynamo.reset()
        w.grad = None
        loss, y = torch.compile(step, fullgraph=True, backend=backend)(w, wrap)
        loss.backward()
        assert_loss(loss, expected)
        assert_grad(w.grad / 2, expected)
        assert y.equal(wrap(w * 2))  # the caller may look at them at any time
    # Given and returned: the memory is the caller's, and he asked for it.
    x = w.detach() * 2
    x.requires_grad_()
    given = x * 1
    loss, y = torch.compile(
        lambda y: (xt.cross_entropy(y, t, overwrite_logits=True), y), fullgraph=True, backend=backend
    )(given)
    loss.backward()
    assert_grad(x.grad, expected)
    assert_grad(given, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_overwrite_of_logits_that_share_memory_is_refused(rng, dynamic):
    x, t = logits(rng, (38,)), targets(rng, (6,), 33)
    for share in (lambda x: x[:33].expand(6, 33), lambda x: x.unfold(0, 33, 1)):
        step = torch.compile(
            lambda x, f=share: xt.cross_entropy(f(x), t, overwrite_logits=True), dynamic=dynamic, backend="aot_eager"
        )
        with pytest.raises(libxent.InvalidArgument, match=r"overwrite_logits: .* may share memory"):
            step(x)


@needs_tells
@pytest.mark.parametrize("columns", [33, 20])
def test_overwrite_of_a_leaf(rng, columns):
    """PyTorch before 2.12 cannot trace a backward that writes to it: it then keeps its values."""
    x, t = logits(rng, (6, 33)), targets(rng, (6,), 20)
    before, expected = x.detach().clone(), want(x[:, :columns], t)
    step = torch.compile(lambda x: xt.cross_entropy(x[:, :columns], t, overwrite_logits=True), backend="aot_eager")
    step(x).backward()
    assert_grad(x.grad[:, :columns], expected)
    if torch.__version__ < torch.torch_version.TorchVersion("2.12"):
        assert x.equal(before)
    else:
        assert_grad(x[:, :columns], expected)


@pytest.mark.skipif(TELLS_OF_HOOKS, reason="this PyTorch tells of hooks on saved tensors")
def test_overwrite_is_refused_by_older_releases(rng):
    x, t = logits(rng, (6, 33)), targets(rng, (6,), 33)
    step = torch.compile(lambda x, t: xt.cross_entropy(x * 1, t, overwrite_logits=True), backend="aot_eager")
    with pytest.raises(libxent.InvalidArgument, match="newer PyTorch"):
        step(x, t)


@needs_tells
def test_overwrite_under_hooks_around_the_graph_is_refused(rng):
    x, t = logits(rng, (6, 33)), targets(rng, (6,), 33)
    step = torch.compile(lambda y: xt.cross_entropy(y, t, overwrite_logits=True), backend="aot_eager")
    step(x * 1).backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        y = x * 1
        with pytest.raises(Exception, match="hooks on saved tensors"):
            step(y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_dim": 7}, "class_dim: 7 is not a dimension"),
        ({"label_smoothing": 3.0}, "label_smoothing: is 3"),
        ({"process_group": 3}, "process_group: not supported"),
    ],
)
def test_refusals(rng, options, message):
    x, t = logits(rng, (6, 33)), targets(rng, (6,), 33)
    step = torch.compile(lambda x, t: xt.cross_entropy(x * 1, t, **options), backend="aot_eager")
    for _ in range(2):
        with pytest.raises(libxent.InvalidArgument, match=message):
            step(x, t)


def test_fused_is_refused(rng):
    x, t = logits(rng, (6, 33)), targets(rng, (6,), 33)
    step = torch.compile(lambda x, t: xt.cross_entropy(x * 1, t, fused=True), backend="aot_eager")
    with pytest.raises(libxent.InvalidArgument, match="fused"):
        step(x, t)
    with torch.no_grad():
        assert_loss(step(x, t), want(x, t))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("options", [{}, {"overwrite_logits": True}, {"fused": True}], ids=str)
def test_jit_trace(rng, options):
    x, t = logits(rng, (6, 33)), targets(rng, (6,), 33)
    traced = torch.jit.trace(
        lambda x, t: xt.cross_entropy(x * 1, t, label_smoothing=0.1, **options), (x, t), check_trace=False
    )
    x, t = logits(rng, (6, 33)), targets(rng, (6,), 33)
    loss, expected = traced(x, t), want(x, t, label_smoothing=0.1)
    loss.backward()
    assert_loss(loss, expected)
    assert_grad(x.grad, expected)


def test_double_backward_of_the_operator_is_refused(rng):
    x, t = logits(rng, (6, 33)), targets(rng, (6,), 33)
    loss = torch.ops.libxent.cross_entropy(x, t, None, None, None, *SPEC, False, False, False, False)[0]
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    assert_grad(grad, want(x, t, label_smoothing=0.1, z_loss=1e-3, softcap=20.0, logit_scale=0.5, classes=30))
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        grad.sum().backward()


def test_shapes_without_memory(rng):
    x, t = torch.empty(4, 5, 33, device="meta", requires_grad=True), torch.empty(4, 5, device="meta", dtype=torch.int64)
    got = xt.cross_entropy(x, t, reduction="none", return_entropy=True, return_row_counts=True)
    assert got.loss.shape == got.entropy.shape == (4, 5) and got.row_counts.shape == (3,)
    got.loss.sum().backward()
    assert x.grad.shape == x.shape
    with torch._subclasses.FakeTensorMode():
        loss = xt.cross_entropy(torch.empty(4, 33, requires_grad=True), torch.empty(4, dtype=torch.int64))
        assert loss.shape == () and loss.dtype == torch.float32


def test_export(rng):
    class Model(torch.nn.Module):
        def forward(self, x, t):
            return xt.cross_entropy(x * 2, t, label_smoothing=0.1)

    x, t = logits(rng, (6, 33)).detach(), targets(rng, (6,), 33)
    rows = torch.export.Dim("rows", min=2, max=1000)
    program = torch.export.export(Model(), (x, t), dynamic_shapes=({0: rows}, {0: rows}))
    x, t = logits(rng, (50, 33)).detach(), targets(rng, (50,), 33)
    assert_loss(program.module()(x, t), want(x * 2, t, label_smoothing=0.1))
