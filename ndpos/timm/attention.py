"""A block's attention with queries and keys turned, and what carries the rotation to it.

The rotation is passed down the call, through the blocks' own ``attn_mask`` argument: a global, a thread-local or an
attribute of the model would be empty or another thread's when activation checkpointing runs a block again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from ndpos.rotation import Rotation

__all__: list[str] = []


class Carried:
    """What travels in ``attn_mask``: the rotation, and the mask that the caller may have given.

    No pytree on purpose: FSDP2 casts every tensor that it finds in a block's arguments to the block's dtype, and cos
    and sin are to stay float32. ``turn`` is None where nothing is to be turned (strength 0).
    """

    __slots__ = ("mask", "turn")

    def __init__(self, turn: Rotation | None, mask: Tensor | None) -> None:
        self.turn, self.mask = turn, mask


def given(carried: Any, is_causal: bool = False) -> tuple[Rotation | None, Tensor | None]:
    """The rotation and the mask that came down the call."""
    if not isinstance(carried, Carried):
        raise ValueError(
            "ndpos.timm: a block of a model wrapped by add_rope was called without the model's forward, so it has "
            "no rotation. Call model(...), model.forward_features(...) or model.forward_intermediates(...)."
        )
    if is_causal and carried.mask is not None:
        raise ValueError("ndpos.timm: give attn_mask or is_causal, not both; a causal mask can be part of attn_mask.")
    return carried.turn, carried.mask


class RotaryAttention(Attention):  # type: ignore[misc]  # timm is untyped
    """timm's ``Attention`` with queries and keys turned; made by ``add_rope``, never built by hand."""

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        turn, mask = given(attn_mask, is_causal)
        if turn is None:
            unturned: Tensor = super().forward(x, attn_mask=mask, is_causal=is_causal)
            return unturned
        batch, tokens, _ = x.shape
        gate = None if self.gate is None else self.gate(x).sigmoid()
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).unbind(2)
        q, k, v = turned(self, turn, q, k, v)
        x = self.norm(attend(self, q, k, v, mask, is_causal).transpose(1, 2).reshape(batch, tokens, self.attn_dim))
        x = x if gate is None else x * gate
        out: Tensor = self.proj_drop(self.proj(x))
        return out


def turned(attention: Any, turn: Rotation, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys normed and turned, heads first; all three are ``(batch, tokens, heads, head_dim)`` before."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]  # BEiT's attention has none
    if all(norm is None or isinstance(norm, nn.Identity) for norm in norms):
        # Turned as they lie: attention then lays its output out so that joining heads is a view. Heads first, the
        # output projection would keep a copy (5 % of a ViT-S's training memory).
        q, k = (each.transpose(1, 2) for each in turn.both(q, k, token_dim=-3))
        # The backward keeps q, k and v. As a view, v would keep all of qkv, two thirds of it for nothing: 18 % of
        # that memory, at the price of this copy.
        return q, k, (v.clone() if torch.is_grad_enabled() else v).transpose(1, 2)
    # Norms lay q and k out heads first, and keep qkv as their input.
    q, k = attention.q_norm(q.transpose(1, 2)), attention.k_norm(k.transpose(1, 2))
    q, k = turn.both(q, k)
    return q.type_as(v), k.type_as(v), v.transpose(1, 2)


def attend(
    attention: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention as timm computes it, fused or not; ``scale`` as that of the module if not given."""
    if attention.fused_attn:
        dropout = attention.attn_drop.p if attention.training else 0.0
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale
        )
    scores = (q if scale == 1 else q * (attention.scale if scale is None else scale)) @ k.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    out: Tensor = attention.attn_drop(scores.softmax(dim=-1)) @ v
    return out
