# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Host time of a warm forward: of the bare C call, made in a loop in C, and of Plan.forward.

The device's work is small enough to end sooner than the host enqueues it; on the CPU backend it is part of the time.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import shlex
import subprocess
import tempfile
import time

import bench_check
import torch
from bench_cases import Case, Data
from bench_stats import summarize

CALLS, BATCHES, WARM = 100, 40, 5
C_BAR_MS, PYTHON_BAR_MS = 0.005, 0.012


def loop_in_c():
    """bench_host_forward of bench_host.c, compiled as a C program would be."""
    source = pathlib.Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, "bench_host.so")
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.check_call([*compiler, "-O2", "-shared", "-fPIC", str(source), "-o", made])
        function = ctypes.CDLL(made).bench_host_forward
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    return function


def tensor(array: torch.Tensor, device) -> ctypes.Structure:
    from libxent import _abi

    kinds = {torch.bfloat16: (4, 16), torch.float32: (2, 32), torch.int64: (0, 64)}
    rank = array.dim()
    extents = (ctypes.c_int64 * (2 * rank))(*array.shape, *array.stride())
    start = ctypes.addressof(extents)
    made = _abi.DLTensor(
        data=array.data_ptr(),
        device=_abi.DLDevice(*device),
        ndim=rank,
        dtype=_abi.DLDataType(*kinds[array.dtype], 1),
        shape=start,
        strides=start + 8 * rank,
    )
    made.keep = extents
    return made


def per_call(device, batch):
    """`batch(calls)` gives milliseconds a call."""
    times = []
    for _ in range(WARM + BATCHES):
        device.synchronize()
        times.append(batch(CALLS))
    device.synchronize()
    return summarize(times[WARM:])


def in_python(call):
    def batch(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) * 1e3 / calls

    return batch


def measure(device, who, environment: str) -> list[dict]:
    from bench_who import Slot
    from libxent import _abi
    from libxent._library import lib

    data = Data("bfloat16", 8, 1024)
    logits, targets, weights = bench_check.make_inputs(data, device.device)
    reference = bench_check.Reference(data, logits, targets, weights)
    bound = who.bind(Case("forward", data), Slot(logits, targets, weights))
    info, pointer = bound.plan.info, bound.plan._handle.pointer
    size = info.forward_workspace_bytes + info.alignment
    workspace = torch.empty(size, dtype=torch.uint8, device=device.device)
    place = (1, 0) if device.kind == "cpu" else (2, 0)
    args = _abi.ForwardArgs(struct_size=ctypes.sizeof(_abi.ForwardArgs))
    args.stream = None if device.kind == "cpu" else torch.cuda.current_stream().cuda_stream
    args.workspace = -(-workspace.data_ptr() // info.alignment) * info.alignment
    args.workspace_bytes = info.forward_workspace_bytes
    arrays = {
        "logits": logits, "targets": targets, "loss": bound.loss, "stats": bound.stats, "divisor": bound.divisor,
    }  # fmt: skip
    tensors = {name: tensor(array, place) for name, array in arrays.items()}
    for name, made in tensors.items():
        setattr(args, name, ctypes.pointer(made))
    loop = loop_in_c()
    forward = ctypes.cast(lib.xent_forward, ctypes.c_void_p)

    def in_c(calls: int) -> float:
        us = loop(forward, pointer, ctypes.addressof(args), calls)
        if us < 0:
            raise RuntimeError("xent_forward failed")
        return us / 1e3

    results = {}

    def new_outputs() -> None:
        results["new"] = bound.plan.forward(logits, targets)

    def new() -> dict:
        return {"loss": results["new"].loss, "stats": results["new"].stats}

    records = []
    ways = (
        ("C call", in_c, bound.outputs),
        ("Plan.forward", in_python(bound.run), bound.outputs),
        ("Plan.forward, new outputs", in_python(new_outputs), new),
    )
    for name, batch, outputs in ways:
        bound.loss.fill_(float("nan"))
        bound.stats.fill_(float("nan"))
        timing = per_call(device, batch)
        wrong = reference.check(**outputs())
        record = {
            "work": "host", "dtype": data.dtype, "rows": data.rows, "vocab": data.vocab, "options": name,
            "who": who.name, "ms": None, "spread_ms": None, "limit_ms": None, "ratio": None, "bar": None, "met": None,
            "correct": not wrong, "samples": timing.samples, "environment": environment,
        }  # fmt: skip
        if wrong:
            record["wrong"] = wrong
        else:
            record.update(ms=timing.ms, spread_ms=timing.spread_ms)
        records.append(record)
    if device.kind == "gpu":
        bare, python, _ = records
        bare["bar"], python["bar"] = "5us", "C call + 12us"
        bare["met"] = bare["ms"] is not None and bare["ms"] <= C_BAR_MS
        both = bare["ms"] is not None and python["ms"] is not None
        python["met"] = both and python["ms"] <= bare["ms"] + PYTHON_BAR_MS
    return records
