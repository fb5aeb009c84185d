#!/usr/bin/env python3
# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the same transformer (torch.nn.TransformerEncoder, causal, tied embedding) from the same weights on the same
batches of real text with each loss, every one in a process of its own, and compares loss curves, time and memory.
Run through tools/train."""

import argparse
import json
import math
import pathlib
import resource
import statistics
import subprocess
import sys
import time

import demo_text
import numpy as np
import torch
import torch.nn.functional as F

LOSSES = {
    "torch": "torch",
    "libxent": "libxent",
    "overwrite": "libxent, over the logits",
}
#        layers, width, heads, context, batch, steps, logits' type
SIZES = {
    "cpu": (2, 96, 4, 64, 12, 60, torch.float32),
    "cuda": (8, 768, 12, 512, 32, 400, torch.bfloat16),
}
RATE, WARM_UP = 2e-3, 10


class Model(torch.nn.Module):
    def __init__(self, layers, width, heads, context):
        super().__init__()
        self.embedding = torch.nn.Embedding(demo_text.VOCAB, width)
        self.position = torch.nn.Parameter(torch.empty(context, width))
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        torch.nn.init.normal_(self.position, std=0.02)
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        norm = torch.nn.LayerNorm(width)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens):
        hidden = self.encoder(self.embedding(tokens) + self.position, mask=self.mask, is_causal=True)
        return hidden @ self.embedding.weight.T


def choose_loss(name):
    if name == "torch":
        # What models do: 16-bit logits are copied to float32 first.
        return lambda logits, targets: F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    import libxent.torch

    return libxent.torch.CrossEntropyLoss(overwrite_logits=name == "overwrite")


def load_tokens(folder):
    try:
        return demo_text.load(folder)
    except ImportError:  # no tokenizers here: what an earlier run left
        found = sorted(folder.glob("tokens-*.npz"))
        if not found:
            raise
        with np.load(found[-1]) as saved:
            return f"{found[-1].name}, made earlier", saved["train"], saved["held"]


def batches(tokens, context, batch, count, seed, device):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        place = rng.integers(0, len(tokens) - context - 1, batch)
        window = torch.from_numpy(tokens[place[:, None] + np.arange(context + 1)].astype(np.int64)).to(device)
        yield window[:, :-1], window[:, 1:]


def run(name, device, steps, folder):
    """Trains with one loss; prints what it measured as JSON."""
    layers, width, heads, context, batch, _, dtype = SIZES[device]
    _, train, held = load_tokens(folder)
    torch.manual_seed(1)
    model = Model(layers, width, heads, context).to(device)
    loss_function = choose_loss(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def logits_of(tokens):
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            return model(tokens)

    losses, seconds = [], []
    for step, (tokens, targets) in enumerate(batches(train, context, batch, steps, 2, device)):
        rate = RATE * min(1, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        wait()
        start = time.perf_counter()
        loss = loss_function(logits_of(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wait()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        print(f"{step + 1}/{steps} {losses[-1]:.4f}", file=sys.stderr, flush=True)
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    with torch.no_grad():
        held_loss = statistics.mean(
            F.cross_entropy(logits_of(tokens).float().flatten(0, 1), targets.flatten()).item()
            for tokens, targets in batches(held, context, batch, 4, 3, device)
        )
        logits = logits_of(tokens).detach()
    alone = []
    for _ in range(12):
        leaf = logits.clone().requires_grad_()
        wait()
        start = time.perf_counter()
        loss_function(leaf, targets).backward()
        wait()
        alone.append(time.perf_counter() - start)
    result = {
        "losses": losses,
        "held": held_loss,
        "step": statistics.median(seconds[min(5, steps // 2) :]),
        "loss": statistics.median(alone[2:]),
        "peak": peak,
        "parameters": sum(p.numel() for p in model.parameters()),
        "logits": [list(logits.shape), str(logits.dtype).rpartition(".")[2], logits.numel() * logits.element_size()],
    }
    print(json.dumps(result))


def child(name, device, steps):
    command = [sys.executable, __file__, "--child", name, "--device", device, "--steps", str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        tail = []
        for line in process.stderr:
            tail = [*tail[-30:], line]
            step = line.split("/")[0]
            if step.isdigit() and (sys.stderr.isatty() or int(step) % max(steps // 4, 1) == 0):
                end = "\r" if sys.stderr.isatty() else "\n"
                print(f"{LOSSES[name]}: step {line.strip()}   ", end=end, file=sys.stderr, flush=True)
        output = process.stdout.read()
    if process.returncode:
        raise SystemExit("".join(tail) + f"train: {name} failed")
    return json.loads(output)


def report(results, steps):
    gaps = {name: np.abs(np.array(r["losses"]) - results["torch"]["losses"]).max() for name, r in results.items()}
    names = list(results)
    print(f"\n{'':30}" + "".join(f"{LOSSES[name]:>27}" for name in names))
    for step in sorted({round(i) for i in np.linspace(0, steps - 1, 6)}):
        print(
            f"{f'training loss, step {step}':30}" + "".join(f"{results[name]['losses'][step]:27.5f}" for name in names)
        )
    for label, cell in (
        ("held-out loss, after", lambda name: f"{results[name]['held']:.4f}"),
        ("largest gap to torch's curve", lambda name: "" if name == "torch" else f"{gaps[name]:.1e}"),
        ("whole step, ms (median)", lambda name: f"{1e3 * results[name]['step']:.1f}"),
        ("loss and gradient alone, ms", lambda name: f"{1e3 * results[name]['loss']:.2f}"),
        ("peak memory, MiB", lambda name: f"{results[name]['peak'] / 2**20:.0f}"),
    ):
        print(f"{label:30}" + "".join(f"{cell(name):>27}" for name in names))
    return gaps


def plot(path, results, title):
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams["axes.titlelocation"] = "left"
    colors = {"torch": "#e8871e", "libxent": "#1f5fa8", "overwrite": "#5aa469"}
    figure, axes = plt.subplot_mosaic(
        [["curve", "step"], ["curve", "loss"], ["curve", "peak"]],
        figsize=(12, 5),
        width_ratios=[1.7, 1],
        layout="constrained",
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    for (name, result), line in zip(results.items(), (6, 2.5, 1)):
        axes["curve"].plot(result["losses"], color=colors[name], linewidth=line, alpha=0.8, label=LOSSES[name])
    axes["curve"].set(title="Training loss, nats a token", xlabel="step")
    axes["curve"].legend(frameon=False)
    for key, heading, scale, unit in (
        ("step", "Whole step", 1e3, "ms"),
        ("loss", "Loss and its gradient alone", 1e3, "ms"),
        ("peak", "Peak memory", 2**-20, "MiB"),
    ):
        bars, values = axes[key], [result[key] * scale for result in results.values()]
        bars.barh([LOSSES[name] for name in results], values, color=[colors[name] for name in results], height=0.6)
        bars.invert_yaxis()
        bars.set(title=heading, xlim=(0, max(values) * 1.3), xticks=[])
        bars.spines["bottom"].set_visible(False)
        bars.tick_params(left=False)
        for index, value in enumerate(values):
            bars.annotate(
                f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}",
                (value, index),
                (4, 0),
                textcoords="offset points",
                va="center",
            )
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main():
    parser = argparse.ArgumentParser(prog="tools/train", description=__doc__)
    parser.add_argument("--steps", type=int, help="training steps (default: 60 on the CPU, 400 on a GPU)")
    parser.add_argument("--device", choices=list(SIZES), help="default: cuda where PyTorch sees one")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the plot (default: build/demo)")
    parser.add_argument("--child", choices=list(LOSSES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    steps = max(options.steps or SIZES[device][5], 2)
    folder = pathlib.Path(__file__).resolve().parent.parent / "build" / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    out = options.out or folder
    out.mkdir(parents=True, exist_ok=True)
    if options.child:
        run(options.child, device, steps, folder)
        return

    text, train, held = load_tokens(folder)
    print(f"text: {text}\ntokens: {len(train):,} to train on, {len(held):,} held out, vocabulary {demo_text.VOCAB}")
    layers, width, heads, context, batch, _, _ = SIZES[device]
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"model: {layers} layers, width {width}, {heads} heads, {context} tokens x {batch} a step, on {where}")
    results = {name: child(name, device, steps) for name in LOSSES}
    shape, dtype, size = results["torch"]["logits"]
    print(
        f"\n{results['torch']['parameters'] / 1e6:.1f} M parameters; logits {shape} {dtype}, {size / 2**20:.0f} MiB; "
        f"peak memory is {'the allocator of PyTorch' if device == 'cuda' else 'the resident set of the process'}"
    )
    gaps = report(results, steps)
    title = f"{results['torch']['parameters'] / 1e6:.1f} M parameters, logits {shape} {dtype}, {where}"
    plot(out / "train.png", results, title)
    losses = results["libxent"]["losses"]
    if not math.isfinite(max(gaps.values())) or losses[-1] >= losses[0]:
        raise SystemExit("train: the loss did not fall")


if __name__ == "__main__":
    main()
