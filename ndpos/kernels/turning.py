"""One rotation, several speeds: a tensor is sent the fastest way that what is done to it allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ndpos.kernels.choice import choose
from ndpos.kernels.compiled import turn_compiled
from ndpos.kernels.eager import turn_eager
from ndpos.kernels.lanes import seen_through, turn_traced
from ndpos.kernels.pairing import Source, Turning, axis_blocks

__all__ = ["exact_tables", "table_gradients", "turn_all", "turn_now"]

CALLER = "ndpos.Rotation"


def turn_all(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    how: Turning,
    backend: str | None = None,
    outs: Sequence[Tensor] | None = None,
    source: Source | None = None,
) -> tuple[Tensor, ...]:
    """Queries, or queries and keys, turned by the same tables; each written to its ``out`` if given.

    ``cos`` and ``sin`` stand beside the dimensions of each ``x``, and so do those of ``source``. Arguments are taken as
    checked.
    """
    if not _own_kernels(xs[0].device, (*xs, cos, sin)):
        if backend == "triton" and torch.compiler.is_compiling():
            turned = tuple(torch.ops.ndpos.turn(x, cos, sin, *how, backend) for x in xs)
        else:
            turned = tuple(turn_traced(x, cos, sin, how) for x in xs)
        return turned if outs is None else tuple(out.copy_(one) for out, one in zip(outs, turned, strict=True))
    # Before autograd keeps them: tables cast by a hook (FSDP's) then change nothing that a checkpoint compares.
    cos, sin = exact_tables(xs[0], cos, sin)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*xs, cos, sin)):
        return cast("tuple[Tensor, ...]", _Turned.apply(how, backend, source, cos, sin, *xs))
    return turn_now(xs, cos, sin, how, backend, outs, source)


def exact_tables(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``cos`` and ``sin`` in the dtype of the products: float32, or wider if they or ``x`` are."""
    if cos.dtype == sin.dtype == torch.float32 and x.dtype != torch.float64:  # nearly always; promotion takes its time
        return cos, sin
    exact = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    return cos.to(exact), sin.to(exact)


def _own_kernels(device: torch.device, tensors: Sequence[Tensor]) -> bool:
    """Whether these are tensors of numbers that nothing but autograd's backward looks through.

    Compilers, exporters, transforms of functions, forward mode, modes and subclasses see the plain formula instead.
    """
    return (
        not torch.compiler.is_compiling()
        and device.type in ("cpu", "cuda")
        and not seen_through(tensors)
        and not torch._C._len_torch_dispatch_stack()
        and not any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
    )


def turn_now(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    how: Turning,
    backend: str | None,
    outs: Sequence[Tensor] | None = None,
    source: Source | None = None,
) -> tuple[Tensor, ...]:
    """The same without autograd, by the backend that is named or fits."""
    chosen = choose(CALLER, backend, xs[0].device)
    if chosen == "compiled":
        return tuple(
            turn_compiled(x, cos, sin, how, None if outs is None else outs[place]) for place, x in enumerate(xs)
        )
    results = tuple(torch.empty_like(x) for x in xs) if outs is None else tuple(outs)
    if chosen == "triton":
        from ndpos.kernels.triton import turn_triton

        source = Source(cos, sin) if source is None else source
        turn_triton(
            xs,
            source.cos,
            source.sin,
            how.pairing,
            how.blocks,
            token_dim=how.token_dim,
            num_prefix=how.num_prefix,
            num_suffix=how.num_suffix,
            inverse=how.inverse,
            outs=results,
            rows=source.rows,
            lattice=source.lattice,
        )
    else:
        turn_eager(xs, cos, sin, how, results)
    return results


class _Turned(torch.autograd.Function):
    """The backward turns by the negative angle and keeps no ``x``, but for the tables' own gradients."""

    @staticmethod
    def forward(
        ctx: Any, how: Turning, backend: str | None, source: Source | None, cos: Tensor, sin: Tensor, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.how, ctx.backend, ctx.source = how, backend, source
        ctx.save_for_backward(cos, sin, *(xs if cos.requires_grad or sin.requires_grad else ()))
        ctx.set_materialize_grads(False)
        return turn_now(xs, cos, sin, how, backend, None, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        cos, sin, *xs = ctx.saved_tensors
        needed = {
            place: grad for place, grad in enumerate(grads) if grad is not None and ctx.needs_input_grad[5 + place]
        }
        of_xs: list[Tensor | None] = [None] * len(grads)
        if needed:
            back = ctx.how._replace(inverse=not ctx.how.inverse)
            turned = turn_all(tuple(needed.values()), cos, sin, back, ctx.backend, None, ctx.source)
            for place, one in zip(needed, turned, strict=True):
                of_xs[place] = one
        of_tables: tuple[Tensor | None, Tensor | None] = (None, None)
        if xs:
            parts = [
                table_gradients(x, grad, cos, ctx.how) for x, grad in zip(xs, grads, strict=True) if grad is not None
            ]
            if parts:
                of_cos, of_sin = (sum(each[1:], each[0]) for each in zip(*parts, strict=True))
                of_tables = (of_cos.to(cos.dtype), of_sin.to(sin.dtype))
        return (None, None, None, *of_tables, *of_xs)


def table_gradients(x: Tensor, grad: Tensor, cos: Tensor, how: Turning) -> tuple[Tensor, Tensor]:
    """What the gradient of ``x`` turned is for cos and for sin, summed over what shares them."""
    exact = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    a, b = _first_and_second(how.parted(x)[1].to(exact), cos.shape[-1], how)
    grad_a, grad_b = _first_and_second(how.parted(grad)[1].to(exact), cos.shape[-1], how)
    of_cos = torch.addcmul(grad_a * a, grad_b, b).sum_to_size(cos.shape)
    of_sin = torch.addcmul(grad_b * a, grad_a, b, value=-1).sum_to_size(cos.shape)
    return of_cos, -of_sin if how.inverse else of_sin


def _first_and_second(x: Tensor, pairs: int, how: Turning) -> tuple[Tensor, Tensor]:
    """``a`` and ``b`` of every pair, ``(..., pairs)`` each."""
    if how.pairing == "interleaved":
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    blocks = axis_blocks(how.pairing, how.blocks, pairs)
    first = [x[..., 2 * start : 2 * start + count] for start, count in blocks]
    second = [x[..., 2 * start + count : 2 * (start + count)] for start, count in blocks]
    return (first[0], second[0]) if len(blocks) == 1 else (torch.cat(first, -1), torch.cat(second, -1))
