# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Host time of a warm forward: of the bare C call, made in a loop in C, and of Plan.forward.

The device's work is small enough to end sooner than the host enqueues it; on the CPU backend it is part of the time.
A vocabulary split over two ranks is called with an all-gather that does nothing: what it takes beside the collective.
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
C_BAR_MS, PYTHON_BAR_MS, SPLIT_BAR_MS = 0.005, 0.012, 0.020


class Gathered(ctypes.Structure):
    _fields_ = (("send", ctypes.c_void_p), ("recv", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def functions_in_c():
    """bench_host_forward and bench_host_gather of bench_host.c, compiled as a C program would be."""
    source = pathlib.Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, "bench_host.so")
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.check_call([*compiler, "-O2", "-shared", "-fPIC", str(source), "-o", made])
        library = ctypes.CDLL(made)
    function = library.bench_host_forward
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    return function, library.bench_host_gather


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


class CCall:
    """xent_forward of a plan, in a loop in C: milliseconds a call. Allocates the workspace."""

    def __init__(self, loop, plan, arrays: dict, place, device) -> None:
        from libxent import _abi
        from libxent._library import lib

        info = plan.info
        self.plan, self.loop, self.arrays = plan, loop, arrays
        self.workspace = torch.zeros(
            info.forward_workspace_bytes + info.alignment, dtype=torch.uint8, device=device.device
        )
        self.args = _abi.ForwardArgs(struct_size=ctypes.sizeof(_abi.ForwardArgs))
        self.args.stream = None if device.kind == "cpu" else torch.cuda.current_stream().cuda_stream
        self.args.workspace = -(-self.workspace.data_ptr() // info.alignment) * info.alignment
        self.args.workspace_bytes = info.forward_workspace_bytes
        self.tensors = {name: tensor(array, place) for name, array in arrays.items()}
        for name, made in self.tensors.items():
            setattr(self.args, name, ctypes.pointer(made))
        self.forward = ctypes.cast(lib.xent_forward, ctypes.c_void_p)

    def __call__(self, calls: int) -> float:
        us = self.loop(self.forward, self.plan._handle.pointer, ctypes.addressof(self.args), calls)
        if us < 0:
            raise RuntimeError("xent_forward failed")
        return us / 1e3


def split_call(loop, gather, data, arrays: dict, place, device):
    """Of rank 0 of two, of which it has all the classes: what rank 1 would send is zeros."""
    import libxent
    from libxent import _abi
    from libxent._library import check, default_context, error_slot, lib

    gathered = Gathered()
    desc = _abi.CommDesc(
        struct_size=ctypes.sizeof(_abi.CommDesc),
        device=_abi.DLDevice(*place),
        ranks=2,
        user=ctypes.addressof(gathered),
        all_gather=ctypes.cast(gather, dict(_abi.CommDesc._fields_)["all_gather"]),
    )
    handle = ctypes.c_void_p()
    check(
        lib.xent_comm_create(default_context()._handle, ctypes.byref(desc), ctypes.byref(handle), error_slot.reference)
    )
    comm = libxent.Communicator.__new__(libxent.Communicator)
    comm._handle, comm._context = handle, default_context()
    plan = libxent.Plan(
        device=place, logits_dtype=data.dtype, max_rows=data.rows, vocab=data.vocab, ignore_index=-100,
        class_offsets=[0, data.vocab, data.vocab], comm=comm,
    )  # fmt: skip
    call = CCall(loop, plan, arrays, place, device)
    call(1)
    device.synchronize()
    base, size = call.workspace.data_ptr(), gathered.bytes
    send, recv = gathered.send - base, gathered.recv - base
    call.workspace[recv : recv + size] = call.workspace[send : send + size]
    call.workspace[recv + size : recv + 2 * size] = 0
    return call, gathered


def measure(device, who, environment: str) -> list[dict]:
    from bench_who import Slot

    data = Data("bfloat16", 8, 1024)
    logits, targets, weights = bench_check.make_inputs(data, device.device)
    reference = bench_check.Reference(data, logits, targets, weights)
    bound = who.bind(Case("forward", data), Slot(logits, targets, weights))
    loop, gather = functions_in_c()
    place = (1, 0) if device.kind == "cpu" else (2, 0)
    arrays = {
        "logits": logits, "targets": targets, "loss": bound.loss, "stats": bound.stats, "divisor": bound.divisor,
    }  # fmt: skip
    bare = CCall(loop, bound.plan, arrays, place, device)
    split, _gathered = split_call(loop, gather, data, arrays, place, device)

    results = {}

    def new_outputs() -> None:
        results["new"] = bound.plan.forward(logits, targets)

    def new() -> dict:
        return {"loss": results["new"].loss, "stats": results["new"].stats}

    records = []
    ways = (
        ("C call", bare, bound.outputs),
        ("Plan.forward", in_python(bound.run), bound.outputs),
        ("Plan.forward, new outputs", in_python(new_outputs), new),
        ("C call, split, but the gather", split, bound.outputs),
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
        bare, python, _, split = records
        bare["bar"], python["bar"], split["bar"] = "5us", "C call + 12us", "20us"
        split["met"] = split["ms"] is not None and split["ms"] <= SPLIT_BAR_MS
        bare["met"] = bare["ms"] is not None and bare["ms"] <= C_BAR_MS
        both = bare["ms"] is not None and python["ms"] is not None
        python["met"] = both and python["ms"] <= bare["ms"] + PYTHON_BAR_MS
    return records
