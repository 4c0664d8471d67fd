"""The rows that an additive ndpos encoding gives a grid of patches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ndpos.encode.baselines import BinaryEmbedding, IntegerEmbedding
from ndpos.encode.learned import LearnedEmbedding
from ndpos.encode.sinusoidal import SinusoidalEmbedding
from ndpos.positions import axis_coords, cells, grid, outside_autocast

__all__: list[str] = []

ADDITIVE = (SinusoidalEmbedding, LearnedEmbedding, IntegerEmbedding, BinaryEmbedding)


def table_rows(
    table: nn.Module, sizes: Sequence[int], reference: Sequence[int] | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """``(prefix rows + prod(sizes), dim)`` of any additive encoding, on a grid of ``sizes``.

    Coordinates are grid steps, or, with ``reference``, those of a grid of that size with the same borders. A learned
    table resamples itself, or repeats itself if it was built with ``outside="wrap"``.
    """
    if isinstance(table, LearnedEmbedding):
        if table.outside == "raise":
            own: Tensor = table(sizes)
            return own.to(dtype)
        rows = table.lookup(grid(sizes, device=device).flatten(0, -2))
        with outside_autocast(device):
            return (rows if table.prefix is None else torch.cat((table.prefix, rows))).to(dtype)
    start: list[float] | int = 0
    step: list[float] | int = 1
    if reference is not None:
        step = [then / now for then, now in zip(reference, sizes, strict=True)]
        start = [by / 2 - 0.5 for by in step]
    if isinstance(table, SinusoidalEmbedding):
        return table.on_grid(sizes, start=start, step=step, dtype=dtype, device=device)
    coords = cells(axis_coords(sizes, start, step, device, caller="ndpos.timm")).flatten(0, -2)
    made: Tensor = table(coords, dtype=dtype)
    return made
