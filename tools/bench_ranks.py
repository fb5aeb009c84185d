#!/usr/bin/env python3
# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Times a vocabulary split over the GPUs of this machine, joined by NCCL; a process a GPU.

    tools/bench_ranks.py [--ranks N] [--rows N] [--classes N] [--dtype bfloat16|float16|float32]

Prints microseconds, the slowest rank's: on the device (median over steps) of this rank's part, of the all-gather alone,
of a split forward and of its backward; on the host of a call of forward and of ncclAllGather alone; and of whole steps
through libxent.torch with a process group, one after the other as in training, host included.
"""

import argparse
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "python"))

import libxent
import libxent.torch
import nccl_ranks
import torch
import torch_ranks

STEPS = 60


def device_us(call, stream):
    """Median over the steps; each begins with a cold L2."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for step in range(STEPS):
        flush.zero_()
        torch.cuda.synchronize()
        torch.distributed.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Both ranks enqueue before either begins, so that no one waits for the other's host.
        torch.cuda._sleep(2_000_000)
        begin.record(stream)
        call()
        end.record(stream)
        torch.cuda.synchronize()
        if step >= STEPS // 4:
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def host_us(call):
    times = []
    for step in range(STEPS):
        torch.cuda.synchronize()
        torch.distributed.barrier()
        begin = time.perf_counter()
        call()
        elapsed = time.perf_counter() - begin
        if step >= STEPS // 4:
            times.append(elapsed * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def steps_us(call):
    """Mean over steps that follow each other without a wait."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(STEPS):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / STEPS


def through_torch(logits, targets, offsets):
    """Forward alone and with backward, through autograd, over an NCCL process group."""
    group = torch.distributed.new_group(backend="nccl")
    leaf = logits.detach().requires_grad_()

    def forward(**options):
        return libxent.torch.cross_entropy(leaf.view_as(leaf), targets, process_group=group, **options)

    def both(**options):
        leaf.grad = None
        forward(**options).backward()

    figures = {
        "torch: forward": steps_us(lambda: forward(class_offsets=offsets)),
        "torch: both": steps_us(lambda: both(class_offsets=offsets)),
        "torch: both, over the logits": steps_us(lambda: both(class_offsets=offsets, overwrite_logits=True)),
    }
    if len({stop - start for start, stop in zip(offsets, offsets[1:])}) == 1:
        figures["torch: forward, equal shards unsaid"] = steps_us(forward)
        figures["torch: both, equal shards unsaid"] = steps_us(both)
    return figures


def _rank(rank, ranks, rows, classes, dtype):
    torch.cuda.set_device(rank)
    stream = torch.cuda.current_stream()
    nccl = nccl_ranks.Nccl(rank, ranks)
    offsets = [classes * r // ranks for r in range(ranks + 1)]
    width = offsets[rank + 1] - offsets[rank]
    options = {
        "device": f"cuda:{rank}",
        "logits_dtype": dtype,
        "max_rows": rows,
        "vocab": width,
        "class_offsets": offsets,
        "rank": rank,
    }
    comm = libxent.Communicator.from_nccl(nccl.comm.value)
    plan, alone = libxent.Plan(**options, comm=comm), libxent.Plan(**options)
    logits = torch.randn(rows, width, device="cuda").to(getattr(torch, dtype))
    targets = torch.randint(0, classes, (rows,)).cuda()
    torch.distributed.broadcast(shared := targets.cpu(), 0)
    targets.copy_(shared)
    forward = plan.forward(logits, targets)
    grad = plan.backward(logits, targets, forward.stats, forward.divisor)
    partial = alone.forward_partial(logits, targets)
    gathered = torch.empty((ranks, *partial.shape), dtype=partial.dtype, device="cuda")

    def gather():
        nccl.all_gather(partial, gathered, stream.cuda_stream)

    def backward():
        plan.backward(logits, targets, forward.stats, forward.divisor, grad_logits=grad)

    figures = {
        "device: partial, this rank's columns": device_us(lambda: alone.forward_partial(logits, targets), stream),
        "device: all-gather alone": device_us(gather, stream),
        "device: split forward": device_us(lambda: plan.forward(logits, targets), stream),
        "device: backward": device_us(backward, stream),
        "host: split forward, from Python": host_us(lambda: plan.forward(logits, targets)),
        "host: partial, from Python": host_us(lambda: alone.forward_partial(logits, targets)),
        "host: ncclAllGather, from Python": host_us(gather),
    }
    figures |= through_torch(logits, targets, offsets)
    mine = torch.tensor(list(figures.values()), dtype=torch.float64)
    torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        print(f"{rows} x {classes} {dtype} over {ranks} ranks, {partial.shape[1] * 4} bytes a row gathered")
        for name, us in zip(figures, mine.tolist()):
            print(f"  {name:40} {us:9.1f} us")
    plan.close()
    alone.close()
    del comm
    nccl.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=128256)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    if not 2 <= options.ranks <= torch.cuda.device_count():
        print(f"bench_ranks: needs 2 GPUs or more; there are {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    torch_ranks.run(_rank, options.ranks, options.rows, options.classes, options.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
