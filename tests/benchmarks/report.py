"""What was measured, as JSON, in the terminal and as Markdown."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.rotation import SHAPES
from tests.benchmarks.rows import Row


@dataclass
class Report:
    """The rows of a run, where they were measured, and what is missing from it and why."""

    machine: dict[str, Any]
    date: str
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        content = dataclasses.asdict(self) | {"rows": [row.as_json() for row in self.rows]}
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(content, indent=1) + "\n")
        beside.replace(path)  # whole or not at all

    @classmethod
    def load(cls, path: Path) -> Report:
        content = json.loads(path.read_text())
        return cls(**(content | {"rows": [Row.from_json(row) for row in content["rows"]]}))


def new(device: str, **counted: Any) -> Report:
    """An empty report of this machine; ``counted`` is said beside its name: threads, batch, heap."""
    return Report(machine(device) | counted, datetime.datetime.now().astimezone().isoformat(timespec="seconds"))


def machine(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def cpu_name() -> str:
    """The processor's model as Linux tells it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def describe(report: Report) -> str:
    where = report.machine
    named = ", ".join(where[name] for name in ("gpu", "cpu") if name in where)
    threads = f"{where['threads']} thread{'s' if where['threads'] > 1 else ''}"
    counted = f"{where['cores']} cores, {threads}, torch {where['torch']}"
    counted += f", {where['batch']} times the batch" if where["batch"] > 1 else ""
    counted += ", heap kept" if where["heap"] == "kept" else ""
    pairs = sorted({row.seen.pairs for row in report.rows if row.seen.pairs > 1})
    medians = f"; medians of {' or '.join(map(str, pairs))} pairs" if pairs else ""
    return f"{named}, {counted}, {report.date[:10]}{medians}"


def line(row: Row) -> str:
    """One row as a line of text."""
    parts = [f"{row.case:<34} {row.name} / {row.over}".ljust(100), f"{row.seen!s:<26}"]
    if row.seen.a_ms is not None:
        parts.append(f"{row.seen.a_ms:10.3f} ms / {row.seen.b_ms:.3f} ms")
    if row.bandwidth is not None:
        parts.append(f"{row.bandwidth:.0%} of the bandwidth of a copy")
    if row.bound is not None:
        parts.append(f"{row.bound}: {'holds' if row.holds else 'MISSED'}")
    return "  ".join(parts)


def show(report: Report) -> None:
    """The bounds in the terminal, missed ones first, and what could not be measured."""
    held = sorted((row for row in report.rows if row.bound is not None), key=lambda row: bool(row.holds))
    print(f"\n{describe(report)}")
    for what, why in report.skipped.items():
        print(f"not measured: {what}: {why}")
    if not held:
        return
    print(f"{sum(bool(row.holds) for row in held)} of {len(held)} bounds hold")
    columns = ("", "case", "ratio", "median (95 % interval)", "bound")
    cells = [
        ("holds" if row.holds else "MISSED", row.case, f"{row.name} / {row.over}", str(row.seen), str(row.bound))
        for row in held
    ]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print("\n".join("  ".join(row) for row in cells))
    else:
        table = Table(*columns)
        for row in cells:
            table.add_row(*(Text(cell) for cell in row), style=None if row[0] == "holds" else "bold red")
        Console(width=None if sys.stdout.isatty() else 180).print(table)


def markdown(report: Report) -> str:
    """Every table of the report for a README: the rotation by dtype and direction, models, tables, memory."""
    parts = [f"Measured on {describe(report)}. In brackets the 95 % interval of the median."]
    rotation = [row for row in report.rows if row.section == "rotation" and row.over == "clone"]
    for kind in dict.fromkeys(row.case.partition(" ")[2] for row in rotation):
        rows = [row for row in rotation if row.case.partition(" ")[2] == kind]
        dtype, direction = kind.split()
        parts.append(f"Time over `clone`, {dtype}, {direction}:\n\n{by_shape(rows)}")
    titles = {
        "models": "Time over the plain model",
        "fused": "timm's rotating models, fused",
        "tables": "Building tables",
        "memory": "Peak memory beyond the result",
    }
    for section, title in titles.items():
        rows = [row for row in report.rows if row.section == section]
        if rows:
            cells = [(row.case, row.name, row.over, brackets(row), str(row.bound or "")) for row in rows]
            parts.append(f"{title}:\n\n{table(('case', 'what', 'over', 'ratio', 'bound'), cells)}")
    return "\n\n".join(parts) + "\n"


def by_shape(rows: Sequence[Row]) -> str:
    """A line for each contender, a column for each shape."""
    shapes = list(dict.fromkeys(row.case.split()[0] for row in rows))
    heads = [f"{SHAPES[name].title}" if name in SHAPES else name for name in shapes]
    found = {(row.name, row.case.split()[0]): brackets(row) for row in rows}
    names = dict.fromkeys(row.name for row in rows)
    return table(("", *heads), [(name, *(found.get((name, shape), "") for shape in shapes)) for name in names])


def brackets(row: Row) -> str:
    seen = row.seen
    return f"{seen.ratio:.2f} ({seen.low:.2f} to {seen.high:.2f})" if seen.pairs > 1 else f"{seen.ratio:.3f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
