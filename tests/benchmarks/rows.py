"""One measured ratio, what it is held to, and the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from tests.benchmarks.paired import Clock, DeviceClock, Ratio

PAIRINGS = ("interleaved", "half")
DIRECTIONS = ("forward", "backward")


class Bound(NamedTuple):
    """What a ratio is held to, and which of its three numbers is: the median, or an end of its interval."""

    limit: float
    sense: Literal["at most", "at least"] = "at most"
    judged: Literal["ratio", "low", "high"] = "ratio"
    aim: float | None = None

    def holds(self, seen: Ratio) -> bool:
        value = getattr(seen, self.judged)
        return value <= self.limit if self.sense == "at most" else value >= self.limit

    def __str__(self) -> str:
        end = {"ratio": "", "low": "lower end ", "high": "upper end "}[self.judged]
        aim = "" if self.aim is None else f", aim {self.aim:g}"
        return f"{end}{self.sense} {self.limit:.4g}{aim}"


@dataclass(frozen=True)
class Row:
    """``name`` over ``over`` in ``case``; a case of the rotation is "shape dtype direction"."""

    section: str
    case: str
    name: str
    over: str
    seen: Ratio
    bound: Bound | None = None
    bandwidth: float | None = None  # achieved, as a share of the device's own copy

    @property
    def holds(self) -> bool | None:
        return None if self.bound is None else self.bound.holds(self.seen)

    def as_json(self) -> dict[str, Any]:
        named = {"seen": self.seen._asdict(), "bound": self.bound and self.bound._asdict(), "holds": self.holds}
        return asdict(self) | named

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        data = {name: value for name, value in data.items() if name != "holds"}
        bound = data["bound"] and Bound(**data["bound"])
        return cls(**(data | {"seen": Ratio(**data["seen"]), "bound": bound}))


class Job(NamedTuple):
    """A part of a run that is measured, kept and reported as a whole."""

    title: str
    measure: Callable[[], Iterable[Row]]


@dataclass
class Settings:
    """What every section reads; ``skipped`` collects what could not be measured, and why."""

    pairs: int = 41
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    shapes: tuple[str, ...] = ()
    batch: int = 1  # times the batch of every shape
    quick: bool = False
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def clock(self) -> Clock:
        return DeviceClock() if self.device == "cuda" else Clock()

    def dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, name)
        return found

    def skip(self, what: str, why: str) -> None:
        self.skipped.setdefault(what, why)
