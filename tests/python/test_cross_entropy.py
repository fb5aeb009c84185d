# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""cross_entropy and loss_and_grad in every array library, against float64, at the bars of the contract."""

import libxent
import numpy as np
import pytest
import reference
from arrays import MAKERS, dtype

OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing-none": {"label_smoothing": 0.3, "reduction": "none"},
    "z-loss": {"z_loss": 1e-4},
    "softcap": {"softcap": 30.0, "reduction": "sum"},
    "scale": {"logit_scale": 0.5},
    "padded": {"classes": 1000},
    "everything": {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 15.0, "logit_scale": 1.5, "reduction": "none"},
}


@pytest.fixture(params=list(MAKERS))
def library(request):
    return MAKERS[request.param]()


def problem(rng, type_name, shape=(3, 5), vocab=1031, scale=4.0):
    logits = (rng.standard_normal((*shape, vocab)) * scale).astype(dtype(type_name))
    targets = rng.integers(0, min(vocab, 1000), shape)
    targets[rng.random(shape) < 0.2] = -100
    targets[0, 0], targets[0, 1] = 1, -100
    return logits, targets


def check(library, logits, targets, options, x=None, t=None, **arrays):
    """One call of loss_and_grad and one of cross_entropy, every output compared."""
    x = library.make(logits) if x is None else x
    t = library.make(targets) if t is None else t
    given = {name: library.make(array) for name, array in arrays.items()}
    want = reference.cross_entropy(logits, targets, ignore_index=-100, **options, **arrays)
    got = libxent.loss_and_grad(
        x, t, return_lse=True, return_entropy=True, return_predicted=True, return_row_counts=True, **options, **given
    )
    given.pop("grad_loss", None)
    assert library.numpy(got.loss).dtype == (np.float64 if logits.dtype == np.float64 else np.float32)
    reference.assert_scalar_close(library.numpy(got.loss), want.loss, want, "loss")
    reference.assert_scalar_close(library.numpy(got.lse), want.lse, want, "lse")
    reference.assert_scalar_close(library.numpy(got.entropy), want.entropy, want, "entropy")
    assert np.array_equal(library.numpy(got.predicted), want.predicted)
    assert library.numpy(got.row_counts).tolist() == want.row_counts
    grad = library.numpy(got.grad)
    assert grad.dtype == logits.dtype
    reference.assert_grad_close(grad, want)
    options = {name: value for name, value in options.items() if name != "grad_loss"}
    loss = libxent.cross_entropy(x, t, **options, **given)
    reference.assert_scalar_close(library.numpy(loss), want.loss, want, "loss of cross_entropy")
    return got


@pytest.mark.parametrize("name", OPTIONS)
def test_options(library, rng, name):
    check(library, *problem(rng, "float32"), OPTIONS[name])


@pytest.mark.parametrize("type_name", ["float32", "float64", "float16", "bfloat16"])
def test_types(library, rng, type_name):
    if type_name not in library.types:
        pytest.skip(f"{library.name} does not take {type_name}")
    check(library, *problem(rng, type_name), {"label_smoothing": 0.1})
    check(library, *problem(rng, type_name, scale=0.01), {"reduction": "sum"})


@pytest.mark.parametrize("vocab", [1, 2, 7, 128, 257, 32768])
def test_vocabularies(library, rng, vocab):
    logits = rng.standard_normal((2, 2, vocab), np.float32)
    check(library, logits, rng.integers(0, vocab, (2, 2)), {})


def test_int32_targets(library, rng):
    logits, targets = problem(rng, "float32")
    check(library, logits, targets.astype(np.int32), {})


@pytest.mark.parametrize("type_name", ["bool", "uint8", "int32", "float32"])
def test_mask(library, rng, type_name):
    logits, targets = problem(rng, "float32")
    mask = (rng.random(targets.shape) < 0.6).astype(type_name)
    mask[0, 0] = 1
    check(library, logits, targets, {"reduction": "none"}, mask=mask)
    check(library, logits, targets, {}, mask=mask)


def test_row_weights(library, rng):
    logits, targets = problem(rng, "float32")
    weights = rng.random(targets.shape, np.float32)
    check(library, logits, targets, {}, row_weights=weights)
    check(library, logits, targets, {"reduction": "none"}, row_weights=weights)


@pytest.mark.parametrize("denominator", [7, 2.5, 0])
def test_denominator_is_a_number(library, rng, denominator):
    check(library, *problem(rng, "float32"), {"denominator": denominator, "reduction": "sum"})


@pytest.mark.parametrize("type_name", ["float32", "int32"])
def test_denominator_is_an_array(library, rng, type_name):
    check(library, *problem(rng, "float32"), {"reduction": "mean"}, denominator=np.array(3, type_name))


def test_grad_loss(library, rng):
    logits, targets = problem(rng, "float32")
    check(library, logits, targets, {"grad_loss": -2.5})
    check(library, logits, targets, {}, grad_loss=np.array(1.75, np.float32))
    upstream = rng.standard_normal(targets.shape).astype(np.float32)
    check(library, logits, targets, {"reduction": "none"}, grad_loss=upstream)


def test_all_ignored(library, rng):
    logits, targets = problem(rng, "float32")
    targets[:] = -100
    for nan in (False, True):
        check(library, logits, targets, {"empty_mean_is_nan": nan})


def test_target_out_of_range(library, rng):
    logits, targets = problem(rng, "float32")
    targets[1, 1], targets[2, 2] = 1031, -7
    got = check(library, logits, targets, {"reduction": "none"})
    assert library.numpy(got.row_counts)[2] == 2


def test_grad_in_float32(library, rng):
    if "bfloat16" not in library.types:
        pytest.skip(f"{library.name} does not take bfloat16")
    logits, targets = problem(rng, "bfloat16")
    want = reference.cross_entropy(logits, targets, ignore_index=-100)
    _, grad = libxent.loss_and_grad(library.make(logits), library.make(targets), grad_dtype="float32")
    grad = library.numpy(grad)
    assert grad.dtype == np.float32
    reference.assert_grad_close(grad, want)


def test_no_ignore_index(library, rng):
    logits = rng.standard_normal((4, 9), np.float32)
    targets = np.array([0, 1, -100, 3])
    loss = libxent.cross_entropy(library.make(logits), library.make(targets), ignore_index=None, reduction="none")
    assert np.isnan(library.numpy(loss)).tolist() == [False, False, True, False]


def test_no_rows(library):
    logits, targets = np.zeros((0, 3, 7), np.float32), np.zeros((0, 3), np.int64)
    loss, grad = libxent.loss_and_grad(library.make(logits), library.make(targets))
    assert library.numpy(loss) == 0 and library.numpy(grad).shape == (0, 3, 7)
    loss = libxent.cross_entropy(library.make(logits), library.make(targets), reduction="none")
    assert library.numpy(loss).shape == (0, 3)


def views(rng, type_name):
    """Name, an array of any layout, always [4, 3, 37] in shape."""
    make = dtype(type_name)
    yield "transposed", rng.standard_normal((3, 4, 37)).astype(make).transpose(1, 0, 2)
    yield "classes first", rng.standard_normal((4, 37, 3)).astype(make).transpose(0, 2, 1)
    yield "sliced", rng.standard_normal((8, 5, 37)).astype(make)[1::2, 1:4]
    yield "row-padded", rng.standard_normal((4, 3, 64)).astype(make)[..., 3:40]
    yield "every second column", rng.standard_normal((4, 3, 74)).astype(make)[..., ::2]
    yield "expanded", np.broadcast_to(rng.standard_normal((1, 3, 37)).astype(make), (4, 3, 37))
    yield "reversed", rng.standard_normal((4, 3, 37)).astype(make)[::-1, :, ::-1]


@pytest.mark.parametrize("type_name", ["float32", "bfloat16"])
def test_views_of_numpy(rng, type_name):
    library = MAKERS["numpy"]()
    targets = rng.integers(0, 37, (3, 4)).T
    for name, logits in views(rng, type_name):
        before = logits.copy()
        got = check(library, logits, targets, {"label_smoothing": 0.1})
        packed = libxent.loss_and_grad(np.ascontiguousarray(logits), np.ascontiguousarray(targets), label_smoothing=0.1)
        assert np.array_equal(got.grad.view(np.uint8), packed[1].view(np.uint8)), name
        assert np.array_equal(logits.view(f"u{logits.itemsize}"), before.view(f"u{before.itemsize}")), name


@pytest.mark.parametrize("device", ["torch-cpu", "torch-cuda"])
def test_views_of_torch(rng, device):
    library = MAKERS[device]()
    torch = library.torch
    base = torch.randn(3, 74, 8, device=library.device)
    targets = torch.randint(0, 37, (8, 3), device=library.device)
    for x, t in (
        (base.permute(2, 0, 1)[..., ::2], targets),
        (base[:, :37].transpose(1, 2), targets.T),
        (base[1:2, 5:42].transpose(1, 2).expand(3, 8, 37), targets.T),
    ):
        got = libxent.loss_and_grad(x, t)
        packed = libxent.loss_and_grad(x.contiguous(), t.contiguous())
        assert torch.equal(got[0], packed[0]) and torch.equal(got[1], packed[1])
        logits = library.numpy(x)
        check(library, logits, library.numpy(t), {}, x=x, t=t)


def test_no_copy_of_the_logits(library, rng):
    """The gradient lands in the caller's own memory, through whatever view was given."""
    if not library.mutable:
        pytest.skip(f"{library.name} arrays cannot be written to")
    logits, targets = problem(rng, "float32")
    base = library.make(np.concatenate([logits, logits], axis=-1))
    view = base[..., 1031:]
    want = reference.cross_entropy(logits, targets, ignore_index=-100)
    _, grad = libxent.loss_and_grad(view, library.make(targets), overwrite_logits=True)
    assert grad is view
    after = library.numpy(base)
    reference.assert_grad_close(np.ascontiguousarray(after[..., 1031:]), want)
    assert np.array_equal(after[..., :1031], logits)


def test_inputs_are_not_written(library, rng):
    logits, targets = problem(rng, "float32")
    x, t = library.make(logits.copy()), library.make(targets.copy())
    libxent.loss_and_grad(x, t, label_smoothing=0.1)
    libxent.cross_entropy(x, t)
    assert np.array_equal(library.numpy(x), logits) and np.array_equal(library.numpy(t), targets)


def test_results_repeat_to_the_bit(library, rng):
    logits, targets = problem(rng, "float32")
    x, t = library.make(logits), library.make(targets)
    first = libxent.loss_and_grad(x, t)
    again = libxent.loss_and_grad(x, t)
    assert library.numpy(first[0]) == library.numpy(again[0])
    assert np.array_equal(library.numpy(first[1]), library.numpy(again[1]))


def test_against_torch(rng):
    """The defaults are those of torch.nn.functional.cross_entropy."""
    torch = pytest.importorskip("torch")
    x = torch.randn(40, 301, dtype=torch.float64, requires_grad=True)
    t = torch.randint(0, 301, (40,))
    t[::7] = -100
    for options in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": int(t[1])}):
        want = torch.nn.functional.cross_entropy(x, t.clone(), **options) if "ignore_index" not in options else None
        if want is None:
            y = t.clone()
            y[::7] = 5
            want, t_used = torch.nn.functional.cross_entropy(x, y, **options), y
        else:
            t_used = t
        (want_grad,) = torch.autograd.grad(want, x)
        loss, grad = libxent.loss_and_grad(x, t_used, **options)
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-14)


def test_gradient_is_never_dropped_silently(rng):
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 9, requires_grad=True)
    t = torch.tensor([1, 2, 3, 4])
    with pytest.raises(libxent.InvalidArgument, match="logits: the tensor requires a gradient"):
        libxent.cross_entropy(x, t)
    with pytest.raises(libxent.InvalidArgument, match="row_weights: the tensor requires a gradient"):
        libxent.cross_entropy(x.detach(), t, row_weights=torch.ones(4, requires_grad=True))
    with torch.no_grad():
        plain = libxent.cross_entropy(x, t)
    loss, grad = libxent.loss_and_grad(x, t)
    assert loss == plain == libxent.cross_entropy(x.detach(), t)
    x.backward(grad)
    want = torch.randn(0)
    y = x.detach().clone().requires_grad_()
    torch.nn.functional.cross_entropy(y, t).backward()
    want = y.grad
    torch.testing.assert_close(x.grad, want, rtol=1e-5, atol=1e-7)


def test_overwriting_is_seen_by_autograd(rng):
    torch = pytest.importorskip("torch")
    weight = torch.randn(5, 9, requires_grad=True)
    x = torch.randn(4, 5) @ weight
    square = x.square().sum()  # saves x
    libxent.loss_and_grad(x, torch.tensor([1, 2, 3, 4]), overwrite_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_current_stream_of_torch():
    """Work enqueued on a side stream runs after what precedes it there, without any synchronisation."""
    library = MAKERS["torch-cuda"]()
    torch = library.torch
    t = torch.randint(0, 50257, (512,), device="cuda")
    plain = torch.randn(512, 50257, device="cuda")
    want = libxent.cross_entropy(plain * 64, t).item()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x = plain.clone()
        for _ in range(6):
            x.mul_(2)
        loss = libxent.cross_entropy(x, t)
    side.synchronize()
    assert loss.item() == want


def test_other_librarys_targets_on_the_cpu(rng):
    torch = pytest.importorskip("torch")
    logits = rng.standard_normal((6, 11), np.float32)
    targets = rng.integers(0, 11, 6)
    want = libxent.cross_entropy(logits, targets)
    assert libxent.cross_entropy(logits, torch.from_numpy(targets)) == want
    got = libxent.cross_entropy(torch.from_numpy(logits), targets)
    assert isinstance(got, torch.Tensor) and got.item() == want
