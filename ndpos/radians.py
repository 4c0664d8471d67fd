"""The hinge: coordinates meet frequencies and become angles, exactly.

Products are elementwise and never ``@``: autocast lowers a matrix product to bfloat16, where an angle of 1000 is
4 radians away from the next. They are formed in float64, so an integer position is exact to 2**53.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ndpos.positions import cells, exact_dtype

__all__ = ["angles"]


def angles(coords: Tensor, frequencies: Tensor) -> Tensor:
    """Angles of every token and pair: the sum over the axes of coordinate times frequency.

    Args:
        coords: ``(*batch, tokens, axes)``, any real dtype; integers stay exact.
        frequencies: ``(axes, pairs)``; or ``(heads, axes, pairs)``; or ``(layers, heads, axes, pairs)``. Radians per
            unit of coordinate.

    Returns:
        Radians ``(*batch, tokens, pairs)``; or ``(*batch, heads, tokens, pairs)``; or
        ``(layers, *batch, heads, tokens, pairs)``. float64 (float32 where the device has none), autocast or not.

    Raises:
        ValueError: the two disagree about the number of axes, or have too few or too many dimensions.
        TypeError: complex or boolean coordinates or frequencies.

    Example:
        >>> import ndpos
        >>> ndpos.angles(ndpos.grid((2, 2)).flatten(0, -2), ndpos.geometric(ndpos.split(8, 2), base=100.0))
        tensor([[0.0000, 0.0000, 0.0000, 0.0000],
                [0.0000, 0.0000, 1.0000, 0.1000],
                [1.0000, 0.1000, 0.0000, 0.0000],
                [1.0000, 0.1000, 1.0000, 0.1000]], dtype=torch.float64)

    Source:
        Su et al. 2021, RoFormer, arXiv:2104.09864, eq. 15, for any number of axes.
    """
    check_coords("ndpos.angles", coords)
    check_frequencies("ndpos.angles", frequencies)
    if not 2 <= frequencies.ndim <= 4:
        raise ValueError(
            f"ndpos.angles: frequencies are (axes, pairs), (heads, axes, pairs) or (layers, heads, axes, pairs), "
            f"got {tuple(frequencies.shape)}."
        )
    if coords.shape[-1] != frequencies.shape[-2]:
        raise ValueError(
            f"ndpos.angles: coordinates have {coords.shape[-1]} axes, frequencies have {frequencies.shape[-2]}.\n"
            f"  coords       {tuple(coords.shape)}  (*batch, tokens, axes)\n"
            f"  frequencies  {tuple(frequencies.shape)}  (..., axes, pairs)\n"
            f"  Build the split for as many axes as the coordinates have: ndpos.split(dim, {coords.shape[-1]})."
        )
    exact = exact_dtype(coords.device)
    position = coords.to(exact)
    speed = frequencies.to(device=coords.device, dtype=exact)
    if frequencies.ndim >= 3:
        position = position.unsqueeze(-3)  # heads stand before tokens
    if frequencies.ndim == 4:
        speed = speed.reshape(speed.shape[0], *(1,) * (coords.ndim - 2), *speed.shape[1:])
    total = position[..., 0, None] * speed[..., None, 0, :]
    for axis in range(1, coords.shape[-1]):
        total = total + position[..., axis, None] * speed[..., None, axis, :]
    return total


def check_coords(caller: str, coords: Tensor, axes: int | None = None) -> None:
    """Raise unless ``coords`` are real numbers ``(*batch, tokens, axes)``."""
    if not isinstance(coords, Tensor):
        raise TypeError(f"{caller}: coordinates are a tensor (..., axes), got {type(coords).__name__}.")
    if coords.dtype.is_complex or coords.dtype == torch.bool:
        raise TypeError(f"{caller}: coordinates are real numbers, got {coords.dtype}.")
    if coords.ndim < 2:
        raise ValueError(f"{caller}: coordinates are (*batch, tokens, axes), got {tuple(coords.shape)}.")
    if axes is not None and coords.shape[-1] != axes:
        raise ValueError(
            f"{caller}: the encoding has {axes} axes, the coordinates have {coords.shape[-1]}: {tuple(coords.shape)}, "
            f"last dimension = axes. One axis per token is coords[..., None]."
        )


def check_frequencies(caller: str, frequencies: Tensor) -> None:
    """Raise unless ``frequencies`` are a tensor of real numbers; a cast would drop imaginary parts with a warning."""
    if not isinstance(frequencies, Tensor):
        raise TypeError(f"{caller}: frequencies are a tensor (..., axes, pairs), got {type(frequencies).__name__}.")
    if frequencies.dtype.is_complex or frequencies.dtype == torch.bool:
        raise TypeError(f"{caller}: frequencies are real numbers, got {frequencies.dtype}.")


def check_setting(caller: str, frequencies: Tensor) -> None:
    """Raise unless ``frequencies`` can be kept as plain numbers: floating, finite, with values, at least one column."""
    if not isinstance(frequencies, Tensor) or not frequencies.dtype.is_floating_point:
        seen = frequencies.dtype if isinstance(frequencies, Tensor) else type(frequencies).__name__
        raise TypeError(f"{caller}: frequencies are a floating tensor (..., axes, pairs), got {seen}.")
    shape = tuple(frequencies.shape)
    if frequencies.is_meta:
        raise ValueError(
            f"{caller}: frequencies {shape} are on the meta device and have no values; make them on the CPU."
        )
    if 0 in shape:
        raise ValueError(f"{caller}: frequencies have at least one axis and one pair, got {shape}.")
    if not bool(torch.isfinite(frequencies.detach().double()).all()):
        raise ValueError(f"{caller}: frequencies are finite, got NaN or infinity in {shape}.")


@dataclass(frozen=True)
class PlainMatrix:
    """A frequency matrix as plain Python numbers: settings of a module, out of reach of casts, moves and loading.

    ``listens[i]`` is the axis of column i, -1 for a zero column, ``None`` for one that mixes axes.
    """

    shape: tuple[int, ...]
    values: tuple[float, ...]
    listens: tuple[int | None, ...]

    @classmethod
    def of(cls, caller: str, frequencies: Tensor) -> PlainMatrix:
        check_setting(caller, frequencies)
        plain = frequencies.detach().to(device="cpu", dtype=torch.float64)
        heard = (plain != 0).flatten(0, -3).any(0) if plain.ndim > 2 else plain != 0
        axes = [column.nonzero().flatten().tolist() for column in heard.unbind(-1)]
        listens = tuple(None if len(heard_by) > 1 else heard_by[0] if heard_by else -1 for heard_by in axes)
        return cls(tuple(plain.shape), tuple(plain.flatten().tolist()), listens)

    def follows(self, pair_axes: Sequence[int]) -> bool:
        """Whether every column that listens to one axis stands in that axis' block, one column for every pair."""
        return len(self.listens) == len(pair_axes) and all(
            heard in (None, -1, axis) for heard, axis in zip(self.listens, pair_axes, strict=True)
        )

    def tensor(self, device: torch.device | str | None) -> Tensor:
        """The matrix ``shape`` in the widest float of ``device``."""
        return torch.tensor(self.values, dtype=exact_dtype(device), device=device).reshape(self.shape)


def turns(coords: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of :func:`angles`, rounded to ``dtype`` once."""
    exact = angles(coords, frequencies)
    return exact.cos().to(dtype), exact.sin().to(dtype)


class AxisRows(NamedTuple):
    """What one axis contributes to a table: ``rows`` ``(..., size, len(channels))`` for these channels of the table."""

    axis: int
    channels: Sequence[int]
    rows: Tensor


def turns_on_grid(
    per_axis: Sequence[Tensor], frequencies: Tensor, listens: Sequence[int | None], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin ``(..., cells, pairs)`` for every cell of a grid, row-major; see :func:`turns_by_axis`."""
    if None in listens:
        return turns(cells(per_axis).flatten(0, -2), frequencies, dtype)
    cosines, sines = turns_by_axis(per_axis, frequencies, listens, dtype)
    sizes = [coords.shape[0] for coords in per_axis]
    return spread(cosines, sizes, len(listens)), spread(sines, sizes, len(listens))


def turns_in_rows(
    per_axis: Sequence[Tensor], frequencies: Tensor, listens: Sequence[int | None], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin ``(..., sum of sizes, pairs)``, the rows of one axis after those of another, unspread.

    A row holds zeros in the columns that listen to another axis. Each column listens to one axis.
    """
    halves = []
    for parts in turns_by_axis(per_axis, frequencies, listens, dtype):
        rows = []
        for axis, coords in enumerate(per_axis):
            filled = _filled([part for part in parts if part.axis == axis], len(listens))
            empty = (*parts[0].rows.shape[:-2], coords.shape[0], len(listens))
            rows.append(parts[0].rows.new_zeros(empty) if filled is None else filled)
        halves.append(torch.cat(rows, dim=-2))
    return halves[0], halves[1]


def turns_by_axis(
    per_axis: Sequence[Tensor], frequencies: Tensor, listens: Sequence[int | None], dtype: torch.dtype
) -> tuple[list[AxisRows], list[AxisRows]]:
    """cos and sin of a grid, evaluated once per row of each axis.

    A column that listens to one axis takes only as many values as that axis has rows: 144 rows in place of 65,536
    cells for a 16 x 64 x 64 clip. The values are those of :func:`turns` bit for bit: same products, same rounding,
    and adding the other axes' zeros changes nothing.

    Args:
        per_axis: Coordinates of each axis, ``(size,)``.
        frequencies: ``(..., axes, pairs)``.
        listens: The axis of each column; none mixes several.
        dtype: Of the result.
    """
    cosines, sines = [], []
    for axis, coords in enumerate(per_axis):
        columns = [column for column, heard in enumerate(listens) if heard == axis or (heard == -1 and axis == 0)]
        if columns:
            cos, sin = turns(coords.unsqueeze(-1), frequencies[..., axis : axis + 1, columns], dtype)
            cosines.append(AxisRows(axis, columns, cos))
            sines.append(AxisRows(axis, columns, sin))
    return cosines, sines


def spread(parts: Sequence[AxisRows], sizes: Sequence[int], channels: int) -> Tensor:
    """Rows of single axes over all cells of a grid: ``(..., cells, channels)``, cells row-major.

    Every axis fills its own channels and leaves zeros in the others', so the axes are added: exact, and one contiguous
    pass over the table, where placing blocks of channels side by side took three times as long.
    """
    total: Tensor | None = None
    leading = parts[0].rows.ndim - 2
    for axis in reversed(range(len(sizes))):
        filled = _filled([part for part in parts if part.axis == axis], channels)
        if filled is None:
            filled = parts[0].rows.new_zeros(*parts[0].rows.shape[:leading], sizes[axis], channels)
        if total is None:
            total = filled
        else:
            ones = (1,) * (len(sizes) - 1 - axis)
            total = filled.reshape(*filled.shape[:-1], *ones, channels) + total.unsqueeze(leading)
    assert total is not None
    return total.flatten(leading, -2)


def _filled(parts: Sequence[AxisRows], channels: int) -> Tensor | None:
    """The rows of one axis ``(..., size, channels)``, zero where no part says otherwise; None without parts."""
    if not parts:
        return None
    given = [channel for part in parts for channel in part.channels]
    rows = F.pad(torch.cat([part.rows for part in parts], dim=-1), (0, 1))  # the last column is the zero of the others
    place = {channel: column for column, channel in enumerate(given)}
    return rows[..., [place.get(channel, len(given)) for channel in range(channels)]]
