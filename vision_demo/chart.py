"""The picture of a comparison: accuracy against resolution, a line for each encoding."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vision_demo.comparison import Plan, Row
from vision_demo.data import Size
from vision_demo.pictures import name

STYLES: dict[str, tuple[str, str, str]] = {  # encoding: colour of its family, line, marker
    "none": ("black", ":", "x"),
    "integer": ("tab:brown", "-", "s"),
    "binary": ("tab:brown", "-.", "D"),
    "sinusoidal-added": ("tab:blue", "-", "o"),
    "sinusoidal-concatenated": ("tab:blue", "-.", "P"),
    "learned-joint": ("tab:green", "-", "^"),
    "learned-axial": ("tab:green", "-.", "v"),
    "learned-modulo": ("tab:green", ":", "<"),
    "rope-axial": ("tab:red", "-", "o"),
    "rope-mixed": ("tab:orange", "-", "d"),
    "rope-and-learned": ("tab:purple", "-", "p"),
}


def figure(rows: Sequence[Row], plan: Plan) -> Figure:
    """Two panels, the second one for raw steps; one panel if no row has them.

    Each row is one line over the square sizes, and a point of its own at each size that is not square, with the
    standard deviation over seeds as error bars.
    """
    panels = [[row for row in rows if row.raw == raw] for raw in (False, True)]
    titles = ["coordinates at the trained scale, or none", "raw steps: coordinates count patches"]
    count = 2 if panels[1] else 1
    found = Figure(figsize=(4.2 * count + 3, 6.5))  # without pyplot there is no window and no global state
    FigureCanvasAgg(found)
    all_axes = found.subplots(1, count, sharey=True, squeeze=False)[0]
    for axes, panel, title in zip(all_axes, panels, titles, strict=False):
        draw(axes, panel, plan)
        axes.set_title(title, fontsize=10)
    all_axes[0].set_ylabel("accuracy on held-out images")
    handles, labels = all_axes[0].get_legend_handles_labels()
    wide = found.get_figwidth()
    found.subplots_adjust(left=0.6 / wide, right=1 - 2.5 / wide, bottom=0.11, top=0.94, wspace=0.06)
    found.legend(handles, labels, loc="center left", bbox_to_anchor=(1 - 2.45 / wide, 0.5), frameon=False)
    return found


def draw(axes: Axes, rows: Sequence[Row], plan: Plan) -> None:
    """The lines of one panel."""
    places = positions(plan.sizes)
    for index, row in enumerate(rows):
        aside = 0.4 * ((index + 0.5) / len(rows) - 0.5)  # side by side, so that error bars do not cover each other
        colour, line, marker = STYLES[row.encoding]
        xs, means, spreads = [], [], []
        for size, x in places.items():
            if size[0] != size[1]:  # a gap: what is not square is no point on the line
                xs, means, spreads = [*xs, x], [*means, float("nan")], [*spreads, 0.0]
            xs, means = [*xs, x + aside], [*means, row.mean(size)]
            spreads.append(row.spread(size) or 0.0)
        axes.errorbar(
            xs,
            means,
            yerr=spreads if any(spreads) else None,
            label=row.title,
            color=colour,
            linestyle="--" if row.raw else line,
            linewidth=0.9 if row.raw else 1.4,
            marker=marker,
            markersize=4 if row.raw else 5,
            elinewidth=0.9,
            capsize=2,
            alpha=0.9,
        )
    chance = 1 / plan.classes
    axes.axhline(chance, color="grey", linewidth=0.8, linestyle=(0, (1, 3)))
    below = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 8, "color": "grey"}
    axes.annotate("chance", (0, chance), (3, -10), **below)
    axes.set_xticks(list(places.values()), [label(size, plan) for size in places])
    axes.set(xlabel="pixels, height x width", ylim=(0, 1.02))
    axes.grid(axis="y", alpha=0.3)


def positions(sizes: Sequence[Size]) -> dict[Size, float]:
    """Where each size stands on the axis: square ones from small to large, then the others, apart."""
    square = sorted(size for size in sizes if size[0] == size[1])
    others = [size for size in sizes if size[0] != size[1]]
    return {size: place + 0.3 * (size in others) for place, size in enumerate([*square, *others])}


def label(size: Size, plan: Plan) -> str:
    """The name of a size below the axis."""
    return name(size) + ("\ntrained" if size == plan.sizes[0] else "")


def png(drawn: Figure) -> bytes:
    """The figure as a file."""
    content = io.BytesIO()
    drawn.savefig(content, format="png", dpi=110)
    return content.getvalue()
