"""The rotation for eager mode on the CPU: few passes over ``x``, in blocks of tokens that stay in the cache.

Written into a given tensor, so that nothing as large as ``x`` is made besides the result. Interleaved pairs are complex
numbers already and turn as one product; halves take a product and two products added in place. Neither is for tracing
or exporting, where :mod:`ndpos.kernels.plain` stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ndpos.kernels.pairing import Turning, axis_blocks

__all__ = ["turn_eager"]

Cut = tuple[int, int, int]  # a dimension, the first index and how many

BLOCK = 2**18  # numbers that are turned at a time where they are passed over more than once: caches hold them
LEAST = 2**15  # and never fewer: below it, PyTorch's own overhead is what costs
SHARE = 1 / 8  # of the bytes of x: the most that is held beside x, the result and the tables, where LEAST allows it
ROWS = 64  # tokens of a block before samples are cut apart too


def turn_eager(x: Tensor, cos: Tensor, sin: Tensor, how: Turning, out: Tensor) -> None:
    """Write ``x`` turned into ``out``, which is ``x`` itself or does not overlap it."""
    before, body, after = how.parted(x)
    out_before, target, out_after = how.parted(out)
    if out is not x:
        if how.num_prefix:
            out_before.copy_(before)
        if how.num_suffix:
            out_after.copy_(after)
    if not body.numel() or not cos.numel():
        target.copy_(body)
        return
    width = 2 * cos.shape[-1]
    if out is not x and width < x.shape[-1]:
        target[..., width:].copy_(body[..., width:])
    body, target = body[..., :width], target[..., :width]
    exact = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    turn_block = _turn_interleaved if how.pairing == "interleaved" else _turn_halves
    direct = x.dtype == exact and (_complex_views(body, target) if how.pairing == "interleaved" else out is not x)
    for where in _blocks(body, cos, exact, how, direct):
        block, into, c, s = body, target, cos, sin
        for dim, start, count in where:
            block, into = block.narrow(dim, start, count), into.narrow(dim, start, count)
            if c.ndim >= -dim and c.shape[dim] > 1:
                c, s = c.narrow(dim, start, count), s.narrow(dim, start, count)
        turn_block(block, c.to(exact), s.to(exact), how, into, direct)


def _turn_interleaved(x: Tensor, cos: Tensor, sin: Tensor, how: Turning, out: Tensor, direct: bool) -> None:
    turns = torch.complex(cos, -sin if how.inverse else sin)
    if direct:
        torch.mul(_as_complex(x), turns, out=_as_complex(out))
    else:
        exact = _exact_copy(x, cos)
        _as_complex(exact).mul_(turns)
        out.copy_(exact)


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor, how: Turning, out: Tensor, direct: bool) -> None:
    source = x if direct else _exact_copy(x, cos)
    result = out if out.dtype == cos.dtype else torch.empty_like(source)
    sign = -1 if how.inverse else 1
    blocks = axis_blocks(how.pairing, how.blocks, cos.shape[-1])
    # One product over all channels takes half the time of one for each half, whose rows are short.
    both = [cos[..., start : start + count] for start, count in blocks for _ in range(2)]
    torch.mul(source, torch.cat(both, dim=-1), out=result)
    for start, count in blocks:
        first, second = slice(2 * start, 2 * start + count), slice(2 * start + count, 2 * (start + count))
        s = sin[..., start : start + count]
        result[..., first].addcmul_(source[..., second], s, value=-sign)
        result[..., second].addcmul_(source[..., first], s, value=sign)
    if result is not out:
        out.copy_(result)


def _blocks(x: Tensor, cos: Tensor, exact: torch.dtype, how: Turning, direct: bool) -> Iterator[tuple[Cut, ...]]:
    """The parts of ``x`` that are turned one after the other, few enough to be fast and many enough to hold little."""
    size, tokens, samples = x.numel(), x.shape[how.token_dim], x.shape[0]
    copies = 0 if direct else 1 if how.pairing == "interleaved" or x.dtype == exact else 2
    held = exact.itemsize * (3 * cos.numel() + copies * size)
    passes_twice = copies > 0 or how.pairing != "interleaved"
    count = max(held / (SHARE * x.element_size() * size), size / BLOCK if passes_twice else 1)
    count = math.ceil(min(count, size / LEAST)) if size else 0
    if count <= 1 or not x.is_cpu:
        yield ()
        return
    rows = max(math.ceil(tokens / count), min(tokens, ROWS))
    groups = math.ceil(count * rows / tokens)
    token_starts = range(0, tokens, rows)
    if groups == 1 or x.ndim + how.token_dim == 0:
        yield from (((how.token_dim, start, min(rows, tokens - start)),) for start in token_starts)
        return
    each = math.ceil(samples / groups)
    for first in range(0, samples, each):
        for start in token_starts:
            yield (-x.ndim, first, min(each, samples - first)), (how.token_dim, start, min(rows, tokens - start))


def _exact_copy(x: Tensor, cos: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=cos.dtype, device=x.device).copy_(x)


def _complex_views(*tensors: Tensor) -> bool:
    """Whether neighbours in the last dimension can be read as complex numbers where they are."""
    return all(
        x.stride(-1) == 1 and not x.storage_offset() % 2 and not any(stride % 2 for stride in x.stride()[:-1])
        for x in tensors
    )


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
