# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Softmax cross-entropy in float64 (extended precision for float64 logits), and how far a result may be from it."""

import types

import numpy as np


def decode(array):
    """Exact values of any floating type, with room to spare: extended precision for float64, else float64."""
    return array.astype(np.longdouble if array.dtype == np.float64 else np.float64)


def cross_entropy(
    logits,
    targets,
    *,
    ignore_index=None,
    reduction="mean",
    label_smoothing=0.0,
    mask=None,
    row_weights=None,
    denominator=None,
    z_loss=0.0,
    softcap=0.0,
    logit_scale=1.0,
    classes=None,
    empty_mean_is_nan=False,
    grad_loss=1.0,
):
    stored = logits.dtype
    shape, vocab = logits.shape[:-1], logits.shape[-1]
    classes = classes or vocab
    x = decode(logits).reshape(-1, vocab)[:, :classes]
    work = x.dtype.type
    t = targets.reshape(-1).astype(np.int64)
    rows = len(t)
    ignored = np.zeros(rows, bool)
    if ignore_index is not None:
        ignored |= t == ignore_index
    if mask is not None:
        ignored |= np.asarray(mask).reshape(-1) == 0
    outside = ~ignored & ((t < 0) | (t >= classes))
    weight = np.ones(rows, work) if row_weights is None else row_weights.reshape(-1).astype(work)
    x = np.where(ignored[:, None], 0, x)
    safe = np.where(ignored | outside, 0, t)
    at = np.arange(rows)

    z = x * work(logit_scale)
    slope = np.full_like(z, logit_scale)
    if softcap:
        ratio = z / work(softcap)
        z = work(softcap) * np.tanh(ratio)
        q = np.exp(-2 * np.abs(ratio))
        slope = work(logit_scale) * 4 * q / (1 + q) ** 2
    m = z.max(axis=1, keepdims=True)
    shifted = z - m
    e = np.exp(shifted)
    d = e.sum(axis=1, keepdims=True)
    log_d = np.log(d)
    lse = (m + log_d)[:, 0]
    p = e / d
    s, k = work(label_smoothing), work(1) / work(classes)
    nll = log_d[:, 0] - shifted[at, safe]
    loss = (1 - s) * nll + s * (log_d[:, 0] - k * shifted.sum(axis=1)) + work(z_loss) * lse**2
    loss = np.where(outside, np.nan, weight * loss)
    loss = np.where(ignored, 0, loss)

    divisor = None
    if denominator is not None:
        divisor = work(denominator)
    elif reduction == "mean":
        divisor = weight[~ignored].sum()
    if reduction == "none":
        total, factor = loss.reshape(shape), work(1)
    else:
        total, factor = loss.sum(), work(1)
        if divisor is not None:
            factor = work(0) if divisor == 0 else 1 / divisor
            total = work(0) if divisor == 0 else total / divisor
            if divisor == 0 and denominator is None and empty_mean_is_nan and ignored.all():
                total = work(np.nan)

    g = np.broadcast_to(np.asarray(grad_loss, work), shape if reduction == "none" else ()).reshape(-1)
    scale = np.where(ignored | outside, 0, (g * factor) * np.where(ignored, 0, weight))[:, None] * slope
    one_hot = np.zeros_like(p)
    one_hot[at, safe] = 1
    grad = np.zeros((rows, vocab), work)
    grad[:, :classes] = scale * (p * (1 + 2 * work(z_loss) * lse[:, None]) - s * k - (1 - s) * one_hot)

    # Section "Accuracy" of the contract: each element has its own bar.
    small = work(1e-8) if stored == np.float64 else work(1)
    tau = (2e-6 + 2e-7 * -shifted) * small
    if softcap:
        tau = tau + 4e-7 * small * (softcap + np.abs(logit_scale * x / softcap))
    bar = np.zeros((rows, vocab), work)
    bar[:, :classes] = np.abs(scale) * (
        tau * p * np.abs(1 + 2 * z_loss * lse[:, None]) + 5e-7 * small * (s * k + (1 - s) * one_hot)
    )
    gw = np.max(np.abs(np.where(ignored | outside, 0, g * factor * weight)), initial=0)
    bar += gw * work(2.0) ** -120

    predicted = np.where(ignored, -1, p.argmax(axis=1)).reshape(shape)
    entropy = np.where(ignored, 0, (log_d[:, 0] - (shifted * p).sum(axis=1))).reshape(shape)
    counts = [int((~ignored & ~outside).sum()), int(ignored.sum()), int(outside.sum())]
    return types.SimpleNamespace(
        loss=total,
        grad=grad.reshape(logits.shape),
        grad_bar=bar.reshape(logits.shape),
        lse=np.where(ignored, 0, lse).reshape(shape),
        entropy=entropy,
        predicted=predicted,
        row_counts=counts,
        divisor=divisor,
        relative=1e-13 if stored == np.float64 else 1e-6,
        softcap=softcap,
    )


def half_ulp(values, dtype):
    """Half a unit in the last place of the stored type, at each value."""
    digits, lowest = {"float64": (53, -1074), "float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}[dtype]
    _, exponent = np.frexp(np.abs(values).astype(np.float64))
    return np.ldexp(0.5, np.maximum(exponent - digits, lowest))


def assert_scalar_close(got, want, reference, what):
    got, want = np.asarray(got, np.longdouble), np.asarray(want, np.longdouble)
    assert got.shape == want.shape, what
    absolute = reference.relative * np.maximum(np.abs(want), 1) + 2.5e-7 * reference.softcap
    bad = ~((np.abs(got - want) <= absolute) | (np.isnan(got) & np.isnan(want)) | (got == want))
    assert not bad.any(), f"{what}: got {got[bad][:3]}, want {want[bad][:3]}"


def assert_grad_close(got, reference, what="grad"):
    name = got.dtype.name
    got = got.astype(np.longdouble)
    bar = reference.grad_bar + half_ulp(reference.grad, name)
    bad = ~((np.abs(got - reference.grad) <= bar) | (np.isnan(got) & np.isnan(reference.grad)))
    assert not bad.any(), (
        f"{what}: {bad.sum()} of {bad.size} wrong, first at {np.argwhere(bad)[0]}: "
        f"got {got[bad][0]}, want {reference.grad[bad][0]} +- {bar[bad][0]}"
    )
