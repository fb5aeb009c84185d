# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Timing, limits and memory on an NVIDIA GPU.

A sample is one replay of a CUDA graph that holds several calls, between two events, after the L2 was filled with other
data; its time is divided by the calls. What cannot be captured is launched plainly.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess

import torch
from bench_stats import Limit, Timing, best_limits, summarize

# Persistent blocks or one pass of them; 16-byte loads, several in flight a thread; no stores unless a sum is NaN.
KERNELS = r"""
template <bool kWhole>
__device__ void load(uint4 (&v)[UNROLL], const uint4 *p, long long base, long long n) {
#pragma unroll
  for (int k = 0; k < UNROLL; ++k) {
    const long long i = base + threadIdx.x + k * (int)blockDim.x;
    v[k] = make_uint4(0, 0, 0, 0);
    if (kWhole || i < n) {
      asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w) : "l"(p + i));
    }
  }
}
extern "C" __global__ void read16(const uint4 *p, long long n, unsigned *out) {
  unsigned s = 0;
  const long long span = (long long)blockDim.x * UNROLL;
  for (long long base = blockIdx.x * span; base < n; base += gridDim.x * span) {
    uint4 v[UNROLL];
    if (base + span <= n) load<true>(v, p, base, n); else load<false>(v, p, base, n);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) s += (v[k].x ^ v[k].y) + (v[k].z ^ v[k].w);
  }
  if (s == 0x9e3779b9u) *out = s;
}
extern "C" __global__ void inplace16(uint4 *p, long long n) {
  const long long span = (long long)blockDim.x * UNROLL;
  for (long long base = blockIdx.x * span; base < n; base += gridDim.x * span) {
    uint4 v[UNROLL];
    if (base + span <= n) load<true>(v, p, base, n); else load<false>(v, p, base, n);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
      const long long i = base + threadIdx.x + (long long)k * blockDim.x;
      if (i < n) { v[k].x ^= 1; v[k].y ^= 1; v[k].z ^= 1; v[k].w ^= 1; p[i] = v[k]; }
    }
  }
}
"""


class Gpu:
    kind = "gpu"
    device = "cuda:0"
    calls = 8  # a sample, at least

    def __init__(self, quick: bool) -> None:
        if not torch.cuda.is_available():
            raise SystemExit("bench: torch finds no CUDA device here; `tools/bench cpu` measures the CPU backend")
        self.samples, self.warm = (20, 3) if quick else (30, 5)
        properties = torch.cuda.get_device_properties(0)
        self.l2 = getattr(properties, "L2_cache_size", 64 << 20)
        self.processors = properties.multi_processor_count
        self.scratch = torch.ones(max(4 * self.l2, 64 << 20) // 4, device=self.device)
        self.sum = torch.empty((), device=self.device)

    def chip(self) -> str:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
        driver = "unknown"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
        return f"{torch.cuda.get_device_name(0)}, driver {driver}, CUDA {torch.version.cuda}"

    def notes(self) -> str | None:
        return None

    def slots(self, size: int, at_least: int, held: int) -> int:
        """How many sets of buffers rotate: so many that they are cold. A set has `held` buffers of `size` bytes."""
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        fits = int(0.7 * free) // (size * held)
        if fits < 1:
            raise MemoryError(f"{held} buffers of {size >> 20} MiB do not fit in {free >> 20} MiB of device memory")
        return min(max(at_least, 2, -(-4 * self.l2 // size)), fits, max(at_least, 64))

    def flush(self) -> None:
        # Reads, so that no dirty line is left to be written back in the time of the work.
        torch.sum(self.scratch, 0, out=self.sum)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def measure(self, runs, before=None, graph: bool = True, samples: int = 0) -> Timing:
        """Times one of `runs`, callables on different buffers; `before(index)` is done untimed ahead of each."""
        slots, runs = len(runs), list(runs)
        if before is None:
            runs *= -(-self.calls // slots)
        launch, captured = self._launcher(runs, graph)
        events = []
        for _ in range(self.warm + (samples or self.samples)):
            if before is not None:
                for index in range(slots):
                    before(index)
            self.flush()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) / len(runs) for start, end in events[self.warm :]]
        return summarize(times, captured)

    def _launcher(self, runs, graph: bool):
        def plainly() -> None:
            for run in runs:
                run()

        if not graph:
            return plainly, False
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            plainly()
        return captured.replay, True

    def memory(self, forward, backward) -> tuple[int, int]:
        """Bytes kept between the two, and the most above what was there before."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        state = forward()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - base
        result = backward(state)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - base
        del state, result
        return kept, peak

    def limits(self, say) -> dict[str, Limit]:
        """Plain work on buffers of 4 GiB; the ways keep them for a second measurement after the run."""
        size = min(4 << 30, torch.cuda.mem_get_info()[0] // 8) // 4096 * 4096
        a = torch.empty(size // 4, device=self.device).normal_()
        b = torch.empty_like(a)
        ways = {
            "read": {"torch.sum": lambda: torch.sum(a, 0, out=self.sum)},
            "write": {"torch fill": lambda: b.fill_(1.5)},
            "copy": {"cudaMemcpyAsync": lambda: b.copy_(a)},
            "in place": {"torch neg_": lambda: a.neg_()},
        }
        try:
            self._raw_kernels(ways, a, size)
        except Exception as error:  # no CuPy, or one that cannot compile
            say(f"no 16-byte read kernel ({type(error).__name__}: {error}); the read limit is torch.sum's")
        return best_limits(self, ways, size, say)

    def _raw_kernels(self, ways, a: torch.Tensor, size: int) -> None:
        import cupy

        vectors = size // 16
        out = torch.empty(1, dtype=torch.int32, device=self.device)
        for unroll, threads, persistent in ((8, 512, False), (4, 512, False), (8, 256, True), (4, 1024, True)):
            module = cupy.RawModule(code=KERNELS.replace("UNROLL", str(unroll)), options=("--std=c++17",))
            blocks = -(-vectors // (threads * unroll))
            if persistent:
                blocks = min(blocks, self.processors * (2048 // threads))

            def launch(kernel, args, blocks=blocks, threads=threads):
                stream = torch.cuda.current_stream().cuda_stream  # 0, the default stream, is CuPy's too
                with cupy.cuda.ExternalStream(stream) if stream else contextlib.nullcontext():
                    kernel((blocks,), (threads,), args)

            read, inplace = module.get_function("read16"), module.get_function("inplace16")
            name = f"16-byte loads, {unroll} x {threads}" + (", persistent" if persistent else "")
            read_args = (cupy.uint64(a.data_ptr()), cupy.int64(vectors), cupy.uint64(out.data_ptr()))
            launch(read, read_args)
            torch.cuda.synchronize()
            ways["read"][name] = lambda kernel=read, args=read_args, launch=launch, keep=out: launch(kernel, args)
            ways["in place"][name] = lambda kernel=inplace, args=read_args[:2], launch=launch: launch(kernel, args)
