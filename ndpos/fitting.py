"""Whether queries or keys fit a rotation: shapes alone are read, never values, so nothing waits for a device."""

from __future__ import annotations

from collections.abc import Sequence

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
    shapes = (
        f"\n  x         {tuple(x.shape)}  token_dim {token_dim}"
        f"\n  rotation  {tuple(rotation)}  (*batch, heads|1, tokens, pairs), "
        f"num_prefix {num_prefix}, num_suffix {num_suffix}\n  "
    )
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


def check_floating(caller: str, x: Tensor) -> None:
    """Raise unless ``x`` is a tensor that can be turned."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{caller}: x is a float16, bfloat16, float32 or float64 tensor, got {seen}.")
