# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Time and memory against vocabulary: libxent, the peers and the limit."""

from __future__ import annotations

from collections import defaultdict

PANELS = (
    ("forward", ("forward",)),
    ("backward", ("backward", "backward_over")),
    ("loss and gradient", ("loss_and_grad", "loss_and_grad_over")),
)


def _series(records: list[dict], works: tuple[str, ...], value) -> dict[str, list[tuple[int, float]]]:
    series = defaultdict(dict)
    for record in records:
        if record["work"] in works and value(record) is not None:
            name = record["who"] + (", over the logits" if record["work"].endswith("_over") else "")
            vocab = record["vocab"]
            # Several shapes of one vocabulary: the one with the most rows.
            if vocab not in series[name] or record["rows"] > series[name][vocab][0]:
                series[name][vocab] = (record["rows"], value(record))
    return {name: sorted((vocab, y) for vocab, (_, y) in points.items()) for name, points in series.items()}


def draw(records: list[dict], environment: str, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    plain = [record for record in records if not record["options"]]
    if not plain:
        raise SystemExit("bench: --plot: nothing without options was measured")
    dtype = plain[0]["dtype"]
    plain = [record for record in plain if record["dtype"] == dtype]

    def time(record):
        return None if record["ms"] is None else record["ms"] * 1e3 / record["rows"]

    def limit(record):
        return record["limit_ms"] * 1e3 / record["rows"]

    def memory(record):
        peak = record.get("peak_bytes")
        return None if peak is None else max(peak, 1) / record["rows"] / 1024

    panels = [(title, works, time, "us a row") for title, works in PANELS]
    if any("peak_bytes" in record for record in plain):
        panels.append(("peak memory above the logits", PANELS[2][1], memory, "KiB a row"))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 4.2), squeeze=False)
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    names = list(dict.fromkeys(record["who"] for record in records))
    for axis, (title, works, value, unit) in zip(axes[0], panels):
        for name, points in sorted(_series(plain, works, value).items()):
            who = name.split(", over")[0]
            axis.plot(
                *zip(*points),
                label=name,
                color=colours[names.index(who) % len(colours)],
                marker="o",
                markersize=3,
                linewidth=2 if who == "libxent" else 1,
                linestyle="--" if "over" in name else "-",
            )
        if value is time:
            ours = [record for record in plain if record["who"] == "libxent"]
            points = _series(ours, works[:1], limit).get("libxent")
            if points:
                axis.plot(
                    *zip(*points),
                    label=f"limit ({'read' if works == ('forward',) else 'copy'})",
                    color="black",
                    linestyle=":",
                )
        axis.set(title=title, xlabel="vocabulary", ylabel=unit, xscale="log", yscale="log")
        if value is memory:
            axis.set_ylim(bottom=0.005)  # less than 5 bytes a row is nothing, which a logarithm does not show
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            scale.set_minor_formatter(ticker.NullFormatter())
        vocabs = sorted({record["vocab"] for record in plain})
        axis.set_xticks(vocabs if len(vocabs) < 7 else [4096, 16384, 65536, 262144])
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(f"{dtype}; {environment}", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
