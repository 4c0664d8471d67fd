"""The picture of a run: time over clone against shape, a line for each contender."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.benchmarks.rows import Row

COLOURS = {  # a colour for each library
    "ndpos": "tab:red",
    "timm": "tab:blue",
    "transformers": "tab:green",
    "rotary-embedding-torch": "tab:purple",
    "liger": "tab:brown",
    "flash-attn": "tab:orange",
}
LINES = {"eager": "-", "torch.compile": "--", "compiled": "-.", "triton": (0, (5, 1)), "kernel": ":"}
MARKERS = {"interleaved": "o", "half": "s"}


def figure(rows: Sequence[Row]) -> Figure:
    """A panel for each direction and dtype; the 95 % intervals are error bars."""
    rows = [row for row in rows if row.section == "rotation" and row.over == "clone"]
    kinds = [row.case.split()[1:] for row in rows]
    dtypes, directions = (list(dict.fromkeys(kind[place] for kind in kinds)) or [""] for place in (0, 1))
    found = Figure(
        figsize=(4.2 * len(dtypes) + 3.8, 4.2 * len(directions) + 0.8)
    )  # no pyplot: no window, no global state
    FigureCanvasAgg(found)
    all_axes = found.subplots(len(directions), len(dtypes), sharex=True, sharey=True, squeeze=False)
    for beside, direction in zip(all_axes, directions, strict=True):
        beside[0].set_ylabel(f"{direction}: time / clone of the same tensor")
        for axes, dtype in zip(beside, dtypes, strict=True):
            draw(axes, [row for row in rows if row.case.split()[1:] == [dtype, direction]])
            axes.set_title(f"{dtype} {direction}", fontsize=10)
    wide, high = found.get_size_inches()
    found.subplots_adjust(left=0.7 / wide, right=1 - 3.4 / wide, bottom=0.9 / high, top=1 - 0.35 / high, wspace=0.06)
    named = {name: line for axes in all_axes.flat for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    place = {"loc": "center left", "bbox_to_anchor": (1 - 3.35 / wide, 0.5), "frameon": False, "fontsize": 8}
    if named:
        found.legend(named.values(), named.keys(), **place)
    return found


def draw(axes: Axes, rows: Sequence[Row]) -> None:
    """The lines of one panel, shapes from left to right as they were measured."""
    shapes = list(dict.fromkeys(row.case.split()[0] for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    for index, name in enumerate(names):
        aside = 0.4 * ((index + 0.5) / len(names) - 0.5)  # side by side, so that error bars do not cover each other
        mine = [row for row in rows if row.name == name]
        run, _, pairing = name.partition(", ")
        who, _, mode = run.partition(" ")
        axes.errorbar(
            [shapes.index(row.case.split()[0]) + aside for row in mine],
            [row.seen.ratio for row in mine],
            yerr=[
                [row.seen.ratio - row.seen.low for row in mine],
                [row.seen.high - row.seen.ratio for row in mine],
            ],
            label=name,
            color=COLOURS.get(who, "grey"),
            linestyle=LINES.get(mode, "-"),
            marker=MARKERS.get(pairing, "x"),
            linewidth=1.6 if who == "ndpos" else 0.9,
            markersize=4,
            elinewidth=0.9,
            capsize=2,
            alpha=0.9,
        )
    axes.axhline(1, color="grey", linewidth=0.8, linestyle=(0, (1, 3)))
    axes.set_yscale("log")
    axes.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right", fontsize=8)
    axes.grid(axis="y", which="both", alpha=0.3)


def png(drawn: Figure) -> bytes:
    """The figure as a file."""
    content = io.BytesIO()
    drawn.savefig(content, format="png", dpi=110)
    return content.getvalue()
