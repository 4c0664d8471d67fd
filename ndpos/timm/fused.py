"""timm's rotating attentions with the rotation done by ndpos: queries and keys in one pass, prefix tokens inside it.

timm's own tables of sines and cosines go on coming down the call, so that augmentation, patch drop, grids per sample
and checkpoints stay timm's. Made by class change, never built by hand; the classes add no state but the name of a
backend, a plain attribute, so that changing the class back and dropping it undoes all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.attention import AttentionRope
from timm.models.eva import Eva, EvaAttention
from timm.models.gemma4_vit import Gemma4Attention
from torch import Tensor, nn

from ndpos.kernels import Backend, check_backend
from ndpos.rotation import Rotation
from ndpos.timm.attention import Carried, attend, turned

__all__ = ["fuse_rope", "unfuse_rope"]


def fuse_rope(model: nn.Module, *, backend: Backend | None = None) -> nn.Module:
    """Let ndpos turn queries and keys of a timm model that already has RoPE: the same outputs, for less time. In place.

    Angles, their settings, and the state dict stay timm's; the rotation becomes one pass over queries and keys, with
    the prefix tokens inside it instead of cut off and joined again, in float32 arithmetic rounded once to the dtype of
    the model. :func:`ndpos.timm.unfuse_rope` undoes it. Calling it again sets the backend and nothing else.

    Args:
        model: Any module with timm's ``AttentionRope``, ``EvaAttention`` or ``Gemma4Attention`` inside, of these exact
            classes: EVA-02, PE, DINOv3, RoPE-ViT, NaFlexViT with RoPE, Qwen3, Gemma4 and DeepSeek vision models, a
            wrapper around one, or one that :func:`torch.compile` has not yet compiled.
        backend: Which way the rotation is computed, see :func:`ndpos.backends`; None picks the one that fits. On a CPU
            ``"compiled"`` is the fastest for a model that is not compiled as a whole, most of all in half precision; it
            costs some seconds at the first forward.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is no module, or holds none of these attentions, with the cure.
        ValueError: an unknown ``backend``.

    Example:
        >>> import ndpos.timm, timm, torch
        >>> model = timm.create_model("vit_small_patch16_rope_224", img_size=64, depth=2, num_classes=10).eval()
        >>> images = torch.randn(1, 3, 64, 64)
        >>> before = model(images)
        >>> after = ndpos.timm.fuse_rope(model)(images)
        >>> torch.allclose(before, after, atol=1e-6)
        True

    Source:
        timm's ``apply_rot_embed_cat`` and ``AttentionRope``; ``apply_multidimensional_rope`` of its gemma4_vit.
    """
    caller = "ndpos.timm.fuse_rope"
    check_backend(caller, backend)
    found = _rotating(caller, model)
    unturned = any(isinstance(module, Eva) and module.rope is None for module in model.modules())
    if not found or unturned:
        raise TypeError(
            f"{caller}: {type(model).__name__} holds no attention of timm that turns queries and keys. To give RoPE to "
            f"a model without it: ndpos.timm.add_rope(model), whose rotation is ndpos's own and needs no fusing."
        )
    for name, module in found.items():
        if type(module) in FUSED and "forward" in vars(module):
            raise TypeError(
                f"{caller}: forward of {name} has been replaced on this instance, which would bypass the rotation. "
                f"Fuse first, then replace."
            )
    for module in found.values():
        if type(module) in FUSED:
            module.__class__ = FUSED[type(module)]
        module.rope_backend = backend  # type: ignore[assignment]  # a plain name, no state
    return model


def unfuse_rope(model: nn.Module) -> nn.Module:
    """Give the attentions of a model back to timm: what :func:`ndpos.timm.fuse_rope` did, undone. In place.

    Args:
        model: Any module; one that is not fused stays as it is.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is no module.

    Example:
        >>> import ndpos.timm, timm
        >>> model = timm.create_model("vit_small_patch16_rope_224", img_size=64, depth=1)
        >>> ndpos.timm.unfuse_rope(ndpos.timm.fuse_rope(model)).blocks[0].attn.__class__.__module__
        'timm.layers.attention'

    Source:
        None of its own.
    """
    own = {fused: plain for plain, fused in FUSED.items()}
    for module in _rotating("ndpos.timm.unfuse_rope", model).values():
        module.__class__ = own.get(type(module), type(module))
        vars(module).pop("rope_backend", None)
    return model


def _rotating(caller: str, model: nn.Module) -> dict[str, nn.Module]:
    """The attentions inside ``model`` that turn, fused or not, by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: takes a torch.nn.Module, got {type(model).__name__}.")
    kinds = {*FUSED, *FUSED.values()}
    return {name: module for name, module in model.named_modules() if type(module) in kinds}


def from_timm(rope: Tensor, half: bool, num_prefix: int, backend: Backend | None = None) -> Rotation:
    """timm's ``(..., tokens, [sin | cos])`` as a Rotation: each angle once, instead of once per channel."""
    exact = torch.promote_types(rope.dtype, torch.float32)  # a half-precision model has rounded its tables before
    sin, cos = _once(rope.to(exact), half).chunk(2, dim=-1)
    if rope.ndim == 2:
        sin, cos = sin.unsqueeze(0), cos.unsqueeze(0)
    return Rotation(cos, sin, "half" if half else "interleaved", num_prefix=num_prefix, backend=backend)


def _once(tables: Tensor, half: bool) -> Tensor:
    """One column for each pair of channels, of sines and of cosines."""
    if half:
        return torch.cat([table.chunk(2, dim=-1)[0] for table in tables.chunk(2, dim=-1)], dim=-1)
    in_graph = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    learned = torch.is_grad_enabled() and tables.requires_grad
    if not in_graph or learned or tables.device.type != "cpu" or tables.dtype != torch.float32:
        return tables[..., 0::2].contiguous()
    # A compiler for the CPU would read every second column one number at a time, from within its loop over queries and
    # keys, which takes longer than the loop itself. A pair read as one integer holds the number twice. The sign changes
    # twice so that the integers begin where a tensor begins.
    return tables.neg().neg().view(torch.int64).to(torch.int32).view(torch.float32)


def _of(rope: Any, attention: Any) -> Rotation | None:
    """The rotation that came down the call: ndpos's own, or one by timm's table."""
    if isinstance(rope, Carried):
        return rope.turn
    half = bool(getattr(attention, "rotate_half", False))
    return from_timm(rope, half, attention.num_prefix_tokens, attention.rope_backend)


class FusedAttentionRope(AttentionRope):  # type: ignore[misc]  # timm is untyped
    """timm's ``AttentionRope``, turned by ndpos."""

    rope_backend: Backend | None = None

    def forward(self, x: Tensor, rope: Any = None, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        turn = None if rope is None else _of(rope, self)
        if turn is None:
            unturned: Tensor = super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
            return unturned
        batch, tokens, _ = x.shape
        gate = None if self.gate is None else self.gate(x).sigmoid()
        if self.qkv is not None:
            q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).unbind(2)
        else:
            q = self.q_proj(x).reshape(batch, tokens, self.num_heads, self.head_dim)
            k, v = (
                project(x).reshape(batch, tokens, self.num_kv_heads, self.head_dim)
                for project in (self.k_proj, self.v_proj)
            )
        q, k, v = turned(self, turn, q, k, v)
        if self.num_kv_groups > 1:
            k, v = (each.repeat_interleave(self.num_kv_groups, dim=1) for each in (k, v))
        x = self.norm(attend(self, q, k, v, attn_mask, is_causal).transpose(1, 2).reshape(batch, tokens, self.attn_dim))
        out: Tensor = self.proj_drop(self.proj(x if gate is None else x * gate))
        return out


class FusedEvaAttention(EvaAttention):  # type: ignore[misc]  # timm is untyped
    """timm's ``EvaAttention``, turned by ndpos."""

    rope_backend: Backend | None = None

    def forward(self, x: Tensor, rope: Any = None, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        turn = None if rope is None else _of(rope, self)
        if turn is None:
            unturned: Tensor = super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
            return unturned
        batch, tokens, channels = x.shape
        gate = None if self.gate is None else self.gate(x).sigmoid()
        if self.qkv is not None:
            q, k, v = project_with_biases(self, x).reshape(batch, tokens, 3, self.num_heads, -1).unbind(2)
        else:
            q, k, v = (
                project(x).reshape(batch, tokens, self.num_heads, -1)
                for project in (self.q_proj, self.k_proj, self.v_proj)
            )
        q, k, v = turned(self, turn, q, k, v)
        x = self.norm(attend(self, q, k, v, attn_mask, is_causal).transpose(1, 2).reshape(batch, tokens, channels))
        out: Tensor = self.proj_drop(self.proj(x if gate is None else x * gate))
        return out


def project_with_biases(attention: Any, x: Tensor) -> Tensor:
    """Queries, keys and values of an EVA or BEiT attention, whose keys have no bias."""
    if attention.q_bias is None:
        plain: Tensor = attention.qkv(x)
        return plain
    bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
    if attention.qkv_bias_separate:
        apart: Tensor = attention.qkv(x) + bias
        return apart
    return F.linear(x, attention.qkv.weight, bias)


class FusedGemma4Attention(Gemma4Attention):  # type: ignore[misc]  # timm is untyped
    """timm's ``Gemma4Attention``, turned by ndpos: half inside each axis, ``[x, x | y, y]``."""

    rope_backend: Backend | None = None

    def forward(self, x: Tensor, rope_cos: Tensor, rope_sin: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, tokens, self.num_heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(batch, tokens, self.num_kv_heads, self.head_dim))
        v = self.v_norm(self.v_proj(x).view(batch, tokens, self.num_kv_heads, self.head_dim))
        count = self.head_dim // 4
        cos, sin = (
            torch.cat((table[..., :count], table[..., 2 * count : 3 * count]), dim=-1) for table in (rope_cos, rope_sin)
        )
        turn = Rotation(
            cos.unsqueeze(-3), sin.unsqueeze(-3), "half_per_axis", blocks=(count, count), backend=self.rope_backend
        )
        q, k = turn.both(q, k, token_dim=-3)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if self.num_kv_groups > 1:
            k, v = (each.repeat_interleave(self.num_kv_groups, dim=1) for each in (k, v))
        x = attend(self, q, k, v, attn_mask, scale=1.0).transpose(1, 2).reshape(batch, tokens, -1)
        out: Tensor = self.proj_drop(self.o_proj(x))
        return out


FUSED: Mapping[type[nn.Module], type[nn.Module]] = {
    AttentionRope: FusedAttentionRope,
    EvaAttention: FusedEvaAttention,
    Gemma4Attention: FusedGemma4Attention,
}
