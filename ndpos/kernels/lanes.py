"""Interleaved pairs for a compiler: a pair is one number of twice the width, as two neighbours lie in memory.

A vector loop over every second number gathers them one by one: in bfloat16 it takes ten times as long, in float32
twice. As one integer, a pair is loaded and stored whole, and its halves are the low and the high bits. Only for graphs
of the CPU that are compiled: run step by step, each of a dozen operations would be a pass of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from ndpos.kernels.pairing import Turning, as_it_lies
from ndpos.kernels.plain import for_all_tokens, turn_plain

__all__ = ["Lane", "lane_of", "seen_through", "turn_lanes", "turn_traced", "viewable_lane"]


class Lane(NamedTuple):
    """The integer that holds a pair, how many of its bits are one channel, and from how many numbers on it pays.

    In a graph the view of another width is a call of its own, some ten microseconds each for ``x`` and the result.
    """

    dtype: torch.dtype
    bits: int
    pays: int


# Not float16: its numbers would have to be put together from sign, exponent and mantissa. It is widened to float32.
LANES = {torch.float32: Lane(torch.int64, 32, 2**18), torch.bfloat16: Lane(torch.int32, 16, 2**16)}


def lane_of(x: Tensor, cos: Tensor, how: Turning) -> Lane | None:
    """The lane that the pairs of ``x`` can be read as, but for where ``x`` begins: at an even place of its storage."""
    lies = (
        x.shape[-1] % 2 == 0
        and x.stride(-1) == 1
        and all(guard_or_false(stride % 2 == 0) for stride in x.stride()[:-1])
    )
    known = how.pairing == "interleaved" and cos.dtype == torch.float32 and x.device.type == "cpu"
    return LANES.get(x.dtype) if lies and known and sys.byteorder == "little" else None


def viewable_lane(x: Tensor, cos: Tensor, how: Turning) -> Lane | None:
    """The lane that ``x`` can be viewed as where it is: its storage is a whole number of lanes, as a compiler wants."""
    lane = lane_of(x, cos, how)
    whole = lane is not None and not x.storage_offset() % 2 and not x.untyped_storage().nbytes() % lane.dtype.itemsize
    return lane if whole else None


def turn_traced(x: Tensor, cos: Tensor, sin: Tensor, how: Turning) -> Tensor:
    """``x`` turned in the caller's graph: by lanes where it is compiled for the CPU, else by the plain formula.

    The values are the same, and so are the gradients, which lanes do not give by themselves. A graph cannot ask where
    in its storage ``x`` begins: at an odd place PyTorch refuses the view, by name.
    """
    learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    # PyTorch 2.9 says of every graph that it is exported: there the plain formula is all there is.
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return turn_plain(x, cos, sin, how)
    swapped = as_it_lies(x, cos, sin, how)
    if swapped is not None:  # so that the result lies as x does
        return turn_traced(x.transpose(-2, -3), *swapped).transpose(-2, -3)
    if x.dtype == torch.float16 and how.pairing == "interleaved" and x.device.type == "cpu":
        return turn_traced(x.float(), cos, sin, how).to(x.dtype)  # both ways and the lanes: half the time of its own
    lane = None if learned or seen_through((x, cos, sin)) else lane_of(x, cos, how)
    if lane is None or statically_known_true(x.numel() < lane.pays):
        return turn_plain(x, cos, sin, how)
    if torch.is_grad_enabled() and x.requires_grad:
        turned: Tensor = _Turned.apply(x, cos, sin, how, lane)
        return turned
    return turn_lanes(x.view(lane.dtype), cos, sin, how, lane).view(x.dtype)


def seen_through(tensors: Sequence[Tensor]) -> bool:
    """Whether a transform, forward mode or a subclass looks at what is done: bits and kernels tell them nothing."""
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
    return not plain or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def turn_lanes(pairs: Tensor, cos: Tensor, sin: Tensor, how: Turning, lane: Lane) -> Tensor:
    """The pairs turned, both as integers."""
    cos, sin, kept = for_all_tokens(pairs, cos, sin, how, rest=pairs.shape[-1] - cos.shape[-1])
    a, b = _channels(pairs, lane)
    first, second = _bits(a * cos - b * sin, lane), _bits(b * cos + a * sin, lane)
    turned = (first & (2**lane.bits - 1)) | (second << lane.bits)
    return turned if kept is None else torch.where(kept, pairs, turned)


def _channels(pairs: Tensor, lane: Lane) -> tuple[Tensor, Tensor]:
    """The two channels of every pair in float32."""
    if lane.bits == 32:
        low, high = pairs.to(torch.int32), (pairs >> 32).to(torch.int32)
    else:  # a bfloat16 is the high half of a float32
        low, high = pairs << 16, pairs & -(2**16)
    return low.view(torch.float32), high.view(torch.float32)


def _bits(x: Tensor, lane: Lane) -> Tensor:
    """The bits of ``x`` in the dtype that a lane holds two of, as the low ones of the lane's integer."""
    bits = x.view(torch.int32)
    if lane.bits == 32:
        return bits.to(torch.int64)
    # To the nearest, ties to even. What is not a number would carry over, and is kept one.
    rounded = bits + (0x7FFF + ((bits >> 16) & 1))
    return torch.where(x != x, bits | 0x400000, rounded) >> 16


class _Turned(torch.autograd.Function):
    """The gradient is the gradient turned by the negative angle, as lanes too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, how: Turning, lane: Lane) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.how, ctx.lane = how, lane
        return turn_lanes(x.view(lane.dtype), cos, sin, how, lane).view(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        # A gradient may begin at an odd place, as a slice of what was joined to something else. Only arithmetic makes a
        # tensor of its own in a graph: compilers leave out clone() and products with one.
        pairs = grad.neg().neg().contiguous().view(ctx.lane.dtype)
        how = ctx.how._replace(inverse=not ctx.how.inverse)
        return turn_lanes(pairs, cos, sin, how, ctx.lane).view(grad.dtype), None, None, None, None
