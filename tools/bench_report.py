# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The table on the terminal."""

from __future__ import annotations

import sys

WIDTHS = (18, 8, 14, 14, 25, 9, 8, 9, 6, 20, 7, 14)
HEAD = (
    "work",
    "type",
    "rows x vocab",
    "options",
    "who",
    "ms",
    "spread",
    "limit ms",
    "ratio",
    "bar",
    "",
    "kept, peak MiB",
)
RIGHT = {5, 6, 7, 8}


def _row(fields) -> str:
    cells = (
        f"{text:>{width}}" if i in RIGHT else f"{text:<{width}}" for i, (text, width) in enumerate(zip(fields, WIDTHS))
    )
    return " ".join(cells).rstrip()


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def head() -> None:
    print(_row(HEAD), flush=True)


def _number(value) -> str:
    return "" if value is None else f"{value:.4f}" if value < 1 else f"{value:.3f}"


def line(record: dict) -> None:
    _clear()
    ms, note = _number(record["ms"]), ""
    if record.get("wrong"):
        ms, note = "WRONG", record["wrong"]
    elif record.get("error"):
        ms, note = "ERROR", record["error"]
    memory = ""
    if "peak_bytes" in record:
        memory = ", ".join(f"{record[key] / (1 << 20):.1f}" for key in ("kept_bytes", "peak_bytes"))
    met = {True: "met", False: "MISSED", None: ""}[record["met"]]
    ratio = "" if record["ratio"] is None else f"{record['ratio']:.3f}"
    shape = f"{record['rows']}x{record['vocab']}"
    fields = (
        record["work"],
        record["dtype"],
        shape,
        record["options"],
        record["who"],
        ms,
        _number(record["spread_ms"]),
    )
    print(_row((*fields, _number(record["limit_ms"]), ratio, record["bar"] or "", met, memory)), flush=True)
    if "speedup" in record:
        print(f"{'':<19}{record['speedup']:.1f}x as fast as torch eager", flush=True)
    if note:
        print(f"{'':<19}{note}", flush=True)


def _same_case(record: dict) -> tuple:
    work = record["work"].removesuffix("_over")
    return work, record["dtype"], record["rows"], record["vocab"], record["options"]


def summary(records: list[dict]) -> None:
    """How loss_and_grad stands beside the best peer, whatever buffer that writes to; then the counts."""
    best: dict[tuple, dict] = {}
    for record in records:
        if record["who"] != "libxent" and record["ms"] is not None:
            key = _same_case(record)
            if key not in best or record["ms"] < best[key]["ms"]:
                best[key] = record
    for record in records:
        peer = best.get(_same_case(record))
        if record["who"] == "libxent" and record["ms"] is not None and peer and "loss_and_grad" in record["work"]:
            name = f"{record['work']} {record['dtype']} {record['rows']}x{record['vocab']} {record['options']}".rstrip()
            print(f"{name}: {peer['ms'] / record['ms']:.2f}x as fast as the best peer, {peer['who']}")
    ours = [record for record in records if record["who"] == "libxent"]
    judged = [record for record in ours if record["met"] is not None]
    wrong, failed = (sum(key in record for record in ours) for key in ("wrong", "error"))
    print(
        f"libxent: {len(ours)} lines, {sum(r['met'] for r in judged)} of {len(judged)} bars met, {wrong} wrong, "
        f"{failed} failed",
        flush=True,
    )


def status(records: list[dict]) -> int:
    """1 where libxent was wrong or failed, or nothing was measured; a missed bar is a finding, not a failure."""
    ours = [record for record in records if record["who"] == "libxent"]
    return int(not ours or any("wrong" in record or "error" in record for record in ours))
