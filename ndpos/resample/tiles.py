"""Tables of picture tiles as torchtune has them: a grid of tiles, each with its class rows and its own grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ndpos.resample.conventions import CORNERED, Stage
from ndpos.resample.moving import moved
from ndpos.sizes import product

__all__: list[str] = []


def moved_tiles(caller: str, table: Tensor, old: Sequence[int], new: Sequence[int], num_prefix: int) -> Tensor:
    """``(tile_y, tile_x, num_prefix + y * x, dim)`` to other numbers of tiles, and of tokens in each.

    Tokens of all tiles are interpolated as one picture, across the borders of tiles; prefix rows over the tiles.

    Source:
        torchtune's ``TiledTokenPositionalEmbedding._resize_global_position_embedding``.
    """
    expected = (*old[:2], num_prefix + product(old[2:]))
    if table.shape[:-1] != expected:
        raise ValueError(
            f"{caller}: like='torchtune' with four axes takes a table (tile_y, tile_x, num_prefix + y * x, dim), "
            f"{(*expected, 'dim')} by old_sizes {tuple(old)} and num_prefix {num_prefix}; got {tuple(table.shape)}."
        )
    prefix, grid = table[..., :num_prefix, :], table[..., num_prefix:, :]
    grid = torch.unflatten(grid, 2, tuple(old[2:])).transpose(1, 2)  # (tile_y, y, tile_x, x, dim)
    grid = _cornered(caller, grid.flatten(2, 3).flatten(0, 1), (new[0] * new[2], new[1] * new[3]))
    grid = torch.unflatten(torch.unflatten(grid, 1, (new[1], new[3])), 0, (new[0], new[2]))
    grid = grid.transpose(1, 2).flatten(2, 3)
    if not num_prefix:
        return grid
    prefix = torch.unflatten(_cornered(caller, prefix.flatten(2), (new[0], new[1])), 2, (num_prefix, -1))
    return torch.cat([prefix, grid], dim=2)


def _cornered(caller: str, picture: Tensor, sizes: tuple[int, int]) -> Tensor:
    # As rows: a picture one row high would be taken for a batch of one.
    stage = Stage(sizes, (CORNERED, CORNERED))
    rows = moved(caller, picture.flatten(0, 1), (picture.shape[0], picture.shape[1]), 0, [stage])
    return torch.unflatten(rows, 0, sizes)
