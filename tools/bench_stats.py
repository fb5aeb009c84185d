# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Median and spread of a measurement; the best of several ways to reach a limit."""

from __future__ import annotations

import functools
import statistics
from typing import Any, Callable, NamedTuple


class Timing(NamedTuple):
    ms: float  # median
    spread_ms: float  # 90th less 10th percentile
    samples: int
    graph: bool  # replayed as a CUDA graph


def summarize(times: list[float], graph: bool = False) -> Timing:
    if len(times) < 2:
        return Timing(times[0], 0.0, len(times), graph)
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), tenths[8] - tenths[0], len(times), graph)


class Limit(NamedTuple):
    rate: float  # bytes a second
    way: str
    again: Callable[..., float]  # measures it once more, with so many samples


def best_limits(device: Any, ways: dict[str, dict[str, Callable[[], Any]]], size: int, say) -> dict[str, Limit]:
    """`ways`: kind of limit -> name -> function that does it on `size` bytes."""
    found = {}
    for kind, functions in ways.items():
        moved = size * (2 if kind in ("copy", "in place") else 1)

        def rate(run, samples: int = 0, moved: int = moved) -> float:
            return moved / device.measure([run], graph=False, samples=samples).ms * 1e3

        trial = {name: rate(run, 5) for name, run in functions.items()}
        way = max(trial, key=trial.get)
        again = functools.partial(rate, functions[way])
        found[kind] = Limit(again(), way, again)
        say(f"{kind} limit {found[kind].rate / 1e9:.1f} GB/s by {way}")
    return found
