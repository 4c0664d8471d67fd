"""What the recipe of :mod:`vision_demo.pretrained` found, in two tables and in words."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import ASCII, SIMPLE
from rich.table import Table

from vision_demo import selfmade
from vision_demo.comparison import key_of
from vision_demo.data import Size
from vision_demo.pictures import can_write, name

WAYS = {"frozen": "untuned", "table": "table alone", "keep": "RoPE and table", "fade": "RoPE alone"}
MEASURES = {  # (photos, answer): (title, factor, whether more is better)
    ("unseen", "cell"): ("cell, %", 100, True),
    ("unseen", "distance"): ("distance", 1, False),
    ("seen", "quarters"): ("turn, %", 100, True),
    ("unseen", "quarters"): ("turn new, %", 100, True),
}
KEY = """\
cell      patches that tell their row and column exactly, in photos that were held out
distance  from the place that a patch tells to its own, in patches, in the same photos
turn      crops whose turn is told, new crops of the photos tuned on; turn new, of those held out
Heads alone are fitted for the untuned ViT. All tunings set out from there, with the same crops in the same order;
for "RoPE alone" the table fades away while the strength rises."""

Result = dict[str, Any]  # way, seed, seconds, sizes: {"HEIGHTxWIDTH": {"seen" or "unseen" photos: answers}}
Drift = dict[str, dict[str, dict[str, float]]]  # {reference sizes: {size: {strength: share}}}


def drift(found: Drift) -> Table:
    """A row for each grid of reference and size, a column for each strength."""
    strengths = next(iter(next(iter(found.values())).values()))
    table = new_table()
    table.add_column("reference sizes")
    table.add_column("image")
    for strength in strengths:
        table.add_column(strength, justify="right")
    for reference, by_size in found.items():
        for size, shares in by_size.items():
            cells = (f"{share:.3f}" for share in shares.values())
            table.add_row(reference.replace("x", " x "), size.replace("x", " x "), *cells)
    return table


def answers(results: Sequence[Result], sizes: Sequence[Size]) -> Table:
    """A row for each size and way, mean and spread over seeds, and what knowing nothing would give."""
    table = new_table()
    table.add_column("image", no_wrap=True)
    table.add_column("way")
    for title, _, _ in MEASURES.values():
        table.add_column(title, justify="right")
    for size in sizes:
        chance = selfmade.chance(size)._asdict()
        for row, way in enumerate(WAYS):
            mine = (shown(values(results, way, size, measure), measure) for measure in MEASURES)
            table.add_row(name(size) if row == 0 else "", WAYS[way], *mine)
        nothing = (shown([chance[kind]], (part, kind)) for part, kind in MEASURES)
        table.add_row("", "no idea", *nothing, end_section=True)
    return table


def new_table() -> Table:
    return Table(padding=(0, 1, 0, 0), box=SIMPLE if can_write("\u2500") else ASCII)


def values(results: Sequence[Result], way: str, size: Size, measure: tuple[str, str]) -> list[float]:
    """One number for each seed, in their order."""
    part, kind = measure
    return [each["sizes"][key_of(size)][part][kind] for each in results if each["way"] == way]


def shown(numbers: Sequence[float], measure: tuple[str, str]) -> str:
    """Mean and sample standard deviation."""
    _, factor, _ = MEASURES[measure]
    digits, sign = (1 if factor > 1 else 2), ("±" if can_write("±") else "+-")
    spread = f" {sign} {factor * statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{factor * statistics.mean(numbers):.{digits}f}{spread}"


def reading(results: Sequence[Result], sizes: Sequence[Size]) -> Iterator[str]:
    """RoPE against the table alone, in words: a paragraph for each way."""
    for way in ("keep", "fade"):
        told: dict[str, list[str]] = {"better": [], "worse": [], "no clear difference": []}
        for measure, (title, _, _) in MEASURES.items():
            for size in sizes:
                gains = compared(results, way, size, measure)
                numbers = "/".join(f"{gain:+.3g}" for gain in gains)
                told[judged(gains)].append(f"{title.removesuffix(', %')} at {name(size)} ({numbers})")
        end = "  RoPE does not clearly help here."
        if len(values(results, way, sizes[0], next(iter(MEASURES)))) < 2:
            end = "  One seed cannot tell whether RoPE helps: --seeds 2 or more."
        yield "\n".join(
            [
                f"{WAYS[way]}, against the table alone (seed by seed, plus where RoPE is better)",
                *(f"  {word}: {'; '.join(found)}" for word, found in told.items() if found),
                *([] if told["better"] else [end]),
            ]
        )


def judged(gains: Sequence[float]) -> str:
    """Clear is what all seeds agree about and is more than two standard errors; a single seed tells nothing."""
    if len(gains) < 2 or abs(statistics.mean(gains)) <= 2 * statistics.stdev(gains) / len(gains) ** 0.5:
        return "no clear difference"
    return "better" if min(gains) > 0 else "worse" if max(gains) < 0 else "no clear difference"


def compared(results: Sequence[Result], way: str, size: Size, measure: tuple[str, str]) -> list[float]:
    """For each seed, by how much ``way`` is better than the table alone."""
    _, factor, more = MEASURES[measure]
    pairs = zip(*(values(results, each, size, measure) for each in (way, "table")), strict=True)
    return [factor * (ours - theirs) * (1 if more else -1) for ours, theirs in pairs]
