# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The definition of the loss in float64, and how far from it a result may be.

Loss and log-sum-exp are checked on all rows, the gradient on as many rows as fit SAMPLE elements.
"""

from __future__ import annotations

import math

import torch
from bench_cases import Data

IGNORE = -100
SAMPLE = {"cuda": 8 << 20, "cpu": 2 << 20}  # elements
MANTISSA = {torch.float32: (23, -126), torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float64: (52, -1022)}


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bits, lowest = MANTISSA[dtype]
    exponent = torch.frexp(value.abs())[1] - 1
    exponent = torch.where(value == 0, lowest, exponent).clamp(min=lowest)
    return torch.pow(2.0, (exponent - bits).double())


class Reference:
    def __init__(self, data: Data, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> None:
        self.data = data
        counted = targets != IGNORE
        self.counted = counted
        weight = torch.where(counted, torch.ones_like(targets, dtype=torch.float64), 0.0)
        if weights is not None:
            weight = torch.where(counted, weights.double(), 0.0)
        self.divisor = weight.sum().item()
        self.lse = torch.zeros_like(weight)
        losses = torch.zeros_like(weight)
        step = max(1, (64 << 20 if logits.is_cuda else 4 << 20) // data.vocab)
        for first in range(0, data.rows, step):
            rows = slice(first, first + step)
            self.lse[rows], losses[rows] = self._rows(logits[rows], targets[rows])
        self.lse = torch.where(counted, self.lse, 0.0)
        self.loss = (torch.where(counted, losses, 0.0) * weight).sum().item() / self.divisor if self.divisor else 0.0
        self.extra = 2.5e-7 * data.softcap

        count = min(data.rows, max(4, SAMPLE[logits.device.type] // data.vocab))
        picks = torch.randperm(data.rows, generator=torch.Generator().manual_seed(1))[:count]
        picks = torch.cat([picks, torch.tensor([0, data.rows - 1])])
        if not counted.all():
            picks = torch.cat([picks, torch.nonzero(~counted)[0].cpu()])
        self.picks = picks.unique().to(logits.device)
        self.gradient, self.bar = self._gradient(logits, targets, weight)

    def _z(self, logits: torch.Tensor) -> torch.Tensor:
        x = logits.double()
        cap = self.data.softcap
        return x if not cap else cap * torch.tanh(x / cap)

    def _rows(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        data, z = self.data, self._z(logits)
        top = z.amax(1)
        shifted = z.sub_(top[:, None])
        target = shifted.gather(1, targets.clamp(min=0)[:, None])[:, 0]
        mean = shifted.mean(1) if data.smoothing else torch.zeros_like(top)
        log_sum = shifted.exp_().sum(1).log()
        lse = top + log_sum
        loss = (1 - data.smoothing) * (log_sum - target) + data.smoothing * (log_sum - mean) + data.z_loss * lse**2
        return lse, loss

    def _gradient(self, logits, targets, weight) -> tuple[torch.Tensor, torch.Tensor]:
        data, picks = self.data, self.picks
        x, lse = logits[picks], self.lse[picks]
        z = self._z(x)
        # exp(z - lse) in float64 is exact enough here: lse has 15 digits.
        scaled = torch.exp(z - lse[:, None]) * (1 + 2 * data.z_loss * lse)[:, None]
        below = z.amax(1, keepdim=True) - z
        hot = torch.zeros_like(z)
        hot.scatter_(1, targets[picks].clamp(min=0)[:, None], 1 - data.smoothing)
        uniform = data.smoothing / data.vocab
        factor = (weight[picks] / self.divisor if self.divisor else 0 * weight[picks])[:, None]
        slope, extra = 1.0, 0.0
        if data.softcap:
            argument = (x.double() / data.softcap).abs()
            q = torch.exp(-2 * argument)
            slope, extra = 4 * q / (1 + q) ** 2, 4e-7 * (data.softcap + argument)
        gradient = factor * slope * (scaled - uniform - hot)
        arithmetic = (2e-6 + 2e-7 * below + extra) * scaled.abs() + (5e-7 + extra) * (uniform + hot)
        bar = factor * slope * arithmetic + factor * 2.0**-120
        return gradient, bar

    def check(self, loss=None, grad=None, stats=None, divisor=None, strict: bool = True) -> str | None:
        """None, or what is wrong. `divisor`: what the gradient was not divided by. `strict`: the specification's bars;
        others may be 10 times as far away, and two units in the last place of the type they store, not half a unit.
        """
        slack = 1 if strict else 10
        if loss is not None:
            value = loss.double().item()
            bar = slack * (1e-6 * max(1.0, abs(self.loss)) + self.extra)
            if not strict:
                bar += 2 * ulp(torch.tensor(self.loss, dtype=torch.float64), loss.dtype).item()
            if not abs(value - self.loss) <= bar:
                return f"loss {value!r}, reference {self.loss!r}, bar {bar:.2g}"
        if stats is not None:
            lse = torch.where(self.counted, stats[:, 0].double() + stats[:, 1].double().log(), 0.0)
            bar = slack * (1e-6 * self.lse.abs().clamp(min=1) + self.extra)
            wrong = ~((lse - self.lse).abs() <= bar)
            if wrong.any():
                row = int(torch.nonzero(wrong)[0])
                return f"lse of row {row}: {lse[row].item()!r}, reference {self.lse[row].item()!r}"
        if grad is not None:
            got = grad.reshape(self.data.rows, self.data.vocab)[self.picks].double()
            factor = 1 if divisor is None else divisor.double()
            wanted, bar = self.gradient * factor, self.bar * (slack * factor)
            bar = bar + ulp(wanted.abs() + bar, grad.dtype) * (0.5 if strict else 2)
            wrong = ~((got - wanted).abs() <= bar)
            if wrong.any():
                row, column = torch.nonzero(wrong)[0].tolist()
                share = wrong.double().mean().item()
                return (
                    f"gradient at row {int(self.picks[row])}, column {column}: {got[row, column].item()!r}, reference "
                    f"{wanted[row, column].item()!r}, bar {bar[row, column].item():.2g} ({share:.1%} wrong)"
                )
            still = ~self.counted[self.picks]
            if got[still].any():
                return "gradient of an ignored row is not 0"
        if loss is None and grad is None and stats is None:
            return "nothing to check"
        return None


def make_inputs(data: Data, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator(device).manual_seed(data.rows * 1000003 + data.vocab)
    dtype = getattr(torch, data.dtype)
    logits = torch.empty(data.rows, data.vocab, dtype=dtype, device=device)
    step = max(1, (64 << 20) // data.vocab)
    for first in range(0, data.rows, step):
        part = logits[first : first + step]
        part.copy_(torch.randn(part.shape, generator=generator, device=device).mul_(2))
    targets = torch.randint(0, data.vocab, (data.rows,), generator=generator, device=device)
    count = math.floor(data.ignored * data.rows)
    order = torch.randperm(data.rows, generator=generator, device=device)
    targets[order[:count]] = IGNORE
    weights = None
    if data.weights:
        weights = torch.rand(data.rows, generator=generator, device=device) + 0.5
    return logits, targets, weights
