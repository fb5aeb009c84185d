# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""libxent and the implementations that it is compared with, each as a way to run a work on a set of buffers.

A contestant has `name`, `strict` (held to the bars of the specification), `takes(case)`, `destroys(case)` (the logits
must be restored before each run), `prepare(case)` and `bind(case, slot)`; what bind gives has `run()`, `graph` (may be
captured), `before` (None, or what each run needs done first, untimed), `outputs()` to check, `spoil()` that makes them
wrong, and `forward()` and `backward(state)` that allocate all they keep, for the memory figures.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pathlib
import subprocess
import sys

import torch
from bench_cases import Case
from bench_check import IGNORE


class Slot:
    """One set of buffers. `grad` is there for works that write a gradient beside the logits."""

    def __init__(self, logits, targets, weights, grad=None) -> None:
        self.logits, self.targets, self.weights, self.grad = logits, targets, weights, grad


class Libxent:
    name, strict = "libxent", True

    def __init__(self, device) -> None:
        import libxent

        self.libxent, self.device = libxent, device
        self.plan = self.plan_of = None
        wanted = "cuda" if device.kind == "gpu" else "cpu"
        if wanted not in libxent.backends():
            try:
                libxent.Context().load_backend(wanted)
            except libxent.Error as error:
                raise SystemExit(f"bench: libxent has no {wanted} backend here: {error}") from None

    def version(self) -> str:
        return f"libxent {self.libxent.version()}"

    def takes(self, case: Case) -> bool:
        return True

    def destroys(self, case: Case) -> bool:
        return case.over

    def prepare(self, case: Case) -> None:
        pass

    def bind(self, case: Case, slot: Slot) -> LibxentRun:
        if self.plan_of != case:
            self.plan, self.plan_of = self._make_plan(case), case
        return LibxentRun(self.plan, case, slot)

    def _make_plan(self, case: Case):
        data = case.data
        return self.libxent.Plan(
            device=self.device.device,
            logits_dtype=data.dtype,
            max_rows=data.rows,
            vocab=data.vocab,
            ignore_index=IGNORE,
            label_smoothing=data.smoothing,
            z_loss=data.z_loss,
            softcap=data.softcap,
            overwrite_logits=case.over,
        )


class LibxentRun:
    before = None

    def __init__(self, plan, case: Case, slot: Slot) -> None:
        self.graph = plan.info.graph_capture
        self.plan, self.work, self.slot = plan, case.work.removesuffix("_over"), slot
        self.grad = slot.logits if case.over else slot.grad
        device = slot.logits.device
        self.loss, self.divisor = (torch.empty((), device=device) for _ in range(2))
        self.stats = torch.empty(case.data.rows, 2, device=device)
        self.given = {"row_weights": slot.weights}
        if self.work == "backward":
            self._forward()

    def _forward(self) -> None:
        slot = self.slot
        self.plan.forward(
            slot.logits, slot.targets, loss=self.loss, stats=self.stats, divisor=self.divisor, **self.given
        )

    def run(self) -> None:
        slot = self.slot
        if self.work == "forward":
            self._forward()
        elif self.work == "backward":
            self.plan.backward(slot.logits, slot.targets, self.stats, self.divisor, grad_logits=self.grad, **self.given)
        else:
            self.plan.loss_and_grad(
                slot.logits, slot.targets, loss=self.loss, divisor=self.divisor, grad_logits=self.grad, **self.given
            )

    def outputs(self) -> dict:
        if self.work == "forward":
            return {"loss": self.loss, "stats": self.stats}
        return {"grad": self.grad} if self.work == "backward" else {"grad": self.grad, "loss": self.loss}

    def spoil(self) -> None:
        """Makes the outputs wrong, so that a check after the timing sees what was written meanwhile."""
        for output in (self.loss if self.work != "backward" else None, self.slot.grad):
            if output is not None:
                output.fill_(float("nan"))

    def forward(self):
        if self.work == "loss_and_grad":
            return None
        return self.plan.forward(self.slot.logits, self.slot.targets, **self.given)

    def backward(self, state):
        slot = self.slot
        if state is None:
            return self.plan.loss_and_grad(slot.logits, slot.targets, **self.given)
        return self.plan.backward(slot.logits, slot.targets, state.stats, state.divisor, **self.given)


class Autograd:
    """A peer that is a differentiable loss. "loss_and_grad" is its forward and backward, one after the other."""

    strict = False
    destroys_forward = destroys_backward = False
    dtypes = ("bfloat16", "float16", "float32")
    options: tuple[str, ...] = ()
    package = "torch"

    def version(self) -> str:
        return f"{self.package} {importlib.metadata.version(self.package)}"

    def takes(self, case: Case) -> bool:
        data = case.data
        wanted = [name for name in ("smoothing", "z_loss", "softcap", "weights") if getattr(data, name)]
        if data.few or data.dtype not in self.dtypes or any(name not in self.options for name in wanted):
            return False
        return case.work == "forward" or case.over == (self.destroys_forward or self.destroys_backward)

    def destroys(self, case: Case) -> bool:
        return self.destroys_forward or (self.destroys_backward and case.work != "forward")

    def bind(self, case: Case, slot: Slot) -> AutogradRun:
        return AutogradRun(self, case, slot)

    def prepare(self, case: Case) -> None:
        pass

    def loss(self, case: Case, x, slot: Slot):
        raise NotImplementedError


class AutogradRun:
    graph = False  # some read results back, which no capture allows

    def __init__(self, peer: Autograd, case: Case, slot: Slot) -> None:
        self.peer, self.case, self.slot = peer, case, slot
        self.work = case.work.removesuffix("_over")
        self.before = self.start if self.work == "backward" else None
        self.value = self.grad = self.x = None

    def start(self) -> None:
        self.value = self.grad = None
        self.x = self.slot.logits.detach().requires_grad_()
        self.value = self.peer.loss(self.case, self.x, self.slot)

    def finish(self) -> None:
        (self.grad,) = torch.autograd.grad(self.value, self.x)

    def run(self) -> None:
        if self.work != "backward":
            self.start()
        if self.work != "forward":
            self.finish()

    def outputs(self) -> dict:
        if self.work == "backward":
            return {"grad": self.grad}
        return {"loss": self.value.detach()} | ({} if self.work == "forward" else {"grad": self.grad})

    def forward(self):
        self.start()

    def backward(self, state) -> None:
        self.finish()

    def spoil(self) -> None:
        self.value = self.grad = self.x = None


def torch_loss(x, targets, weights, smoothing: float, z_loss: float, softcap: float):
    z = x.float()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    plain = torch.nn.functional.cross_entropy
    if not z_loss and weights is None:
        return plain(z, targets, ignore_index=IGNORE, label_smoothing=smoothing)
    loss = plain(z, targets, ignore_index=IGNORE, label_smoothing=smoothing, reduction="none")
    counted = (targets != IGNORE).float()
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(z, 1) ** 2 * counted
    weights = counted if weights is None else weights * counted
    return (loss * weights).sum() / weights.sum()


class TorchEager(Autograd):
    name = "torch eager"
    options = ("smoothing", "z_loss", "softcap", "weights")

    def loss(self, case: Case, x, slot: Slot):
        data = case.data
        return torch_loss(x, slot.targets, slot.weights, data.smoothing, data.z_loss, data.softcap)


class TorchCompile(TorchEager):
    name = "torch.compile"

    def __init__(self) -> None:
        self.function = None

    def prepare(self, case: Case) -> None:
        torch._dynamo.reset()
        self.function = torch.compile(torch_loss, dynamic=False)

    def loss(self, case: Case, x, slot: Slot):
        data = case.data
        return self.function(x, slot.targets, slot.weights, data.smoothing, data.z_loss, data.softcap)


class Liger(Autograd):
    name, package = "liger", "liger-kernel"
    destroys_forward = True
    options = ("smoothing", "z_loss", "softcap")

    def __init__(self) -> None:
        self.function = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction

    def loss(self, case: Case, x, slot: Slot):
        data = case.data
        softcap = data.softcap or None
        result = self.function.apply(x, slot.targets, None, IGNORE, data.z_loss, data.smoothing, "mean", softcap)
        return result[0] if isinstance(result, tuple) else result


class Quack(Autograd):
    name, package = "quack", "quack-kernels"

    def __init__(self, inplace: bool) -> None:
        self.function = importlib.import_module("quack.cross_entropy").cross_entropy
        self.destroys_backward = inplace

    def takes(self, case: Case) -> bool:
        # Its forward is the same either way.
        return super().takes(case) and not (self.destroys_backward and case.work == "forward")

    def loss(self, case: Case, x, slot: Slot):
        return self.function(
            x, slot.targets, ignore_index=IGNORE, reduction="mean", inplace_backward=self.destroys_backward
        )


class QuackOnePass(Autograd):
    """Its forward that writes the gradient too, of the sum: the caller of a mean has to scale it."""

    name, package = "quack return_dx (of the sum)", "quack-kernels"

    def __init__(self) -> None:
        self.function = importlib.import_module("quack.cross_entropy").cross_entropy_fwd

    def takes(self, case: Case) -> bool:
        return case.work == "loss_and_grad" and super().takes(case)

    def bind(self, case: Case, slot: Slot) -> QuackOnePassRun:
        return QuackOnePassRun(self, case, slot)


class QuackOnePassRun(AutogradRun):
    def start(self) -> None:
        slot = self.slot
        losses, self.grad = self.peer.function(slot.logits, slot.targets, ignore_index=IGNORE, return_dx=True)
        self.value = losses.sum()

    def finish(self) -> None:
        pass

    def outputs(self) -> dict:
        count = (self.slot.targets != IGNORE).sum()
        return {"loss": self.value / count, "grad": self.grad, "divisor": count}


class TransformerEngine(Autograd):
    package = "transformer_engine"
    dtypes = ("bfloat16", "float32")
    options = ("smoothing",)

    def __init__(self, overwrite: bool) -> None:
        self.name = "transformer_engine" + (" (overwrite)" if overwrite else "")
        self.function = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
        has = "overwrite_input" in inspect.signature(self.function).parameters
        if overwrite and not has:
            raise ImportError("this version cannot overwrite its input")
        self.destroys_backward = overwrite
        self.extra = {"overwrite_input": overwrite} if has else {}

    def loss(self, case: Case, x, slot: Slot):
        # By position: in older releases it is the apply of an autograd.Function, which takes no keywords.
        losses = self.function(x[None], slot.targets[None], case.data.smoothing, False, None, IGNORE, **self.extra)
        return losses.sum() / (slot.targets != IGNORE).sum()


def install_wheels(folder: pathlib.Path, into: pathlib.Path) -> None:
    """Installs the wheels of a folder, without their dependencies, where only this program sees them."""
    wheels = sorted(str(path) for path in folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"bench: --peers {folder}: no .whl file there")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target"]
    done = subprocess.run([*command, str(into), *wheels], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bench: --peers {folder}: pip failed\n{done.stderr.strip()}")
    sys.path.insert(0, str(into))


def peers(kind: str, say) -> list:
    makers = [TorchEager]
    if kind == "gpu":
        makers += [
            TorchCompile,
            Liger,
            lambda: Quack(False),
            lambda: Quack(True),
            QuackOnePass,
            lambda: TransformerEngine(False),
            lambda: TransformerEngine(True),
        ]
    found = []
    for make in makers:
        try:
            peer = make()
            peer.version()
        except Exception as error:  # whatever a package does when it is imported
            say(f"left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        found.append(peer)
    return found
