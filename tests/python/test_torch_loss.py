# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""libxent.torch.cross_entropy and CrossEntropyLoss: PyTorch's semantics, libxent's options, refusals."""

import itertools

import libxent
import pytest

torch = pytest.importorskip("torch", minversion="2.4")

import libxent.torch as xt  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch_cases import DEVICES, TYPES, assert_grad, assert_loss, logits, supported, targets, want  # noqa: E402

LAYOUTS = {
    "C": ((7,), ()),
    "N C": ((5, 7), (5,)),
    "N C d": ((3, 7, 4), (3, 4)),
    "N C d d": ((2, 7, 3, 4), (2, 3, 4)),
    "empty batch": ((0, 7), (0,)),
    "one class": ((4, 1), (4,)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_as_pytorch(rng, device, layout, reduction):
    """Loss and gradient of torch.nn.functional.cross_entropy in float64 on the CPU, through the same call.

    Its CUDA kernel gives 0, not NaN, where the only row of an input (C) is ignored.
    """
    shape, target_shape = LAYOUTS[layout]
    classes = shape[0] if len(shape) == 1 else shape[1]
    for smoothing, ignored, weighted in itertools.product([0.0, 0.2], [0.0, 0.4], [False, True]):
        if weighted and smoothing:
            continue
        x = logits(rng, shape, torch.float32, device)
        t = targets(rng, target_shape, classes, ignored, device)
        weight = torch.from_numpy(rng.random(classes)).float().to(device) if weighted else None
        got = xt.cross_entropy(x, t, weight, reduction=reduction, label_smoothing=smoothing, empty_mean_is_nan=True)
        double = x.detach().double().cpu().requires_grad_()
        weight = weight.double().cpu() if weighted else None
        expected = F.cross_entropy(double, t.cpu(), weight, reduction=reduction, label_smoothing=smoothing)
        assert got.dtype == torch.float32 and got.shape == expected.shape
        torch.testing.assert_close(got.double().cpu(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)
        upstream = torch.from_numpy(rng.standard_normal(tuple(got.shape)))
        got.backward(upstream.float().to(device))
        if (t != -100).any():
            expected.backward(upstream)
            torch.testing.assert_close(x.grad.double().cpu(), double.grad, rtol=1e-5, atol=1e-6)
        else:
            assert not x.grad.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("class_dim", [-1, 1])
def test_types_against_the_reference(rng, device, dtype, class_dim):
    supported(device, dtype)
    x = logits(rng, (3, 5, 67) if class_dim == -1 else (3, 67, 5), dtype, device)
    t = targets(rng, (3, 5), 67, device=device)
    loss = xt.cross_entropy(x, t, label_smoothing=0.1)
    loss.backward(torch.tensor(-1.75, device=device))
    expected = want(x, t, class_dim, label_smoothing=0.1, grad_loss=-1.75)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and x.grad.dtype == dtype
    assert x.grad.stride() == x.stride()
    assert_loss(loss, expected)
    assert_grad(x.grad, expected, class_dim)


@pytest.mark.parametrize("device", DEVICES)
def test_every_option_together(rng, device):
    x = logits(rng, (4, 6, 90), torch.bfloat16, device)
    t = targets(rng, (4, 6), 80, device=device)
    mask = torch.from_numpy(rng.random((4, 6)) < 0.7).to(device)
    weights = torch.from_numpy(rng.random((4, 6))).float().to(device)
    options = {
        "mask": mask,
        "row_weights": weights,
        "z_loss": 1e-3,
        "softcap": 20.0,
        "logit_scale": 1.25,
        "classes": 80,
        "label_smoothing": 0.1,
        "reduction": "sum",
    }
    for denominator in (None, 13, 6.5, torch.tensor(11, device=device)):
        x.grad = None
        given = {} if denominator is None else {"denominator": denominator}
        got = xt.cross_entropy(
            x,
            t,
            return_lse=True,
            return_entropy=True,
            return_predicted=True,
            return_row_counts=True,
            **options,
            **given,
        )
        expected = want(x, t, **options, **given)
        got.loss.backward()
        assert_loss(got.loss, expected)
        assert_grad(x.grad, expected)
        torch.testing.assert_close(got.lse.cpu().double(), torch.from_numpy(expected.lse), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(got.entropy.cpu().double(), torch.from_numpy(expected.entropy), rtol=9e-6, atol=9e-6)
        assert (got.predicted.cpu().numpy() == expected.predicted).all()
        assert got.row_counts.tolist() == expected.row_counts
        assert got.loss.requires_grad
        assert not any(extra.requires_grad for extra in got[1:])


def test_class_weights_multiply_row_weights(rng):
    x, t = logits(rng, (9, 5)), targets(rng, (9,), 5)
    weight, rows = torch.from_numpy(rng.random(5)).float(), torch.from_numpy(rng.random(9)).float()
    got = xt.cross_entropy(x, t, weight, row_weights=rows)
    picked = weight[t.clamp(0)] * rows * (t >= 0)
    each = F.cross_entropy(x.double(), t, reduction="none")
    torch.testing.assert_close(got.double(), (picked * each).sum() / picked.double().sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3, 255, 2**40, -(2**60), None])
def test_ignore_index(rng, ignore_index):
    x = logits(rng, (12, 5))
    t = targets(rng, (12,), 5, ignored=0)
    if ignore_index is not None:
        t[::3] = ignore_index
    for weight in (None, torch.from_numpy(rng.random(5)).float()):
        got = xt.cross_entropy(x, t, weight, ignore_index=ignore_index)
        expected = F.cross_entropy(x, t, weight, ignore_index=-100 if ignore_index is None else ignore_index)
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def test_an_option_in_a_tensor_that_changes(rng):
    x = logits(rng, (4, 5))
    t = torch.zeros(4, dtype=torch.long)
    for name, before, after in (("ignore_index", 0, 1), ("classes", 5, 4)):
        option = torch.tensor(before)
        first = xt.cross_entropy(x, t, **{name: option})
        option.fill_(after)
        second = xt.cross_entropy(x, t, **{name: option})
        assert first == xt.cross_entropy(x, t, **{name: before})
        assert second == xt.cross_entropy(x, t, **{name: after}) != first
    assert xt.cross_entropy(x, t, softcap=30) == xt.cross_entropy(x, t, softcap=30.0)


def test_all_ignored(rng):
    x, t = logits(rng, (4, 7)), torch.full((4,), -100)
    for nan in (False, True):
        x.grad = None
        loss = xt.cross_entropy(x, t, empty_mean_is_nan=nan)
        assert loss.isnan() if nan else loss == 0
        loss.backward()
        assert not x.grad.any()
    assert xt.cross_entropy(x, t, reduction="sum") == 0


def test_target_out_of_range_is_told(rng):
    x, t = logits(rng, (4, 7)), torch.tensor([1, 7, -1, -100])
    for weight in (None, torch.ones(7)):
        got = xt.cross_entropy(x, t, weight, reduction="none", return_row_counts=True)
        assert got.loss.isnan().tolist() == [False, True, True, False]
        assert got.row_counts.tolist() == [1, 1, 2]


def test_the_meaning_of_a_cube(rng):
    """Where both layouts fit, the second dimension is the classes, as in PyTorch, unless the caller says otherwise."""
    x, t = logits(rng, (4, 6, 6)), targets(rng, (4, 6), 6)
    torch.testing.assert_close(xt.cross_entropy(x, t), F.cross_entropy(x, t), rtol=2e-6, atol=2e-6)
    last = F.cross_entropy(x.movedim(-1, 1), t)
    torch.testing.assert_close(xt.cross_entropy(x, t, class_dim=-1), last, rtol=2e-6, atol=2e-6)
    x, t = logits(rng, (4, 6, 9)), targets(rng, (4, 6), 9)
    assert_loss(xt.cross_entropy(x, t), want(x, t))
    x = logits(rng, (9, 4, 6))
    assert_loss(xt.cross_entropy(x, t, class_dim=0), want(x, t, 0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16, torch.int8])
def test_target_types(rng, dtype):
    x, t = logits(rng, (6, 9)), targets(rng, (6,), 9, ignored=0, dtype=dtype)
    torch.testing.assert_close(xt.cross_entropy(x, t), F.cross_entropy(x, t.long()), rtol=2e-6, atol=2e-6)


def test_inputs_are_left_alone(rng):
    x, t = logits(rng, (6, 9)), targets(rng, (6,), 9)
    before = x.detach().clone(), t.clone(), x._version, t._version
    xt.cross_entropy(x, t).backward()
    assert x.equal(before[0]) and t.equal(before[1]) and (x._version, t._version) == before[2:]


REFUSED = {
    "probabilities": (lambda x, t: xt.cross_entropy(x, x.softmax(-1)), "probabilities"),
    "shape": (lambda x, t: xt.cross_entropy(x, t[:-1]), r"shape \(5,\) does not fit.*\(6,\)"),
    "shape of three dimensions": (lambda x, t: xt.cross_entropy(x[None], t), r"\(1, 9\) or \(1, 6\)"),
    "no dimensions": (lambda x, t: xt.cross_entropy(x.sum(), t), "without dimensions"),
    "bool target": (lambda x, t: xt.cross_entropy(x, t > 0), "torch.bool"),
    "complex logits": (lambda x, t: xt.cross_entropy(x.to(torch.complex64), t), "complex64"),
    "not a tensor": (lambda x, t: xt.cross_entropy(x, [1] * 6), "target.*list"),
    "reduction": (lambda x, t: xt.cross_entropy(x, t, reduction="avg"), "reduction.*'avg'"),
    "smoothing": (lambda x, t: xt.cross_entropy(x, t, label_smoothing=1.5), "1.5"),
    "weight size": (lambda x, t: xt.cross_entropy(x, t, torch.ones(8)), "weight: expected one for each of 9"),
    "weight type": (lambda x, t: xt.cross_entropy(x, t, torch.ones(9).long()), "weight.*int64"),
    "row weights' shape": (lambda x, t: xt.cross_entropy(x, t, row_weights=torch.ones(1)), "row_weights"),
    "row weights' shape beside a weight": (
        lambda x, t: xt.cross_entropy(x, t, torch.ones(9), row_weights=torch.ones(1)),
        r"row_weights: expected shape \(6,\)",
    ),
    "row weights' columns beside a weight": (
        lambda x, t: xt.cross_entropy(
            x[:, None].expand(6, 6, 9), t.expand(6, 6), torch.ones(9), row_weights=torch.ones(6)
        ),
        r"row_weights: expected shape \(6, 6\)",
    ),
    "row weights' type beside a weight": (
        lambda x, t: xt.cross_entropy(x, t, torch.ones(9), row_weights=torch.ones(6).double()),
        "row_weights: expected .*float32",
    ),
    "ignore_index": (lambda x, t: xt.cross_entropy(x, t, ignore_index=[1]), "ignore_index: expected an integer"),
    "classes": (lambda x, t: xt.cross_entropy(x, t, classes=9.0), "classes: expected an integer, got 9.0"),
    "list of reductions": (lambda x, t: xt.cross_entropy(x, t, reduction=["sum"]), r"reduction: .*\['sum'\]"),
    "z_loss": (lambda x, t: xt.cross_entropy(x, t, z_loss=None), "z_loss: expected a number, got None"),
    "smoothing's type": (lambda x, t: xt.cross_entropy(x, t, label_smoothing="0.1"), "label_smoothing: expected a num"),
    "weight with smoothing": (lambda x, t: xt.cross_entropy(x, t, torch.ones(9), label_smoothing=0.1), "label_smooth"),
    "weight's gradient": (
        lambda x, t: xt.cross_entropy(x, t, torch.ones(9, requires_grad=True)),
        "weight: it requires",
    ),
    "row weights' gradient": (
        lambda x, t: xt.cross_entropy(x, t, row_weights=torch.ones(6, requires_grad=True)),
        "row_weights: it requires",
    ),
    "denominator's gradient": (
        lambda x, t: xt.cross_entropy(x, t, denominator=torch.ones((), requires_grad=True)),
        "denominator: it requires",
    ),
    "mask shape": (lambda x, t: xt.cross_entropy(x, t, mask=torch.ones(5)), "mask"),
    "denominator with none": (lambda x, t: xt.cross_entropy(x, t, reduction="none", denominator=3), "denominator"),
    "class_dim": (lambda x, t: xt.cross_entropy(x, t, class_dim=2), "class_dim: 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(rng, name):
    call, message = REFUSED[name]
    x, t = logits(rng, (6, 9)), targets(rng, (6,), 9)
    with pytest.raises(libxent.InvalidArgument, match=message):
        call(x, t)


def test_weights_that_require_a_gradient_are_taken_where_none_is_recorded(rng):
    x, t = logits(rng, (6, 9)), targets(rng, (6,), 9)
    with torch.no_grad():
        loss = xt.cross_entropy(x, t, row_weights=torch.full((6,), 2.0, requires_grad=True), reduction="sum")
    torch.testing.assert_close(loss, 2 * F.cross_entropy(x, t, reduction="sum").detach())


def test_deprecated_arguments(rng):
    x, t = logits(rng, (6, 9)), targets(rng, (6,), 9)
    with pytest.warns(UserWarning, match="deprecated"):
        loss = xt.cross_entropy(x, t, size_average=False)
    assert_loss(loss, want(x, t, reduction="sum"))
    with pytest.warns(UserWarning, match="deprecated"):
        assert xt.CrossEntropyLoss(reduce=False).reduction == "none"


def test_module(rng):
    x, t = logits(rng, (6, 9)), targets(rng, (6,), 9)
    weight = torch.from_numpy(rng.random(9)).float()
    module = xt.CrossEntropyLoss(weight, ignore_index=3, reduction="sum")
    theirs = torch.nn.CrossEntropyLoss(weight, ignore_index=3, reduction="sum")
    t[t == -100] = 3
    torch.testing.assert_close(module(x, t), theirs(x, t), rtol=2e-6, atol=2e-6)
    assert isinstance(module, torch.nn.CrossEntropyLoss)
    assert set(module.state_dict()) == set(theirs.state_dict())
    options = {"z_loss": 1e-2, "softcap": 5.0, "logit_scale": 0.5, "label_smoothing": 0.1}
    mask = torch.from_numpy(rng.random(6) < 0.5)
    module = xt.CrossEntropyLoss(**options, return_lse=True)
    got = module(x, t, mask=mask, denominator=4)
    assert_loss(got.loss, want(x, t, mask=mask, denominator=4, **options))
    assert repr(module) == (
        "CrossEntropyLoss(ignore_index=-100, reduction='mean', label_smoothing=0.1, z_loss=0.01, softcap=5.0, "
        "logit_scale=0.5, return_lse=True)"
    )
    with pytest.raises(TypeError, match="'zloss'"):
        xt.CrossEntropyLoss(zloss=1.0)


def test_libxent_does_not_import_torch():
    import subprocess
    import sys

    code = "import libxent, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
