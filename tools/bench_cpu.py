# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Timing and limits on the CPU: wall clock, the threads that libxent uses, buffers larger than the caches."""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import pathlib
import platform
import time

import torch
from bench_stats import Limit, Timing, best_limits, summarize


def cores() -> int:
    return len(os.sched_getaffinity(0))


def last_level_cache() -> int:
    sizes = [0]
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        if text.endswith("K"):
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)


class Cpu:
    kind = "cpu"
    device = "cpu"

    def __init__(self, quick: bool) -> None:
        self.buffers = max((128 if quick else 256) << 20, 4 * last_level_cache())  # bytes that rotate, at least
        self.samples, self.warm = (20, 1) if quick else (30, 2)
        self.threads = cores()
        torch.set_num_threads(self.threads)
        self.scratch = torch.ones(self.buffers // 4)
        self.pool = concurrent.futures.ThreadPoolExecutor(self.threads)

    def chip(self) -> str:
        name = platform.processor() or platform.machine()
        try:
            with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
                name = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), name)
        except OSError:
            pass
        return f"{name}, {self.threads} threads, {platform.system()} {platform.release()}"

    def slots(self, size: int, at_least: int, held: int) -> int:
        """How many sets of buffers of `size` bytes rotate: so many that they are cold."""
        return min(max(2, -(-self.buffers // size)), 64)

    def flush(self) -> None:
        self.scratch.sum()

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        pass

    def notes(self) -> str | None:
        load = os.getloadavg()[0]
        if load > 0.3 * self.threads:
            return f"other programs run here (load {load:.1f}): limits and times are too slow, by unequal parts"
        return None

    def measure(self, runs, before=None, graph: bool = False, samples: int = 0) -> Timing:
        """Times one of `runs`, callables on different buffers; `before(index)` is done untimed ahead of each."""
        times = []
        for number in range(self.warm + (samples or self.samples)):
            if before is not None:
                before(number % len(runs))
                self.flush()
            start = time.perf_counter()
            runs[number % len(runs)]()
            times.append((time.perf_counter() - start) * 1e3)
        return summarize(times[self.warm :])

    def limits(self, say) -> dict[str, Limit]:
        """Plain work on buffers larger than the caches, with the same threads."""
        size = self.buffers
        a, b = torch.ones(size // 4), torch.ones(size // 4)
        part = size // self.threads // 64 * 64
        libc = ctypes.CDLL(None)
        pointer, length = ctypes.c_void_p, ctypes.c_size_t(part)

        def on_parts(name: str, *make):
            """A libc function on a part of the buffer a thread; ctypes lets them run at once."""
            function = getattr(libc, name)
            function.restype = pointer

            def run() -> None:
                starts = (index * part for index in range(self.threads))
                jobs = [self.pool.submit(function, *(m(start) for m in make), length) for start in starts]
                for job in jobs:
                    job.result()

            return run

        def at(tensor: torch.Tensor):
            return lambda start: pointer(tensor.data_ptr() + start)

        def byte(value: int):
            return lambda start: ctypes.c_int(value)

        ways = {
            # 0x7e is in no byte of 1 or -1.
            "read": {"torch.sum": a.sum, "torch.amax": a.amax, "memchr": on_parts("memchr", at(a), byte(0x7E))},
            "write": {"torch fill": lambda: b.fill_(1.0), "memset": on_parts("memset", at(b), byte(0))},
            "copy": {"torch copy": lambda: b.copy_(a), "memcpy": on_parts("memcpy", at(b), at(a))},
            "in place": {"torch neg_": a.neg_},
        }
        return best_limits(self, ways, part * self.threads, say)
