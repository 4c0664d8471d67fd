"""What a comparison leaves behind: every number in a JSON file, and the table and the picture made from it.

``comparison.json`` alone decides how a comparison goes on. It is replaced as a whole after every training, and the
others after it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vision_demo.data import Size
from vision_demo.devices import first_line
from vision_demo.model import ENCODINGS
from vision_demo.pictures import name
from vision_demo.problems import Problem
from vision_demo.runs import PARTIAL, read, replace

FORMAT = 1
FILE = "comparison.json"

Pair = tuple[str, int]  # (encoding, seed)
Training = dict[str, Any]  # encoding, seed, accuracy by size, accuracy_raw_steps, epochs, seconds; see Comparison.keep


@dataclass(frozen=True)
class Plan:
    """What is trained and how; the same for every training but the encoding and the seed."""

    encodings: tuple[str, ...]
    seeds: tuple[int, ...]  # each decides the weights and the order of the images
    recipe: dict[str, int | float]  # without the seed
    sizes: tuple[Size, ...]  # (height, width) in pixels that accuracy is measured at; the first is the trained one
    classes: int
    train_images: int
    held_out_images: int
    source: dict[str, str | int]  # the data

    def pairs(self) -> list[Pair]:
        """Seed by seed, so that a comparison broken off has seen every encoding."""
        return [(encoding, seed) for seed in self.seeds for encoding in self.encodings]


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        encoding: Its name in ``ENCODINGS``.
        raw: Whether coordinates count patches at every size although the encoding could keep the trained scale.
        shares: {size: accuracy from 0 to 1 of every seed that has been trained}.
    """

    encoding: str
    raw: bool
    shares: dict[Size, list[float]]

    @property
    def title(self) -> str:
        return ENCODINGS[self.encoding] + (", raw steps" if self.raw else "")

    def mean(self, size: Size) -> float:
        return statistics.mean(self.shares[size])

    def spread(self, size: Size) -> float | None:
        """The sample standard deviation over seeds (divided by seeds - 1); None for one seed."""
        return statistics.stdev(self.shares[size]) if len(self.shares[size]) > 1 else None

    def percent(self, size: Size, sign: str = "±") -> str:
        """``"97.1 ± 0.4"``."""
        spread = self.spread(size)
        return f"{100 * self.mean(size):.1f}" + ("" if spread is None else f" {sign} {100 * spread:.1f}")


class Comparison:
    """One folder: :func:`begin` makes it, :func:`find` opens it."""

    def __init__(self, folder: Path, plan: Plan, trainings: Sequence[Training] = (), machines: Sequence = ()) -> None:
        self.folder, self.plan = folder, plan
        self.trainings: list[Training] = list(trainings)
        self.machines: list[dict[str, Any]] = list(machines)  # that the trainings were made on, with versions

    def remaining(self) -> list[Pair]:
        """What is still to be trained."""
        done = {(training["encoding"], training["seed"]) for training in self.trainings}
        return [pair for pair in self.plan.pairs() if pair not in done]

    def keep(self, training: Training, machine: dict[str, Any]) -> None:
        """Add a training to the files.

        Args:
            training: ``encoding``, ``seed``, ``accuracy`` {"HEIGHTxWIDTH": share}, ``accuracy_raw_steps`` the same with
                raw coordinates or None, ``epochs`` the records of the training, ``seconds`` in all.
            machine: What it was trained on; ``training["machine"]`` becomes its place in ``machines``.
        """
        if machine not in self.machines:
            self.machines.append(machine)
        self.trainings.append({**training, "machine": self.machines.index(machine)})
        order = self.plan.pairs()  # not the order of finishing, which differs when several train side by side
        self.trainings.sort(key=lambda training: order.index((training["encoding"], training["seed"])))
        self.write()

    def write(self) -> None:
        """Write the file of all numbers, then what is made from it."""
        content = {"format": FORMAT, **asdict(self.plan), "machines": self.machines, "trainings": self.trainings}
        replace(self.folder / FILE, (json.dumps(content, indent=2) + "\n").encode())
        if self.trainings:
            from vision_demo import chart  # matplotlib is slow to import, and a problem is told before it is needed

            replace(self.folder / "table.md", self.markdown().encode())
            replace(self.folder / "accuracy.png", chart.png(chart.figure(self.rows(), self.plan)))

    def rows(self) -> list[Row]:
        """A row for each encoding that has been trained, and one more below it where raw coordinates differ."""
        found = []
        for encoding in self.plan.encodings:
            mine = [training for training in self.trainings if training["encoding"] == encoding]
            for raw, key in enumerate(("accuracy", "accuracy_raw_steps")):
                accuracies = [training[key] for training in mine if training[key] is not None]
                if accuracies:
                    shares = {size: [each[key_of(size)] for each in accuracies] for size in self.plan.sizes}
                    found.append(Row(encoding, bool(raw), shares))
        return found

    def markdown(self) -> str:
        """The table with what has to be known to read it, for a README."""
        trained, *others = (name(size) for size in self.plan.sizes)
        lines = [
            "| encoding | " + " | ".join([f"{trained}, trained", *others]) + " |",
            "|---" + "|--:" * len(self.plan.sizes) + "|",
        ]
        for row in self.rows():
            cells = [row.percent(size) for size in self.plan.sizes]
            lines.append("| " + " | ".join([row.title + self.lacking(row), *cells]) + " |")
        return "\n".join([*lines, "", *self.notes()]) + "\n"

    def lacking(self, row: Row) -> str:
        """How many seeds stand behind a row, if not all."""
        count, wanted = len(row.shares[self.plan.sizes[0]]), len(self.plan.seeds)
        return "" if count == wanted else f" ({count} of {wanted} seeds)"

    def notes(self) -> list[str]:
        """What the numbers are, how they were made and where."""
        plan, recipe = self.plan, self.plan.recipe
        spread = "mean ± sample standard deviation over seeds" if len(plan.seeds) > 1 else "one seed,"
        seeds = ", ".join(map(str, plan.seeds))
        return [
            f"Accuracy in percent on {plan.held_out_images:,} held-out images, {spread} {seeds}; chance is "
            f"{100 / plan.classes:.0f}. Trained at {name(plan.sizes[0])} on {plan.train_images:,} images of "
            f"{plan.source['name']}, {recipe['epochs']} epochs, batch {recipe['batch_size']}.",
            "Other sizes are the same images drawn larger or smaller. Coordinates are then those of the trained grid, "
            "laid over the new one; raw steps: they count patches instead, with the same trained weights. Binary "
            "always counts patches; learned tables are resampled, modulo repeats its own. At 24 x 24 a source pixel "
            "is 3 x 3, so that patches of 4 x 4 straddle several.",
            *(self.provenance(index, machine) for index, machine in enumerate(self.machines)),
        ]

    def provenance(self, index: int, machine: dict[str, Any]) -> str:
        """One machine in a sentence."""
        mine = [training["seconds"] for training in self.trainings if training["machine"] == index]
        versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
        return (
            f"{len(mine)} trainings on {machine['device']} ({machine['cpu']}, threads: {machine['threads']}, trainings "
            f"side by side: {machine['jobs']}), {sum(mine) / len(mine):.0f} seconds each; {versions}."
        )

    def table(self, sign: str = "±") -> str:
        """The table in lines of 80 characters, for a terminal."""
        lines = [f"{'accuracy in %':<25}" + "".join(f"{name(size).replace(' ', ''):>11}" for size in self.plan.sizes)]
        for row in self.rows():
            title = ("  raw steps" if row.raw else ENCODINGS[row.encoding]) + self.lacking(row)
            cells = (row.percent(size, sign).replace(f"{sign} ", sign) for size in self.plan.sizes)
            lines.append(f"{title:<25}" + "".join(f"{cell:>11}" for cell in cells))
        return "\n".join(lines)


def key_of(size: Size) -> str:
    """``(32, 48)`` as "32x48", as JSON has it."""
    return f"{size[0]}x{size[1]}"


def begin(folder: Path | None, plan: Plan) -> Comparison:
    """A new comparison in ``folder``, or in one named after the time.

    Raises:
        Problem: Something is in that folder already.
    """
    if folder is None:
        folder = stamped = Path("runs", f"compare-{time.strftime('%Y-%m-%d-%H%M%S')}")
        while folder.exists():  # begun in the same second
            folder = stamped.with_name(f"{stamped.name}-{int(time.time() * 1000) % 1000:03d}")
    if folder.exists() and not folder.is_dir():
        raise Problem(f"{folder}: is a file; --run takes a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / FILE).exists():
        raise Problem(f"{folder}: holds a comparison already, never overwritten; go on with compare --resume {folder}")
    if any(not path.name.endswith(PARTIAL) for path in folder.iterdir()):
        raise Problem(f"{folder}: holds other files; --run takes a new folder")
    comparison = Comparison(folder, plan)
    comparison.write()
    return comparison


def find(folder: Path) -> Comparison:
    """The comparison in ``folder``.

    Raises:
        Problem: There is none, or it was written by another version, or is damaged.
    """
    path = folder / FILE
    if not folder.is_dir():
        raise Problem(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    if not path.exists():
        raise Problem(f"{folder}: not the folder of a comparison, it has no {FILE}")
    try:
        return understood(folder, json.loads(read(path)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Problem(f"{path}: damaged: {type(error).__name__}: {first_line(error)}") from error


def understood(folder: Path, content: dict[str, Any]) -> Comparison:
    """The reverse of :meth:`Comparison.write`; an exception of whatever kind if that is not possible."""
    if content.pop("format") != FORMAT:
        raise ValueError("another format than this version writes")
    trainings, machines = content.pop("trainings"), content.pop("machines")
    for key in ("encodings", "seeds"):
        content[key] = tuple(content[key])
    content["sizes"] = tuple((int(height), int(width)) for height, width in content["sizes"])
    plan = Plan(**content)
    unknown = set(plan.encodings) - ENCODINGS.keys()
    if unknown:
        raise ValueError(f"encoding {unknown.pop()!r} is unknown")
    comparison = Comparison(folder, plan, trainings, machines)
    if len(comparison.remaining()) + len(trainings) != len(plan.pairs()):
        raise ValueError("trainings that were never planned")
    comparison.markdown()  # trips over whatever is missing
    return comparison
