# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Problems for the tests of libxent.torch, and comparison with the float64 reference."""

import numpy as np
import pytest
import reference
import torch

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")),
]
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def supported(device, dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is for the CPU")


def logits(rng, shape, dtype=torch.float32, device="cpu", scale=4.0):
    values = torch.from_numpy(rng.standard_normal(shape) * scale)
    return values.to(dtype).to(device).requires_grad_()


def targets(rng, shape, classes, ignored=0.2, device="cpu", dtype=torch.int64):
    values = rng.integers(0, classes, shape)
    values = np.where(rng.random(shape) < ignored, -100, values)
    return torch.from_numpy(np.asarray(values)).to(dtype).to(device)


def to_numpy(tensor):
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def want(x, t, class_dim=-1, **options):
    """The reference's results for tensors; `class_dim` as in cross_entropy, its gradient with the classes last."""
    options = {name: to_numpy(o) if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    options.setdefault("ignore_index", -100)
    return reference.cross_entropy(to_numpy(x.detach().movedim(class_dim, -1)), to_numpy(t), **options)


def assert_loss(got, expected, what="loss"):
    reference.assert_scalar_close(to_numpy(got), expected.loss, expected, what)


def assert_grad(got, expected, class_dim=-1, what="grad"):
    reference.assert_grad_close(to_numpy(got.movedim(class_dim, -1)), expected, what)


def close(got, expected):
    torch.testing.assert_close(got.double(), expected.double(), rtol=2e-5, atol=2e-6)


def grad_of(function, x, t, **options):
    """Gradient of `function(logits, targets)` by PyTorch in float64."""
    double = x.detach().double().requires_grad_()
    return torch.autograd.grad(function(double, t, **options), double)[0]


UPSTREAMS = {
    "vector": lambda u: u,
    "strided": lambda u: torch.stack([u, u * 3], -1)[..., 0],
    "expanded": lambda u: u[:1].expand_as(u),
    "one value": lambda u: u[0, 0].expand_as(u),
    "zero": torch.zeros_like,
    "negative": lambda u: -u.abs(),
    "float64": lambda u: u.double().float(),
}
