"""Functions timed in turn: ratios of neighbours hold when the machine's speed drifts.

A sample is one call, or as many as fill ``SAMPLE_MS``. Each task is timed beside the reference, A B in one round and
B A in the next, and the order of the tasks is shuffled and then walked backwards: what drifts, and what a neighbour
leaves in caches, falls on both sides.

What an allocation costs depends on what was freed before. glibc hands blocks above 32 MB back to the system, so that
each call pays for their page faults, unless its heap happens to have room: the same copy of 50 MB takes five times as
long or not. So both sides of a ratio run in one process, in turn, after warm-up, and both free their result inside the
sample; and ``keep_heap`` takes page faults out of all of them.
"""

from __future__ import annotations

import ctypes
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

SAMPLE_MS = 0.2
WARMUP = 1  # rounds, besides the two in which the calls of a sample are counted


class Ratio(NamedTuple):
    """The median of ``a / b`` over the pairs with its bootstrap 95 % interval, and median milliseconds of each."""

    ratio: float
    low: float
    high: float
    a_ms: float | None = None
    b_ms: float | None = None
    pairs: int = 1

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})" if self.pairs > 1 else f"{self.ratio:.4f}"


@dataclass(frozen=True)
class Task:
    """What is timed, and what is made anew before each call of it, untimed: ``run(*prepare())``."""

    run: Callable[..., Any]
    prepare: Callable[[], tuple[Any, ...]] = tuple


class Clock:
    """Wall time of calls on the CPU."""

    def sample(self, task: Task, calls: int) -> float:
        """Milliseconds of one call, the mean of ``calls``."""
        prepared = [task.prepare() for _ in range(calls)]
        started = time.perf_counter()
        for arguments in prepared:
            task.run(*arguments)
        return 1e3 * (time.perf_counter() - started) / calls

    def calls(self, task: Task) -> int:
        """How many calls fill a sample."""
        once = min(self.sample(task, 1) for _ in range(2))
        return max(1, min(200, math.ceil(SAMPLE_MS / max(once, 1e-6))))


class DeviceClock(Clock):
    """Time between two events on a CUDA device, the L2 cache flushed before.

    The device sleeps while the CPU queues the calls: the time to launch them is not counted where it fits in the nap.
    """

    NAP_CYCLES = 2_000_000  # about a millisecond

    def __init__(self) -> None:
        cache = torch.cuda.get_device_properties().L2_cache_size
        self.flushed = torch.empty(4 * cache, dtype=torch.uint8, device="cuda")

    def sample(self, task: Task, calls: int) -> float:
        prepared = [task.prepare() for _ in range(calls)]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.zero_()
        torch.cuda._sleep(self.NAP_CYCLES)
        start.record()
        for arguments in prepared:
            task.run(*arguments)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls

    def calls(self, task: Task) -> int:
        return 1  # a second call would find the cache full


@dataclass(frozen=True)
class Times:
    """Milliseconds by round: each task's own, and those of the reference beside it."""

    own: dict[str, list[float]]
    reference: dict[str, list[float]]

    def over_reference(self, name: str) -> Ratio:
        return ratio(self.own[name], self.reference[name])

    def over(self, name: str, other: str) -> Ratio:
        """One task over another of the same round."""
        return ratio(self.own[name], self.own[other])

    def fastest(self, names: Sequence[str]) -> str:
        return min(names, key=lambda name: median(self.own[name]))


def keep_heap() -> None:
    """Make glibc keep what is freed, so that a warm call meets no page fault; an error with another C library."""
    mallopt = ctypes.CDLL(None).mallopt
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD of malloc.h
    if not (mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1)):
        raise OSError("tests.benchmarks: the C library refused to keep its heap")


def in_turn(
    tasks: Mapping[str, Task], reference: Task, *, pairs: int = 41, clock: Clock | None = None, label: str = ""
) -> Times:
    """Every task beside the reference, ``pairs`` times after ``WARMUP`` uncounted ones."""
    clock = clock or Clock()
    both = [*tasks.values(), reference]
    for task in both * WARMUP:
        task.run(*task.prepare())
    calls = {id(task): clock.calls(task) for task in both}
    times = Times({name: [] for name in tasks}, {name: [] for name in tasks})
    names, shuffle = list(tasks), random.Random(0).shuffle
    for turn in tqdm(range(pairs), desc=label, leave=False, disable=None):
        names.reverse() if turn % 2 else shuffle(names)
        for name in names:
            pair = [(times.own[name], tasks[name]), (times.reference[name], reference)]
            for kept, task in reversed(pair) if turn % 2 else pair:
                kept.append(clock.sample(task, calls[id(task)]))
    return times


def paired(a: Callable[[], Any], b: Callable[[], Any], *, pairs: int = 41, label: str = "") -> Ratio:
    """``a`` over ``b`` on the CPU."""
    return in_turn({"a": Task(a)}, Task(b), pairs=pairs, label=label).over_reference("a")


def ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """The median of the paired quotients, with its interval."""
    quotients = [one / other for one, other in zip(a, b, strict=True)]
    return Ratio(median(quotients), *interval(quotients), median(a), median(b), len(quotients))


def median(values: Sequence[float]) -> float:
    return torch.tensor(values, dtype=torch.float64).quantile(0.5).item()


def interval(values: Sequence[float], *, level: float = 0.95, draws: int = 2000) -> tuple[float, float]:
    """The bootstrap interval of the median: percentiles of the medians of samples drawn with replacement."""
    seen = torch.tensor(values, dtype=torch.float64)
    drawn = torch.randint(len(seen), (draws, len(seen)), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = seen[drawn].quantile(0.5, dim=1).quantile(ends).tolist()
    return low, high
