"""A trained table per grid or per axis: looked up at coordinates, or resampled whole to another grid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as corners
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ndpos.parameters import check_movable, move
from ndpos.positions import exact_dtype, outside_autocast
from ndpos.radians import check_coords
from ndpos.resample import Align, Kernel, Like, Policy, changes, changes_nothing, resize
from ndpos.sizes import product, refuse_outside, refuse_tracing, refuse_unless, sizes_per_axis, whole
from ndpos.subspaces import AxisSplit
from ndpos.subspaces import split as even_split

__all__ = ["LearnedEmbedding"]

Kind = Literal["joint", "axial", "sum"]


class LearnedEmbedding(nn.Module):
    """A learned table that knows its own grid: whole, looked up at coordinates, or resampled to other sizes.

    Args:
        sizes: The grid that is learned, tokens per axis, slowest first.
        dim: Channels of a token.
        kind: ``"joint"``: a vector per cell. ``"axial"``: one table per axis on disjoint channels, side by side.
            ``"sum"``: one table per axis on all channels, added.
        split: Channels per axis for ``"axial"``; ``ndpos.split(dim, axes)`` if not given.
        num_prefix: Rows in front for tokens without a position (class, register): learned, never resampled.
        outside: What :meth:`lookup` does with coordinates outside the grid: ``"raise"``, or ``"wrap"``: modulo sizes.
        kernel, antialias, align, like: How the table is resampled to other sizes, as :func:`ndpos.resize`. Tables per
            axis have one axis each.
        device, dtype: Of the parameters.

    Attributes:
        tables: The parameters: ``(*sizes, dim)`` for ``"joint"``, else ``(size, channels)`` per axis with channels.
        prefix: ``(num_prefix, dim)``, or None.

    Raises:
        ValueError: settings that contradict each other, with what was seen.

    Example:
        >>> import ndpos, torch
        >>> emb = ndpos.LearnedEmbedding((14, 14), 64, num_prefix=1)
        >>> emb().shape, emb((20, 16)).shape  # own sizes: the table itself; other sizes: resampled
        (torch.Size([197, 64]), torch.Size([321, 64]))
        >>> emb.lookup(torch.tensor([[13, 13], [0, 5]])).shape
        torch.Size([2, 64])

    Source:
        "joint": Dosovitskiy et al. 2020, arXiv:2010.11929. "sum" (factorised): Dehghani et al. 2023, NaViT,
        arXiv:2307.06304. "axial": Ho et al. 2019, arXiv:1912.12180, and Reformer, arXiv:2001.04451.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        *,
        kind: Kind = "joint",
        split: AxisSplit | None = None,
        num_prefix: int = 0,
        outside: Literal["raise", "wrap"] = "raise",
        kernel: Kernel | Policy = "cubic",
        antialias: bool = True,
        align: Align = "centre",
        like: Like | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        caller = "ndpos.LearnedEmbedding"
        self.sizes = sizes_per_axis(caller, sizes, minimum=1)
        self.dim = whole(caller, "dim", dim, minimum=1)
        self.num_prefix = whole(caller, "num_prefix", num_prefix)
        if kind not in get_args(Kind):
            raise ValueError(f"{caller}: kind is one of {get_args(Kind)}, got {kind!r}.")
        if outside not in ("raise", "wrap"):
            raise ValueError(f"{caller}: outside is 'raise' or 'wrap', got {outside!r}.")
        if split is not None and kind != "axial":
            raise ValueError(f"{caller}: a split belongs to kind='axial'; kind={kind!r} gives every axis all channels.")
        if kind == "axial":
            split = even_split(dim, len(self.sizes)) if split is None else split
            if split.axes != len(self.sizes) or split.dim != dim:
                raise ValueError(
                    f"{caller}: {split!r} has {split.axes} axes and dim {split.dim}; sizes {self.sizes}, dim {dim}."
                )
        self.kind, self.split, self.outside = kind, split, outside
        self.resampling: dict[str, Any] = {"kernel": kernel, "antialias": antialias, "align": align, "like": like}
        one = (1,) * (len(self.sizes) if kind == "joint" else 1)
        changes(one, old_sizes=one, **self.resampling)  # unknown settings raise here, not in a forward
        self.table_axes = tuple(split.order if split is not None else range(len(self.sizes)))
        if kind == "joint":
            shapes: list[tuple[int, ...]] = [(*self.sizes, dim)]
        elif split is not None:
            self.table_axes = tuple(axis for axis in split.order if split.channels[axis])
            shapes = [(self.sizes[axis], split.channels[axis]) for axis in self.table_axes]
        else:
            shapes = [(size, dim) for size in self.sizes]
        make = {"device": device, "dtype": dtype}
        self.tables = nn.ParameterList([nn.Parameter(torch.empty(shape, **make)) for shape in shapes])  # type: ignore[arg-type]
        self.prefix = nn.Parameter(torch.empty(num_prefix, dim, **make)) if num_prefix else None  # type: ignore[arg-type]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all rows anew, normal with standard deviation 0.02, as ViTs do."""
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, sizes: Sequence[int] | None = None) -> Tensor:
        """The table of a grid.

        Args:
            sizes: Tokens per axis; the embedding's own if not given.

        Returns:
            ``(num_prefix + prod(sizes), dim)``, row-major. At its own sizes the learned rows themselves; at others
            resampled, prefix rows untouched.

        Raises:
            ValueError: another number of axes, or a size below 1.
        """
        caller = "ndpos.LearnedEmbedding"
        refuse_tracing(caller)
        sizes = self.sizes if sizes is None else sizes_per_axis(caller, sizes, minimum=1, axes=len(self.sizes))
        if self.kind == "joint":
            table = self._at(_own(self.tables[0]).flatten(0, -2), 0, sizes)
        else:
            rows = [self._at(_full(_own(table)), place, sizes) for place, table in enumerate(self.tables)]
            spread = [
                row.reshape(*(1,) * axis, sizes[axis], *(1,) * (len(sizes) - axis - 1), row.shape[-1]).expand(
                    *sizes, row.shape[-1]
                )
                for axis, row in zip(self.table_axes, rows, strict=True)
            ]
            table = self._join(spread).reshape(product(sizes), self.dim).to(self.tables[0].dtype)
        if self.prefix is None:
            return table
        with outside_autocast(table.device):
            return torch.cat((_own(self.prefix), table))

    def _at(self, table: Tensor, place: int, sizes: Sequence[int]) -> Tensor:
        if all(map(changes_nothing, self.sizes, sizes)):
            return table  # without asking the kernel: a cut that starts further in does not fit its own grid
        return resize(table, self._of(place, sizes), old_sizes=self._of(place, self.sizes), **self.resampling)

    def _of(self, place: int, sizes: Sequence[int]) -> tuple[int, ...]:
        """Those of ``sizes`` that the table at ``place`` has."""
        return tuple(sizes) if self.kind == "joint" else (sizes[self.table_axes[place]],)

    def resize_(self, sizes: Sequence[int], *, optimizer: torch.optim.Optimizer | None = None) -> LearnedEmbedding:
        """Move the table to another grid for good, in place; the parameters stay the same objects.

        Args:
            sizes: Tokens per axis from now on.
            optimizer: One that trains the table: what it keeps in the table's shape is moved too. Averages of
                gradients move as the table does, those of squares linearly where it is cubic. Without it, an optimiser
                that has stepped fails at its next step.

        Returns:
            The same embedding. ``requires_grad`` is kept, the gradient dropped, prefix rows untouched.

        Raises:
            ValueError: another number of axes, a size below 1, a sharded table, or an optimiser that keeps
                other shapes.
        """
        caller = "ndpos.LearnedEmbedding.resize_"
        new = sizes_per_axis(caller, sizes, minimum=1, axes=len(self.sizes))
        check_movable(caller, self.tables, optimizer)
        if new == self.sizes:
            return self
        puts = []
        for place, table in enumerate(self.tables):
            change = changes(self._of(place, new), old_sizes=self._of(place, self.sizes), **self.resampling)
            puts.append(move(table, change, optimizer))
        for put in puts:
            put()
        self.sizes = new
        return self

    def lookup(self, coords: Tensor, *, kernel: Literal["exact", "linear"] = "exact") -> Tensor:
        """The rows at ``coords``; prefix rows have no coordinates and are not among them.

        Args:
            coords: ``(..., axes)``, each in [0, size - 1], or anywhere for ``outside="wrap"``.
            kernel: ``"exact"`` takes whole coordinates only; ``"linear"`` interpolates between neighbouring rows.

        Returns:
            ``(..., dim)`` in the table's dtype, differentiable in the table and, for ``"linear"``, in the coordinates.

        Raises:
            ValueError: coordinates outside the grid (-1 is outside), fractional ones under ``"exact"``, NaN, or another
                number of axes. On an accelerator or under ``torch.compile`` an asynchronous assertion instead.
        """
        caller = "ndpos.LearnedEmbedding.lookup"
        refuse_tracing(caller)
        if kernel not in ("exact", "linear"):
            raise ValueError(f"{caller}: kernel is 'exact' or 'linear', got {kernel!r}.")
        one = isinstance(coords, Tensor) and coords.ndim == 1
        check_coords(caller, coords.unsqueeze(0) if one else coords, len(self.sizes))
        if coords.device != self.tables[0].device:
            raise ValueError(f"{caller}: coordinates are on {coords.device}, the table is on {self.tables[0].device}.")
        places = [self._neighbours(numbers, axis, kernel) for axis, numbers in enumerate(coords.unbind(-1))]
        if self.kind == "joint":
            return self._blend(self.tables[0].flatten(0, -2), places, self.sizes).to(self.tables[0].dtype)
        rows = [
            self._blend(table, [places[axis]], [self.sizes[axis]])
            for axis, table in zip(self.table_axes, self.tables, strict=True)
        ]
        return self._join(rows).to(self.tables[0].dtype)

    def _neighbours(self, numbers: Tensor, axis: int, kernel: str) -> list[tuple[Tensor, Tensor | None]]:
        """Row indices beside ``numbers`` on one axis and the weight of each; no weight where there is one row."""
        caller, size = "ndpos.LearnedEmbedding.lookup", self.sizes[axis]
        if numbers.dtype.is_floating_point:
            numbers = numbers.to(exact_dtype(numbers.device))
            fits = numbers.abs() < 2**53  # beyond, a float no longer tells neighbouring rows apart; NaN fits nowhere
            fits = fits if kernel == "linear" else fits & (numbers == numbers.floor())
            advice = "finite" if kernel == "linear" else "whole numbers; kernel='linear' takes fractional ones"
            refuse_unless(fits, numbers, f"{caller}: coordinates of axis {axis} are {advice}.")
        else:
            numbers = numbers.to(torch.int64)  # a narrower integer may not hold the size it is compared with
        if self.outside == "raise":
            refuse_outside(
                numbers,
                size,
                f"{caller}: axis {axis} has {size} rows, coordinates 0 to {size - 1}. Resample the table to a larger "
                f"grid with emb(sizes), or build it with outside='wrap' to take coordinates modulo the sizes.",
            )
        low = numbers.detach().floor() if numbers.dtype.is_floating_point else numbers
        row = low.to(torch.int64).remainder(size)  # remainder of the integer: that of a float can round up to size
        if kernel == "exact" or not numbers.dtype.is_floating_point:
            return [(row, None)]
        weight = numbers - low
        above = (row + 1).remainder(size) if self.outside == "wrap" else (row + 1).clamp(max=size - 1)
        return [(row, 1 - weight), (above, weight)]

    @staticmethod
    def _blend(table: Tensor, places: Sequence[Sequence[tuple[Tensor, Tensor | None]]], sizes: Sequence[int]) -> Tensor:
        """The sum over all corners of weight times row."""
        total: Tensor | None = None
        for corner in corners(*places):
            index, weight = corner[0][0], corner[0][1]
            for (row, share), size in zip(corner[1:], sizes[1:], strict=True):
                index = index * size + row
                weight = share if weight is None else weight if share is None else weight * share
            rows = F.embedding(index, table)
            if weight is not None:
                rows = _full(rows)
                rows = rows * weight.unsqueeze(-1).to(rows.dtype)
            total = rows if total is None else total + rows
        assert total is not None
        return total

    def _join(self, rows: Sequence[Tensor]) -> Tensor:
        """Per-axis rows ``(..., channels)`` side by side, or added."""
        if self.kind == "sum":
            total = _full(rows[0])
            for row in rows[1:]:
                total = total + row
            return total
        with outside_autocast(rows[0].device):
            joined = torch.cat(list(rows), dim=-1)
        rest = self.dim - joined.shape[-1]
        return F.pad(joined, (0, rest)) if rest else joined

    def extra_repr(self) -> str:
        chosen = self.resampling
        chosen = {"like": chosen["like"]} if chosen["like"] else {k: v for k, v in chosen.items() if k != "like"}
        settings = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
        split = f", split={self.split!r}" if self.split is not None else ""
        return (
            f"{self.sizes}, {self.dim}, kind={self.kind!r}{split}, num_prefix={self.num_prefix}, "
            f"outside={self.outside!r}, {settings}"
        )


def _own(parameter: Tensor) -> Tensor:
    """The same numbers in memory of their own, and a gradient in memory of its own.

    A view would be of nothing once FSDP2 has freed the parameter after the forward. And where two tables are added to
    the same tokens, a parameter would keep a view of the one gradient of both: torch (2.14) then accumulates the next
    backward into both at once, and gradients come out too large. ``clone`` hands the gradient on, a product does not.
    """
    return parameter * 1


def _full(rows: Tensor) -> Tensor:
    """Half-precision rows as float32, in which they are weighed and added; others as they are."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))
