"""How one axis of a table gets from its old size to its new one: read, checked against sizes, and done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ndpos.resample.weights import GATHERS, Align, Kernel, weights
from ndpos.sizes import finite, product, whole

__all__: list[str] = []

Policy = (
    Literal["repeat"]
    | tuple[Literal["cut"], int | Literal["centre", "random"]]
    | tuple[Literal["pad"], float]
    | tuple[Literal["pad"], float, Literal["centre"]]
)
KNOWN = (*get_args(Kernel), "repeat", ("cut", "offset, 'centre' or 'random'"), ("pad", "value"))


class Way(NamedTuple):
    """What is done along one axis.

    Attributes:
        kernel: An interpolating kernel, or "repeat", "cut", "pad".
        antialias, align: Of interpolating kernels, as in :func:`ndpos.resize`.
        shift: Added to the new size where interpolating kernels find their places (0.1 for DINOv2).
        offset: Of a cut: the first row taken, "centre" or "random". Of a pad: 0, or "centre".
        value: Of a pad: what new rows hold.
    """

    kernel: Kernel | Literal["repeat", "cut", "pad"]
    antialias: bool = False
    align: Align = "centre"
    shift: float = 0.0
    offset: int | Literal["centre", "random"] = 0
    value: float = 0.0


def ways_per_axis(
    caller: str,
    kernel: Kernel | Policy | Mapping[str, Kernel | Policy],
    antialias: bool,
    align: Align,
    names: tuple[str, ...] | None,
    count: int,
) -> tuple[Way, ...]:
    """One way per axis, from one kernel or policy for all or from a mapping by axis name."""
    if align not in get_args(Align):
        raise ValueError(f"{caller}: align is one of {get_args(Align)}, got {align!r}.")
    if not isinstance(antialias, bool):
        raise TypeError(f"{caller}: antialias is True or False, got {antialias!r}.")
    if not isinstance(kernel, Mapping):
        ways = (_read(caller, kernel, antialias, align),) * count
    elif names is None:
        raise ValueError(f"{caller}: a kernel for each axis needs axes=, their names; got {dict(kernel)}.")
    elif set(kernel) != set(names):
        raise ValueError(f"{caller}: kernel has one entry for each axis of {names}; got {dict(kernel)}.")
    else:
        ways = tuple(_read(caller, kernel[name], antialias, align) for name in names)
    if align == "corner" and any(way.kernel in GATHERS for way in ways):
        raise ValueError(
            f"{caller}: nearest kernels are not defined for align='corner', got kernel "
            f"{tuple(way.kernel for way in ways)}. Use align='centre', or kernel='linear'."
        )
    return ways


def _read(caller: str, kernel: Any, antialias: bool, align: Align) -> Way:
    if isinstance(kernel, str) and kernel in (*get_args(Kernel), "repeat"):
        return Way(kernel, antialias, align)  # type: ignore[arg-type]
    match kernel:
        case ("cut", "centre" | "random" as place):
            return Way("cut", offset=place)
        case ("cut", offset) if not isinstance(offset, str):
            return Way("cut", offset=whole(caller, "offsets of a cut", offset))
        case ("pad", value, *place) if place in ([], ["centre"]):
            return Way("pad", value=finite(caller, "the value of a pad", value), offset="centre" if place else 0)
    raise ValueError(f"{caller}: kernel is one of {KNOWN}, got {kernel!r}.")


def check_fits(
    caller: str, ways: Sequence[Way], old: Sequence[int], new: Sequence[int], names: tuple[str, ...] | None
) -> None:
    """Raise where an axis cannot go its way: a cut that is larger than its table, a pad or a repeat that shrinks."""
    largest = tuple(_largest(way, before, after) for way, before, after in zip(ways, old, new, strict=True))
    for axis, (way, before, after) in enumerate(zip(ways, old, new, strict=True)):
        called = f"axis {axis}" if names is None else f"axis {names[axis]!r}"
        if way.kernel == "cut" and after > largest[axis]:
            start = f" from token {way.offset} on" if isinstance(way.offset, int) and way.offset else ""
            raise ValueError(
                f"{caller}: {called} is to be cut to {after} tokens{start}, and the table has {before}. The largest "
                f"grid possible is {largest}. For a larger one interpolate, repeat or pad that axis."
            )
        if way.kernel in ("pad", "repeat") and after < before:
            raise ValueError(
                f"{caller}: {called} has {before} tokens, and {way.kernel!r} only adds to them; {after} were asked "
                f"for. Cut the axis, ('cut', 0), or interpolate it."
            )


def _largest(way: Way, old: int, new: int) -> int:
    if way.kernel != "cut":
        return new
    return max(0, old - way.offset) if isinstance(way.offset, int) else old


def changes_nothing(old: int, new: int) -> bool:
    """Whether an axis stays as it is; only sizes can tell, and counts cannot.

    Asking a symbolic size would fix the answer into the graph, one graph for each set of axes that stay. An axis
    that might stay is therefore multiplied by an exact identity there: values are kept, all but the sign of a zero.
    """
    if not torch.compiler.is_compiling():
        return old == new
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # not at the top: it loads sympy

    return statically_known_true(old == new)


def step(way: Way, dim: int, old: int, new: int, unit: Tensor) -> Callable[[Tensor], Tensor]:
    """What is done to dimension ``dim`` (negative) of a tensor to take it from ``old`` to ``new``."""
    if way.kernel == "pad":
        before = new // 2 - old // 2 if way.offset == "centre" else 0
        return lambda x: _padded(x, dim, before, new - old - before, way.value)
    row = torch.arange(new, device=unit.device)
    if way.kernel in ("nearest", "nearest-exact", "repeat", "cut"):
        index = _source_row(way, row, old, new)
        return lambda x: x.index_select(dim, index)
    mix = weights(old, new, way.kernel, way.antialias, way.align, way.shift, unit)  # type: ignore[arg-type]
    return lambda x: _mix(mix, x, dim)


def _source_row(way: Way, row: Tensor, old: int, new: int) -> Tensor:
    if way.kernel == "nearest":
        return row * old // new
    if way.kernel == "nearest-exact":
        return (2 * row + 1) * old // (2 * new)
    if way.kernel == "repeat":
        return row % old
    if way.offset == "random":
        return row + _window(old, new).to(row.device)
    return row + (old // 2 - new // 2 if way.offset == "centre" else way.offset)


def _padded(x: Tensor, dim: int, before: int, after: int, value: float) -> Tensor:
    def rows(count: int) -> Tensor:
        return x.new_full((*x.shape[:dim], count, *x.shape[dim + 1 :]), value)

    return torch.cat([rows(before), x, rows(after)], dim=dim)


def _mix(mix: Tensor, x: Tensor, dim: int) -> Tensor:
    """The matrix ``(new, old)`` applied along ``dim``: ``(*before, old, *after)`` to ``(*before, new, *after)``."""
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    columns = x.reshape(product(before), x.shape[dim], product(after))
    # Not matmul, which transposes and copies ``columns`` when it holds one matrix or needs a gradient.
    mixed = torch.bmm(mix.expand(columns.shape[0], -1, -1), columns)
    return mixed.reshape(*before, mix.shape[0], *after)


def for_squares(way: Way) -> Way:
    """The same way for averages of squares: no weight is negative, and rows that are new know nothing yet."""
    return way._replace(kernel="linear" if way.kernel in ("cubic", "keys") else way.kernel, value=0.0)


def drawn(ways: Sequence[Way], old: Sequence[int], new: Sequence[int]) -> tuple[Way, ...]:
    """The same ways with every random window settled, for several tensors to have the same one."""
    return tuple(
        way._replace(offset=int(_window(before, after))) if way.offset == "random" and before > after else way
        for way, before, after in zip(ways, old, new, strict=True)
    )


def _window(old: int, new: int) -> Tensor:
    return torch.randint(old - new + 1, ())
