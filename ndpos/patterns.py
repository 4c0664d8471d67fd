"""Frequency matrices of other patterns than one ladder per axis block: axes in turn, sections, zero columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ndpos.frequencies import matrix_of, per_axis, positive
from ndpos.sizes import sizes_per_axis
from ndpos.subspaces import AxisSplit

__all__ = ["alternating", "interleave_axes", "keep_highest", "sections"]


def alternating(split: AxisSplit, base: float = 1e4) -> Tensor:
    """One ladder over all pairs whose steps the axes take in turn, each axis in its own channel block.

    Args:
        split: Which channels belong to which axis; all axes equally many.
        base: The theta of the one ladder, ``base ** (-j / pairs)`` for step j; axis a takes the steps a, a + axes, ...

    Returns:
        ``(axes, pairs)`` float64, radians per unit of coordinate.

    Raises:
        ValueError: axes have different channel counts, or the base is not positive and finite.

    Example:
        >>> import ndpos
        >>> ndpos.alternating(ndpos.split(8, 2), base=1e4)
        tensor([[1.0000, 0.0100, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.1000, 0.0010]], dtype=torch.float64)

    Source:
        Agrawal et al. 2024, Pixtral, arXiv:2410.07073: ``PixtralRotaryEmbedding`` in transformers.
    """
    caller = "ndpos.alternating"
    theta = positive(caller, "base", base)
    if len(set(split.channels)) != 1:
        raise ValueError(f"{caller}: axes take turns, so each has equally many channels; got {split.channels}.")
    return per_axis(
        split, lambda axis, pairs: [theta ** (-(step * split.axes + axis) / split.pairs) for step in range(pairs)]
    )


def interleave_axes(frequencies: Tensor) -> Tensor:
    """The same frequencies with the columns in turns: first column of every axis, second of every axis, ...

    Axes come in the order in which their blocks stand; an axis with more columns than others has the rest at the end.

    Args:
        frequencies: ``(axes, pairs)``, exactly one non-zero entry per column.

    Returns:
        Like ``frequencies``, its columns in another order.

    Raises:
        ValueError: another shape, or a column that listens to no axis or to several.

    Example:
        >>> import ndpos
        >>> ndpos.interleave_axes(ndpos.geometric(ndpos.split(8, 2), base=100.0))
        tensor([[1.0000, 0.0000, 0.1000, 0.0000],
                [0.0000, 1.0000, 0.0000, 0.1000]], dtype=torch.float64)

    Source:
        Kimi-VL's MoonViT (arXiv:2504.07491), ``Rope2DPosEmb``; Lumina (arXiv:2405.05945).
    """
    if frequencies.ndim != 2:
        raise ValueError(f"ndpos.interleave_axes: frequencies are (axes, pairs), got {tuple(frequencies.shape)}.")
    listeners = (frequencies != 0).sum(0)
    if not bool((listeners == 1).all()):
        raise ValueError(
            f"ndpos.interleave_axes: every column listens to exactly one axis; got {listeners.tolist()} non-zero "
            f"entries per column. Interleave first, then drop frequencies with keep_highest."
        )
    seen: dict[int, int] = {}
    turns = []
    for column, axis in enumerate((frequencies != 0).int().argmax(0).tolist()):
        turns.append((seen.setdefault(axis, 0), column))
        seen[axis] += 1
    return frequencies[:, [column for _, column in sorted(turns, key=lambda turn: turn[0])]]


def sections(
    counts: Sequence[int], base: float = 1e4, *, layout: Literal["chunked", "interleaved"] = "chunked"
) -> Tensor:
    """One ladder over all pairs, cut into sections that listen to different axes: M-RoPE.

    Where all coordinates of a token are equal (text), this is plain 1-D RoPE.

    Args:
        counts: Pairs of each axis, slowest axis (time) first.
        base: The theta of the one ladder, ``base ** (-j / sum(counts))`` for pair j.
        layout: ``"chunked"``: T...T H...H W...W. ``"interleaved"``: T H W T H W ... and, once an axis has had its
            count, the first axis: T H W ... T T T.

    Returns:
        ``(axes, pairs)`` float64, radians per unit of coordinate.

    Raises:
        ValueError: no pairs; or sections that cannot be interleaved, since the turns of an axis run past the last
            pair (``(8, 12, 12)``, which other code gives as 11, 11, 10 in silence).

    Example:
        >>> import ndpos
        >>> (ndpos.sections((3, 2, 1), layout="interleaved") != 0).int().argmax(0).tolist()
        [0, 1, 2, 0, 1, 0]

    Source:
        "chunked": Wang et al. 2024, Qwen2-VL, arXiv:2409.12191; "interleaved": Qwen3-VL, arXiv:2511.21631.
    """
    caller = "ndpos.sections"
    per_axis = sizes_per_axis(caller, counts, name="counts")
    theta, pairs, axes = positive(caller, "base", base), sum(per_axis), len(per_axis)
    if not pairs:
        raise ValueError(f"{caller}: at least one pair, got counts {per_axis}.")
    if layout == "chunked":
        pair_axes = [axis for axis, count in enumerate(per_axis) for _ in range(count)]
    elif layout == "interleaved":
        pair_axes = [0] * pairs
        for axis in range(1, axes):
            turns = range(axis, axis + axes * per_axis[axis], axes)
            if per_axis[axis] and turns[-1] >= pairs:
                raise ValueError(
                    f"{caller}: sections {per_axis} sum to {pairs} pairs and cannot be interleaved: axis {axis} takes "
                    f"every {axes}. pair from {axis} on, {per_axis[axis]} times, up to pair {turns[-1]}. Give "
                    f"the first axis more pairs, or take layout='chunked'."
                )
            for pair in turns:
                pair_axes[pair] = axis
    else:
        raise ValueError(f"{caller}: layout is 'chunked' or 'interleaved', got {layout!r}.")
    return matrix_of(axes, pair_axes, [theta ** (-pair / pairs) for pair in range(pairs)])


def keep_highest(frequencies: Tensor, fraction: float) -> Tensor:
    """Zero columns in place of the lowest frequencies: those pairs keep still and carry content alone.

    Args:
        frequencies: ``(axes, pairs)``, at most one non-zero entry per column.
        fraction: Share of each axis' pairs to keep, the fastest ``int(fraction * pairs)`` of them; in [0, 1].

    Returns:
        Like ``frequencies``; its own exponents are kept, nothing is respaced.

    Raises:
        ValueError: ``fraction`` outside [0, 1], another shape, or a column that listens to several axes.

    Example:
        >>> import ndpos
        >>> ndpos.keep_highest(ndpos.geometric(ndpos.AxisSplit((8,)), base=1e4), 0.5)
        tensor([[1.0000, 0.1000, 0.0000, 0.0000]], dtype=torch.float64)

    Source:
        Barbero et al. 2024, p-RoPE, arXiv:2410.06205, section 6; "proportional" in transformers.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"ndpos.keep_highest: fraction is a share between 0 and 1, got {fraction!r}.")
    if frequencies.ndim != 2 or bool(((frequencies != 0).sum(0) > 1).any()):
        raise ValueError(
            f"ndpos.keep_highest: frequencies are (axes, pairs) with at most one axis per column, "
            f"got shape {tuple(frequencies.shape)}."
        )
    kept = torch.zeros_like(frequencies)
    for axis, row in enumerate(frequencies):
        columns = row.nonzero().flatten()
        fastest = row[columns].abs().argsort(descending=True, stable=True)[: int(fraction * len(columns))]
        kept[axis, columns[fastest]] = row[columns[fastest]]
    return kept
