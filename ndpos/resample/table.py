"""A table moved to another grid: by kernels and policies per axis, or as another library does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ndpos.resample.conventions import TILES, Like, Stage, convention
from ndpos.resample.moving import check_resizable, moved
from ndpos.resample.tiles import moved_tiles
from ndpos.resample.ways import Policy, Way, drawn, for_squares, ways_per_axis
from ndpos.resample.weights import Align, Kernel
from ndpos.sizes import sizes_per_axis, whole

__all__ = ["resize"]

CALLER = "ndpos.resize"


def resize(
    table: Tensor,
    new_sizes: Sequence[int],
    *,
    old_sizes: Sequence[int],
    num_prefix: int = 0,
    kernel: Kernel | Policy | Mapping[str, Kernel | Policy] = "cubic",
    antialias: bool = True,
    align: Align = "centre",
    axes: Sequence[str] | None = None,
    like: Like | None = None,
) -> Tensor:
    """Resample a learned grid of vectors from the grid it was trained on to another one.

    Channels are never mixed, axes are resampled one by one, and an axis whose size stays is left as it is (by
    ``like="dinov2"`` a grid whose sizes all stay). "Nothing to do" means equal sizes, not equal counts: (2, 8) to
    (4, 4) is resampled.

    Args:
        table: ``(*batch, num_prefix + prod(old_sizes), dim)`` with rows in row-major order, or ``(*old_sizes, dim)``
            without prefix rows; where both fit, the first reading. Any floating dtype.
        new_sizes: Tokens per axis wanted, slowest axis first.
        old_sizes: Tokens per axis of the table, 1 for an axis that is new. No default: a guessed square is silently
            wrong.
        num_prefix: Leading rows of the table without a position (class, register). They come back bit-identical.
        kernel: How neighbours are weighed. ``"linear"``; ``"cubic"``, with a = -0.75 without antialias and -0.5 with
            it, as torch has them; ``"keys"``, cubic with a = -0.5 always (jax, Pillow); ``"nearest"``, row
            ``i * old // new``, and ``"nearest-exact"``, row ``(2 * i + 1) * old // (2 * new)``, which copy rows and
            know no antialias. Or a policy: ``"repeat"``, row ``i % old``; ``("cut", offset)``, rows from ``offset`` on,
            ``"centre"`` the middle ones, ``"random"`` a window drawn by torch's generator, one for the whole table;
            ``("pad", value)``, new rows of that value after the old ones, and ``("pad", value, "centre")`` around them.
            One for all axes, or a mapping with one for each name in ``axes``.
        antialias: Widen the kernel by ``old / new`` on an axis that shrinks, so that no row is skipped. At a border,
            rows past it are dropped and the other weights scaled up; without antialias the border row stands for them.
        align: What of the two grids coincides. ``"centre"``: cell borders, new token i at ``(i + 1/2) * old / new -
            1/2`` (torch's ``align_corners=False``). ``"corner"``: first and last token, new token i at
            ``i * (old - 1) / (new - 1)``, a lone token at 0; not for the nearest kernels.
        axes: A name for each axis, for a ``kernel`` given by name and for messages.
        like: The name of a library or model whose convention is meant, in place of ``kernel``, ``antialias`` and
            ``align``; it knows its axes and refuses others. For ``"torchtune"`` with four axes the table is
            ``(tile_y, tile_x, num_prefix + y * x, dim)``, and prefix rows are interpolated over the tiles, as there.

    Returns:
        A table of the same rank and dtype, computed in float64 (float32 on devices without it) and rounded once;
        float16 and bfloat16 are rounded through float32. With equal sizes it may be ``table`` itself.

    Raises:
        TypeError: sizes or ``num_prefix`` that are not integers.
        ValueError: sizes below 1 or of different lengths, rows that are not ``num_prefix + prod(old_sizes)``, an
            integer or complex table, an unknown ``kernel``, ``align`` or ``like``, names that do not fit ``axes``, a
            cut larger than the table (with the largest grid possible), or a pad or repeat of fewer rows.

    Example:
        A class row and a 2 x 8 grid, moved to 4 x 4. The grid holds its row number.

        >>> import ndpos, torch
        >>> rows = torch.arange(2.0).repeat_interleave(8)
        >>> table = torch.cat([torch.tensor([7.0]), rows])[:, None]          # (1 + 2 * 8, dim=1)
        >>> new = ndpos.resize(table, (4, 4), old_sizes=(2, 8), num_prefix=1, kernel="linear")
        >>> new[0].item(), new[1:].reshape(4, 4)[:, 0].tolist()
        (7.0, [0.0, 0.25, 0.75, 1.0])

        The same table given 3 frames, its rows interpolated and its columns cut.

        >>> kernel = {"t": "repeat", "y": "cubic", "x": ("cut", 3)}
        >>> clip = ndpos.resize(
        ...     table, (3, 4, 5), old_sizes=(1, 2, 8), num_prefix=1, axes=("t", "y", "x"), kernel=kernel
        ... )
        >>> clip.shape, ndpos.resize(table, (4, 4), old_sizes=(2, 8), num_prefix=1, like="torchvision").shape
        (torch.Size([61, 1]), torch.Size([17, 1]))

    Source:
        Keys 1981, doi:10.1109/TASSP.1981.1163711, eq. 4 and 15. Borders, a and antialias of
        ``torch.nn.functional.interpolate``, which this equals but for two: nearest rows are found in exact integers,
        and corner alignment with antialias has its corners on the corners. Conventions: the functions that the README's
        table names.
    """
    check_resizable(CALLER, "table", table)
    settings: dict[str, Any] = {"kernel": kernel, "antialias": antialias, "align": align, "axes": axes, "like": like}
    return _mover(new_sizes, old_sizes=old_sizes, num_prefix=num_prefix, **settings)(table, lambda way: way)


class Changes(NamedTuple):
    """One move, of a table and of what an optimiser keeps about it.

    Attributes:
        table: The table, or a copy of it.
        averages: Averages of its gradients: new rows know nothing yet.
        squares: Averages of squares: no weight is negative.
    """

    table: Callable[[Tensor], Tensor]
    averages: Callable[[Tensor], Tensor]
    squares: Callable[[Tensor], Tensor]


def changes(new_sizes: Sequence[int], **settings: Any) -> Changes:
    """What :func:`resize` does, with the same arguments, for several tensors; a random window is drawn once for all."""
    move = _mover(new_sizes, **settings, draw=True)
    return Changes(
        lambda table: move(table, lambda way: way),
        lambda averages: move(averages, lambda way: way._replace(value=0.0)),
        lambda squares: move(squares, for_squares),
    )


def _mover(
    new_sizes: Sequence[int],
    *,
    old_sizes: Sequence[int],
    num_prefix: int = 0,
    kernel: Any = "cubic",
    antialias: bool = True,
    align: Align = "centre",
    axes: Sequence[str] | None = None,
    like: Like | None = None,
    draw: bool = False,
) -> Callable[[Tensor, Callable[[Way], Way]], Tensor]:
    """What moves a table, each way changed by a function; all that needs no table is read and checked."""
    old = sizes_per_axis(CALLER, old_sizes, name="old_sizes", minimum=1)
    new = sizes_per_axis(CALLER, new_sizes, name="new_sizes", minimum=1, axes=len(old))
    num_prefix = whole(CALLER, "num_prefix", num_prefix)
    names = _names(axes, len(old))
    if like is None:
        ways = ways_per_axis(CALLER, kernel, antialias, align, names, len(old))
        stages = [Stage(new, drawn(ways, old, new) if draw else ways)]
    else:
        _check_alone(like, kernel, antialias, align)
        found = convention(CALLER, like, names, len(old))
        if found.axes == TILES:
            return lambda table, each: moved_tiles(CALLER, table, old, new, num_prefix)
        stages, names = found.plan(old, new), found.axes

    def move(table: Tensor, each: Callable[[Way], Way]) -> Tensor:
        changed = [stage._replace(ways=tuple(map(each, stage.ways))) for stage in stages]
        return moved(CALLER, table, old, num_prefix, changed, names)

    return move


def _names(axes: Sequence[str] | None, count: int) -> tuple[str, ...] | None:
    names = None if axes is None else tuple(axes)
    if names is not None and (len(names) != count or len(set(names)) != count):
        raise ValueError(f"{CALLER}: axes are {count} different names, one for each of old_sizes; got {names}.")
    return names


def _check_alone(like: str, kernel: Any, antialias: bool, align: str) -> None:
    if (kernel, antialias, align) != ("cubic", True, "centre"):
        raise ValueError(
            f"{CALLER}: like={like!r} decides kernel, antialias and align; got kernel={kernel!r}, "
            f"antialias={antialias!r}, align={align!r} beside it. Leave them out, or leave out like."
        )
