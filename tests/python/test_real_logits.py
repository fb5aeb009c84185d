# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Loss, statistics and gradient on the logits of a real language model (language_model.py), with options in
combination, against float64 at the bars of the contract. `pytest -s` prints the worst errors."""

import collections
import warnings

import language_model
import libxent
import numpy as np
import pytest
import reference
from arrays import MAKERS, dtype

TYPES = ["float32", "bfloat16", "float16", "float64"]
OPTIONS = {
    "plain": {},
    "smoothing-z-loss-sum": {"label_smoothing": 0.1, "z_loss": 1e-4, "reduction": "sum"},
    "softcap-smoothing-z-loss-none": {"softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "none"},
    "softcap-scale-padded": {"softcap": 15.0, "logit_scale": 0.7, "classes": 49001},
    "z-loss-scale-padded-none": {"z_loss": 1e-2, "logit_scale": 1.6, "classes": 49001, "reduction": "none"},
    "uniform-targets-none": {"label_smoothing": 1.0, "reduction": "none"},
}

worst = collections.defaultdict(float)


@pytest.fixture(scope="module")
def texts():
    return language_model.load()


@pytest.fixture(scope="module", autouse=True)
def record():
    yield
    for (device, name), ratios in groups().items():
        print(f"\nreal logits, {device}, {name}: worst error / bar:", end="")
        print("".join(f"  {what} {ratio:.3f}" for what, ratio in ratios.items()), end="")


def groups():
    found = collections.defaultdict(dict)
    for (device, name, what), ratio in worst.items():
        found[device, name][what] = ratio
    return found


@pytest.fixture(params=["numpy", "torch-cuda"])
def library(request):
    return MAKERS[request.param]()


def batch(texts, type_name):
    logits = np.concatenate([logits for logits, _ in texts.values()])
    targets = np.concatenate([targets for _, targets in texts.values()])
    return logits.astype(dtype(type_name)), targets


def note(library, name, what, error, bar):
    """Keeps the worst of the errors as a part of their bars, whatever the asserts say."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        ratio = np.nanmax(np.where(bar > 0, error / bar, 0), initial=0)
    key = library.name, name, what
    worst[key] = max(worst[key], float(ratio))


def compare(library, name, got, want):
    for what in ("loss", "lse", "entropy"):
        value, expected = library.numpy(getattr(got, what)), getattr(want, what)
        bar = want.relative * np.maximum(np.abs(expected), 1) + 2.5e-7 * want.softcap
        note(library, name, what, np.abs(value - expected), bar)
        reference.assert_scalar_close(value, expected, want, what)
    assert np.array_equal(library.numpy(got.predicted), want.predicted)
    assert library.numpy(got.row_counts).tolist() == want.row_counts
    grad = library.numpy(got.grad)
    # Beyond the rounding, which no implementation can avoid.
    error = np.abs(grad.astype(want.grad.dtype) - want.grad) - reference.half_ulp(want.grad, grad.dtype.name)
    note(library, name, "gradient", error, want.grad_bar)
    reference.assert_grad_close(grad, want)


def check(library, name, logits, targets, options, overwrite=False, **arrays):
    want = reference.cross_entropy(logits, targets, ignore_index=-100, **options, **arrays)
    given = {key: library.make(array) for key, array in arrays.items()}
    options = dict(options, return_lse=True, return_entropy=True, return_predicted=True, return_row_counts=True)
    x, t = library.make(logits.copy()), library.make(targets)
    got = libxent.loss_and_grad(x, t, overwrite_logits=overwrite, **options, **given)
    assert not overwrite or got.grad is x
    compare(library, name, got, want)
    return got


def test_the_model_models_language(texts):
    """A guess would have a loss of ln 49152 = 10.8; a broken forward pass, about that."""
    loss = {name: libxent.cross_entropy(logits, targets) for name, (logits, targets) in texts.items()}
    assert loss["prose"] < 4 and loss["code"] < 1.5 and 6 < loss["shuffled"] < 11, loss
    p_top = {}
    for name, (logits, _) in texts.items():
        shifted = logits.astype(np.float64)
        shifted -= shifted.max(axis=1, keepdims=True)
        p_top[name] = 1 / np.exp(shifted).sum(axis=1)
    assert max(p_top["code"]) > 0.999 and min(p_top["shuffled"]) < 0.1, "rows neither peaked nor spread"


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(library, rng, texts, name, type_name):
    if type_name not in library.types:
        pytest.skip(f"{library.name} does not take {type_name}")
    logits, targets = batch(texts, type_name)
    step = 8 if type_name == "float64" else 2  # the reference takes its time, in extended precision most
    start = rng.integers(step)
    logits, targets = logits[start::step], targets[start::step]
    rows = len(targets)
    targets = np.where(rng.random(rows) < 0.15, -100, targets)
    options, arrays = dict(OPTIONS[name]), {"mask": rng.random(rows) < 0.85}
    acc = np.float64 if type_name == "float64" else np.float32
    if options.get("reduction") == "none":
        arrays["grad_loss"] = rng.standard_normal(rows).astype(acc)
    else:
        options["grad_loss"] = 0.75
    arrays["row_weights"] = rng.random(rows).astype(acc)
    check(library, type_name, logits, targets, options, overwrite=rng.random() < 0.5, **arrays)


@pytest.mark.parametrize("type_name", ["bfloat16", "float16"])
def test_sixteen_bits_against_their_values_in_float32(library, texts, type_name):
    logits, targets = batch(texts, type_name)
    options = {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-4}
    narrow = libxent.loss_and_grad(library.make(logits), library.make(targets), grad_dtype="float32", **options)
    wide = libxent.loss_and_grad(library.make(logits.astype(np.float32)), library.make(targets), **options)
    want = reference.cross_entropy(logits, targets, **options)
    reference.assert_scalar_close(library.numpy(narrow[0]), library.numpy(wide[0]), want, "loss")
    reference.assert_grad_close(library.numpy(narrow[1]), want)
    reference.assert_grad_close(library.numpy(wide[1]), want)


@pytest.mark.parametrize("type_name", ["float32", "bfloat16"])
def test_text_by_text(library, texts, type_name):
    """Each text alone, as cross_entropy is called most: mean over its tokens, nothing else."""
    for logits, targets in texts.values():
        check(library, type_name, logits.astype(dtype(type_name)), targets, {})
