"""The rotation in plain PyTorch: real arithmetic alone, out of place, for compilers, exporters and transforms."""

from __future__ import annotations

import torch
from torch import Tensor

from ndpos.kernels.pairing import Pairing, Turning, axis_blocks

__all__ = ["for_all_tokens", "turn_pairs", "turn_plain"]


def turn_plain(x: Tensor, cos: Tensor, sin: Tensor, how: Turning) -> Tensor:
    """``x`` turned, its tokens before and after the turned ones bit for bit."""
    cos, sin, kept = for_all_tokens(x, cos, sin, how)
    return turn_pairs(x, cos, sin, how.pairing, how.blocks, kept=kept)


def for_all_tokens(
    x: Tensor, cos: Tensor, sin: Tensor, how: Turning, rest: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cos and sin with rows for the tokens before and after, and which tokens are kept as they are, if any.

    ``rest`` is the number of pairs after the turned ones to be kept as well.

    The three parts are not turned and joined: a compiler then writes the turned tokens twice. Chosen where they stand,
    they cost a comparison; the tables get rows that turn nothing.
    """
    sin = -sin if how.inverse else sin
    if not (how.num_prefix or how.num_suffix or rest):
        return cos, sin, None
    tokens, above, pairs = x.shape[how.token_dim], -1 - how.token_dim, cos.shape[-1]
    rows: tuple[int, ...] = (0, rest)
    if how.num_prefix or how.num_suffix:  # else nothing is said of the tokens: PyTorch 2.9 pads none of none by raising
        rows = (*rows, *(0, 0) * (above - 1), how.num_prefix, how.num_suffix)
    place = torch.arange(tokens, device=x.device).view(-1, *(1,) * above)
    kept = (place < how.num_prefix) | (place >= tokens - how.num_suffix)
    if rest:
        kept = kept | (torch.arange(pairs + rest, device=x.device) >= pairs)
    return torch.nn.functional.pad(cos, rows, value=1.0), torch.nn.functional.pad(sin, rows), kept


def turn_pairs(
    x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing, blocks: tuple[int, ...] | None, kept: Tensor | None = None
) -> Tensor:
    """Every pair ``(a, b)`` of the first ``2 * pairs`` channels becomes ``(a cos - b sin, a sin + b cos)``.

    ``x`` is ``(..., head_dim)``; ``cos`` and ``sin`` ``(..., pairs)`` broadcast against its leading dimensions.
    ``blocks``, the pairs of each axis block, is read for ``"half_per_axis"`` alone; tokens that ``kept`` marks stay as
    they are. Arguments are taken as checked.

    Products are formed in float32 or wider whatever ``x``, ``cos`` and ``sin`` are, so that tables cast by a hook
    change neither the dtype of the result nor that of what autograd saves; the result is rounded once.
    """
    exact = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    cos, sin = cos.to(exact), sin.to(exact)
    pairs = cos.shape[-1]
    turning = x if x.shape[-1] == 2 * pairs else x[..., : 2 * pairs]
    if pairing == "interleaved":
        a, b = turning.reshape(*x.shape[:-1], pairs, 2).unbind(-1)
        turned = [torch.stack(_turned(a, b, cos, sin, kept), dim=-1).reshape(*x.shape[:-1], 2 * pairs)]
    else:
        counts = [count for _, count in axis_blocks(pairing, blocks, pairs)]
        # Split, not sliced: the gradient of a slice is a tensor of zeros as large as x with the slice in it.
        halves = torch.split(turning, [count for count in counts for _ in range(2)], dim=-1)
        tables = zip(torch.split(cos, counts, dim=-1), torch.split(sin, counts, dim=-1), strict=True)
        turned = [
            each
            for a, b, (c, s) in zip(halves[::2], halves[1::2], tables, strict=True)
            for each in _turned(a, b, c, s, kept)
        ]
    # An empty rest is left out: zero-size pieces upset tracers and exporters.
    parts = [*turned, x[..., 2 * pairs :]] if x.shape[-1] > 2 * pairs else turned
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _turned(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor, kept: Tensor | None) -> list[Tensor]:
    exact_a, exact_b = a.to(cos.dtype), b.to(cos.dtype)
    first, second = (exact_a * cos - exact_b * sin).to(a.dtype), (exact_b * cos + exact_a * sin).to(a.dtype)
    if kept is None:
        return [first, second]
    return [torch.where(kept, a, first), torch.where(kept, b, second)]
