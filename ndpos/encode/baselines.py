"""Integer and binary positions: what came before sines, kept as small baselines to compare with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ndpos.radians import check_coords
from ndpos.sizes import refuse_unless
from ndpos.subspaces import AxisSplit

__all__ = ["BinaryEmbedding", "IntegerEmbedding"]


class IntegerEmbedding(nn.Module):
    """The coordinate itself on every channel of its axis: unbounded, far above embeddings from the first rows on.

    Args:
        split: Channels per axis; channels past the blocks are zero.

    Raises:
        ValueError: at the call, coordinates with another number of axes.

    Example:
        >>> import ndpos
        >>> ndpos.IntegerEmbedding(ndpos.split(4, 2))(ndpos.grid((1, 3)).flatten(0, -2))
        tensor([[0., 0., 0., 0.],
                [0., 0., 1., 1.],
                [0., 0., 2., 2.]])

    Source:
        The first attempt that sinusoids answer: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    def __init__(self, split: AxisSplit) -> None:
        super().__init__()
        if not isinstance(split, AxisSplit):
            raise TypeError(f"ndpos.{type(self).__name__}: split is an AxisSplit, got {split!r}.")
        self.split = split

    def forward(self, coords: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """``(..., tokens, axes)`` to ``(..., tokens, dim)``."""
        check_coords("ndpos.IntegerEmbedding", coords, self.split.axes)
        parts = [
            coords[..., axis, None].expand(*coords.shape[:-1], self.split.channels[axis]) for axis in self.split.order
        ]
        return _padded(torch.cat(parts, dim=-1).to(dtype), self.split)

    def extra_repr(self) -> str:
        return repr(self.split)


class BinaryEmbedding(nn.Module):
    """The bits of the coordinate, lowest first, on the channels of its axis: bounded, but with jumps.

    Args:
        split: Channels per axis, one bit each; channels past the blocks are zero.

    Raises:
        ValueError: at the call, coordinates that are negative, fractional or need more bits than their axis has.

    Example:
        >>> import ndpos
        >>> ndpos.BinaryEmbedding(ndpos.AxisSplit((4,)))(ndpos.grid((1,), start=6)).tolist()
        [[0.0, 1.0, 1.0, 0.0]]

    Source:
        The second attempt that sinusoids answer: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    def __init__(self, split: AxisSplit) -> None:
        super().__init__()
        if not isinstance(split, AxisSplit):
            raise TypeError(f"ndpos.{type(self).__name__}: split is an AxisSplit, got {split!r}.")
        self.split = split

    def forward(self, coords: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """``(..., tokens, axes)`` to ``(..., tokens, dim)`` of zeros and ones."""
        caller = "ndpos.BinaryEmbedding"
        check_coords(caller, coords, self.split.axes)
        parts = []
        for axis in self.split.order:
            numbers, bits = coords[..., axis], self.split.channels[axis]
            if numbers.dtype.is_floating_point:
                fits = (numbers >= 0) & (numbers < 2.0 ** min(bits, 63)) & (numbers == numbers.floor())
            else:  # without a float in between: float32 rounds 2**26 - 1 up to the bound itself
                fits = numbers.to(torch.int64) >> min(bits, 63) == 0
            refuse_unless(
                fits if bits else numbers == numbers,
                numbers,
                f"{caller}: axis {axis} has {bits} bits, for whole numbers at least 0 and below 2**{bits}.",
            )
            weights = torch.arange(bits, dtype=torch.int64, device=coords.device).clamp(max=63)
            parts.append((numbers.to(torch.int64)[..., None] >> weights) & 1)
        return _padded(torch.cat(parts, dim=-1).to(dtype), self.split)

    def extra_repr(self) -> str:
        return repr(self.split)


def _padded(table: Tensor, split: AxisSplit) -> Tensor:
    rest = split.dim - table.shape[-1]
    return torch.nn.functional.pad(table, (0, rest)) if rest else table
