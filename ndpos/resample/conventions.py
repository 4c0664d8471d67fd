"""How other libraries move a learned table to another grid, by name.

A convention is a function of the old and the new sizes, because some choose by them: what is interpolated when it
grows may be cut when it shrinks. It gives stages, done one after the other; all but one convention have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from ndpos.resample.ways import Way

__all__: list[str] = []

Like = Literal[
    "timm",
    "transformers-vit",
    "transformers-clip",
    "transformers-dinov2",
    "transformers-dinov2-registers",
    "dinov2",
    "dinov2-registers",
    "torchvision",
    "torchtune",
    "big_vision",
    "flexivit",
    "siglip2",
    "qwen3-vl",
    "glm-4v",
    "kimi-vl",
    "minicpm-v",
    "timesformer",
    "v-jepa",
    "naflex",
    "naflex-aspect",
    "naflex-factorised",
    "ast",
    "passt",
]


class Stage(NamedTuple):
    """Sizes to reach, and the way of each axis there."""

    sizes: tuple[int, ...]
    ways: tuple[Way, ...]


Plan = Callable[[Sequence[int], Sequence[int]], list[Stage]]  # from old and new sizes


class Convention(NamedTuple):
    """Axes that a source knows, by name and slowest first, and how it moves them."""

    axes: tuple[str, ...]
    plan: Plan


def convention(caller: str, like: str, names: tuple[str, ...] | None, count: int) -> Convention:
    """The convention called ``like`` for tables of ``count`` axes, which are called ``names`` if they are named."""
    if like not in get_args(Like):
        raise ValueError(f"{caller}: like is None or one of {get_args(Like)}, got {like!r}.")
    known = CONVENTIONS[like]
    fitting = [each for each in known if len(each.axes) == count]
    if not fitting:
        raise ValueError(
            f"{caller}: like={like!r} is defined for axes {_named(known)}, and old_sizes has {count}. "
            f"{CURES.get(like) or _plainly(known[0])}"
        )
    for found in fitting:
        if names in (None, found.axes):
            return found
    raise ValueError(f"{caller}: axes of like={like!r} are {_named(fitting)}, slowest first; got {names}.")


def _named(known: Sequence[Convention]) -> str:
    return " or ".join(str(each.axes) for each in known)


def _plainly(known: Convention) -> str:
    """The cure for a wrong number of axes: plain settings that do to any axes what a convention does to its own."""
    sizes = (8,) * len(known.axes)
    way = known.plan(sizes, sizes)[0].ways[-1]
    return f"For other axes: kernel={way.kernel!r}, antialias={way.antialias}, align={way.align!r}."


def _always(*ways: Way) -> Plan:
    return lambda old, new: [Stage(tuple(new), ways)]


def _image(way: Way) -> tuple[Convention, ...]:
    return (Convention(("y", "x"), _always(way, way)),)


def _v_jepa(old: Sequence[int], new: Sequence[int]) -> list[Stage]:
    """A shorter clip of the same pictures is the first part of the longer one; everything else is trilinear."""
    if tuple(old[1:]) == tuple(new[1:]) and new[0] < old[0]:
        return [Stage(tuple(new), (Way("cut"), LINEAR, LINEAR))]
    return [Stage(tuple(new), (LINEAR,) * 3)]


def _dinov2(old: Sequence[int], new: Sequence[int]) -> list[Stage]:
    """Places of ``n + 0.1`` rows on both axes, also on one whose size stays; a grid that stays is left as it is."""
    way = CUBIC if tuple(old) == tuple(new) else CUBIC._replace(shift=0.1)
    return [Stage(tuple(new), (way, way))]


def _naflex_aspect(old: Sequence[int], new: Sequence[int]) -> list[Stage]:
    """Both axes at the scale of the longer side, of which the shorter one uses the first part."""
    if tuple(old) == tuple(new):
        return [Stage(tuple(new), (CUBIC_ANTIALIASED,) * 2)]
    longest = max(new)
    return [
        Stage((longest, longest), (CUBIC_ANTIALIASED,) * 2),
        Stage(tuple(new), (Way("cut"),) * 2),
    ]


def _ast(old: Sequence[int], new: Sequence[int]) -> list[Stage]:
    """Each axis by itself: the middle of the table where there is enough of it, else interpolated."""
    ways = (Way("cut", offset="centre") if after <= before else LINEAR for before, after in zip(old, new, strict=True))
    return [Stage(tuple(new), tuple(ways))]


TILES = ("tile_y", "tile_x", "y", "x")
LINEAR = Way("linear")
CORNERED = Way("linear", align="corner")
CUBIC = Way("cubic")
CUBIC_ANTIALIASED = Way("cubic", antialias=True)
NEAREST = Way("nearest")

CONVENTIONS: dict[str, tuple[Convention, ...]] = {
    "timm": _image(CUBIC_ANTIALIASED),
    "transformers-vit": _image(CUBIC),
    "transformers-clip": _image(CUBIC),
    "transformers-dinov2": _image(CUBIC),
    "transformers-dinov2-registers": _image(CUBIC_ANTIALIASED),
    "dinov2": (Convention(("y", "x"), _dinov2),),
    "dinov2-registers": _image(CUBIC_ANTIALIASED),
    "torchvision": _image(Way("cubic", align="corner")),
    "torchtune": (
        *_image(CORNERED),
        Convention(TILES, _always(*(CORNERED,) * 4)),  # not axis by axis: tiles.py
    ),
    "big_vision": _image(CORNERED),
    "flexivit": _image(Way("linear", antialias=True)),
    "siglip2": _image(Way("linear", antialias=True)),
    "qwen3-vl": _image(CORNERED),
    "glm-4v": _image(CUBIC),
    "kimi-vl": _image(CUBIC),
    "minicpm-v": _image(NEAREST),
    "timesformer": (Convention(("t",), _always(NEAREST)), *_image(NEAREST)),
    "v-jepa": (Convention(("t", "y", "x"), _v_jepa),),
    "naflex": _image(CUBIC_ANTIALIASED),
    "naflex-aspect": (Convention(("y", "x"), _naflex_aspect),),
    "naflex-factorised": tuple(Convention((axis,), _always(LINEAR)) for axis in "yx"),
    "ast": (Convention(("f", "t"), _ast),),
    "passt": (Convention(("t",), _always(Way("cut"))),),
}
CURES = {  # where no plain settings say it
    "dinov2": "Nothing plain has its offset of 0.1; without it: kernel='cubic', antialias=False.",
    "naflex-factorised": "Its tables are one per axis: resize each, and add the rows of y to those of x.",
    "naflex-aspect": "For other axes: resize all to the longest size, then cut each with kernel=('cut', 0).",
    "ast": "For other axes: kernel=('cut', 'centre') where an axis shrinks, 'linear' with antialias=False if it grows.",
    "passt": "Its time table is resized by itself, and its frequency table never.",
}
