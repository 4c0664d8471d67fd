"""Which channels listen to which axis: a plain value that says what the last dimension of a tensor means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ndpos.sizes import sizes_per_axis, whole

__all__ = ["AxisSplit", "split"]


@dataclass(frozen=True, init=False, repr=False)
class AxisSplit:
    """Disjoint channel blocks, one per axis: the channels of one head (or of one token) and the axis each listens to.

    Args:
        channels: Channels of each axis, slowest axis first: even, 0 allowed. Two channels turn together as a pair.
        order: The axis of each channel block in turn: ``(0, 1)`` is y first, ``(1, 0)`` x first. Ascending if omitted.
        dim: All channels, when more than the sum: those past the blocks listen to no axis and stay as they are.

    Attributes:
        axes: Number of axes.
        pairs: Number of channel pairs that listen to an axis, ``sum(channels) // 2``.
        blocks: Pairs of each channel block, in channel order.
        pair_axes: The axis of each pair, in channel order.

    Raises:
        ValueError: an odd or negative channel count, an ``order`` that is no permutation, a ``dim`` below the sum.

    Example:
        >>> import ndpos
        >>> head = ndpos.AxisSplit((4, 2), order=(1, 0))
        >>> head
        AxisSplit((4, 2), order=(1, 0))
        >>> head.dim, head.axes, head.pairs, head.blocks, head.pair_axes
        (6, 2, 3, (1, 2), (1, 0, 0))

    Source:
        Axial rotary: Heo et al. 2024, arXiv:2403.13298, section 3. Unequal blocks: CogVideoX, arXiv:2408.06072.
    """

    channels: tuple[int, ...]
    order: tuple[int, ...]
    dim: int

    def __init__(self, channels: Sequence[int], *, order: Sequence[int] | None = None, dim: int | None = None) -> None:
        caller = "ndpos.AxisSplit"
        per_axis = sizes_per_axis(caller, channels, name="channels")
        odd = [count for count in per_axis if count % 2]
        if odd:
            raise ValueError(
                f"{caller}: channels come in pairs, so each axis has an even number of them; got {per_axis}. "
                f"ndpos.split(dim, axes) makes even blocks that add up to dim."
            )
        order = tuple(range(len(per_axis))) if order is None else sizes_per_axis(caller, order, name="order")
        if sorted(order) != list(range(len(per_axis))):
            raise ValueError(
                f"{caller}: order names each of the {len(per_axis)} axes once, got {tuple(order)}; (1, 0) is x first."
            )
        used = sum(per_axis)
        total = used if dim is None else whole(caller, "dim", dim)
        if total < used:
            raise ValueError(
                f"{caller}: dim is at least the sum of the channels; got dim {total}, channels {per_axis} = {used}."
            )
        if used == 0:
            raise ValueError(f"{caller}: at least one axis has channels, got {per_axis}.")
        object.__setattr__(self, "channels", per_axis)
        object.__setattr__(self, "order", tuple(order))
        object.__setattr__(self, "dim", total)

    @property
    def axes(self) -> int:
        return len(self.channels)

    @property
    def pairs(self) -> int:
        return sum(self.channels) // 2

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(self.channels[axis] // 2 for axis in self.order)

    @property
    def pair_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis in self.order for _ in range(self.channels[axis] // 2))

    def __repr__(self) -> str:
        parts = [repr(self.channels)]
        if self.order != tuple(range(self.axes)):
            parts.append(f"order={self.order}")
        if self.dim != sum(self.channels):
            parts.append(f"dim={self.dim}")
        return f"AxisSplit({', '.join(parts)})"


def split(dim: int, axes: int, *, remainder: Literal["last", "first", "all_first", "tail"] = "last") -> AxisSplit:
    """``dim`` channels divided over ``axes`` axes as evenly as pairs allow.

    Args:
        dim: Channels to divide: ``head_dim`` for a rotary, the model's width for a table. Even, at least ``2 * axes``.
        axes: Number of axes.
        remainder: Where pairs go that do not divide evenly. ``"last"``: one each to the last axes, ``"first"``: one
            each to the first (counts then differ by at most one pair); ``"all_first"``: all of them to the first axis,
            time in a video model (Wan, Cosmos); ``"tail"``: to no axis, the last channels stay as they are.

    Returns:
        An :class:`AxisSplit`. Its channels sum to ``dim``, or to at most ``dim`` for ``"tail"``.

    Raises:
        ValueError: ``dim`` is odd or below ``2 * axes``, ``axes`` below 1, or an unknown ``remainder``.

    Example:
        >>> import ndpos
        >>> ndpos.split(64, 2)
        AxisSplit((32, 32))
        >>> ndpos.split(64, 3)
        AxisSplit((20, 22, 22))
        >>> ndpos.split(128, 3, remainder="all_first")
        AxisSplit((44, 42, 42))
        >>> ndpos.split(64, 3, remainder="tail")
        AxisSplit((20, 20, 20), dim=64)

    Source:
        "all_first": Wan 2.1, arXiv:2503.20314 (``WanRotaryPosEmbed`` in diffusers); "tail": V-JEPA 2, arXiv:2506.09985.
    """
    caller = "ndpos.split"
    dim, axes = whole(caller, "dim", dim), whole(caller, "axes", axes, minimum=1)
    if dim % 2 or dim < 2 * axes:
        raise ValueError(
            f"{caller}: dim is even and gives every axis at least one pair; got dim {dim} for {axes} axes "
            f"(at least {2 * axes}). Name the channels of each axis with ndpos.AxisSplit to leave an axis out."
        )
    each, over = divmod(dim // 2, axes)
    if remainder == "last":
        pairs = [each + (axis >= axes - over) for axis in range(axes)]
    elif remainder == "first":
        pairs = [each + (axis < over) for axis in range(axes)]
    elif remainder == "all_first":
        pairs = [each + over] + [each] * (axes - 1)
    elif remainder == "tail":
        pairs = [each] * axes
    else:
        raise ValueError(f"{caller}: remainder is 'last', 'first', 'all_first' or 'tail', got {remainder!r}.")
    return AxisSplit([2 * count for count in pairs], dim=dim)
