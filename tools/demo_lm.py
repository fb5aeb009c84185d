#!/usr/bin/env python3
# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Trains one small language model twice on the same batches, once with its loss and gradient from libxent and once
from float64 written out plainly, and shows both side by side. Run through tools/demo."""

import argparse
import math
import pathlib
import sys
import time

import demo_model
import demo_text
import libxent
import numpy as np

CONTEXT, WIDTH, HIDDEN, BATCH = 4, 64, 192, 256
RATE, WARM_UP = 0.01, 20
HELD_OUT_POINTS = 16  # closer at the start, where the loss falls fastest


class Xent:
    """Loss and gradient from libxent: two numbers a row are kept, and the gradient goes over the logits."""

    name = "libxent"

    def __init__(self, ops):
        self.plan = libxent.Plan(
            device=ops.device, max_rows=BATCH, vocab=demo_text.VOCAB, overwrite_logits=True, reduction="mean"
        )

    def loss(self, logits, targets):
        self.logits, self.targets = logits, targets
        self.saved = self.plan.forward(logits, targets)
        self.kept = self.saved.stats.nbytes + self.saved.divisor.nbytes
        return float(self.saved.loss)

    def grad(self):
        return self.plan.backward(self.logits, self.targets, self.saved.stats, self.saved.divisor)


class Plain:
    """The same in float64; the probabilities are kept for the gradient."""

    name = "float64"

    def __init__(self, ops):
        self.ops = ops

    def loss(self, logits, targets):
        self.targets = targets
        loss, self.p = self.ops.plain_loss(logits, targets)
        self.kept = self.p.nbytes
        return loss

    def grad(self):
        grad = self.ops.plain_grad(self.p, self.targets)
        self.p = None
        return grad


class Run:
    def __init__(self, ops, loss):
        self.ops, self.loss = ops, loss(ops)
        self.model = demo_model.Model(ops, demo_text.VOCAB, CONTEXT, WIDTH, HIDDEN, BATCH, seed=1)
        self.losses, self.held, self.loss_seconds, self.step_seconds = [], [], [], []
        self.name = self.loss.name

    def train(self, context, targets, rate):
        clock, wait = time.perf_counter, self.ops.wait
        wait()
        start = clock()
        logits = self.model.forward(context)
        wait()
        before = clock()
        self.losses.append(self.loss.loss(logits, targets))
        grad = self.loss.grad()
        wait()
        after = clock()
        self.model.backward(grad, rate)
        wait()
        self.loss_seconds.append(after - before)
        self.step_seconds.append(clock() - start)

    def evaluate(self, batches):
        total = sum(self.loss.loss(self.model.forward(context), targets) for context, targets in batches)
        self.held.append(total / len(batches))


def batches(ops, tokens, rng, count):
    """Random places of the text: the tokens before them and the token there."""
    for _ in range(count):
        place = rng.integers(CONTEXT, len(tokens), BATCH)
        yield ops.array(tokens[place[:, None] + np.arange(-CONTEXT, 0)]), ops.array(tokens[place].astype(np.int64))


def progress(step, steps, run, start):
    width = 32
    done = width * step // steps
    left = (time.perf_counter() - start) / max(step, 1) * (steps - step)
    bar = "#" * done + "." * (width - done)
    line = f"[{bar}] step {step}/{steps}  held-out loss {run.held[-1]:.3f}  {left:3.0f} s left"
    if sys.stderr.isatty():
        print("\r" + line, end="\n" if step == steps else "", file=sys.stderr, flush=True)
    elif step % max(steps // 10, 1) == 0:
        print(line, file=sys.stderr, flush=True)


def loss_ms(run):
    return 1e3 * np.median(run.loss_seconds)


def size(count):
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def report(runs, held_at, steps):
    xent, plain = runs
    gap = np.abs(np.array(xent.losses) - np.array(plain.losses))
    print("\nstep    training loss               held-out loss")
    print("        libxent      float64        libxent      float64")
    shown = sorted({held_at[round(i)] for i in np.linspace(0, len(held_at) - 1, 11)})
    for step in shown:
        index, at = held_at.index(step), min(step, steps - 1)
        trained = "  ".join(f"{run.losses[at]:.8f}" for run in runs)
        held = "  ".join(f"{run.held[index]:.8f}" for run in runs)
        print(f"{step:5d}   {trained:26}  {held}")
    rows = [
        ("largest difference of the training losses", f"{gap.max():.2e} at step {gap.argmax()}", ""),
        ("kept between forward and backward", size(xent.loss.kept), size(plain.loss.kept)),
        ("loss and gradient, ms a step (median)", *(f"{loss_ms(run):.1f}" for run in runs)),
        ("whole step, ms (median)", *(f"{1e3 * np.median(run.step_seconds):.1f}" for run in runs)),
    ]
    print(f"\n{'':44}{'libxent':>12}{'float64':>12}")
    for label, left, right in rows:
        print(f"{label:44}{left:>12}{right:>12}" if right else f"{label:44}{left:>24}")
    print("libxent reads the logits again and writes the gradient over them; float64 needs a new array for it.")
    return gap


def plot(path, runs, held_at, gap, title):
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    xent, plain = runs
    plt.rcParams.update(
        {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
    )
    blue, orange = "#1f5fa8", "#e8871e"
    figure, axes = plt.subplot_mosaic(
        [["curve", "gap", "kept"], ["curve", "gap", "time"]],
        figsize=(13, 4.8),
        width_ratios=[2.1, 1.5, 1.1],
        layout="constrained",
    )
    figure.get_layout_engine().set(w_pad=0.12)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    note = {"textcoords": "offset points", "color": "0.4", "fontsize": 9}

    curve, steps = axes["curve"], np.arange(len(xent.losses))
    curve.plot(steps, plain.losses, color=orange, alpha=0.35, linewidth=3)
    curve.plot(steps, xent.losses, color=blue, alpha=0.8, linewidth=0.7)
    curve.plot(held_at, plain.held, color=orange, linewidth=6, alpha=0.6, label="float64, held-out")
    curve.plot(held_at, xent.held, color=blue, linewidth=1.8, marker=".", label="libxent, held-out")
    uniform = math.log(demo_text.VOCAB)
    curve.axhline(uniform, color="0.6", linewidth=0.8, linestyle=":")
    curve.annotate(f"ln {demo_text.VOCAB}: a uniform guess", (len(steps), uniform), (0, 4), ha="right", **note)
    curve.annotate(f"{xent.held[-1]:.2f}", (held_at[-1], xent.held[-1]), (5, -3), **{**note, "color": blue})
    curve.set(title="Loss in nats (thin: each training batch)", xlabel="step", ylim=(None, 10.9))
    curve.legend(frameon=False, loc="center right")

    difference = axes["gap"]
    difference.semilogy(steps, np.maximum(gap, 1e-9), ".", color=blue, markersize=4)
    difference.axhline(gap.max(), color="0.6", linewidth=0.8, linestyle=":")
    difference.annotate(f"largest: {gap.max():.1e}", (0, gap.max()), (0, 4), **note)
    difference.set(title="Training loss, |libxent - float64|", xlabel="step", ylim=(None, gap.max() * 2))

    for name, heading, values, labels in (
        ("kept", "Kept for backward", *zip(*((r.loss.kept, size(r.loss.kept)) for r in runs))),
        ("time", "Loss and gradient, a step", *zip(*((ms, f"{ms:.0f} ms") for ms in map(loss_ms, runs)))),
    ):
        bars = axes[name]
        bars.barh([run.name for run in runs], values, color=[blue, orange], height=0.6)
        bars.invert_yaxis()
        bars.set(title=heading, xlim=(0, max(values) * 1.35), xticks=[])
        bars.spines["bottom"].set_visible(False)
        bars.tick_params(left=False)
        for index, (value, label) in enumerate(zip(values, labels)):
            bars.annotate(label, (value, index), (4, 0), textcoords="offset points", va="center")
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main():
    parser = argparse.ArgumentParser(prog="tools/demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument("--quick", action="store_true", help="30 steps")
    options = parser.parse_args()
    steps = 30 if options.quick else max(options.steps, 1)
    root = pathlib.Path(__file__).resolve().parent.parent
    folder = root / "build" / "demo"
    folder.mkdir(parents=True, exist_ok=True)

    ops = demo_model.choose_ops()
    print(f"libxent {libxent.version()}, backends {' '.join(libxent.backends())}; model on {ops.name}, {ops.device}")
    began = time.perf_counter()
    text, train, held = demo_text.load(folder)
    print(f"text: {text}")
    print(
        f"tokens: {len(train):,} to train on and {len(held):,} held out, BPE vocabulary {demo_text.VOCAB} "
        f"({time.perf_counter() - began:.1f} s)"
    )

    runs = [Run(ops, Xent), Run(ops, Plain)]
    parameters = sum(math.prod(value.shape) for value in runs[0].model.parameters.values())
    print(f"model: {CONTEXT} tokens of context, {parameters / 1e6:.1f} M parameters, {BATCH} rows a step, Adam\n")
    held_batches = list(batches(ops, held, np.random.default_rng(3), 2))
    evaluate_at = {round(steps * (point / HELD_OUT_POINTS) ** 1.7) for point in range(HELD_OUT_POINTS)}
    held_at, start = [], time.perf_counter()
    for step, (context, targets) in enumerate(batches(ops, train, np.random.default_rng(2), steps)):
        if step in evaluate_at:
            held_at.append(step)
            for run in runs:
                run.evaluate(held_batches)
        progress(step, steps, runs[0], start)
        rate = RATE * min(1, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for run in runs:
            run.train(context, targets, rate)
    held_at.append(steps)
    for run in runs:
        run.evaluate(held_batches)
    progress(steps, steps, runs[0], start)

    gap = report(runs, held_at, steps)
    print(f"held-out loss: {runs[0].held[0]:.3f} before, {runs[0].held[-1]:.3f} after {steps} steps")
    title = (
        f"{parameters / 1e6:.1f} M parameters, vocabulary {demo_text.VOCAB}, {BATCH} rows a step, {ops.device.upper()}"
    )
    plot(folder / "demo.png", runs, held_at, gap, title)
    if not np.isfinite(gap).all() or runs[0].held[-1] >= runs[0].held[0]:
        raise SystemExit("demo: the loss did not fall")


if __name__ == "__main__":
    main()
