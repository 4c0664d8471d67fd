"""The rotation in plain PyTorch: real arithmetic alone, for eager mode, compilers and exporters alike."""

from __future__ import annotations

import torch
from torch import Tensor

from ndpos.kernels.pairing import Pairing

__all__ = ["turn_pairs"]


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing, blocks: tuple[int, ...] | None) -> Tensor:
    """Every pair ``(a, b)`` of the first ``2 * pairs`` channels becomes ``(a cos - b sin, a sin + b cos)``.

    ``x`` is ``(..., head_dim)``; ``cos`` and ``sin`` ``(..., pairs)`` broadcast against its leading dimensions.
    ``blocks``, the pairs of each axis block, is read for ``"half_per_axis"`` alone. Arguments are taken as checked.

    Products are formed in float32 or wider whatever ``x``, ``cos`` and ``sin`` are, so that tables cast by a hook
    change neither the dtype of the result nor that of what autograd saves; the result is rounded once.
    """
    exact = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    cos, sin = cos.to(exact), sin.to(exact)
    pairs = cos.shape[-1]
    if pairing == "interleaved":
        turning = x[..., : 2 * pairs].to(exact)
        a, b = turning.reshape(*x.shape[:-1], pairs, 2).unbind(-1)
        turned = [torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)]
    else:
        turned, start = [], 0
        for count in (pairs,) if pairing == "half" or blocks is None else blocks:
            if count == 0:
                continue
            a = x[..., 2 * start : 2 * start + count].to(exact)
            b = x[..., 2 * start + count : 2 * (start + count)].to(exact)
            c, s = cos[..., start : start + count], sin[..., start : start + count]
            turned += [(a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype)]
            start += count
    # An empty remainder is left out: zero-size pieces upset tracers and exporters.
    parts = [*turned, x[..., 2 * pairs :]] if x.shape[-1] > 2 * pairs else turned
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
