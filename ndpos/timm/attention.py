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


class RotaryAttention(Attention):  # type: ignore[misc]  # timm is untyped
    """timm's ``Attention`` with queries and keys turned; made by ``add_rope``, never built by hand."""

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        if not isinstance(attn_mask, Carried):
            raise ValueError(
                "ndpos.timm: a block of a model wrapped by add_rope was called without the model's forward, so it has "
                "no rotation. Call model(...), model.forward_features(...) or model.forward_intermediates(...)."
            )
        turn, mask = attn_mask.turn, attn_mask.mask
        if is_causal and mask is not None:
            raise ValueError(
                "ndpos.timm: give attn_mask or is_causal, not both; a causal mask can be part of attn_mask."
            )
        if turn is None:
            unturned: Tensor = super().forward(x, attn_mask=mask, is_causal=is_causal)
            return unturned
        batch, tokens, _ = x.shape
        gate = None if self.gate is None else self.gate(x).sigmoid()
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        if isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity):
            # Turned as (batch, tokens, heads, head_dim), as they lie: attention then lays its output out so that
            # joining heads is a view. Heads first, the output projection would keep a copy (5 % of a ViT-S's training
            # memory).
            q, k, v = qkv.unbind(2)
            q, k = (turned.transpose(1, 2) for turned in turn.both(q, k, token_dim=-3))
            # The backward keeps q, k and v. As a view, v would keep all of qkv, two thirds of it for nothing: 18 % of
            # that memory, at the price of this copy.
            v = (v.clone() if torch.is_grad_enabled() else v).transpose(1, 2)
        else:  # norms lay q and k out heads first, and keep qkv as their input
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            q, k = turn.both(self.q_norm(q), self.k_norm(k))
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)
        else:
            scores = (q * self.scale) @ k.transpose(-2, -1)
            if is_causal:
                mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            x = self.attn_drop(scores.softmax(dim=-1)) @ v
        x = self.norm(x.transpose(1, 2).reshape(batch, tokens, self.attn_dim))
        x = x if gate is None else x * gate
        out: Tensor = self.proj_drop(self.proj(x))
        return out
