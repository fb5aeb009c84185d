# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""What is measured: works, shapes and options, the bytes each must move, and the bar it has to meet."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

WORKS = ("forward", "backward", "backward_over", "loss_and_grad", "loss_and_grad_over")
GROUPS = ("host", "few", "ignored", "small", "options", "sweep")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
LAUNCH_MS, FEW_MS = 0.004, 0.005  # what the bars allow beside the bytes
FEW_CALLS = 100
# Works under which an implementation that keeps the logits is compared with one that overwrites them.
UNDER = {"backward_over": "backward", "loss_and_grad_over": "loss_and_grad"}


@dataclasses.dataclass(frozen=True)
class Data:
    """Inputs shared by the works on them."""

    dtype: str
    rows: int
    vocab: int
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    weights: bool = False
    ignored: float = 0.06
    few: bool = False  # timed as FEW_CALLS calls in a graph

    @property
    def itemsize(self) -> int:
        return BYTES[self.dtype]

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * self.itemsize

    @property
    def options(self) -> str:
        parts = [
            f"{name}={value:g}"
            for name, value in (("smoothing", self.smoothing), ("z_loss", self.z_loss), ("softcap", self.softcap))
            if value
        ]
        if self.weights:
            parts.append("weights")
        if self.ignored != 0.06:
            parts.append(f"ignored={self.ignored:.0%}")
        if self.few:
            parts.append("few rows")
        return " ".join(parts)


class Case(NamedTuple):
    work: str
    data: Data

    @property
    def over(self) -> bool:
        return self.work.endswith("_over")

    @property
    def limit(self) -> str:
        """The limit that counts for the work."""
        return "read" if self.work == "forward" else "in place" if self.over else "copy"

    def bytes(self, ignored_rows: int) -> int:
        """What any method has to move: an ignored row's logits are not read, its gradient is written."""
        data = self.data
        read = (data.rows - ignored_rows) * data.vocab * data.itemsize
        write = 0 if self.work == "forward" else data.logits_bytes
        row = 8 + (4 if data.weights else 0)  # target, weight
        if not self.work.startswith("loss_and_grad"):
            row += 8  # the two kept numbers, written or read
        return read + write + row * data.rows


class Bar(NamedTuple):
    text: str
    ms: float


def gpu_bar(case: Case, limit_ms: float) -> Bar | None:
    data, work = case.data, case.work.removesuffix("_over")
    row_bytes = data.vocab * data.itemsize
    if data.few:
        return Bar("1.5x + 5us", 1.5 * (limit_ms + FEW_MS))
    if data.ignored > 0.06:
        return None  # judged against the run without ignored rows
    if data.softcap:
        share, extra = {"forward": 0.50, "backward": 0.80, "loss_and_grad": 0.60}[work], 0.0
    elif work == "loss_and_grad":
        long = 0.75 if data.itemsize == 4 and row_bytes > 512 << 10 else 0.85
        share, extra = (0.92 if row_bytes <= 128 << 10 else long), 0.0
    else:
        share, extra = (0.95 if work == "forward" else 0.97), LAUNCH_MS
        if row_bytes % 16:
            share = 0.90
    if 128 <= data.vocab < 4096:
        return Bar("80%", limit_ms / 0.80)
    if not 4096 <= data.vocab <= 300000:
        return None
    bar = limit_ms / share + extra
    text = f"{share:.0%}" + (" + 4us" if extra else "")
    # Full bars begin at the bytes a row of 32000 columns of half precision.
    if row_bytes >= 2 * 32000 and data.vocab <= 262144 and data.rows >= 2048:
        return Bar(text, bar)
    return Bar(f"80% of {text}", bar / 0.80)


CPU_SPEEDUP = 6.0  # over torch's loss


def cpu_bar(case: Case, limit_ms: float) -> Bar | None:
    if not 32000 <= case.data.vocab <= 151936 or case.data.softcap or case.data.rows < 64:
        return None
    share = 0.80 if case.data.dtype == "float32" else 0.50
    return Bar(f"{share:.0%}, {CPU_SPEEDUP:g}x torch", limit_ms / share)


SHAPES = {
    "gpu": ((4096, 128256), (8192, 32000), (4096, 50257), (4096, 151936), (4096, 262144)),
    "cpu": ((256, 128256), (1024, 32000), (512, 50257), (256, 151936)),
}
QUICK_SHAPES = {"gpu": ((4096, 128256), (8192, 32000)), "cpu": ((128, 128256), (512, 32000))}
DTYPES = {"gpu": ("bfloat16", "float16", "float32"), "cpu": ("float32", "bfloat16", "float16")}
SWEEP = (
    4096, 5003, 6144, 8192, 10007, 12288, 16384, 20480, 24576, 32768, 40009, 49152, 57344, 65536, 73728, 81920,
    98304, 114688, 131072, 150001, 163840, 196608, 229376, 262144, 300000,
)  # fmt: skip
OPTIONS = ({"smoothing": 0.1}, {"z_loss": 1e-4}, {"weights": True}, {"softcap": 30.0})


def wants_host(device: str, works=None, shapes=None) -> bool:
    return "host" in works if works else device == "gpu" and not shapes


def select(device: str, quick: bool, works=None, dtypes=None, shapes=None) -> list[Case]:
    """The cases asked for, those on the same data beside each other."""
    base = [work for work in WORKS if works is None or work in works]
    if works is None:
        groups = ("few",) if quick and device == "gpu" else () if quick else GROUPS[1:]
        if shapes:
            groups = ()
    else:
        groups = tuple(group for group in GROUPS if group in works)
    types = dtypes or (DTYPES[device][:1] if quick else DTYPES[device])
    sizes = shapes or (QUICK_SHAPES if quick else SHAPES)[device]
    main = types[0]
    gpu = device == "gpu"
    every = base or list(WORKS)
    cases = [Case(work, Data(dtype, *size)) for dtype in types for size in sizes for work in base]
    if "few" in groups:
        few = shapes if shapes and not base else [(n, 128256) for n in ((1, 8, 32, 128) if gpu else (1, 8))]
        plain = ("forward", "backward", "loss_and_grad")
        kinds = [work for work in every if work in plain] or plain
        cases += [Case(work, Data(main, *size, few=gpu)) for size in few for work in kinds]
    if "ignored" in groups:
        for size in sizes[:2]:
            cases += [
                Case(w, Data(main, *size, ignored=i)) for i in (0.0, 0.6) for w in every if not w.endswith("_over")
            ]
    if "small" in groups:
        total = 1 << (28 if gpu else 24)
        cases += [Case(w, Data(main, total // v, v)) for v in (128, 512, 1000, 2048) for w in every]
    if "options" in groups:
        cases += [Case(w, Data(main, *size, **o)) for size in sizes[:2] for o in OPTIONS for w in every]
    if "sweep" in groups:
        total = 1 << (29 if gpu else 25)
        vocabs = SWEEP if gpu else SWEEP[::4]
        cases += [Case(w, Data(main, max(total // v, 1), v)) for v in vocabs for w in every]
    return list(dict.fromkeys(cases))
