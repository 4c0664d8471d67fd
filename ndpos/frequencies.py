"""How fast each pair turns about each axis: one matrix ``(axes, pairs)`` in radians per unit of coordinate.

The pattern of non-zero entries says which pair listens to which axis, the values say how fast. All of it is plain
float64 on the CPU, made from settings: a frequency is never a buffer, so no cast or checkpoint can round it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ndpos.sizes import finite, numbers_per_axis, whole
from ndpos.subspaces import AxisSplit, split

__all__ = [
    "geometric",
    "mixed",
    "periodic",
    "pixel_bands",
]


def matrix_of(axes: int, pair_axes: Sequence[int], values: Sequence[float]) -> Tensor:
    """The matrix whose column ``i`` has ``values[i]`` in row ``pair_axes[i]`` and zero elsewhere."""
    matrix = torch.zeros(axes, len(values), dtype=torch.float64, device="cpu")
    for column, (axis, value) in enumerate(zip(pair_axes, values, strict=True)):
        matrix[axis, column] = value
    return matrix


def per_axis(split: AxisSplit, ladder: Callable[[int, int], Sequence[float]]) -> Tensor:
    """``ladder(axis, pairs)`` in the block of each axis."""
    values = [value for axis in split.order for value in ladder(axis, split.channels[axis] // 2)]
    return matrix_of(split.axes, split.pair_axes, values)


def _evenly(count: int) -> list[float]:
    """``count`` numbers from 0 to 1, both ends included; 0 alone for a count of one."""
    return [step / max(count - 1, 1) for step in range(count)]


def positive(caller: str, name: str, value: float) -> float:
    try:
        number = finite(caller, name, value)
    except ValueError:
        number = 0.0
    if number <= 0:
        raise ValueError(f"{caller}: {name} is a positive finite number, got {value!r}.")
    return number


def geometric(
    split: AxisSplit, base: float | Sequence[float] = 1e4, *, endpoint: Literal["open", "closed"] = "open"
) -> Tensor:
    """A geometric ladder inside each axis, from 1 radian per step down towards ``1 / base``.

    Args:
        split: Which channels belong to which axis.
        base: The theta of the ladder, for all axes or one per axis.
        endpoint: Of the n pairs of an axis, pair i turns by ``base ** (-i / n)`` (``"open"``) or by
            ``base ** (-i / (n - 1))``, which reaches ``1 / base`` (``"closed"``; a lone pair turns by 1).

    Returns:
        ``(axes, pairs)`` float64, radians per unit of coordinate, one non-zero entry per column.

    Raises:
        ValueError: a base that is not positive and finite, another number of bases than axes, an unknown endpoint.

    Example:
        >>> import ndpos
        >>> ndpos.geometric(ndpos.split(8, 2), base=100.0)
        tensor([[1.0000, 0.1000, 0.0000, 0.0000],
                [0.0000, 0.0000, 1.0000, 0.1000]], dtype=torch.float64)

    Source:
        Vaswani et al. 2017, arXiv:1706.03762, section 3.5; "closed": Whisper's ``sinusoids``, big_vision.
    """
    caller = "ndpos.geometric"
    bases = [positive(caller, "base", each) for each in numbers_per_axis(caller, "base", base, split.axes)]
    if endpoint not in ("open", "closed"):
        raise ValueError(f"{caller}: endpoint is 'open' or 'closed', got {endpoint!r}.")

    def ladder(axis: int, pairs: int) -> list[float]:
        steps = _evenly(pairs) if endpoint == "closed" else [step / pairs for step in range(pairs)]
        return [bases[axis] ** -step for step in steps]

    return per_axis(split, ladder)


def pixel_bands(
    split: AxisSplit, *, max_frequency: float = 224.0, spacing: Literal["linear", "log"] = "linear"
) -> Tensor:
    """Bands for coordinates in [-1, 1]: one turn over that range up to the Nyquist rate of ``max_frequency`` pixels.

    Args:
        split: Which channels belong to which axis.
        max_frequency: Pixels across the range that the fastest band can tell apart.
        spacing: ``"linear"``: pi times evenly spaced from 1 to ``max_frequency / 2``; ``"log"``: powers of two between.

    Returns:
        ``(axes, pairs)`` float64, radians per unit of normalised coordinate.

    Raises:
        ValueError: ``max_frequency`` is not positive and finite, or an unknown ``spacing``.

    Example:
        >>> import ndpos, math
        >>> (ndpos.pixel_bands(ndpos.AxisSplit((6,)), max_frequency=6.0) / math.pi).tolist()
        [[1.0, 2.0, 3.0]]

    Source:
        ``pixel_freq_bands`` of timm; Jaegle et al. 2021, Perceiver, arXiv:2103.03206, section 3.2.
    """
    caller = "ndpos.pixel_bands"
    top = positive(caller, "max_frequency", max_frequency)
    if spacing not in ("linear", "log"):
        raise ValueError(f"{caller}: spacing is 'linear' or 'log', got {spacing!r}.")

    def ladder(axis: int, pairs: int) -> list[float]:
        if spacing == "linear":
            return [math.pi * (1 + step * (top / 2 - 1)) for step in _evenly(pairs)]
        return [math.pi * 2 ** (step * (math.log2(top) - 1)) for step in _evenly(pairs)]

    return per_axis(split, ladder)


def periodic(
    split: AxisSplit, *, base: float | None = None, shortest: float | None = None, longest: float | None = None
) -> Tensor:
    """Frequencies given by their periods: ``2 * pi / period``, a full turn per period of coordinate.

    Args:
        split: Which channels belong to which axis.
        base: Pair i of the n of an axis has the period ``base ** (i / n)``; or
        shortest, longest: periods spaced geometrically from ``shortest`` to ``longest``, both included.

    Returns:
        ``(axes, pairs)`` float64, radians per unit of coordinate.

    Raises:
        ValueError: neither or both of ``base`` and the pair ``shortest``, ``longest``; or one not positive and finite.

    Example:
        >>> import ndpos, math
        >>> (2 * math.pi / ndpos.periodic(ndpos.AxisSplit((4,)), base=100.0)).tolist()
        [[1.0, 10.0]]

    Source:
        Siméoni et al. 2025, DINOv3, arXiv:2508.10104: ``rope_position_encoding.py``.
    """
    caller = "ndpos.periodic"
    by_ends = shortest is not None and longest is not None
    if (base is None) == (not by_ends) or (base is not None and (shortest is not None or longest is not None)):
        raise ValueError(
            f"{caller}: give either base, or both shortest and longest; "
            f"got base={base!r}, shortest={shortest!r}, longest={longest!r}."
        )
    if base is not None:
        return 2 * math.pi * geometric(split, positive(caller, "base", base))
    low, high = (positive(caller, name, value or 0.0) for name, value in (("shortest", shortest), ("longest", longest)))
    return per_axis(split, lambda axis, pairs: [2 * math.pi / (low * (high / low) ** step) for step in _evenly(pairs)])


def mixed(
    axes: int,
    pairs: int,
    *,
    heads: int,
    layers: int | None = None,
    base: float = 10.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Directions drawn at random per head and layer: every pair listens to a mixture of all axes.

    The pairs are divided over ``axes`` perpendicular directions, a frame turned at random for every head and layer;
    along each direction runs a geometric ladder. Meant to be learned.

    Args:
        axes: Number of axes. For two, row 1 is x and row 0 is y, the slower axis first.
        pairs: Channel pairs of one head, at least one per axis.
        heads: Attention heads.
        layers: Layers, for a leading dimension; none if not given.
        base: The theta of each direction's ladder.
        generator: Source of the draw, for reproducible matrices.

    Returns:
        ``(heads, axes, pairs)`` or ``(layers, heads, axes, pairs)`` float64, radians per unit of coordinate.

    Raises:
        ValueError: fewer pairs than axes, a count below 1, or a base that is not positive and finite.

    Example:
        >>> import ndpos
        >>> matrix = ndpos.mixed(2, 4, heads=3, base=100.0)
        >>> matrix.shape
        torch.Size([3, 2, 4])
        >>> matrix.norm(dim=1)[0]  # the speed of each pair, in whatever direction
        tensor([1.0000, 0.1000, 1.0000, 0.1000], dtype=torch.float64)

    Source:
        Heo et al. 2024, RoPE-ViT, arXiv:2403.13298, ``init_random_2d_freqs`` (two axes); frames from the QR
        decomposition of a normal matrix for more (Mezzadri 2007, arXiv:math-ph/0609050).
    """
    caller = "ndpos.mixed"
    axes, pairs = whole(caller, "axes", axes, minimum=1), whole(caller, "pairs", pairs, minimum=1)
    leading = [whole(caller, "heads", heads, minimum=1)]
    if layers is not None:
        leading.insert(0, whole(caller, "layers", layers, minimum=1))
    if pairs < axes:
        raise ValueError(f"{caller}: every axis needs a pair; got {pairs} pairs for {axes} axes.")
    blocks = split(2 * pairs, axes)
    speeds = geometric(blocks, positive(caller, "base", base)).sum(0)
    frame = _frames(leading, axes, generator)
    return frame[..., list(blocks.pair_axes)] * speeds


def _frames(leading: Sequence[int], axes: int, generator: torch.Generator | None) -> Tensor:
    """Random orthonormal frames ``(*leading, axes, directions)``."""
    source = generator.device if generator is not None else torch.device("cpu")
    if axes == 2:
        turn = torch.rand(*leading, dtype=torch.float64, device=source, generator=generator).cpu() * 2 * math.pi
        y = torch.stack((turn.sin(), turn.cos()), -1)  # the second direction is the first turned by a quarter
        x = torch.stack((turn.cos(), -turn.sin()), -1)
        return torch.stack((y, x), -2)
    normal = torch.randn(*leading, axes, axes, dtype=torch.float64, device=source, generator=generator).cpu()
    factors = torch.linalg.qr(normal)
    frame: Tensor = factors.Q
    signs: Tensor = factors.R.diagonal(dim1=-2, dim2=-1).sign()
    return frame * signs.unsqueeze(-2)  # without the signs QR favours some frames
