#!/usr/bin/env python3
# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of the loss in PyTorch, forward and backward through autograd: libxent.torch in each of its modes,
PyTorch's own loss, and Liger's where it can be imported. Every result is checked before it is timed.

kept: what is held between forward and backward beside the logits; peak: the most held beside them, both as PyTorch's
allocator counts them. host: time of the calls alone, on logits of 8 x 32."""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import libxent.torch
import torch
import torch.nn.functional as F


def libxent_mode(**options):
    return lambda logits, targets: libxent.torch.cross_entropy(logits, targets, **options)


def contestants():
    found = {
        "libxent": libxent_mode(),
        "libxent overwrite": libxent_mode(overwrite_logits=True),
        "libxent fused": libxent_mode(fused=True),
        "libxent fused overwrite": libxent_mode(fused=True, overwrite_logits=True),
        "torch": F.cross_entropy,
        "torch, float32 copy": lambda logits, targets: F.cross_entropy(logits.float(), targets),
    }
    try:
        from liger_kernel.transformers.functional import liger_cross_entropy

        found["liger"] = liger_cross_entropy
    except ImportError:
        print("liger_kernel cannot be imported: left out")
    return found


class Clock:
    """Times a piece of work on the device."""

    def __init__(self, device):
        self.cuda = device == "cuda"

    def __enter__(self):
        if self.cuda:
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.start.record()
        else:
            self.start = time.perf_counter()
        return self

    def __exit__(self, *_):
        if self.cuda:
            self.end.record()
        else:
            self.end = time.perf_counter()

    def ms(self):
        return self.start.elapsed_time(self.end) if self.cuda else 1e3 * (self.end - self.start)


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def check(name, loss_function, source, targets, sixteen_bit_loss):
    """Loss, and gradient of a few rows, against float64."""
    leaf = source.clone().requires_grad_()
    loss = loss_function(leaf.view_as(leaf), targets)
    loss.backward()
    counted = (targets != -100).sum()
    total = torch.zeros((), dtype=torch.float64, device=source.device)
    for rows in range(0, len(source), 256):
        part = source[rows : rows + 256].double()
        total += F.cross_entropy(part, targets[rows : rows + 256], reduction="sum")
    bar = 1e-2 if sixteen_bit_loss else 1e-5
    torch.testing.assert_close(loss.double(), total / counted, rtol=bar, atol=bar, msg=lambda m: f"{name}: {m}")
    for part in (slice(0, 8), slice(len(source) // 2, len(source) // 2 + 8), slice(-8, None)):
        rows = source[part].double().requires_grad_()
        (F.cross_entropy(rows, targets[part], reduction="sum") / counted).backward()
        torch.testing.assert_close(
            leaf.grad[part].double(), rows.grad, rtol=2e-2, atol=1e-3 / len(source), msg=lambda m: f"{name}: {m}"
        )


def measure(loss_function, source, targets, device, samples):
    """Medians of (forward ms, backward ms), and (kept, peak) bytes on CUDA."""
    forward, backward, kept, peak = [], [], 0, 0
    logits = source.clone().requires_grad_()
    for _ in range(samples + 3):
        with torch.no_grad():
            logits.copy_(source)
        logits.grad = None
        view = logits.view_as(logits)  # not a leaf, as in a model
        wait(device)
        if device == "cuda":
            gc.collect()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        with Clock(device) as first:
            loss = loss_function(view, targets)
        if device == "cuda":
            kept = torch.cuda.memory_allocated() - before
        with Clock(device) as second:
            loss.backward()
        wait(device)
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated() - before
        forward.append(first.ms())
        backward.append(second.ms())
        del loss, view
    return statistics.median(forward[3:]), statistics.median(backward[3:]), kept, peak


def host_us(loss_function, device, count=200):
    targets = torch.randint(32, (8,), device=device)
    leaves = [torch.randn(8, 32, device=device, requires_grad=True) for _ in range(count)]

    def seconds():
        wait(device)
        start = time.perf_counter()
        losses = [loss_function(leaf.view_as(leaf), targets) for leaf in leaves]
        middle = time.perf_counter()
        wait(device)
        late = time.perf_counter()
        for loss in losses:
            loss.backward()
        return (middle - start) / count, (time.perf_counter() - late) / count

    seconds()
    return [1e6 * min(column) for column in zip(*(seconds() for _ in range(5)))]


def compare(took, device):
    """Each of libxent's modes beside PyTorch's loss."""
    for theirs in (name for name in took if name.startswith("torch")):
        for ours in (name for name in took if name.startswith("libxent")):
            (ms, peak), (other_ms, other_peak) = took[ours], took[theirs]
            saved = f", peak {peak:.0f} MiB: {other_peak - peak:.0f} MiB less than {other_peak:.0f}"
            line = f"{ours} beside {theirs}: {ms:.3f} ms to {other_ms:.3f} ({other_ms / ms:.2f} times as fast)"
            print(line + (saved if device == "cuda" else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="4096x128256,16384x128256", help="ROWSxVOCAB,... (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--only", help="names that contain this")
    options = parser.parse_args()
    device = options.device
    chip = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{chip}, torch {torch.__version__}, libxent {libxent.version()}, {options.dtype}")
    found = {n: f for n, f in contestants().items() if not options.only or options.only in n}
    for shape in options.shapes.split(","):
        rows, vocab = map(int, shape.split("x"))
        torch.manual_seed(0)
        source = torch.randn(rows, vocab, device=device, dtype=getattr(torch, options.dtype))
        targets = torch.randint(vocab, (rows,), device=device)
        targets[torch.rand(rows, device=device) < 0.06] = -100
        size = source.numel() * source.element_size() / 2**20
        print(f"\n{rows} x {vocab}, logits {size:.0f} MiB")
        print(f"{'':26}{'forward ms':>12}{'backward ms':>12}{'both ms':>10}{'kept MiB':>12}{'peak MiB':>12}")
        took = {}
        for name, function in found.items():
            try:
                check(name, function, source, targets, name in ("torch", "liger"))
                forward, backward, kept, peak = measure(function, source, targets, device, options.samples)
            except torch.OutOfMemoryError:
                print(f"{name:26}{'out of memory':>24}")
                continue
            memory = f"{kept / 2**20:12.3f}{peak / 2**20:12.3f}" if device == "cuda" else f"{'-':>12}{'-':>12}"
            print(f"{name:26}{forward:12.3f}{backward:12.3f}{forward + backward:10.3f}{memory}", flush=True)
            took[name] = forward + backward, peak / 2**20
            if device == "cuda":
                torch.cuda.empty_cache()
        compare(took, device)
        del source
    print(f"\n{'host, microseconds a call':26}{'forward':>12}{'backward':>12}")
    for name, function in found.items():
        forward, backward = host_us(function, device)
        print(f"{name:26}{forward:12.1f}{backward:12.1f}")


if __name__ == "__main__":
    main()
