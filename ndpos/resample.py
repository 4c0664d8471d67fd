"""A table moved to another grid: one separable resampler for any number of axes.

Every axis has one small matrix ``(new, old)`` of weights and axes are resized one after the other, so that a clip
needs no other code than a picture. Sizes are integers from end to end: no scale factor decides a size or a place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ndpos.positions import exact_dtype, outside_autocast
from ndpos.sizes import product, sizes_per_axis, whole

__all__ = ["resize"]

Kernel = Literal["nearest", "nearest-exact", "linear", "cubic", "keys"]
Align = Literal["centre", "corner"]

CALLER = "ndpos.resize"
GATHERS = ("nearest", "nearest-exact")  # kernels that copy rows: no weights, no antialias, no corner alignment
REACH = 2  # columns that the widest kernel (cubic) reaches past either border
NUMBERS_AT_ONCE = 2**21  # 16 MB of float64: 2**19 was a third slower for clips


def resize(
    table: Tensor,
    new_sizes: Sequence[int],
    *,
    old_sizes: Sequence[int],
    num_prefix: int = 0,
    kernel: Kernel | Mapping[str, Kernel] = "cubic",
    antialias: bool = True,
    align: Align = "centre",
    axes: Sequence[str] | None = None,
) -> Tensor:
    """Resample a learned grid of vectors from the grid it was trained on to another one.

    Channels are never mixed, axes are resampled one by one, and an axis whose size stays is left as it is. "Nothing
    to do" means equal sizes, not equal counts: (2, 8) to (4, 4) is resampled.

    Args:
        table: ``(*batch, num_prefix + prod(old_sizes), dim)`` with rows in row-major order, or ``(*old_sizes, dim)``
            without prefix rows; where both fit, the first reading. Any floating dtype.
        new_sizes: Tokens per axis wanted, slowest axis first.
        old_sizes: Tokens per axis of the table. No default: a guessed square is silently wrong.
        num_prefix: Leading rows of the table without a position (class, register). They come back bit-identical.
        kernel: How neighbours are weighed. ``"linear"``; ``"cubic"``, with a = -0.75 without antialias and -0.5 with
            it, as torch has them; ``"keys"``, cubic with a = -0.5 always (jax, Pillow); ``"nearest"``, row
            ``i * old // new``, and ``"nearest-exact"``, row ``(2 * i + 1) * old // (2 * new)``, which copy rows and
            know no antialias. One for all axes, or a mapping with one for each name in ``axes``.
        antialias: Widen the kernel by ``old / new`` on an axis that shrinks, so that no row is skipped. At a border,
            rows past it are dropped and the other weights scaled up; without antialias the border row stands for them.
        align: What of the two grids coincides. ``"centre"``: cell borders, new token i at ``(i + 1/2) * old / new -
            1/2`` (torch's ``align_corners=False``). ``"corner"``: first and last token, new token i at
            ``i * (old - 1) / (new - 1)``, a lone token at 0; not for the nearest kernels.
        axes: A name for each axis, for a ``kernel`` given by name.

    Returns:
        A table of the same rank and dtype, computed in float64 (float32 on devices without it) and rounded once;
        float16 and bfloat16 are rounded through float32. With equal sizes it may be ``table`` itself.

    Raises:
        TypeError: sizes or ``num_prefix`` that are not integers.
        ValueError: sizes below 1 or of different lengths, rows that are not ``num_prefix + prod(old_sizes)``, an
            integer or complex table, an unknown ``kernel`` or ``align``, or names that do not fit ``axes``.

    Example:
        A class row and a 2 x 8 grid, moved to 4 x 4. The grid holds its row number.

        >>> import ndpos, torch
        >>> rows = torch.arange(2.0).repeat_interleave(8)
        >>> table = torch.cat([torch.tensor([7.0]), rows])[:, None]          # (1 + 2 * 8, dim=1)
        >>> new = ndpos.resize(table, (4, 4), old_sizes=(2, 8), num_prefix=1, kernel="linear")
        >>> new[0].item(), new[1:].reshape(4, 4)[:, 0].tolist()
        (7.0, [0.0, 0.25, 0.75, 1.0])

    Source:
        Keys 1981, doi:10.1109/TASSP.1981.1163711, eq. 4 and 15. Borders, a and antialias of
        ``torch.nn.functional.interpolate``, which this equals but for two: nearest rows are found in exact integers,
        and corner alignment with antialias has its corners on the corners.
    """
    old = sizes_per_axis(CALLER, old_sizes, name="old_sizes", minimum=1)
    new = sizes_per_axis(CALLER, new_sizes, name="new_sizes", minimum=1, axes=len(old))
    num_prefix = whole(CALLER, "num_prefix", num_prefix)
    kernels = _kernel_per_axis(kernel, axes, len(old))
    _check_align(align, kernels)
    if not table.is_floating_point():
        raise ValueError(
            f"{CALLER}: a table of {table.dtype} cannot be resampled. Convert it with table.float() first."
        )
    if not isinstance(antialias, bool):
        raise TypeError(f"{CALLER}: antialias is True or False, got {antialias!r}.")
    flat = _is_flat(table, old, num_prefix)
    if all(_is_same(before, after) for before, after in zip(old, new, strict=True)):
        return table

    like = torch.empty((), dtype=exact_dtype(table.device), device=table.device)
    steps = [
        _axis_step(axis - len(old) - 1, old[axis], new[axis], kernels[axis], antialias, align, like)
        for axis in _cheapest_order(old, new)
    ]

    def move(part: Tensor) -> Tensor:
        grid = torch.unflatten(part[..., num_prefix:, :], -2, old) if flat else part
        moved = grid.to(like.dtype)
        for step in steps:
            moved = step(moved)
        moved = _round(moved, table.dtype)
        return torch.cat([part[..., :num_prefix, :], moved.flatten(-1 - len(new), -2)], dim=-2) if flat else moved

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


def _axis_step(
    dim: int, old: int, new: int, kernel: Kernel, antialias: bool, align: Align, like: Tensor
) -> Callable[[Tensor], Tensor]:
    """What is done to dimension ``dim`` (negative) of a tensor to take it from ``old`` to ``new``."""
    if _is_same(old, new):
        return lambda x: x
    if kernel in GATHERS:
        row = torch.arange(new, device=like.device)
        index = row * old // new if kernel == "nearest" else (2 * row + 1) * old // (2 * new)
        return lambda x: x.index_select(dim, index)
    weights = _weights(old, new, kernel, antialias, align, like)
    return lambda x: _mix(weights, x, dim)


def _mix(weights: Tensor, x: Tensor, dim: int) -> Tensor:
    """The matrix ``(new, old)`` applied along ``dim``: ``(*before, old, *after)`` to ``(*before, new, *after)``."""
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    columns = x.reshape(product(before), x.shape[dim], product(after))
    # Not matmul, which transposes and copies ``columns`` when it holds one matrix or needs a gradient.
    mixed = torch.bmm(weights.expand(columns.shape[0], -1, -1), columns)
    return mixed.reshape(*before, weights.shape[0], *after)


def _weights(old: int, new: int, kernel: Kernel, antialias: bool, align: Align, like: Tensor) -> Tensor:
    """How much of each old token goes into each new one: ``(new, old)``, rows that sum to one.

    Built elementwise, so that one graph serves all sizes. Most of it is zero: next to nothing for the axes of a grid,
    but a single axis of 4096 tokens taken to 8192 costs 2 GB and some seconds.
    """
    row = torch.arange(new, dtype=like.dtype, device=like.device)[:, None]
    column = torch.arange(old, dtype=like.dtype, device=like.device)
    one = torch.ones_like(like)
    if align == "centre":
        centre, spacing = (row + 0.5) * old / new - 0.5, one * old / new
    else:
        # torch widens by the same spacing but puts antialiased centres half a token off, so that its corners drift.
        gaps = (one * (new - 1)).clamp(min=1)
        centre = row * (old - 1) / gaps
        spacing = centre[-1] / gaps  # 0 for a lone token, which so stays unwidened: it is the first row
    if antialias:
        inside = _curve((centre - column) / spacing.clamp(min=1), kernel, antialias)
        return inside / inside.sum(dim=-1, keepdim=True)
    wide = torch.arange(-REACH, old + REACH, dtype=like.dtype, device=like.device)
    weights = _curve(centre - wide, kernel, antialias)
    before = weights[:, :REACH].sum(dim=-1, keepdim=True)
    after = weights[:, -REACH:].sum(dim=-1, keepdim=True)
    return weights[:, REACH:-REACH] + before * (column == 0) + after * (column == old - 1)


def _curve(distance: Tensor, kernel: Kernel, antialias: bool) -> Tensor:
    """Weight at a distance counted in (widened) columns; exactly 1 at 0 and 0 at every other integer."""
    x = distance.abs()
    if kernel == "linear":
        return (1 - x).clamp(min=0)
    a = -0.75 if kernel == "cubic" and not antialias else -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (x - 1) * (2 - x).clamp(min=0) ** 2
    return torch.where(x <= 1, near, far)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the dtype of the table. Half types by way of float32: a bfloat16 table and its float copy then agree."""
    return x.to(torch.float32).to(dtype) if dtype.itemsize < 4 else x.to(dtype)


def _is_same(old: int, new: int) -> bool:
    """Whether an axis stays as it is.

    Asking a symbolic size would fix the answer into the graph, one graph for each set of axes that stay. An axis
    that might stay is therefore multiplied by an exact identity there: values are kept, all but the sign of a zero.
    """
    if not torch.compiler.is_compiling():
        return old == new
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # not at the top: it loads sympy

    return statically_known_true(old == new)


def _is_flat(table: Tensor, old: tuple[int, ...], num_prefix: int) -> bool:
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
        f"{CALLER}: the table has {rows} rows, old_sizes and num_prefix need {needed}.\n"
        f"  table       {tuple(shape)}  (*batch, num_prefix + prod(old_sizes), dim) or (*old_sizes, dim)\n"
        f"  old_sizes   {old}  {product(old)} rows\n"
        f"  num_prefix  {num_prefix}\n"
        f"  {cure}"
    )


def _kernel_per_axis(
    kernel: Kernel | Mapping[str, Kernel], axes: Sequence[str] | None, count: int
) -> tuple[Kernel, ...]:
    """One kernel per axis, from one for all or from a mapping by axis name."""
    names = None if axes is None else tuple(axes)
    if names is not None and (len(names) != count or len(set(names)) != count):
        raise ValueError(f"{CALLER}: axes are {count} different names, one for each of old_sizes; got {names}.")
    if isinstance(kernel, Mapping):
        if names is None:
            raise ValueError(f"{CALLER}: a kernel for each axis needs axes=, their names; got {dict(kernel)}.")
        if set(kernel) != set(names):
            raise ValueError(f"{CALLER}: kernel has one entry for each axis of {names}; got {dict(kernel)}.")
        kernels = tuple(kernel[name] for name in names)
    else:
        kernels = (kernel,) * count
    for each in kernels:
        if each not in get_args(Kernel):
            raise ValueError(f"{CALLER}: kernel is one of {get_args(Kernel)}, got {each!r}.")
    return kernels


def _check_align(align: Align, kernels: Sequence[Kernel]) -> None:
    if align not in get_args(Align):
        raise ValueError(f"{CALLER}: align is one of {get_args(Align)}, got {align!r}.")
    if align == "corner" and any(kernel in GATHERS for kernel in kernels):
        raise ValueError(
            f"{CALLER}: nearest kernels are not defined for align='corner', got kernel {tuple(kernels)}. "
            f"Use align='centre', or kernel='linear'."
        )
