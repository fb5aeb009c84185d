# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The CPU backend at the ends of the types, and in floating-point environments that are not the default."""

import ctypes
import platform
import subprocess
import sys

import libxent
import numpy as np
import pytest
from arrays import dtype as named_dtype

Wide = np.longdouble
wide_only = pytest.mark.skipif(np.finfo(Wide).maxexp < 16384, reason="no type wider than float64")
linux_x86 = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64", reason="constants of the x86-64 C library"
)


def expected(x, target, dtype, *, smoothing=0.0, z_loss=0.0, softcap=0.0, scale=1.0, upstream=1.0):
    """Loss and gradient of one row."""
    x = np.asarray(x, dtype).astype(Wide)
    smoothing, z_loss, softcap, scale, upstream = map(Wide, (smoothing, z_loss, softcap, scale, upstream))
    z, slope = scale * x, np.full(x.shape, scale)
    if softcap:
        q = np.exp(-2 * np.abs(z / softcap))
        z, slope = softcap * np.tanh(z / softcap), scale * 4 * q / (1 + q) ** 2
    u = z - z.max()
    log_sum = np.log(np.exp(u).sum())
    lse = z.max() + log_sum
    loss = (1 - smoothing) * (log_sum - u[target]) + smoothing * (log_sum - u.mean()) + z_loss * lse * lse
    grad = np.exp(u - log_sum) * (1 + 2 * z_loss * lse) - smoothing / x.size
    grad[target] -= 1 - smoothing
    return loss, upstream * grad * slope


def close(got, want, dtype, rel=2e-6):
    with np.errstate(over="ignore", under="ignore"):
        want = want.astype(dtype)  # beyond the type: infinity
    np.testing.assert_allclose(got, want, rtol=rel, atol=0)


CASES = [
    # The gradient's factors pass the type, its value does not, or is 0, or is infinite.
    ("float32", [1e38, 0, -1e38, 3e38], {"z_loss": 1e38}),
    ("float64", [1e308, 0, -1e308], {"z_loss": 1e308}),
    ("float32", [0.0, 1e38, 2.0], {"z_loss": 1e30, "smoothing": 0.5, "upstream": 1e20}),
    ("float32", [10.0, 11.0, 12.0], {"smoothing": 1.0, "scale": 1e30, "upstream": 1e20}),
    ("float32", [1.0, 2.0, -2.0], {"smoothing": 1.0, "softcap": 0.5, "scale": 1e24, "upstream": 1e30}),
    ("float32", [5e-29, 6e-29, -6e-29], {"softcap": 1.0, "scale": 1e29, "upstream": 1e10}),
    ("float64", [5e-290, 6e-290, -6e-290], {"softcap": 1.0, "scale": 1e290, "upstream": 1e20}),
    ("float64", [37.0, 42.0], {"smoothing": 0.2, "z_loss": 1e-20, "scale": 1e210, "upstream": 1e100}),
    # A product of three that passes the type on the way.
    ("float64", [1.0, 2.0, 3.0], {"scale": 1e-300, "upstream": 1e250}),
]


@wide_only
@pytest.mark.parametrize("dtype, x, options", CASES)
def test_gradient_at_the_ends_of_the_type(dtype, x, options):
    c = {"smoothing": 0.0, "z_loss": 0.0, "softcap": 0.0, "scale": 1.0, "upstream": 1.0, **options}
    x = np.array([x], dtype)
    loss, grad = expected(x[0], 0, dtype, **c)
    plan = libxent.Plan(
        max_rows=1,
        vocab=x.shape[1],
        logits_dtype=dtype,
        reduction="sum",
        label_smoothing=c["smoothing"],
        z_loss=c["z_loss"],
        softcap=c["softcap"],
        logit_scale=c["scale"],
    )
    result = plan.loss_and_grad(x, np.array([0]), grad_loss=c["upstream"])
    close(result.loss, loss, dtype)
    close(result.grad[0], grad, dtype)


@wide_only
def test_weights_and_scale_multiply_in_a_wider_type():
    x, weights = np.array([[1.0, 2.0, 3.0]]), np.array([1e-200])
    result = libxent.loss_and_grad(
        x, np.array([0]), row_weights=weights, logit_scale=1e-200, grad_loss=1e250, reduction="sum"
    )
    close(result[1][0], expected(x[0], 0, "float64", scale=1e-200, upstream=1e50)[1], "float64")


@wide_only
def test_blocks_further_apart_than_the_largest_number():
    x = np.full((1, 2048), -0.95e308)
    x[0, 1024:] = 0.95e308
    plan = libxent.Plan(max_rows=1, vocab=2048, logits_dtype="float64", logit_scale=2.3e-308, reduction="sum")
    result = plan.loss_and_grad(x, np.array([0]), lse=True)
    z = Wide(2.3e-308) * x[0].astype(Wide)
    lse = np.log(np.exp(z).sum())
    close(result.lse[0], lse, "float64", rel=1e-13)
    close(result.loss, lse - z[0], "float64", rel=1e-13)
    assert result.grad[0, 0] / 2.3e-308 == pytest.approx(float(np.exp(z[0] - lse) - 1), rel=1e-7)


@wide_only
def test_smoothing_of_logits_below_the_normal_range():
    x = np.full((1, 5000), -1.3e-38, np.float32)
    x[0, 0] = 0
    loss = libxent.cross_entropy(x, np.array([0]), label_smoothing=1.0, logit_scale=1e38)
    close(loss, expected(x[0], 0, "float32", smoothing=1.0, scale=1e38)[0], "float32", rel=1e-6)


@pytest.mark.parametrize(
    "dtype, scale, softcap", [("float32", 1e38, 1e-3), ("float32", 1e-3, 1e37), ("float64", 1e300, 1e-10)]
)
def test_a_softcap_that_the_arithmetic_cannot_apply(dtype, scale, softcap):
    with pytest.raises(libxent.InvalidArgument, match="logit_scale / softcap"):
        libxent.Plan(max_rows=1, vocab=4, logits_dtype=dtype, logit_scale=scale, softcap=softcap)


def test_int32_where_indices_do_not_fit():
    logits = np.broadcast_to(np.float32(0), (1, 2**31 + 1))
    plan = libxent.Plan(max_rows=1, vocab=2**31 + 1, target_dtype="int32", predicted=True)
    with pytest.raises(libxent.InvalidArgument, match="predicted: dtype is int32; this plan takes int64"):
        plan.forward(logits, np.zeros(1, np.int32), predicted=np.zeros(1, np.int32))


class Environment:
    """The floating-point environment of this thread, changed for a while."""

    def __init__(self, change):
        self.libm = ctypes.CDLL("libm.so.6")
        self.saved = ctypes.create_string_buffer(64)
        self.change = change

    def __enter__(self):
        self.libm.fegetenv(self.saved)
        self.change(self.libm)

    def __exit__(self, *_):
        self.libm.fesetenv(self.saved)


def flush_subnormals(libm):
    env = ctypes.create_string_buffer(64)
    libm.fegetenv(env)
    mxcsr = ctypes.c_uint32.from_buffer(env, 28)
    mxcsr.value |= 0x8040  # FTZ and DAZ
    libm.fesetenv(env)


def round_to_zero(libm):
    libm.fesetround(0xC00)


@linux_x86
@pytest.mark.parametrize("change", [flush_subnormals, round_to_zero])
def test_the_callers_arithmetic_changes_no_bits(rng, change):
    logits = rng.standard_normal((512, 257), np.float32)
    targets = rng.integers(0, 257, 512)
    mask = np.full(512, 1e-40, np.float32)  # not 0
    grad_loss = np.array(1e-36, np.float32)

    def run():
        plan = libxent.Plan(max_rows=512, vocab=257, reduction="none", context=libxent.Context(2))
        return plan.loss_and_grad(logits, targets, mask=mask, grad_loss=grad_loss)

    want = run()
    assert np.any((want.grad != 0) & (np.abs(want.grad) < np.finfo(np.float32).tiny))
    with Environment(change):
        got = run()
    assert got.loss.tobytes() == want.loss.tobytes() and got.grad.tobytes() == want.grad.tobytes()


TRAPS = """
import ctypes, libxent, numpy as np
libm = ctypes.CDLL("libm.so.6")
invalid_and_overflow, but_inexact = 0x01 | 0x08, 0x1D
plan = libxent.Plan(max_rows=1, vocab=3)
logits, targets = np.array([[0, -np.inf, 1]], np.float32), np.array([1])
loss, divisor, stats = np.zeros((), np.float32), np.zeros((), np.float32), np.zeros((1, 2), np.float32)
libm.feclearexcept(but_inexact)
libm.feenableexcept(invalid_and_overflow)
plan.forward(logits, targets, loss=loss, divisor=divisor, stats=stats)
raised = libm.fetestexcept(but_inexact)
libm.fedisableexcept(invalid_and_overflow)
assert raised == 0 and loss == np.inf, (raised, loss)
"""


@linux_x86
def test_the_callers_traps_and_flags_are_left_alone():
    # A trap would kill the process.
    done = subprocess.run([sys.executable, "-c", TRAPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("value", [2**24 + 1, 2**53 + 1, 2**60 + 2**36 + 1, -(2**62) - 2**38 - 1, 2**63 - 1])
def test_an_integer_denominator_is_rounded_once(dtype, value):
    x = np.array([[1, 2, 3], [3, 2, 1]], dtype)
    plan = libxent.Plan(max_rows=2, vocab=3, logits_dtype=dtype, reduction="sum")
    saved = plan.forward(x, np.array([0, 1]), denominator=value)
    assert saved.divisor.dtype == dtype and saved.divisor == np.array(value, np.int64).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", [0xFFFFFFFF, 0x7FFFFFFF, 0x7FC00000, 0xFF800001], ids=hex)
def test_nan_of_any_bits_stays_nan(rng, dtype, bits):
    """A NaN in an upstream gradient or in the statistics may not be rounded to a number."""
    nan = np.array(bits, np.uint32).view(np.float32)
    # Columns beside the target's are computed in other ways than its own and its neighbours.
    logits = rng.standard_normal((2, 9000), np.float32).astype(named_dtype(dtype))
    targets = np.array([3, 8999])
    plan = libxent.Plan(max_rows=2, vocab=9000, logits_dtype=dtype, reduction="sum")
    stats = plan.forward(logits, targets).stats
    assert np.isnan(plan.backward(logits, targets, stats, grad_loss=nan).astype(np.float32)).all()
    for column in (0, 1):
        wrong = stats.copy()
        wrong[1, column] = nan
        grad = plan.backward(logits, targets, wrong).astype(np.float32)
        assert np.isnan(grad[1]).all() and np.isfinite(grad[0]).all()
