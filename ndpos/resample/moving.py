"""The resampling itself: stages of steps along single axes, in exact arithmetic, a few channels at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndpos.positions import exact_dtype, outside_autocast
from ndpos.resample.conventions import Stage
from ndpos.resample.ways import changes_nothing, check_fits, step
from ndpos.sizes import product

__all__: list[str] = []

NUMBERS_AT_ONCE = 2**21  # 16 MB of float64: 2**19 was a third slower for clips


def check_resizable(caller: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is a tensor of a floating dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{caller}: {name} is a torch.Tensor, got {type(value).__name__}. torch.as_tensor makes one.")
    if not value.is_floating_point():
        raise ValueError(f"{caller}: a {name} of {value.dtype} cannot be resampled. Convert it with {name}.float().")


def moved(
    caller: str,
    table: Tensor,
    old: tuple[int, ...],
    num_prefix: int,
    stages: Sequence[Stage],
    names: tuple[str, ...] | None = None,
) -> Tensor:
    """``table``, flat or a grid, taken from ``old`` sizes through ``stages``; all sizes are checked before."""
    flat = _is_flat(caller, table, old, num_prefix)
    starts = [old, *(stage.sizes for stage in stages[:-1])]
    for start, stage in zip(starts, stages, strict=True):
        check_fits(caller, stage.ways, start, stage.sizes, names)
    unit = torch.empty((), dtype=exact_dtype(table.device), device=table.device)
    steps = [
        step(stage.ways[axis], axis - len(old) - 1, start[axis], stage.sizes[axis], unit)
        for start, stage in zip(starts, stages, strict=True)
        for axis in _cheapest_order(start, stage.sizes)
        if stage.ways[axis].shift or not changes_nothing(start[axis], stage.sizes[axis])
    ]
    if not steps:
        return table
    new = stages[-1].sizes

    def move(part: Tensor) -> Tensor:
        grid = torch.unflatten(part[..., num_prefix:, :], -2, old) if flat else part
        grid = grid.to(unit.dtype)
        for each in steps:
            grid = each(grid)
        grid = _round(grid, table.dtype)
        return torch.cat([part[..., :num_prefix, :], grid.flatten(-1 - len(new), -2)], dim=-2) if flat else grid

    with outside_autocast(table.device):
        parts = [move(part) for part in torch.split(table, _channels_at_once(table, old, new), dim=-1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _cheapest_order(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """Axes in the order of least work: those that shrink most come first. Symbolic sizes are not compared."""
    axes = list(range(len(old)))
    return axes if torch.compiler.is_compiling() else sorted(axes, key=lambda axis: new[axis] / old[axis])


def _channels_at_once(table: Tensor, old: Sequence[int], new: Sequence[int]) -> int:
    """How many channels are resampled together, so that float64 copies stay small and are not fetched anew.

    Whole tables took up to half as long again, on two cores, for want of memory already at hand. The price is one
    more copy of the result. A graph is not cut into pieces: their number would be part of it.
    """
    if torch.compiler.is_compiling():
        return table.shape[-1]
    rows = table[..., :1].numel()
    return max(1, NUMBERS_AT_ONCE // max(1, rows * product(new) // product(old)))


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the dtype of the table. Half types by way of float32: a bfloat16 table and its float copy then agree."""
    return x.to(torch.float32).to(dtype) if dtype.itemsize < 4 else x.to(dtype)


def _is_flat(caller: str, table: Tensor, old: tuple[int, ...], num_prefix: int) -> bool:
    """Whether the table is ``(*batch, rows, dim)``; False if it is ``(*old_sizes, dim)``; an error if neither fits."""
    shape, needed = table.shape, num_prefix + product(old)
    if table.ndim >= 2 and shape[-2] == needed:
        return True
    if num_prefix == 0 and shape[:-1] == old:
        return False
    rows = shape[-2] if table.ndim >= 2 else 0
    spare = rows - product(old)
    cure = "Pass in old_sizes the grid that the table was trained on."
    if spare >= 0:
        cure = f"If it starts with {spare} class or register rows, pass num_prefix={spare}. If not, old_sizes is wrong."
    raise ValueError(
        f"{caller}: the table has {rows} rows, old_sizes and num_prefix need {needed}.\n"
        f"  table       {tuple(shape)}  (*batch, num_prefix + prod(old_sizes), dim) or (*old_sizes, dim)\n"
        f"  old_sizes   {old}  {product(old)} rows\n"
        f"  num_prefix  {num_prefix}\n"
        f"  {cure}"
    )
