"""Which two channels make a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

__all__ = ["PAIRINGS", "Pairing", "check_blocks", "pair_channels"]

Pairing = Literal["interleaved", "half", "half_per_axis"]
PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)


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


def pair_channels(pairing: Pairing, pairs: int, blocks: tuple[int, ...] | None) -> tuple[list[int], list[int]]:
    """The first and the second channel of every pair."""
    if pairing == "interleaved":
        return list(range(0, 2 * pairs, 2)), list(range(1, 2 * pairs, 2))
    first: list[int] = []
    second: list[int] = []
    start = 0
    for count in blocks if pairing == "half_per_axis" and blocks is not None else (pairs,):
        first += range(2 * start, 2 * start + count)
        second += range(2 * start + count, 2 * (start + count))
        start += count
    return first, second
