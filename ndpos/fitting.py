"""Whether queries or keys fit a rotation: shapes alone are read, never values, so nothing waits for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__: list[str] = []

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_fit(
    caller: str,
    x: Tensor,
    token_dim: int,
    rotation: Sequence[int],
    *,
    head_dim: int | None,
    num_prefix: int,
    num_suffix: int,
    num_layers: int | None,
    basis: tuple[int, ...] | None,
) -> int:
    """Raise unless ``x`` fits a rotation of shape ``(*batch, heads|1, tokens, pairs)``.

    Returns the dimension of the tokens counted from the end: -2 or -3.
    """
    check_floating(caller, x)
    tokens, pairs = rotation[-2:]
    shapes = _Shapes(x, token_dim, rotation, num_prefix, num_suffix)
    from_end = token_dim - x.ndim if token_dim >= 0 else token_dim
    if from_end not in (-2, -3) or x.ndim < -from_end:
        raise ValueError(f"{caller}: token_dim is -2 or -3, the last dimension is head_dim.{shapes}")
    if num_layers is not None:
        raise ValueError(f"{caller}: the rotation holds {num_layers} layers.{shapes}Select one: turn.layer(i).")
    if head_dim is not None and x.shape[-1] != head_dim:
        raise ValueError(
            f"{caller}: expected head_dim {head_dim}, got {x.shape[-1]}.{shapes}Split the heads off first: "
            f"x.unflatten(-1, (heads, head_dim)); to turn a part of a head, AxisSplit(channels, dim=head_dim)."
        )
    if 2 * pairs > x.shape[-1]:
        raise ValueError(
            f"{caller}: {pairs} pairs need {2 * pairs} channels, x has {x.shape[-1]}.{shapes}"
            f"Fewer pairs, or wider heads."
        )
    if x.shape[from_end] != num_prefix + tokens + num_suffix:
        raise ValueError(
            f"{caller}: the rotation is for {num_prefix} + {tokens} + {num_suffix} tokens (prefix, "
            f"rotated, suffix), x has {x.shape[from_end]}.{shapes}If x starts with class or register tokens, say "
            f"num_prefix, or turn x[..., num_prefix:, :]; if it is (batch, tokens, heads, head_dim), token_dim=-3."
        )
    if basis is not None:
        square, x_heads = (x.shape[-1], x.shape[-1]), x.shape[-5 - from_end] if x.ndim > 2 else 1
        if basis not in (square, (1, *square), (x_heads, *square)):
            raise ValueError(
                f"{caller}: the basis is (head_dim, head_dim) or (heads, head_dim, head_dim), got "
                f"{basis}.{shapes}One basis for all heads, or one for each head of x."
            )
    heads, shared = rotation[-3], len(rotation) == 3
    if shared and heads == 1:
        return from_end
    heads_dim = -5 - from_end  # the other one of -2 and -3
    if x.ndim < 3 or (not shared and x.ndim != len(rotation)):
        raise ValueError(
            f"{caller}: x needs {len(rotation)} dimensions, (*batch, heads, tokens, head_dim), got {x.ndim}."
            f"{shapes}Give x a heads dimension, or the rotation no batch."
        )
    expected = [*rotation[:-3], heads]
    given = [*x.shape[-len(rotation) : -3], x.shape[heads_dim]]
    if not all(one == 1 or one == other for one, other in zip(expected, given, strict=True)):
        raise ValueError(
            f"{caller}: batch and heads of the rotation are {tuple(expected)}, of x {tuple(given)}.{shapes}"
            f"Fewer key heads: turn.head(slice(...)); one rotation for all samples: coords without a batch."
        )
    return from_end


def check_outs(
    caller: str, xs: Sequence[Tensor], outs: Sequence[Tensor], others: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Raise unless each ``x`` turned can be written to its ``out``; an ``out`` that is where ``x`` is becomes ``x``."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*xs, *outs, *others)):
        raise ValueError(
            f"{caller}: out= is for inference: autograd would lose what it overwrites. Leave out away, or turn under "
            f"torch.no_grad()."
        )
    if not isinstance(outs, Sequence) or len(outs) != len(xs):
        raise ValueError(f"{caller}: out is a tensor for each of {len(xs)} inputs.")
    checked = []
    for x, out in zip(xs, outs, strict=True):
        check_floating(caller, out)
        if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
            raise ValueError(
                f"{caller}: out has the shape, dtype and device of x: {tuple(x.shape)} {x.dtype} on {x.device}, got "
                f"{tuple(out.shape)} {out.dtype} on {out.device}. torch.empty_like(x) fits, or x itself."
            )
        if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise ValueError(
                f"{caller}: out is expanded, several of its tokens or heads are one place in memory: shape "
                f"{tuple(out.shape)}, strides {out.stride()}. Give a tensor of its own: out.contiguous()."
            )
        checked.append(x if not torch.compiler.is_compiling() and _same_place(x, out) else out)
    if torch.compiler.is_compiling():  # a graph has no addresses, and turns into a tensor of its own first
        return tuple(checked)
    for place, out in enumerate(checked):
        rest = [x for where, x in enumerate(xs) if where != place or x is not out]
        for other in (*rest, *others, *checked[:place]):
            if not _apart(out, other):
                raise ValueError(
                    f"{caller}: out overlaps another tensor in memory, and would overwrite what is still to be read. "
                    f"Give x itself, to turn it in place, or a tensor of its own: torch.empty_like(x)."
                )
    return tuple(checked)


def _same_place(one: Tensor, other: Tensor) -> bool:
    if one is other or not one.numel():
        return one is other
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether no number of ``one`` is in ``other``: by their storages, their spans, or one stride that both share."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or not (one.numel() and other.numel()):
        return True
    first, second = sorted(((each.storage_offset(), _span(each), each) for each in (one, other)), key=lambda e: e[0])
    if first[0] + first[1] <= second[0]:
        return True
    # Slices of a packed qkv: the same strides, each in its own part of a stride that wider ones are multiples of.
    gap, strides = second[0] - first[0], first[2].stride()
    return strides == second[2].stride() and any(
        gap >= _span(first[2], below)
        and gap + _span(second[2], below) <= below
        and not any(stride % below for stride in strides if stride > below)
        for below in strides
    )


def _span(x: Tensor, below: int | None = None) -> int:
    """How many numbers apart the first and the last are, plus one; of dimensions whose stride is under ``below``."""
    strides = zip(x.shape, x.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in strides if below is None or stride < below)


class _Shapes(NamedTuple):
    """What an error shows of the tensors; spelled out only when there is one."""

    x: Tensor
    token_dim: int
    rotation: Sequence[int]
    num_prefix: int
    num_suffix: int

    def __str__(self) -> str:
        return (
            f"\n  x         {tuple(self.x.shape)}  token_dim {self.token_dim}"
            f"\n  rotation  {tuple(self.rotation)}  (*batch, heads|1, tokens, pairs), "
            f"num_prefix {self.num_prefix}, num_suffix {self.num_suffix}\n  "
        )


def check_floating(caller: str, x: Tensor) -> None:
    """Raise unless ``x`` is a tensor that can be turned."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{caller}: x is a float16, bfloat16, float32 or float64 tensor, got {seen}.")
