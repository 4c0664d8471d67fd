"""The rows that an additive ndpos encoding gives a grid of patches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ndpos.encode.baselines import BinaryEmbedding, IntegerEmbedding
from ndpos.encode.learned import LearnedEmbedding
from ndpos.encode.sinusoidal import SinusoidalEmbedding
from ndpos.positions import grid, outside_autocast, scaled_grid

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
    if isinstance(table, SinusoidalEmbedding):
        return table.on_grid(sizes, reference_sizes=reference, dtype=dtype, device=device)
    if reference is None:
        coords = grid(sizes, device=device)
    else:
        coords = scaled_grid(sizes, reference_sizes=reference, align="centre", device=device)
    made: Tensor = table(coords.flatten(0, -2), dtype=dtype)
    return made
