"""Angles spent as a table of sines and cosines that is added to tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ndpos.frequencies import geometric
from ndpos.kernels import Pairing, pair_channels
from ndpos.positions import Align, Numbers, cells, outside_autocast, placed_coords
from ndpos.radians import PlainMatrix, check_coords, check_setting, spread, turns, turns_by_axis
from ndpos.subspaces import AxisSplit

__all__ = ["SinusoidalEmbedding", "add"]

Layout = Literal["interleaved", "sin_cos", "axis_sin_cos"]
CHANNELS: dict[Layout, Pairing] = {"interleaved": "interleaved", "sin_cos": "half", "axis_sin_cos": "half_per_axis"}


class SinusoidalEmbedding(nn.Module):
    """Sines and cosines of coordinates, each axis on its own channels: coordinates in, a table out.

    Frequencies are settings, never state: ``state_dict()`` is empty, and the table is exact under ``.half()``,
    ``.bfloat16()``, autocast and after ``to_empty``.

    Args:
        split: Channels per axis; ``AxisSplit(..., order=(1, 0))`` puts x first. Channels past the blocks are zero.
        base: The theta of the geometric ladder, for all axes or one per axis; 1e4 if neither it nor ``frequencies``
            is given.
        endpoint: ``"open"`` or ``"closed"``, as :func:`ndpos.geometric`.
        frequencies: ``(axes, pairs)`` radians per unit of coordinate, instead of ``base`` and ``endpoint``.
        layout: Where sine and cosine of a pair go. ``"interleaved"``: side by side (Vaswani). ``"sin_cos"``: all sines,
            then all cosines (timm, Whisper). ``"axis_sin_cos"``: the same inside each axis block (MAE, big_vision).

    Raises:
        ValueError: settings that contradict each other or the split.
        TypeError: a split or frequencies of another type, complex or boolean frequencies.

    Example:
        >>> import ndpos
        >>> emb = ndpos.SinusoidalEmbedding(ndpos.split(4, 1))
        >>> emb(ndpos.grid((3,)))
        tensor([[ 0.0000,  1.0000,  0.0000,  1.0000],
                [ 0.8415,  0.5403,  0.0100,  0.9999],
                [ 0.9093, -0.4161,  0.0200,  0.9998]])
        >>> ndpos.SinusoidalEmbedding(ndpos.split(96, 3)).on_grid((8, 14, 14)).shape  # a clip: (frames, height, width)
        torch.Size([1568, 96])

    Source:
        Vaswani et al. 2017, arXiv:1706.03762, section 3.5, for any number of axes.
    """

    def __init__(
        self,
        split: AxisSplit,
        *,
        base: float | Sequence[float] | None = None,
        endpoint: Literal["open", "closed"] = "open",
        frequencies: Tensor | None = None,
        layout: Layout = "interleaved",
    ) -> None:
        super().__init__()
        caller = "ndpos.SinusoidalEmbedding"
        if not isinstance(split, AxisSplit):
            raise TypeError(f"{caller}: split is an AxisSplit, got {split!r}. ndpos.split(dim, axes) makes one.")
        if layout not in get_args(Layout):
            raise ValueError(f"{caller}: layout is one of {get_args(Layout)}, got {layout!r}.")
        if frequencies is None:
            frequencies = geometric(split, 1e4 if base is None else base, endpoint=endpoint)
        elif base is not None or endpoint != "open":
            raise ValueError(
                f"{caller}: frequencies already say how fast each pair turns; leave base and endpoint out."
            )
        check_setting(caller, frequencies)
        shape = tuple(frequencies.shape)
        if len(shape) != 2 or shape[0] != split.axes or 2 * shape[1] > split.dim:
            raise ValueError(
                f"{caller}: frequencies are (axes, pairs) with {split.axes} axes and at most {split.dim // 2} pairs; "
                f"got {shape}."
            )
        self.split, self.layout, self.matrix = split, layout, PlainMatrix.of(caller, frequencies)
        if layout == "axis_sin_cos" and not self.matrix.follows(split.pair_axes):
            raise ValueError(
                f"{caller}: 'axis_sin_cos' needs a column for each of the {split.pairs} pairs, in the "
                f"blocks of the split, axes {split.pair_axes}; got columns for {self.matrix.listens}."
            )

    def forward(self, coords: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The table at ``coords``.

        Args:
            coords: ``(..., tokens, axes)``, any real dtype; integers stay exact.
            dtype: Of the table, rounded once from float64; never that of the coordinates.

        Returns:
            ``(..., tokens, dim)``.

        Raises:
            ValueError: coordinates with another number of axes, or a ``dtype`` that is not floating.
        """
        check_coords("ndpos.SinusoidalEmbedding", coords, self.split.axes)
        with outside_autocast(coords.device):
            return self._lay_out(*turns(coords, self.matrix.tensor(coords.device), self._floating(dtype)))

    def on_grid(
        self,
        sizes: Sequence[int],
        *,
        start: Numbers = 0,
        step: Numbers = 1,
        reference_sizes: Sequence[int] | None = None,
        align: Align = "centre",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The table of a whole grid ``(prod(sizes), dim)``, row-major; sines evaluated once per row of each axis.

        Bit-equal to ``emb(grid(sizes, start=start, step=step).flatten(0, -2))``, or, with ``reference_sizes``, to the
        same of ``scaled_grid(sizes, reference_sizes=reference_sizes, align=align)``.
        """
        caller = "ndpos.SinusoidalEmbedding.on_grid"
        per_axis = placed_coords(sizes, start, step, reference_sizes, align, device, caller=caller)
        if len(per_axis) != self.split.axes:
            raise ValueError(f"{caller}: the encoding has {self.split.axes} axes, sizes are {tuple(sizes)}.")
        with outside_autocast(per_axis[0].device):
            return self._on_grid(per_axis, self._floating(dtype))

    def _on_grid(self, per_axis: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        matrix, listens = self.matrix.tensor(per_axis[0].device), self.matrix.listens
        if None in listens:
            return self._lay_out(*turns(cells(per_axis).flatten(0, -2), matrix, dtype))
        # Sines and cosines go to their channels axis by axis, before rows are spread over cells: one pass, not three.
        cosines, sines = turns_by_axis(per_axis, matrix, listens, dtype)
        pairs = self.matrix.shape[-1]
        first, second = pair_channels(CHANNELS[self.layout], pairs, self.split.blocks)
        parts = [part._replace(channels=[first[column] for column in part.channels]) for part in sines]
        parts += [part._replace(channels=[second[column] for column in part.channels]) for part in cosines]
        return self._padded(spread(parts, [coords.shape[0] for coords in per_axis], 2 * pairs))

    def _floating(self, dtype: torch.dtype) -> torch.dtype:
        if not dtype.is_floating_point:
            raise ValueError(f"ndpos.SinusoidalEmbedding: sines are floating numbers, got dtype {dtype}.")
        return dtype

    def _lay_out(self, cos: Tensor, sin: Tensor) -> Tensor:
        if self.layout == "interleaved":
            table = torch.stack((sin, cos), dim=-1).flatten(-2)
        elif self.layout == "sin_cos":
            table = torch.cat((sin, cos), dim=-1)
        else:
            widths = list(self.split.blocks)
            blocks = zip(torch.split(sin, widths, dim=-1), torch.split(cos, widths, dim=-1), strict=True)
            table = torch.cat([part for block in blocks for part in block], dim=-1)
        return self._padded(table)

    def _padded(self, table: Tensor) -> Tensor:
        rest = self.split.dim - table.shape[-1]
        return F.pad(table, (0, rest)) if rest else table

    def extra_repr(self) -> str:
        return f"{self.split!r}, layout={self.layout!r}"


def add(
    x: Tensor,
    table: Tensor,
    *,
    scale: Literal["none", "sqrt_dim"] = "none",
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """Tokens plus a table of positions.

    Args:
        x: Tokens ``(..., tokens, dim)``, channels last, any floating dtype.
        table: ``(tokens, dim)`` for all samples, or with leading dimensions that are those of x or 1.
        scale: ``"sqrt_dim"`` multiplies x by the square root of dim first, so that positions do not drown embeddings
            of unit variance divided by it.
        dropout: Share of the sum's entries to zero while training.
        training: Whether dropout acts, as in ``torch.nn.functional.dropout``.

    Returns:
        Like ``x``: the sum is formed in the wider dtype of the two and rounded to that of x.

    Raises:
        ValueError: shapes that do not fit (nothing is broadcast over tokens or channels), an unknown scale, a dropout
            outside [0, 1].
        TypeError: x or table is no floating tensor.

    Example:
        >>> import ndpos, torch
        >>> x = torch.zeros(2, 6, 8, dtype=torch.bfloat16)
        >>> ndpos.add(x, ndpos.SinusoidalEmbedding(ndpos.split(8, 2)).on_grid((2, 3))).dtype
        torch.bfloat16

    Source:
        Vaswani et al. 2017, arXiv:1706.03762, sections 3.4 (sqrt_dim), 3.5 and 5.4 (dropout on the sum).
    """
    caller = "ndpos.add"
    for name, tensor in (("x", x), ("table", table)):
        if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
            seen = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{caller}: {name} is a floating tensor, got {seen}.")
    if scale not in ("none", "sqrt_dim"):
        raise ValueError(f"{caller}: scale is 'none' or 'sqrt_dim', got {scale!r}.")
    if not 0 <= dropout <= 1:
        raise ValueError(f"{caller}: dropout is a share between 0 and 1, got {dropout!r}.")
    fits = 2 <= table.ndim <= x.ndim and table.shape[-2:] == x.shape[-2:]
    leading = zip(reversed(table.shape[:-2]), reversed(x.shape[:-2]), strict=False)
    if not fits or not all(one == 1 or one == other for one, other in leading):
        raise ValueError(
            f"{caller}: the table has a row for every token and as many channels as x.\n"
            f"  x      {tuple(x.shape)}  (..., tokens, dim)\n  table  {tuple(table.shape)}  (..., tokens, dim)\n"
            f"  Channels first? x.flatten(2).mT. Class or register tokens? Add to x[..., num_prefix:, :], or give a "
            f"LearnedEmbedding num_prefix."
        )
    wide = x
    if scale == "sqrt_dim":
        wide = x.to(torch.promote_types(x.dtype, table.dtype)) * math.sqrt(x.shape[-1])  # rounded with the sum, once
    return F.dropout((wide + table).to(x.dtype), dropout, training)
