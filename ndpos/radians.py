"""The hinge: coordinates meet frequencies and become angles, exactly.

Products are elementwise and never ``@``: autocast lowers a matrix product to bfloat16, where an angle of 1000 is
4 radians away from the next. They are formed in float64, so an integer position is exact to 2**53.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ndpos.positions import exact_dtype

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
    if frequencies.dtype.is_complex or frequencies.dtype == torch.bool:
        raise TypeError(f"ndpos.angles: frequencies are real numbers, got {frequencies.dtype}.")
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


@dataclass(frozen=True)
class PlainMatrix:
    """A frequency matrix as plain Python numbers: settings of a module, out of reach of casts, moves and loading.

    ``listens[i]`` is the axis of column i, 0 for a zero column, ``None`` for one that mixes axes.
    """

    shape: tuple[int, ...]
    values: tuple[float, ...]
    listens: tuple[int | None, ...]

    @classmethod
    def of(cls, frequencies: Tensor) -> PlainMatrix:
        plain = frequencies.detach().to(device="cpu", dtype=torch.float64)
        heard = (plain != 0).flatten(0, -3).any(0) if plain.ndim > 2 else plain != 0
        listens = tuple(None if column.sum() > 1 else int(column.int().argmax()) for column in heard.unbind(-1))
        return cls(tuple(plain.shape), tuple(plain.flatten().tolist()), listens)

    def tensor(self, device: torch.device | str | None) -> Tensor:
        """The matrix ``shape`` in the widest float of ``device``."""
        return torch.tensor(self.values, dtype=exact_dtype(device), device=device).reshape(self.shape)


def turns(coords: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of :func:`angles`, rounded to ``dtype`` once."""
    exact = angles(coords, frequencies)
    return exact.cos().to(dtype), exact.sin().to(dtype)


def turns_on_grid(
    per_axis: Sequence[Tensor], frequencies: Tensor, listens: Sequence[int | None], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin for every cell of a grid, evaluated once per row of each axis and spread over the cells.

    A column that listens to one axis takes only as many values as that axis has rows: 144 rows in place of 65,536
    cells for a 16 x 64 x 64 clip. The values are those of :func:`turns` bit for bit: same products, same rounding,
    and adding the other axes' zeros changes nothing. A matrix with mixed columns is evaluated cell by cell.

    Args:
        per_axis: Coordinates of each axis, ``(size,)``.
        frequencies: ``(..., axes, pairs)``.
        listens: The axis of each column, ``None`` if it mixes several.
        dtype: Of the result.

    Returns:
        Two tensors ``(..., cells, pairs)``, cells row-major.
    """
    sizes = [coords.shape[0] for coords in per_axis]
    if None in listens:
        cells = torch.stack(torch.meshgrid(*per_axis, indexing="ij"), dim=-1).flatten(0, -2)
        return turns(cells, frequencies, dtype)
    order: list[int] = []
    cosines: list[Tensor] = []
    sines: list[Tensor] = []
    for axis, coords in enumerate(per_axis):
        columns = [column for column, heard in enumerate(listens) if heard == axis]
        if not columns:
            continue
        rows = turns(coords.unsqueeze(-1), frequencies[..., axis : axis + 1, columns], dtype)
        for parts, part in zip((cosines, sines), rows, strict=True):
            there = part.reshape(
                *part.shape[:-2], *(1,) * axis, sizes[axis], *(1,) * (len(sizes) - axis - 1), len(columns)
            )
            parts.append(there.expand(*part.shape[:-2], *sizes, len(columns)))
        order += columns
    cos, sin = torch.cat(cosines, -1), torch.cat(sines, -1)
    if order != sorted(order):
        places = sorted(range(len(order)), key=order.__getitem__)
        cos, sin = cos[..., places], sin[..., places]
    leading = frequencies.ndim - 2
    return cos.flatten(leading, -2), sin.flatten(leading, -2)
