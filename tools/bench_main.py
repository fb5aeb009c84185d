# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Measures libxent, and peers where they are installed, against what this machine's memory gives. See --help."""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import shlex
import signal
import sys
import time
from itertools import groupby

import bench_cases as cases_of
import bench_report as report
from bench_cases import ALIASES, BYTES, FEW_CALLS, GROUPS, WORKS, Case, Data

DESCRIPTION = """\
Times libxent on cold, random inputs and prints each line beside the limit of this machine, which is measured in the
same run: bytes that any method must move over the bandwidth of plain code that does nothing else (forward: read;
backward and loss_and_grad: copy; over the logits: in place). Every timed result is checked against float64; a wrong one
is shown as WRONG and not timed. `spread` is the 90th less the 10th percentile.
"""
EPILOG = """\
works: forward backward backward_over loss_and_grad loss_and_grad_over, where _over writes the gradient over the logits;
groups of them: host (time of one call), few (1 to 128 rows), ignored (60 % of the rows), small (vocabularies), options,
sweep (of vocabularies).
Peers: torch, and on GPUs liger-kernel, quack-kernels and transformer_engine where they can be imported: install them
beside torch (tools/requirements/peers.txt), or give a folder of wheels, made on a machine with a package index by
  pip download --no-deps -r tools/requirements/peers.txt -d .deps/peers --only-binary=:all: --python-version X.Y
with the X.Y of the Python that runs the benchmark. A folder .deps/peers is found by itself.
"""


LIMIT_SAMPLES = 7  # of a limit beside a line


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/bench", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=("gpu", "cpu"))
    parser.add_argument("--quick", action="store_true", help="two shapes, one type, without peers; under a minute")
    parser.add_argument("--works", nargs="+", choices=WORKS + GROUPS, metavar="WORK", help="works and groups")
    parser.add_argument("--dtypes", nargs="+", metavar="TYPE", help="bfloat16 float16 float32 (or bf16 fp16 fp32)")
    parser.add_argument("--shapes", metavar="NxV,...", help="rows x vocabulary, such as 4096x128256,8192x32000")
    parser.add_argument("--no-peers", action="store_true", help="libxent alone")
    parser.add_argument(
        "--peers", metavar="DIR", help="a folder of wheels of peers; default: .deps/peers if it is there"
    )
    parser.add_argument("--json", metavar="FILE", help="writes a list of records")
    parser.add_argument("--plot", metavar="FILE", help="draws time and memory against vocabulary (matplotlib)")
    parser.add_argument("--seconds", type=float, metavar="LIMIT", help="starts no further measurement after that long")
    args = parser.parse_args(argv)
    if args.dtypes:
        args.dtypes = [ALIASES.get(name, name) for text in args.dtypes for name in text.split(",")]
        for name in args.dtypes:
            if name not in BYTES:
                parser.error(f"--dtypes: unknown type {name}")
    if args.shapes:
        try:
            args.shapes = [tuple(int(n) for n in text.split("x")) for text in args.shapes.split(",")]
            if any(len(shape) != 2 or min(shape) < 1 for shape in args.shapes):
                raise ValueError
        except ValueError:
            parser.error("--shapes: expected NxV,..., such as 4096x128256")
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path and not pathlib.Path(path).resolve().parent.is_dir():
            parser.error(f"--{name} {path}: no such folder")
    if args.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib")
    return args


class Bench:
    def __init__(self, args: argparse.Namespace, device, limits: dict, environment: str) -> None:
        self.args, self.device, self.limits, self.environment = args, device, limits, environment
        self.records: list[dict] = []
        self.times: dict[tuple[str, str, Data], float] = {}

    def measure(self, who, case: Case, inputs, reference) -> dict:
        """A record of one contestant at one work; raises where it cannot run."""
        import torch
        from bench_who import Slot

        device, data = self.device, case.data
        logits, targets, weights = inputs
        own = who.name == "libxent" and case.work in ("backward", "loss_and_grad")
        destroys = who.destroys(case)
        at_least = FEW_CALLS if data.few else 2 if who.name != "libxent" or not destroys else 8
        # A peer's float32 copies and saved probabilities: up to five times the bytes of half-precision logits.
        held = (2 if own else 1) if who.name == "libxent" else 8
        count = device.slots(data.logits_bytes, at_least, held)
        if data.few and count < FEW_CALLS:
            raise MemoryError(f"{FEW_CALLS} sets of buffers do not fit in device memory")
        if who.name != "libxent":
            count = min(count, 4)
        # Gradients are written once before, as the buffers of the limits are: no new page is timed.
        slots = [
            Slot(logits.clone(), targets, weights, torch.full_like(logits, float("nan")) if own else None)
            for _ in range(count)
        ]
        bound = [who.bind(case, slot) for slot in slots]

        def before(index: int) -> None:
            if destroys:
                slots[index].logits.copy_(logits)
            if bound[index].before is not None:
                bound[index].before()

        prepares = destroys or bound[0].before is not None
        before(0)
        bound[0].run()
        device.synchronize()
        wrong = reference.check(**bound[0].outputs(), strict=who.strict)
        if wrong:
            return {"wrong": wrong}
        memory = {}
        if device.kind == "gpu" and case.work != "forward" and not data.few:
            bound[0].spoil()
            slots[0].logits.copy_(logits)
            kept, peak = device.memory(bound[0].forward, bound[0].backward)
            memory = {"kept_bytes": kept, "peak_bytes": peak}
        last = bound[min(count, device.samples + device.warm) - 1]
        last.spoil()
        timing = device.measure([run.run for run in bound], before if prepares else None, graph=last.graph)
        wrong = reference.check(**last.outputs(), strict=who.strict)
        if wrong:
            return {"wrong": f"after the timing: {wrong}"}
        return {
            "ms": timing.ms,
            "spread_ms": timing.spread_ms,
            "samples": timing.samples,
            "graph": timing.graph,
            **memory,
        }

    def record(self, who, case: Case, inputs, reference, ignored: int) -> dict:
        data, moved = case.data, case.bytes(ignored)
        limit = self.limits[case.limit]
        # A CPU is shared with other programs: its limit is taken again beside each line.
        beside = self.device.kind == "cpu" and who.name == "libxent"
        rates = [limit.again(LIMIT_SAMPLES)] if beside else [limit.rate]
        limit_ms = moved / rates[0] * 1e3
        record = {
            "work": case.work, "dtype": data.dtype, "rows": data.rows, "vocab": data.vocab, "options": data.options,
            "who": who.name, "ms": None, "spread_ms": None, "limit_ms": limit_ms, "ratio": None, "bar": None,
            "met": None, "correct": None, "bytes": moved, "limit": case.limit,
        }  # fmt: skip
        try:
            record.update(self.measure(who, case, inputs, reference))
        except Exception as error:  # a peer may raise anything; the others still run
            record["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        record["correct"] = None if "error" in record else "wrong" not in record
        if beside:
            rates.append(limit.again(LIMIT_SAMPLES))
            record["limit_ms"] = moved / (sum(rates) / len(rates)) * 1e3
        if record["ms"] is not None:
            record["ratio"] = record["limit_ms"] / record["ms"]
            self.times[who.name, case.work, data] = record["ms"]
        record["environment"] = self.environment
        return record

    def judge(self, record: dict, case: Case) -> None:
        """Bar and met of a line of libxent, once all others on the same case are measured."""
        limit_ms, ms, data = record["limit_ms"], record["ms"], case.data
        bar = (cases_of.gpu_bar if self.device.kind == "gpu" else cases_of.cpu_bar)(case, limit_ms)
        if self.device.kind == "gpu" and data.ignored > 0.06 and case.work == "forward":
            full = self.times.get(("libxent", case.work, Data(**{**vars(data), "ignored": 0.0})))
            bar = cases_of.Bar("1.9x of none ignored", full / 1.9) if full else None
        if bar is None:
            return
        record["bar"], record["bar_ms"] = bar.text, bar.ms
        if ms is None:
            record["met"] = False
            return
        reasons = [ms <= bar.ms]
        if self.device.kind == "cpu":
            work = cases_of.UNDER.get(case.work, case.work)
            torch_ms = self.times.get(("torch eager", work, data))
            if torch_ms is None:
                record["bar"] = bar.text.split(",")[0]
            else:
                record["speedup"] = torch_ms / ms
                reasons.append(record["speedup"] >= cases_of.CPU_SPEEDUP)
        record["met"] = all(reasons)

    def host(self, who) -> None:
        import bench_host

        try:
            lines = bench_host.measure(self.device, who, self.environment)
        except Exception as error:  # the rest still runs
            say(f"host: {type(error).__name__}: {error}")
            return
        for line in lines:
            report.line(line)
        self.records += lines

    def run(self, cases: list[Case], contestants: list) -> None:
        import bench_check

        started, done = time.monotonic(), 0
        for data, group in groupby(cases, key=lambda case: case.data):
            group = list(group)
            if self.args.seconds and time.monotonic() - started > self.args.seconds:
                say(f"--seconds {self.args.seconds:g}: left out {len(cases) - done} of {len(cases)} lines of libxent")
                break
            try:
                inputs = bench_check.make_inputs(data, self.device.device)
                reference = bench_check.Reference(data, *inputs)
            except Exception as error:  # memory, most likely
                say(f"{data.rows}x{data.vocab} {data.dtype}: {type(error).__name__}: {str(error).splitlines()[0]}")
                done += len(group)
                continue
            ignored = data.rows - int(reference.counted.sum())
            for who in contestants:
                who.prepare(group[0])
            for case in group:
                done += 1
                lines = []
                for who in contestants:
                    if not who.takes(case):
                        continue
                    report.progress(
                        f"[{done}/{len(cases)}] {case.work} {data.dtype} {data.rows}x{data.vocab} {who.name}"
                    )
                    lines.append(self.record(who, case, inputs, reference, ignored))
                    self.device.release()
                self.judge(lines[0], case)
                for line in lines:
                    report.line(line)
                self.records += lines
            del inputs, reference
            self.device.release()


def main(argv: list[str]) -> int:
    args = parse(argv)
    started = time.monotonic()
    try:
        import torch
    except ImportError:
        raise SystemExit("bench: needs PyTorch in the Python in use") from None
    root = pathlib.Path(__file__).resolve().parent.parent
    wheels = pathlib.Path(args.peers) if args.peers else root / ".deps" / "peers"
    if (args.peers or wheels.is_dir()) and args.device == "gpu" and not (args.no_peers or args.quick):
        from bench_who import install_wheels

        install_wheels(wheels, root / "build" / "bench-wheels")
    from bench_who import Libxent, peers

    if args.device == "gpu":
        from bench_gpu import Gpu as Device
    else:
        from bench_cpu import Cpu as Device
    device = Device(args.quick)
    contestants = [Libxent(device)]
    if not (args.no_peers or args.quick):
        contestants += peers(args.device, say)
    versions = dict.fromkeys([contestants[0].version(), f"torch {torch.__version__}"])
    versions.update(dict.fromkeys(who.version() for who in contestants[1:] if not who.version().startswith("torch ")))
    date = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    command = shlex.join(["tools/bench", *argv])
    environment = f"{device.chip()}; {', '.join(versions)}; {date}; {command}"
    print(environment, flush=True)

    if device.notes():
        say(device.notes())
    limits = device.limits(say)
    rates = ", ".join(f"{kind} {limit.rate / 1e9:.1f} GB/s ({limit.way})" for kind, limit in limits.items())
    print(f"limits: {rates}", flush=True)
    bench = Bench(args, device, limits, environment)
    selected = cases_of.select(args.device, args.quick, args.works, args.dtypes, args.shapes)
    report.head()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit of the caller's, too, keeps what there is
    try:
        if cases_of.wants_host(args.device, args.works, args.shapes):
            bench.host(contestants[0])
        bench.run(selected, contestants)
    except KeyboardInterrupt:
        say("interrupted; what was measured is kept")
    report.summary(bench.records)
    for kind, limit in limits.items():
        rate = limit.again()
        if abs(rate / limit.rate - 1) > 0.05:
            say(f"the {kind} limit was {limit.rate / 1e9:.1f} GB/s before and {rate / 1e9:.1f} GB/s after the run")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(bench.records, file, indent=1)
            file.write("\n")
    if args.plot:
        from bench_plot import draw

        draw(bench.records, environment, args.plot)
    say(f"{time.monotonic() - started:.0f} s")
    return report.status(bench.records)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
