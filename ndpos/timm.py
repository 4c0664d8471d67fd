"""A timm ViT given ndpos encodings. The only room that imports timm.

The rotation is passed down the call, through the blocks' own ``attn_mask`` argument: a global, a thread-local or an
attribute of the model would be empty or another thread's when activation checkpointing runs a block again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndpos.encode.rotary import RotaryEmbedding
from ndpos.rotation import Rotation
from ndpos.subspaces import split

try:
    from timm.layers import Attention
    from timm.models import checkpoint
    from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
except ImportError as error:
    raise ImportError("ndpos.timm needs timm 1.0.31 or newer: pip install 'ndpos[timm]'.") from error

__all__ = ["add_rope"]


class Carried:
    """What travels in ``attn_mask``: the rotation, and the mask that the caller may have given.

    No pytree on purpose: FSDP2 casts every tensor that it finds in a block's arguments to the block's dtype, and cos
    and sin are to stay float32.
    """

    __slots__ = ("mask", "turn")

    def __init__(self, turn: Rotation, mask: Tensor | None) -> None:
        self.turn, self.mask = turn, mask


class RotaryAttention(Attention):  # type: ignore[misc]  # timm is untyped
    """timm's ``Attention`` with queries and keys turned; made by :func:`add_rope`, never built by hand."""

    def forward(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        if not isinstance(attn_mask, Carried):
            raise ValueError(
                "ndpos.timm: a block of a model wrapped by add_rope was called without the model's forward, so it has "
                "no rotation. Call model(...) or model.forward_features(...)."
            )
        turn, mask = attn_mask.turn, attn_mask.mask
        if is_causal and mask is not None:
            raise ValueError(
                "ndpos.timm: give attn_mask or is_causal, not both; a causal mask can be part of attn_mask."
            )
        batch, tokens, _ = x.shape
        gate = None if self.gate is None else self.gate(x).sigmoid()
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = turn(self.q_norm(q)), turn.keys(self.k_norm(k))
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


class RotaryVisionTransformer(VisionTransformer):  # type: ignore[misc]  # timm is untyped
    """timm's ``VisionTransformer`` whose blocks turn queries and keys; made by :func:`add_rope`."""

    rope: RotaryEmbedding

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        # Sizes come from the image: with strict_img_size=False the embedding's own grid may be another of equal count.
        sizes = self.patch_embed.dynamic_feat_size(x.shape[-2:])
        x = self.patch_embed(x)
        sizes = x.shape[1:3] if x.ndim == 4 else sizes
        turn = self.rope.on_grid(sizes, num_prefix=self.num_prefix_tokens, device=x.device)
        x = self.norm_pre(self.patch_drop(self._pos_embed(x)))
        for index, block in enumerate(self.blocks):
            carried = Carried(turn if self.rope.layers is None else turn.layer(index), attn_mask)
            if self.grad_checkpointing and self.training:
                x = checkpoint(block, x, carried, is_causal)
            else:
                x = block(x, attn_mask=carried, is_causal=is_causal)
        out: Tensor = self.norm(x)
        return out


def add_rope(
    model: VisionTransformer, *, rope: RotaryEmbedding | None = None, base: float | None = None
) -> VisionTransformer:
    """Give a timm ``VisionTransformer`` two-dimensional rotary embeddings, in place.

    ``forward`` and ``forward_features`` carry the rotation; ``forward_intermediates`` does not yet, and raises.
    Class and register tokens are not turned. A learned table that the model has is kept and still added; build the
    model with ``pos_embed="none"`` for rotary alone. ``state_dict`` keeps its keys: a fixed rotary adds none.

    Args:
        model: A ``timm.models.VisionTransformer``, of that exact class, whose blocks hold timm's ``Attention``.
        rope: The rotary embedding, two axes (y, x) and the model's head_dim; built from ``base`` if not given.
        base: The theta of the ladder of each axis, 100 if not given (RoPE-ViT); refused beside ``rope``.

    Returns:
        The same model. Any image size that the model itself takes, square or not, fixed or dynamic.

    Raises:
        TypeError: another class of model or of attention, with the reason.
        ValueError: the model is wrapped already, drops patches, or ``rope`` does not fit its heads.

    Example:
        >>> import timm, torch, ndpos.timm
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), depth=2, num_classes=10)
        >>> model = ndpos.timm.add_rope(vit)
        >>> model(torch.randn(1, 3, 32, 48)).shape
        torch.Size([1, 10])

    Source:
        Heo et al. 2024, RoPE-ViT, arXiv:2403.13298: axial, base 100, class token untouched.
    """
    caller = "ndpos.timm.add_rope"
    if isinstance(model, RotaryVisionTransformer):
        raise ValueError(f"{caller}: the model is wrapped already; wrapping twice would turn queries and keys twice.")
    if type(model) is not VisionTransformer:
        raise TypeError(
            f"{caller}: takes a timm VisionTransformer of that exact class, got {type(model).__name__}. A subclass may "
            f"have a forward of its own, which the wrapper would bypass."
        )
    for index, block in enumerate(model.blocks):
        if type(block) not in (Block, ResPostBlock) or type(block.attn) is not Attention:
            inside = type(getattr(block, "attn", None)).__name__
            raise TypeError(
                f"{caller}: blocks hold timm's Attention; block {index} is {type(block).__name__} with {inside}, whose "
                f"queries and keys are out of reach."
            )
    if getattr(model.patch_drop, "prob", 0.0) > 0:
        raise ValueError(f"{caller}: patch_drop_rate {model.patch_drop.prob} is not supported; build the model with 0.")
    heads = {(block.attn.num_heads, block.attn.head_dim) for block in model.blocks}
    if len(heads) != 1:
        raise ValueError(f"{caller}: every block has the same heads; got (num_heads, head_dim) {sorted(heads)}.")
    num_heads, head_dim = heads.pop()
    if rope is None:
        rope = RotaryEmbedding(split(head_dim, 2), base=100.0 if base is None else base)
    elif base is not None:
        raise ValueError(f"{caller}: rope has its own frequencies; leave base={base!r} out.")
    _check_rope(caller, rope, head_dim, num_heads, len(model.blocks))
    model.rope = rope
    for block in model.blocks:
        block.attn.__class__ = RotaryAttention
    model.__class__ = RotaryVisionTransformer
    return model


def _check_rope(caller: str, rope: RotaryEmbedding, head_dim: int, heads: int, layers: int) -> None:
    if not isinstance(rope, RotaryEmbedding):
        raise TypeError(f"{caller}: rope is an ndpos.RotaryEmbedding, got {type(rope).__name__}.")
    if rope.split.axes != 2 or rope.split.dim != head_dim:
        raise ValueError(
            f"{caller}: rope has {rope.split.axes} axes and head_dim {rope.split.dim}; the model's patches have 2 axes "
            f"(y, x) and its heads {head_dim} channels: ndpos.RotaryEmbedding(ndpos.split({head_dim}, 2))."
        )
    if rope.heads not in (None, 1, heads) or rope.layers not in (None, layers):
        raise ValueError(
            f"{caller}: rope is for {rope.heads} heads and {rope.layers} layers, the model has {heads} and {layers}."
        )
