"""Where tokens stand: coordinates ``(..., axes)``, the last dimension one number per axis, slowest axis first.

Everything here is a choice of coordinates and nothing else. Grids are row-major over the named axes in every
function: options choose what number a cell gets, never the order of the cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from ndpos.sizes import finite, numbers_per_axis, sizes_per_axis

__all__ = [
    "augment",
    "centred_grid",
    "grid",
    "normalised_grid",
    "scaled_grid",
]

WITHOUT_FLOAT64 = frozenset({"mps"})

Numbers = float | Sequence[float]
Align = Literal["index", "centre", "corner"]


def exact_dtype(device: torch.device | str | None) -> torch.dtype:
    """The widest float of ``device``: float64, or float32 where there is no float64 (Apple's MPS)."""
    kind = torch.device(device).type if device is not None else torch.get_default_device().type
    return torch.float32 if kind in WITHOUT_FLOAT64 else torch.float64


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, which lowers float32 products and, on the CPU, refuses to join float16 tensors."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def axis_coords(
    sizes: Sequence[int], start: Any, step: Any, device: Any, *, caller: str = "ndpos.grid"
) -> list[Tensor]:
    """The coordinates of a grid axis by axis: one tensor ``(size,)`` each, before any cell is made.

    int64 when every start and step is an integer, since float32 steps by two from 2**24 on; one dtype for all axes.
    """
    sizes = sizes_per_axis(caller, sizes)
    starts = numbers_per_axis(caller, "start", start, len(sizes))
    steps = numbers_per_axis(caller, "step", step, len(sizes))
    symbolic = any(isinstance(number, torch.SymInt) for number in (*starts, *steps)) or torch.compiler.is_compiling()
    if not symbolic:
        _check_reach(caller, sizes, starts, steps)
    counts = [torch.arange(size, dtype=torch.int64, device=device) for size in sizes]
    if all(isinstance(number, (Integral, torch.SymInt)) for number in (*starts, *steps)):
        return [count * by + first for count, first, by in zip(counts, starts, steps, strict=True)]
    dtype = exact_dtype(counts[0].device)  # not of `device`: asking for the default one would break a compiled graph
    return [count.to(dtype) * float(by) + float(first) for count, first, by in zip(counts, starts, steps, strict=True)]


def _check_reach(caller: str, sizes: Sequence[int], starts: Sequence[Any], steps: Sequence[Any]) -> None:
    """Raise unless the first and the last coordinate of every axis are exact: int64, or below 2**53 as floats."""
    numbers = (*starts, *steps)
    for number in numbers:
        if isinstance(number, (bool, str, Tensor)):
            raise TypeError(
                f"{caller}: start and step are plain numbers, got {number!r}. Add tensors to the coordinates."
            )
        finite(caller, "start and step", number)
    whole_numbers = all(isinstance(number, Integral) for number in numbers)
    bits = 63 if whole_numbers else 53
    for size, first, by in zip(sizes, starts, steps, strict=True):
        ends = (first, first + by * max(size - 1, 0))
        if any(abs(end) >= 2**bits for end in ends):
            raise ValueError(
                f"{caller}: coordinates stay below 2**{bits} in size, where they are exact; {size} from {first!r} in "
                f"steps of {by!r} end at {ends[1]!r}."
            )


def cells(per_axis: Sequence[Tensor]) -> Tensor:
    """Coordinates of every cell ``(*sizes, axes)``, row-major, from the coordinates of each axis ``(size,)``."""
    return torch.stack(torch.meshgrid(*per_axis, indexing="ij"), dim=-1)


def grid(
    sizes: Sequence[int], *, start: Numbers = 0, step: Numbers = 1, device: torch.device | str | None = None
) -> Tensor:
    """Coordinates of every cell of a grid, counted from ``start`` in steps of ``step``.

    Args:
        sizes: Tokens per axis, slowest axis first: ``(height, width)``, ``(frames, height, width)``. Zero is allowed.
        start: Coordinate of the first cell, for all axes or one per axis.
        step: Distance between neighbours, for all axes or one per axis.
        device: Where the coordinates are made; torch's default device if not given.

    Returns:
        ``(*sizes, axes)``: int64 when ``start`` and ``step`` are integers, else float64 (float32 where the device has
        none). Flatten it with ``.flatten(0, -2)`` for one row per token; rows are then in row-major order.

    Raises:
        TypeError: ``sizes`` is a lone number or holds a float or a boolean.
        ValueError: a size is negative, there is no axis, or ``start``/``step`` have another number of axes.

    Example:
        >>> import ndpos
        >>> ndpos.grid((2, 3)).flatten(0, -2).tolist()
        [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
        >>> ndpos.grid((3,), start=10, step=0.5).flatten().tolist()
        [10.0, 10.5, 11.0]

    Source:
        Patch order of Dosovitskiy et al. 2020, arXiv:2010.11929, for any number of axes.
    """
    return cells(axis_coords(sizes, start, step, device))


def centred_grid(sizes: Sequence[int], *, step: Numbers = 1, device: torch.device | str | None = None) -> Tensor:
    """Coordinates with zero in the middle of every axis: ``(i - (size - 1) / 2) * step``.

    Args:
        sizes: Tokens per axis, slowest first.
        step: Distance between neighbours, for all axes or one per axis.
        device: Where the coordinates are made.

    Returns:
        ``(*sizes, axes)`` float64 (float32 where the device has none).

    Raises:
        TypeError, ValueError: as :func:`ndpos.grid`.

    Example:
        >>> import ndpos
        >>> ndpos.centred_grid((4,)).flatten().tolist()
        [-1.5, -0.5, 0.5, 1.5]

    Source:
        Wei et al. 2025, VideoRoPE, arXiv:2502.05173, section 3 (diagonal layout centres the spatial axes).
    """
    caller = "ndpos.centred_grid"
    axes = axis_coords(sizes, 0.0, 1.0, device, caller=caller)
    steps = [finite(caller, "step", by) for by in numbers_per_axis(caller, "step", step, len(axes))]
    middle = [(coords - (size - 1) / 2) * by for coords, size, by in zip(axes, sizes, steps, strict=True)]
    return cells(middle)


def normalised_grid(
    sizes: Sequence[int],
    *,
    by: Literal["axis", "shortest", "longest"] = "axis",
    at: Literal["centre", "start", "ends"] = "centre",
    span: tuple[float, float] = (-1.0, 1.0),
    device: torch.device | str | None = None,
) -> Tensor:
    """Coordinates as a fraction of the picture, so that a larger picture has finer steps and the same range.

    Args:
        sizes: Tokens per axis, slowest first.
        by: The length that counts as the whole: each axis by itself (which distorts the aspect ratio), the
            shortest axis, or the longest.
        at: Where in its cell a token stands: ``"centre"`` ``(i + 1/2) / length``, ``"start"`` ``i / length``,
            ``"ends"`` ``i / (length - 1)``, first and last token on the ends of the range (0 for a length of one).
        span: Coordinates of fraction 0 and fraction 1.
        device: Where the coordinates are made.

    Returns:
        ``(*sizes, axes)`` float64 (float32 where the device has none).

    Raises:
        ValueError: an unknown ``by`` or ``at``; otherwise as :func:`ndpos.grid`.

    Example:
        >>> import ndpos
        >>> ndpos.normalised_grid((4,)).flatten().tolist()
        [-0.75, -0.25, 0.25, 0.75]

    Source:
        Siméoni et al. 2025, DINOv3, arXiv:2508.10104: ``rope_position_encoding.py`` ("separate", "min", "max").
    """
    caller = "ndpos.normalised_grid"
    axes = axis_coords(sizes, 0.0, 1.0, device, caller=caller)
    if by not in ("axis", "shortest", "longest"):
        raise ValueError(f"{caller}: by is 'axis', 'shortest' or 'longest', got {by!r}.")
    if at not in ("centre", "start", "ends"):
        raise ValueError(f"{caller}: at is 'centre', 'start' or 'ends', got {at!r}.")
    lengths = list(sizes) if by == "axis" else [min(sizes) if by == "shortest" else max(sizes)] * len(axes)
    offset, less = {"centre": (0.5, 0), "start": (0.0, 0), "ends": (0.0, 1)}[at]
    low, high = span
    # A length of one has no distance between its ends; max() keeps that cell at fraction 0 in place of 0 / 0.
    fractions = [(coords + offset) / max(length - less, 1) for coords, length in zip(axes, lengths, strict=True)]
    return cells([low + fraction * (high - low) for fraction in fractions])


def scaled_grid(
    sizes: Sequence[int],
    *,
    reference_sizes: Sequence[int],
    align: Align,
    device: torch.device | str | None = None,
) -> Tensor:
    """Coordinates of a grid laid over a reference grid, in the reference's own steps.

    A model trained on ``reference_sizes`` sees the range of coordinates that it knows, whatever the new grid is.

    Args:
        sizes: Tokens per axis now, slowest first.
        reference_sizes: Tokens per axis of the grid whose coordinates are to be kept.
        align: What of the two grids coincides, with n the size and r the reference size. ``"index"``: the first
            cells, ``i * r / n`` (EVA-02). ``"centre"``: cell borders, ``(i + 1/2) * r / n - 1/2``, as images are
            resized. ``"corner"``: first and last cell, ``i * (r - 1) / (n - 1)``. No default: the wrong one is silent.
        device: Where the coordinates are made.

    Returns:
        ``(*sizes, axes)`` float64 (float32 where the device has none).

    Raises:
        ValueError: the two grids have different numbers of axes, or ``align`` is unknown.

    Example:
        >>> import ndpos
        >>> ndpos.scaled_grid((4,), reference_sizes=(2,), align="index").flatten().tolist()
        [0.0, 0.5, 1.0, 1.5]
        >>> ndpos.scaled_grid((4,), reference_sizes=(2,), align="centre").flatten().tolist()
        [-0.25, 0.25, 0.75, 1.25]

    Source:
        Fang et al. 2023, EVA-02, arXiv:2303.11331 (``ref_feat_shape`` in timm); Chen et al. 2023, arXiv:2306.15595.
    """
    return cells(scaled_coords(sizes, reference_sizes, align, device, caller="ndpos.scaled_grid"))


def placed_coords(
    sizes: Sequence[int], start: Any, step: Any, reference_sizes: Any, align: Any, device: Any, *, caller: str
) -> list[Tensor]:
    """The coordinates of an ``on_grid`` call axis by axis: from ``start`` in ``step``, or over a reference grid."""
    if reference_sizes is None:
        return axis_coords(sizes, start, step, device, caller=caller)
    if start != 0 or step != 1:
        raise ValueError(
            f"{caller}: reference_sizes already say where the grid starts and how it steps; leave start={start!r} and "
            f"step={step!r} out."
        )
    return scaled_coords(sizes, reference_sizes, align, device, caller=caller)


def scaled_coords(
    sizes: Sequence[int], reference_sizes: Sequence[int], align: Any, device: Any, *, caller: str
) -> list[Tensor]:
    """The coordinates of :func:`scaled_grid` axis by axis: one tensor ``(size,)`` each, before any cell is made."""
    axes = axis_coords(sizes, 0.0, 1.0, device, caller=caller)
    reference = sizes_per_axis(caller, reference_sizes, name="reference_sizes", minimum=1, axes=len(axes))
    if align not in ("index", "centre", "corner"):
        raise ValueError(f"{caller}: align is 'index', 'centre' or 'corner', got {align!r}.")
    scaled = []
    for coords, now, then in zip(axes, sizes, reference, strict=True):
        if align == "corner":
            scaled.append(coords * (then - 1) / max(now - 1, 1))
        else:
            half = 0.5 if align == "centre" else 0.0
            scaled.append((coords + half) * then / now - half)
    return scaled


def augment(
    coords: Tensor,
    *,
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Coordinates moved and stretched at random, so that a model does not learn one grid by heart.

    One draw per call: make the coordinates once per forward and hand them to every layer.

    Args:
        coords: ``(..., axes)``.
        shift: Every axis moves by a number drawn from [-shift, shift].
        jitter: Every axis is multiplied by a factor drawn log-uniformly from [1 / jitter, jitter].
        rescale: All axes are multiplied by one factor drawn log-uniformly from [1 / rescale, rescale].
        training: ``coords`` come back untouched unless true, as in ``torch.nn.functional.dropout``.
        generator: Source of the draw, for reproducible runs; its device is where the draw is made.

    Returns:
        Like ``coords``; float64 (float32 where the device has none) when anything was drawn.

    Raises:
        ValueError: ``shift`` is negative, or ``jitter`` or ``rescale`` is below 1.

    Example:
        >>> import ndpos, torch
        >>> coords = ndpos.normalised_grid((2, 2))
        >>> draw = lambda: ndpos.augment(coords, jitter=1.5, training=True, generator=torch.Generator().manual_seed(0))
        >>> torch.equal(draw(), draw())
        True
        >>> ndpos.augment(coords, jitter=1.5) is coords
        True

    Source:
        Siméoni et al. 2025, DINOv3, arXiv:2508.10104: ``rope_position_encoding.py``, in its order.
    """
    if not isinstance(coords, Tensor) or coords.dtype.is_complex or coords.dtype == torch.bool:
        seen = coords.dtype if isinstance(coords, Tensor) else type(coords).__name__
        raise TypeError(f"ndpos.augment: coordinates are a tensor of real numbers, got {seen}.")
    if shift is not None and not shift >= 0:
        raise ValueError(f"ndpos.augment: shift is at least 0, got {shift!r}.")
    for name, factor in (("jitter", jitter), ("rescale", rescale)):
        if factor is not None and not factor >= 1:
            raise ValueError(
                f"ndpos.augment: {name} is a factor of at least 1, got {factor!r}. For no {name} pass None."
            )
    for name, reach in (("shift", shift), ("jitter", jitter), ("rescale", rescale)):
        if reach is not None:
            finite("ndpos.augment", name, reach)
    if not training or (shift is None and jitter is None and rescale is None):
        return coords
    source = generator.device if generator is not None else coords.device
    moved = coords.to(exact_dtype(coords.device))

    def draw(count: int, reach: float) -> Tensor:
        uniform = torch.rand(count, dtype=exact_dtype(source), device=source, generator=generator)
        return ((2 * uniform - 1) * reach).to(moved)

    if shift is not None:
        moved = moved + draw(coords.shape[-1], shift)
    if jitter is not None:
        moved = moved * draw(coords.shape[-1], math.log(jitter)).exp()
    if rescale is not None:
        moved = moved * draw(1, math.log(rescale)).exp()
    return moved
