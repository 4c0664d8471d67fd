"""The plain rotation fused by ``torch.compile``: ``x`` is read once and written once, after a first compilation."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ndpos.kernels.lanes import Lane, turn_lanes, turn_traced, viewable_lane
from ndpos.kernels.pairing import Turning, as_it_lies
from ndpos.kernels.plain import turn_plain

__all__ = ["compiler_missing", "turn_compiled"]


def turn_compiled(x: Tensor, cos: Tensor, sin: Tensor, how: Turning, out: Tensor | None = None) -> Tensor:
    """``x`` turned; compiled for the first sizes, once more for all others, and for another pairing, head_dim or dtype.

    The result has the strides of ``torch.empty_like(x)``, or is ``out``.
    """
    swapped = as_it_lies(x, cos, sin, how)
    if swapped is not None:  # so that the result lies so without another pass
        across = x.transpose(-2, -3)
        into = None if out is None else across if out is x else out.transpose(-2, -3)
        turned = turn_compiled(across, *swapped, into).transpose(-2, -3)
        return turned if out is None else out
    # Autograd stands outside, since each of its states is a graph.
    inputs = [x.detach(), cos.detach(), sin.detach()]
    if out is not None and out is not x:
        inputs.append(out.detach())
    lanes = [viewable_lane(each, cos, how) for each in inputs[::3]]
    lane = None if None in lanes else lanes[0]
    if lane is not None:
        inputs[::3] = [each.view(lane.dtype) for each in inputs[::3]]  # x and out
    # What PyTorch would compile anew for is part of the key.
    kind = _Kind(out is x, out is not None, x.ndim, cos.ndim, x.dtype, cos.dtype, x.device.type)
    with torch.no_grad():
        turned = _fused(how, inputs[0].shape[-1], cos.shape[-1], lane, kind)(*inputs)
    if out is not None:
        return out
    turned, strides = turned.view(x.dtype), torch.empty_like(x, device="meta").stride()
    return turned if turned.stride() == strides else torch.empty_like(x).copy_(turned)


class _Kind(NamedTuple):
    in_place: bool
    into: bool
    rank: int
    table_rank: int
    dtype: torch.dtype
    table_dtype: torch.dtype
    device_type: str


@lru_cache(maxsize=256)
def _fused(how: Turning, width: int, pairs: int, lane: Lane | None, kind: _Kind) -> Callable[..., Tensor]:
    def fused(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
        # Channels are known even where other sizes are open, so that the loop over them is.
        torch._check(x.shape[-1] == width)
        torch._check(cos.shape[-1] == pairs)
        if lane is not None:
            turned = turn_lanes(x, cos, sin, how, lane)
        else:  # float16 is widened to lanes as in a caller's graph; others have none, or not where they begin
            turned = (turn_traced if kind.dtype == torch.float16 else turn_plain)(x, cos, sin, how)
        if kind.in_place:
            return x.copy_(turned)
        return turned if out is None else out.copy_(turned)

    # Graphs are counted by code object, and past eight of them PyTorch stops compiling: each setting gets its own.
    own = types.FunctionType(fused.__code__.replace(), globals(), fused.__name__, fused.__defaults__, fused.__closure__)
    # Sizes are open from the second ones on: loops over known ones took half the time for interleaved pairs.
    return cast("Callable[..., Tensor]", torch.compile(own))


def compiler_missing(device: torch.device) -> str:
    """Why nothing can be compiled for ``device``; empty if it can."""
    if device.type == "cuda":
        return "" if torch.utils._triton.has_triton() else "torch.compile needs Triton for a GPU, and it is not here"
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:
        return f"torch.compile found no C++ compiler ({str(error).strip().splitlines()[0]}); g++ or clang++ is one"
    return ""
