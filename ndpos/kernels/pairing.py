"""Which two channels make a pair, and what else a kernel is told about a rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

__all__ = [
    "PAIRINGS",
    "Lattice",
    "Pairing",
    "Source",
    "Turning",
    "as_it_lies",
    "axis_blocks",
    "check_blocks",
    "pair_channels",
]

Pairing = Literal["interleaved", "half", "half_per_axis"]
PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)


class Turning(NamedTuple):
    """How a tensor is turned; cos and sin are the other half of it.

    ``x`` is ``(..., heads, tokens, head_dim)``, heads and tokens swapped for ``token_dim`` -3. Its first ``num_prefix``
    and last ``num_suffix`` tokens come back bit for bit. ``inverse`` turns by the negative angles, as a backward does.
    """

    pairing: Pairing
    blocks: tuple[int, ...] | None = None
    token_dim: int = -2
    num_prefix: int = 0
    num_suffix: int = 0
    inverse: bool = False

    def parted(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of ``x`` before those that turn, these, and those after, as views."""
        turning = x.shape[self.token_dim] - self.num_prefix - self.num_suffix
        before, body, after = x.split_with_sizes((self.num_prefix, turning, self.num_suffix), self.token_dim)
        return before, body, after


def as_it_lies(x: Tensor, cos: Tensor, sin: Tensor, how: Turning) -> tuple[Tensor, Tensor, Turning] | None:
    """Tables and settings for ``x`` with heads and tokens swapped, where it lies in that order; else None."""
    if x.ndim == 2 or not guard_or_false(x.stride(-3) < x.stride(-2)):  # strides are symbols in a graph
        return None
    cos, sin = (table.transpose(-2, -3) if table.ndim > 2 else table.unsqueeze(-2) for table in (cos, sin))
    return cos, sin, how._replace(token_dim=-5 - how.token_dim)


class Lattice(NamedTuple):
    """Coordinates that form a row-major grid, so that a table holds ``sum(sizes)`` rows, not their product.

    The rows of axis ``a`` start at ``sum(sizes[:a])``; pair ``p`` listens to axis ``axes[p]``.
    """

    sizes: tuple[int, ...]
    axes: tuple[int, ...]


class Source(NamedTuple):
    """The fewer rows that cos and sin were spread from, for a kernel that finds its row by itself.

    ``cos`` and ``sin`` are ``(..., rows, pairs)``; ``rows`` is the row of each token, or its cell in ``lattice``.
    """

    cos: Tensor
    sin: Tensor
    rows: Tensor | None = None
    lattice: Lattice | None = None


def check_blocks(caller: str, pairing: Pairing, blocks: Sequence[int] | None, pairs: int) -> tuple[int, ...] | None:
    """The axis blocks that ``pairing`` needs: none but for ``"half_per_axis"``."""
    if pairing not in PAIRINGS:
        raise ValueError(f"{caller}: pairing is one of {PAIRINGS}, got {pairing!r}.")
    if pairing != "half_per_axis":
        if blocks is not None:
            raise ValueError(
                f"{caller}: blocks belong to 'half_per_axis'; {pairing!r} pairs the same with any of them."
            )
        return None
    if blocks is None or sum(blocks) != pairs or min(blocks) < 0:
        raise ValueError(
            f"{caller}: 'half_per_axis' needs the pairs of each axis block, {pairs} in all, got blocks={blocks!r}. "
            f"They are split.blocks."
        )
    return tuple(blocks)


def axis_blocks(pairing: Pairing, blocks: tuple[int, ...] | None, pairs: int) -> list[tuple[int, int]]:
    """First pair and number of pairs of every block whose first channels stand before its second ones."""
    counts = blocks if pairing == "half_per_axis" and blocks is not None else (pairs,)
    starts = [sum(counts[:place]) for place in range(len(counts))]
    return [(start, count) for start, count in zip(starts, counts, strict=True) if count]


def pair_channels(pairing: Pairing, pairs: int, blocks: tuple[int, ...] | None) -> tuple[list[int], list[int]]:
    """The first and the second channel of every pair."""
    if pairing == "interleaved":
        return list(range(0, 2 * pairs, 2)), list(range(1, 2 * pairs, 2))
    first: list[int] = []
    second: list[int] = []
    for start, count in axis_blocks(pairing, blocks, pairs):
        first += range(2 * start, 2 * start + count)
        second += range(2 * start + count, 2 * (start + count))
    return first, second
