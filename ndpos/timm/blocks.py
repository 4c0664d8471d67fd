"""Where queries and keys are made in the blocks of each family, and the same places with the turn in them.

Classes are changed, never built by hand: a turning class has the parameters, keys and numbers of timm's own, and calls
timm's own forward where nothing is to be turned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from timm.layers import Attention, DiffAttention
from timm.layers.attention import AttentionRope
from timm.models import beit, eva
from timm.models.vision_transformer import (
    Block,
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
)
from timm.models.vision_transformer_relpos import RelPosAttention, RelPosBlock, ResPostRelPosBlock
from torch import Tensor, nn

from ndpos.rotation import Rotation
from ndpos.timm.attention import RotaryAttention, attend, given, turned
from ndpos.timm.fused import FusedAttentionRope, FusedEvaAttention, project_with_biases

__all__: list[str] = []


class RotaryDiffAttention(DiffAttention):  # type: ignore[misc]  # timm is untyped
    """timm's ``DiffAttention`` with both halves of every query and key turned: they are heads of half the width."""

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        turn, mask = given(attn_mask, is_causal)
        if turn is None:
            unturned: Tensor = super().forward(x, attn_mask=mask, is_causal=is_causal)
            return unturned
        q, k, v = self.qkv(x).chunk(3, dim=2)
        out: Tensor = self.proj(self.norm(difference(self, turn, q, k, v, mask, is_causal)))
        out = self.proj_drop(out)
        return out


class RotaryParallelScalingBlock(ParallelScalingBlock):  # type: ignore[misc]  # likewise
    """timm's ``ParallelScalingBlock`` with queries and keys turned."""

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        turn, mask = given(attn_mask, is_causal)
        if turn is None:
            unturned: Tensor = super().forward(x, attn_mask=mask, is_causal=is_causal)
            return unturned
        batch, tokens, _ = x.shape
        hidden, *qkv = torch.split(self.in_proj(self.in_norm(x)), self.in_split, dim=-1)
        q, k, v = (each.reshape(batch, tokens, self.num_heads, self.head_dim) for each in qkv)
        q, k, v = turned(self, turn, q, k, v)
        attended = attend(self, q, k, v, mask, is_causal).transpose(1, 2).reshape(x.shape)
        return joined(self, x, attended, hidden)


class RotaryDiffParallelScalingBlock(DiffParallelScalingBlock):  # type: ignore[misc]  # likewise
    """timm's ``DiffParallelScalingBlock`` with both halves of every query and key turned."""

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        turn, mask = given(attn_mask, is_causal)
        if turn is None:
            unturned: Tensor = super().forward(x, attn_mask=mask, is_causal=is_causal)
            return unturned
        hidden, q, k, v = torch.split(self.in_proj(self.in_norm(x)), self.in_split, dim=-1)
        return joined(self, x, difference(self, turn, q, k, v, mask, is_causal), hidden)


def joined(block: Any, x: Tensor, attended: Tensor, hidden: Tensor) -> Tensor:
    """The end of a parallel block: attention and MLP through their projections, and the residual."""
    hidden = hidden if block.mlp_bias is None else hidden + block.mlp_bias
    hidden = block.mlp_drop(block.mlp_act(hidden))
    if block.out_proj is not None:
        y = block.out_proj(torch.cat((attended, hidden), dim=-1))
    else:
        y = block.attn_out_proj(attended) + block.mlp_out_proj(hidden)
    out: Tensor = x + block.drop_path(block.ls(y))
    return out


def difference(
    attention: Any, turn: Rotation, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool
) -> Tensor:
    """The difference of two attentions, ``(batch, tokens, channels)`` before the output's norm and projection."""
    batch, tokens, channels = q.shape
    heads, head_dim = attention.num_heads, attention.head_dim
    q, k = (each.reshape(batch, tokens, 2 * heads, head_dim) for each in (q, k))
    q, k, v = turned(attention, turn, q, k, v.reshape(batch, tokens, heads, 2 * head_dim))
    weight = attention._compute_lambda().type_as(q)
    first, second = (attend(attention, q[:, i::2], k[:, i::2], v, mask, is_causal) for i in (0, 1))
    out = attention.sub_norm(first - weight * second) * (1 - attention.lambda_init)
    joined_heads: Tensor = out.transpose(1, 2).reshape(batch, tokens, channels)
    return joined_heads


class RotaryEvaAttention(FusedEvaAttention):
    """timm's ``EvaAttention`` in a model that has no rotation of its own."""

    def forward(self, x: Tensor, rope: Any = None, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        given(rope)
        return super().forward(x, rope, attn_mask, is_causal)


class RotaryAttentionRope(FusedAttentionRope):
    """timm's ``AttentionRope`` in a model that has no rotation of its own."""

    def forward(self, x: Tensor, rope: Any = None, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        given(rope)
        return super().forward(x, rope, attn_mask, is_causal)


class RotaryBeitAttention(beit.Attention):  # type: ignore[misc]  # likewise
    """BEiT's attention with queries and keys turned, and its relative position bias added as before."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Any = None) -> Tensor:
        turn, bias = given(shared_rel_pos_bias)
        if turn is None:
            unturned: Tensor = super().forward(x, shared_rel_pos_bias=bias)
            return unturned
        batch, tokens, channels = x.shape
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        q, k, v = project_with_biases(self, x).reshape(batch, tokens, 3, self.num_heads, -1).unbind(2)
        q, k, v = turned(self, turn, q, k, v)
        out: Tensor = self.proj(attend(self, q, k, v, bias).transpose(1, 2).reshape(batch, tokens, channels))
        out = self.proj_drop(out)
        return out


class RotaryRelPosAttention(RelPosAttention):  # type: ignore[misc]  # likewise
    """The attention of timm's relative-position ViTs with queries and keys turned, and its bias added as before."""

    def forward(self, x: Tensor, shared_rel_pos: Any = None) -> Tensor:
        turn, bias = given(shared_rel_pos)
        if turn is None:
            unturned: Tensor = super().forward(x, shared_rel_pos=bias)
            return unturned
        batch, tokens, channels = x.shape
        bias = self.rel_pos.get_bias() if self.rel_pos is not None else bias
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).unbind(2)
        q, k, v = turned(self, turn, q, k, v)
        out: Tensor = self.proj(attend(self, q, k, v, bias).transpose(1, 2).reshape(batch, tokens, channels))
        out = self.proj_drop(out)
        return out


# timm's class, and the one that turns.
TURNING: Mapping[type[nn.Module], type[nn.Module]] = {
    Attention: RotaryAttention,
    DiffAttention: RotaryDiffAttention,
    ParallelScalingBlock: RotaryParallelScalingBlock,
    DiffParallelScalingBlock: RotaryDiffParallelScalingBlock,
    eva.EvaAttention: RotaryEvaAttention,
    AttentionRope: RotaryAttentionRope,
    beit.Attention: RotaryBeitAttention,
    RelPosAttention: RotaryRelPosAttention,
}
WITH_ATTENTION = (
    Block,
    ResPostBlock,
    eva.EvaBlock,
    eva.EvaBlockPostNorm,
    beit.Block,
    RelPosBlock,
    ResPostRelPosBlock,
)


def turning_places(block: Any) -> Iterator[nn.Module]:
    """The modules of a block that make queries and keys: its attention, several, or itself; none if it is unknown."""
    kinds = {*TURNING, *TURNING.values()}
    if type(block) in kinds:
        yield block
    elif type(block) in WITH_ATTENTION:
        yield from [block.attn] if type(block.attn) in kinds else []
    elif type(block) is ParallelThingsBlock and all(type(each.attn) in kinds for each in block.attns):
        yield from (each.attn for each in block.attns)


def heads_of(place: Any) -> tuple[int, int]:
    """(heads, head_dim) of the queries that are turned there."""
    if isinstance(place, (DiffAttention, DiffParallelScalingBlock)):
        return 2 * place.num_heads, place.head_dim
    return place.num_heads, place.head_dim if hasattr(place, "head_dim") else round(place.scale**-2)
