"""Two functions timed in turn: ratios of neighbours hold when the machine's speed drifts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Ratio(NamedTuple):
    """Medians over the pairs: ``a / b``, and milliseconds of each."""

    ratio: float
    a_ms: float
    b_ms: float


def milliseconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - started)


def paired(a: Callable[[], Any], b: Callable[[], Any], *, pairs: int = 41, warmup: int = 3) -> Ratio:
    """``a`` and ``b`` in turn, A B A B ..., ``pairs`` times after ``warmup`` uncounted ones."""
    for _ in range(warmup):
        a(), b()
    times = [(milliseconds(a), milliseconds(b)) for _ in range(pairs)]
    return Ratio(
        statistics.median(one / other for one, other in times),
        statistics.median(one for one, _ in times),
        statistics.median(other for _, other in times),
    )
