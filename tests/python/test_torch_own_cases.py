# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch tests of its cross-entropy, of libxent.torch: its module inputs and operator samples where this PyTorch
ships them, and the cases of its suite for class indices."""

import itertools

import libxent
import pytest

torch = pytest.importorskip("torch", minversion="2.4")

import libxent.torch as xt  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch_cases import DEVICES, TYPES, supported  # noqa: E402

BARS = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def compare(ours, theirs, x, t, dtype, seed):
    """Loss, and gradient for a random upstream gradient, against PyTorch's in float64."""
    x = x.detach().requires_grad_()
    double = x.detach().double().requires_grad_()
    got, expected = ours(x, t), theirs(double, t)
    assert got.shape == expected.shape
    loose = BARS[dtype]
    tight = min(loose, 3e-6)
    torch.testing.assert_close(got.double(), expected, rtol=tight, atol=tight, equal_nan=True)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    upstream = upstream.to(x.device)
    got.backward(upstream.to(got.dtype))
    if expected.isnan().any():  # no row counts
        assert not x.grad.any()
        return
    expected.backward(upstream)
    torch.testing.assert_close(x.grad.double(), double.grad, rtol=loose, atol=loose)


def as_double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_module_inputs(rng, device, dtype):
    supported(device, dtype)
    common = pytest.importorskip("torch.testing._internal.common_modules", exc_type=ImportError)
    torch.manual_seed(int(rng.integers(2**31)))
    inputs = common.module_inputs_torch_nn_CrossEntropyLoss(None, device, dtype, False, True)
    run = refused = 0
    for case in inputs:
        options, (x, t) = dict(case.constructor_input.kwargs), case.forward_input.args
        label = case.desc
        if t.is_floating_point() or (options.get("weight") is not None and options.get("label_smoothing")):
            with pytest.raises(libxent.InvalidArgument):
                xt.CrossEntropyLoss(**options)(x, t)
            refused += 1
            continue
        if "weight" in options:  # of both signs: keep the divisor of the mean away from 0, where nothing is determined
            options["weight"] = options["weight"].abs() + 1
        double = {name: as_double(value) for name, value in options.items()}
        ours = xt.CrossEntropyLoss(**options, empty_mean_is_nan=True)
        try:
            compare(ours, torch.nn.CrossEntropyLoss(**double), x, t, dtype, run)
        except AssertionError as error:
            raise AssertionError(label) from error
        run += 1
    assert run >= 60 and refused >= 36, (run, refused)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_operator_samples(rng, device, dtype):
    supported(device, dtype)
    common = pytest.importorskip("torch.testing._internal.common_methods_invocations", exc_type=ImportError)
    torch.manual_seed(int(rng.integers(2**31)))
    run = 0
    for sample in common.sample_inputs_cross_entropy(None, device, dtype, False):
        (t,), options = sample.args, dict(sample.kwargs)
        if t.is_floating_point():
            continue
        if "weight" in options:
            options["weight"] = options["weight"].abs() + 1
        double = {name: as_double(value) for name, value in options.items()}
        compare(
            lambda x, t, o=options: xt.cross_entropy(x, t, **o, empty_mean_is_nan=True),
            lambda x, t, o=double: F.cross_entropy(x, t, **o),
            sample.input,
            t,
            dtype,
            run,
        )
        run += 1
    assert run >= 11


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [False, True])
def test_smoothing_is_a_loss_of_probabilities(device, reduction, ignored, rng):
    """Indices with smoothing are the probabilities that the smoothing makes of them."""
    torch.manual_seed(int(rng.integers(2**31)))
    for (n, c), smoothing in itertools.product([(10, 20), (3, 4)], [0.05, 0.15, 1.0]):
        for tail in ((), (6,), (6, 5)):
            x = torch.rand(n, c, *tail, device=device)
            t = torch.empty(n, *tail, dtype=torch.long, device=device).random_(0, c)
            if ignored:
                t.view(-1)[0] = 2
                x, t = x.clone(), t.clone()
            smooth = F.one_hot(t, c).movedim(-1, 1) * (1 - smoothing) + smoothing / c
            each = -(smooth * x.double().log_softmax(1)).sum(1)
            each = each * (t != 2) if ignored else each
            count = (t != 2).sum() if ignored else t.numel()
            expected = {"none": each, "sum": each.sum(), "mean": each.sum() / count}[reduction]
            options = {"ignore_index": 2 if ignored else -100, "reduction": reduction, "empty_mean_is_nan": True}
            got = xt.cross_entropy(x, t, label_smoothing=smoothing, class_dim=1, **options)
            torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_smoothing_out_of_range():
    x, t = torch.randn(3, 5), torch.tensor([0, 3, 4])
    for smoothing in (-0.2, 1.01, float("nan")):
        with pytest.raises(RuntimeError, match="label_smoothing"):
            xt.cross_entropy(x, t, label_smoothing=smoothing)


@pytest.mark.parametrize("device", DEVICES)
def test_mean_of_many_pixels_is_the_mean_of_the_losses(device):
    torch.manual_seed(0)
    x = torch.randn(32, 2, 192, 192, device=device)
    t = torch.empty(32, 192, 192, dtype=torch.long, device=device).random_(2)
    each = xt.cross_entropy(x, t, reduction="none")
    torch.testing.assert_close(xt.cross_entropy(x, t).double(), each.double().mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty_batches(device, reduction):
    for shape, target_shape in (((0, 3), (0,)), ((0, 3, 5, 7), (0, 5, 7)), ((2, 3, 0, 4), (2, 0, 4))):
        x = torch.randn(shape, device=device, requires_grad=True)
        t = torch.empty(target_shape, dtype=torch.long, device=device)
        got = xt.cross_entropy(x, t, reduction=reduction, empty_mean_is_nan=True)
        torch.testing.assert_close(got, F.cross_entropy(x, t, reduction=reduction), equal_nan=True)
        got.sum().backward()
        assert x.grad.shape == x.shape
    with pytest.raises(RuntimeError):
        xt.cross_entropy(torch.randn(3, 0), torch.tensor([0, 0, 0]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_batch_of_one_and_none(rng, reduction):
    x, t = torch.from_numpy(rng.standard_normal((1, 7))), torch.tensor([3])
    batch = xt.cross_entropy(x, t, reduction=reduction)
    single = xt.cross_entropy(x[0], t[0], reduction=reduction)
    assert single.shape == () and single.equal(batch.reshape(()))


@pytest.mark.parametrize("device", DEVICES)
def test_weight_of_zero_divides_by_what_is_left(device):
    """A class of weight 0 beside one of weight 1: the mean is over the second."""
    x = torch.randn(6, 2, device=device)
    t = torch.tensor([0, 0, 1, 0, 1, 0], device=device)
    weight = torch.tensor([0.0, 1.0], device=device)
    torch.testing.assert_close(xt.cross_entropy(x, t, weight), F.cross_entropy(x, t, weight), rtol=2e-6, atol=2e-6)


def test_shapes_that_do_not_fit():
    x = torch.randn(10, 3)
    for t in (torch.zeros(10, 2, dtype=torch.long), torch.zeros(9, dtype=torch.long), torch.tensor(0)):
        with pytest.raises(ValueError, match="does not fit"):
            xt.cross_entropy(x, t)
    for t in (torch.zeros(1, 5, 6, 5, 5, dtype=torch.long), torch.zeros(1, dtype=torch.long)):
        with pytest.raises(ValueError, match="does not fit"):
            xt.cross_entropy(torch.randn(1, 7, 5, 6), t)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_of_channels_last(device, rng):
    torch.manual_seed(int(rng.integers(2**31)))
    x = torch.randn(2, 5, 6, 7, device=device).to(memory_format=torch.channels_last).requires_grad_()
    t = torch.empty(2, 6, 7, dtype=torch.long, device=device).random_(5)
    packed = x.detach().contiguous().requires_grad_()
    ours, expected = xt.cross_entropy(x, t), F.cross_entropy(packed, t)
    ours.backward()
    expected.backward()
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(x.grad, packed.grad, rtol=1e-5, atol=1e-7)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_more_than_2_to_the_31_logits(reduction):
    size = 70000 * 2**15
    if torch.cuda.mem_get_info()[0] < size * 2 * 3.2:
        pytest.skip("too little memory on this GPU")
    x = torch.randn(70000, 2**15, device="cuda", dtype=torch.float16, requires_grad=True)
    t = torch.randint(2**15, (70000,), device="cuda")
    loss = xt.cross_entropy(x, t, reduction=reduction)
    loss.backward(torch.ones_like(loss))
    for part in (slice(0, 50), slice(-50, None)):
        double = x[part].detach().double().requires_grad_()
        each = F.cross_entropy(double, t[part], reduction="none")
        each.sum().backward()
        scale = 70000 if reduction == "mean" else 1
        torch.testing.assert_close(x.grad[part].double() * scale, double.grad, rtol=2e-3, atol=1e-4 * scale**0.5)
        if reduction == "none":
            torch.testing.assert_close(loss[part].double(), each, rtol=2e-6, atol=2e-6)
