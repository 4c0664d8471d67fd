"""q and k weights carried from one convention to another, exactly: channels change places, numbers never change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from ndpos.kernels import Pairing, check_blocks, pair_channels
from ndpos.sizes import whole

__all__ = ["convert_pairing"]

Part = Literal["q", "k", "v"]


def convert_pairing(
    weight: Tensor,
    *,
    head_dim: int,
    source: Pairing,
    target: Pairing,
    pairs: int | None = None,
    blocks: Sequence[int] | None = None,
    fused: Sequence[tuple[Part, int]] | None = None,
) -> Tensor:
    """Rows of a query or key projection in the channel order of another pairing.

    A model trained with one pairing runs with the other after its q and k weights, biases and per-head norms are
    converted; scores are the same. Without it the model runs too, and is silently wrong.

    Args:
        weight: ``(heads * head_dim, ...)``: a weight ``(out, in)``, a bias ``(out,)``, or a norm ``(head_dim,)``.
        head_dim: Channels of one head.
        source: The pairing that the weights were trained with.
        target: The pairing that they are to be used with. Converting back restores every bit.
        pairs: Pairs that turn, when only the first ``2 * pairs`` channels do; the rest stays in place.
        blocks: Pairs of each axis block (``split.blocks``), when source or target is ``"half_per_axis"``.
        fused: The parts of a fused projection in row order and their heads, ``(("q", 12), ("k", 12), ("v", 12))``;
            rows of ``"v"`` stay in place.

    Returns:
        A new tensor like ``weight``.

    Raises:
        ValueError: rows that are no whole heads or not those of ``fused``, too many pairs, an unknown pairing or part.

    Example:
        >>> import ndpos, torch
        >>> rows = torch.arange(8.0)
        >>> ndpos.convert_pairing(rows, head_dim=8, source="interleaved", target="half").tolist()
        [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]

    Source:
        ``permute`` of transformers' ``convert_llama_weights_to_hf.py``, for any pairing, part and number of axes.
    """
    caller = "ndpos.convert_pairing"
    head_dim = whole(caller, "head_dim", head_dim, minimum=2)
    pairs = head_dim // 2 if pairs is None else whole(caller, "pairs", pairs, minimum=1)
    if 2 * pairs > head_dim:
        raise ValueError(f"{caller}: {pairs} pairs need {2 * pairs} channels, head_dim is {head_dim}.")
    if blocks is not None and "half_per_axis" not in (source, target):
        raise ValueError(f"{caller}: blocks belong to 'half_per_axis'; got {source!r} to {target!r}.")
    here, there = (
        pair_channels(
            pairing, pairs, check_blocks(caller, pairing, blocks if pairing == "half_per_axis" else None, pairs)
        )
        for pairing in (source, target)
    )
    order = list(range(head_dim))
    for come_from, go_to in zip((*here[0], *here[1]), (*there[0], *there[1]), strict=True):
        order[go_to] = come_from
    if weight.ndim < 1 or weight.shape[0] % head_dim:
        raise ValueError(f"{caller}: rows are whole heads of {head_dim} channels, got {tuple(weight.shape)}.")
    heads = weight.shape[0] // head_dim
    turned = [True] * heads
    if fused is not None:
        unknown = [part for part, _ in fused if part not in ("q", "k", "v")]
        if unknown or sum(count for _, count in fused) != heads:
            raise ValueError(
                f"{caller}: fused names the heads of each part 'q', 'k' or 'v' in row order; got {tuple(fused)} for "
                f"{heads} heads in {tuple(weight.shape)}."
            )
        turned = [part != "v" for part, count in fused for _ in range(count)]
    rows = rearrange(weight, "(heads channels) ... -> heads channels ...", channels=head_dim)
    moved = rows[:, torch.tensor(order, device=weight.device)]
    kept = torch.tensor(turned, device=weight.device).view(-1, *(1,) * weight.ndim)
    return rearrange(torch.where(kept, moved, rows), "heads channels ... -> (heads channels) ...")
