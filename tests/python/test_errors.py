# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Refusals: the exception, what it carries, and that nothing was written."""

import copy
import ctypes
import os
import pickle
import subprocess
import sys

import libxent
import numpy as np
import pytest
from libxent import _abi
from libxent._library import lib


def plan(**options):
    return libxent.Plan(**{"max_rows": 8, "vocab": 10, **options})


LOGITS, TARGETS = np.zeros((4, 10), np.float32), np.zeros(4, np.int64)


@pytest.mark.parametrize(
    "options, word",
    [
        ({"vocab": 0}, "vocab"),
        ({"vocab": -1}, "vocab"),
        ({"vocab": 2**64}, "vocab"),
        ({"vocab": 2.5}, "vocab"),
        ({"max_rows": -1}, "max_rows"),
        ({"classes": 11}, "classes"),
        ({"classes": 0}, "classes"),
        ({"classes": -3}, "classes"),
        ({"reduction": "average"}, "reduction"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"label_smoothing": float("nan")}, "label_smoothing"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"softcap": -1.0}, "softcap"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"logit_scale": -1.0}, "logit_scale"),
        ({"logit_scale": float("inf")}, "logit_scale"),
        ({"logits_dtype": "int32"}, "logits_dtype"),
        ({"logits_dtype": "float8_e4m3fn"}, "logits_dtype"),
        ({"target_dtype": "float32"}, "target_dtype"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:4294967296"}, "device"),
        ({"device": (2**32 + 1, 0)}, "device"),
        ({"reduction": ["mean"]}, "reduction"),
        ({"classes": "ten"}, "classes"),
        ({"label_smoothing": "0.1"}, "label_smoothing"),
        ({"z_loss": None}, "z_loss"),
        ({"logit_scale": "1"}, "logit_scale"),
    ],
)
def test_options_out_of_range(options, word):
    with pytest.raises(ValueError, match=word) as caught:
        plan(**options)
    assert isinstance(caught.value, libxent.InvalidArgument) and isinstance(caught.value, libxent.Error)
    assert caught.value.status == "XENT_INVALID_ARGUMENT" and caught.value.native_code == 0


@pytest.mark.parametrize("number", [2**63, 2**64 + 4, 2**70, -(2**63) - 1, 10**400, 1e300, 1e-300, "4", True + 1j])
def test_numbers_that_do_not_fit(number):
    for name in ("denominator", "grad_loss"):
        if name == "grad_loss" and isinstance(number, int) and number < 10**38:
            continue
        with pytest.raises(libxent.InvalidArgument, match=name):
            libxent.loss_and_grad(LOGITS, TARGETS, **{name: number})


@pytest.mark.parametrize("number", [4, np.int64(4), np.int32(4), 4.0, np.float32(4), np.float64(4), np.float16(4)])
def test_numbers_of_any_kind(number):
    loss, grad = libxent.loss_and_grad(LOGITS, TARGETS, reduction="sum", denominator=number, grad_loss=number)
    assert float(loss) == pytest.approx(np.log(10), rel=1e-6)
    assert grad[0, 0] == pytest.approx(-0.9, rel=1e-6)


@pytest.mark.parametrize("threads", [2**32, 2**32 + 1, 1.5, "2", -1])
def test_threads_out_of_range(threads):
    with pytest.raises(libxent.InvalidArgument, match="threads"):
        libxent.Context(threads)


def test_handles_are_not_copied():
    context = libxent.Context(1)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Context"):
            duplicate(context)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Plan"):
            duplicate(plan())


def test_backend_path_with_a_null():
    with pytest.raises(libxent.InvalidArgument, match="null character"):
        libxent.Context(1).load_backend("cuda\0")


def test_device_without_a_backend():
    if "cuda" in libxent.backends():
        pytest.skip("the CUDA backend runs here")
    with pytest.raises(libxent.Error) as caught:
        plan(device="cuda")
    assert caught.value.status == "XENT_UNSUPPORTED" and "cuda" in str(caught.value).lower()
    assert not isinstance(caught.value, ValueError)


def test_backend_that_is_no_library(tmp_path):
    path = tmp_path / "plugin.so"
    path.write_text("no ELF")
    with pytest.raises(libxent.Error) as caught:
        libxent.Context().load_backend(str(path))
    assert caught.value.status in ("XENT_PLUGIN_ERROR", "XENT_UNSUPPORTED") and str(path) in str(caught.value)


@pytest.mark.parametrize(
    "arguments, word",
    [
        ({"logits": np.zeros((4, 11), np.float32)}, "logits"),
        ({"logits": np.zeros((4, 10), np.float16)}, "logits"),
        ({"logits": np.zeros(10, np.float32), "targets": np.zeros((), np.int32)}, "targets"),
        ({"logits": np.float32(1)}, "logits"),
        ({"logits": np.zeros((), np.float32)}, "logits"),
        ({"logits": np.zeros((9, 10), np.float32), "targets": np.zeros(9, np.int64)}, "rows"),
        ({"logits": None}, "logits"),
        ({"targets": None}, "targets"),
        ({"targets": np.zeros(5, np.int64)}, "targets"),
        ({"targets": np.zeros((2, 2), np.int64)}, "targets"),
        ({"targets": np.zeros(4, np.int32)}, "targets"),
        ({"targets": np.zeros(4, np.float32)}, "targets"),
        ({"mask": np.zeros(3, bool)}, "mask"),
        ({"mask": np.zeros(4, np.float64)}, "mask"),
        ({"row_weights": np.zeros(4, np.float64)}, "row_weights"),
        ({"row_weights": np.zeros((4, 1), np.float32)}, "row_weights"),
        ({"denominator": np.zeros(2, np.float32)}, "denominator"),
        ({"denominator": "many"}, "denominator"),
        ({"loss": np.zeros(4, np.float32)}, "loss"),
        ({"loss": np.zeros((), np.float64)}, "loss"),
        ({"loss": None}, "loss"),
        ({"stats": np.zeros((4, 3), np.float32)}, "stats"),
        ({"lse": np.broadcast_to(np.zeros(1, np.float32), 4)}, "lse"),
        ({"lse": TARGETS.view(np.float32)[:4]}, "lse"),
        ({"entropy": True}, "entropy"),
        ({"predicted": True}, "predicted"),
        ({"row_counts": np.zeros(2, np.int64)}, "row_counts"),
    ],
)
def test_arguments_that_do_not_fit(arguments, word):
    given = {"logits": LOGITS, "targets": TARGETS, **arguments}
    outputs = [
        given[name] for name in ("loss", "stats", "lse", "row_counts") if isinstance(given.get(name), np.ndarray)
    ]
    before = [array.copy() for array in outputs]
    with pytest.raises(libxent.InvalidArgument, match=word):
        plan().forward(given.pop("logits"), given.pop("targets"), **given)
    for array, old in zip(outputs, before):
        assert np.array_equal(array, old)


def test_denominator_and_divisor_need_something_to_divide():
    with pytest.raises(libxent.InvalidArgument, match=r'denominator: .*it needs reduction="sum" or "mean"'):
        plan(reduction="none").forward(LOGITS, TARGETS, denominator=2)
    with pytest.raises(libxent.InvalidArgument, match="divisor"):
        plan(reduction="sum").forward(LOGITS, TARGETS, divisor=True)
    stats = plan().forward(LOGITS, TARGETS).stats
    with pytest.raises(libxent.InvalidArgument, match="divisor"):
        plan().backward(LOGITS, TARGETS, stats)


def test_partial_overlap_of_the_gradient():
    base = np.zeros((5, 10), np.float32)
    with pytest.raises(libxent.InvalidArgument, match="grad_logits"):
        plan(overwrite_logits=True).loss_and_grad(base[:4], TARGETS, grad_logits=base[1:])


def test_grad_of_another_type():
    grad = np.zeros((4, 10), np.float64)
    with pytest.raises(libxent.InvalidArgument, match="grad"):
        plan().loss_and_grad(LOGITS, TARGETS, grad_logits=grad)
    with pytest.raises(libxent.InvalidArgument, match="grad_dtype"):
        plan().loss_and_grad(LOGITS, TARGETS, grad_dtype="nibble")
    with pytest.raises(libxent.InvalidArgument, match="grad_dtype"):
        plan(logits_dtype="float16", overwrite_logits=True).loss_and_grad(
            LOGITS.astype(np.float16), TARGETS, grad_dtype="float32"
        )


def test_upstream_gradient_that_does_not_fit():
    with pytest.raises(libxent.InvalidArgument, match="grad_loss"):
        plan().loss_and_grad(LOGITS, TARGETS, grad_loss=np.ones(4, np.float32))
    with pytest.raises(libxent.InvalidArgument, match="grad_loss"):
        plan().loss_and_grad(LOGITS, TARGETS, grad_loss=np.ones((), np.int64))


def test_message_names_function_argument_and_value():
    with pytest.raises(libxent.InvalidArgument) as caught:
        plan().forward(LOGITS, np.zeros(5, np.int64))
    text = str(caught.value)
    assert "xent_forward" in text and "targets" in text and "5" in text


def test_message_names_options_as_python_does():
    for outputs, text in (
        ({"entropy": np.zeros(4, np.float32)}, "the plan needs entropy=True"),
        ({"predicted": np.zeros(4, np.int64)}, "the plan needs predicted=True"),
        ({"denominator": 3}, 'it needs reduction="sum" or "mean"'),
        ({"divisor": np.zeros((), np.float32)}, 'without reduction="mean" and denominator nothing is divided'),
    ):
        with pytest.raises(libxent.InvalidArgument, match=text):
            plan(reduction="none").forward(LOGITS, TARGETS, **outputs)


def test_message_names_what_leads_the_call():
    for grad in (np.zeros((), np.float32), np.float32(1)):
        with pytest.raises(libxent.InvalidArgument) as caught:
            plan().scale_grad(grad, TARGETS, 2.0)
        assert "grad_logits: " in str(caught.value) and " logits: " not in f" {caught.value}"


def test_struct_of_another_size():
    """What a later header's struct would do to this library, through the very mirror."""
    desc = _abi.PlanDesc(struct_size=8, max_rows=1, vocab=2)
    error = _abi.Error(struct_size=ctypes.sizeof(_abi.Error))
    context, out = libxent.Context(), ctypes.c_void_p()
    status = lib.xent_plan_create(context._handle, ctypes.byref(desc), ctypes.byref(out), ctypes.byref(error))
    assert status == _abi.XENT_INVALID_STRUCT and not out.value and error.message


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_library_that_is_not_there(tmp_path):
    got = run("import libxent", LIBXENT_LIBRARY=str(tmp_path / "absent.so"))
    assert got.returncode and "ImportError" in got.stderr and "absent.so" in got.stderr


def test_library_of_another_abi(tmp_path):
    source = tmp_path / "other.c"
    functions = "\n".join(f"void {name}(void) {{}}" for name in _abi.FUNCTIONS if name != "xent_abi_version")
    source.write_text(f"unsigned xent_abi_version(void) {{ return 77; }}\n{functions}\n")
    library = tmp_path / "libxent.so"
    if subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)]).returncode:
        pytest.skip("no C compiler")
    got = run("import libxent", LIBXENT_LIBRARY=str(library))
    assert got.returncode and "has ABI 77, this package needs" in got.stderr


def test_exit_is_silent():
    """Contexts, plans and arrays that live until the interpreter ends."""
    code = (
        "import numpy, libxent\n"
        "keep = [libxent.Context(), libxent.Plan(max_rows=4, vocab=9)]\n"
        "x, t = numpy.zeros((4, 9), numpy.float32), numpy.zeros(4, numpy.int64)\n"
        "keep.append(keep[1].forward(x, t)); keep.append(libxent.loss_and_grad(x, t))\n"
        "try:\n"
        "    import jax; y = jax.numpy.asarray(x); keep.append(libxent.loss_and_grad(y, t))\n"
        "except ImportError: pass\n"
    )
    got = run(code, JAX_PLATFORMS="cpu")
    assert (got.returncode, got.stderr) == (0, "")


@pytest.mark.parametrize("character", ["x", "\u00e9", "\u20ac", "\U0001f600"])
@pytest.mark.parametrize("shift", range(4))
def test_a_cut_message_ends_with_a_whole_character(character, shift):
    context = libxent.Context(1)
    error = _abi.Error(struct_size=ctypes.sizeof(_abi.Error))
    path = "/" + "a" * shift + character * 600
    assert lib.xent_backend_load(context._handle, path.encode(), ctypes.byref(error)) == _abi.XENT_PLUGIN_ERROR
    text = error.message.decode()  # strict
    assert text.endswith(character) and len(error.message) > 495 - 4
