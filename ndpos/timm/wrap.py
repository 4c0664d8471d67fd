"""The calls that give a timm ViT its encoding, in place: everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from timm.layers import PatchDropout, PatchDropoutWithIndices, PatchEmbed
from torch import nn

from ndpos.encode.baselines import BinaryEmbedding
from ndpos.encode.learned import LearnedEmbedding
from ndpos.encode.rotary import RotaryEmbedding
from ndpos.sizes import sizes_per_axis
from ndpos.subspaces import split
from ndpos.timm.blocks import TURNING, heads_of, turning_places
from ndpos.timm.encoded import Encoded
from ndpos.timm.families import ENCODED, TABLED, EncodedNaFlexVit
from ndpos.timm.patch_embed import OpenPatchEmbed
from ndpos.timm.reasons import why_not
from ndpos.timm.settings import Absolute, check_absolute, check_strength
from ndpos.timm.tables import ADDITIVE

__all__ = ["add_rope", "set_table"]

# Methods that the wrapper replaces: one that a user has put on the instance would win over it, unseen.
REPLACED = ("forward", "forward_features", "forward_intermediates", "get_intermediate_layers", "_pos_embed")


def add_rope(
    model: nn.Module,
    *,
    rope: RotaryEmbedding | None = None,
    base: float | None = None,
    reference_sizes: Sequence[int] | None = None,
    learnable: bool = False,
    absolute: Absolute = "keep",
    strength: float | Sequence[float] = 1.0,
) -> nn.Module:
    """Give a timm ViT two-dimensional rotary embeddings, in place.

    Everything a ViT is used for goes on working: every forward, state-dict keys, gradient checkpointing, patch drop,
    dynamic image sizes, masks, half precision, ``torch.compile`` and export. Class, distillation and register tokens
    are not turned. A new image size is no new graph after the second. Not supported: ``torch.jit``, FX tracing, and
    reentrant checkpoint wrappers around blocks with learned frequencies (timm's own ``set_grad_checkpointing`` is).

    Args:
        model: A model of timm, of the exact class ``VisionTransformer`` (ViT, DeiT, hybrids, ViTamin; parallel and
            differential blocks too), ``VisionTransformerDistilled``, ``Eva`` without a rotation of its own,
            ``Beit`` and ``VisionTransformerRelPos``, whose relative position bias is kept, or ``NaFlexVit``, a grid per
            image. ``python -m ndpos timm-support`` lists them.
        rope: The rotary embedding, two axes (y, x) and the model's head_dim; built from ``base`` if not given. One
            with heads and layers must have the model's.
        base: The theta of the ladder of each axis, 100 if not given (RoPE-ViT); refused beside ``rope``.
        reference_sizes: Patches per axis, (height, width), whose coordinates are kept: at another image size the grid
            is laid over this one, borders on borders as images are resized, so that no distance is longer than those
            trained. Grid steps if not given.
        learnable: Learn the frequencies: one parameter more, ``rope.frequencies``; refused beside ``rope``.
        absolute: The learned table that the model has: ``"keep"`` it; ``"fade"`` it, times 1 - strength or, once
            ``model.fade`` is set, 1 - fade; or ``"drop"`` it, prefix rows too: ``pos_embed`` stays in the state dict,
            frozen and unused. ``NaFlexVit`` keeps its own.
        strength: From 0 to 1, what angles are multiplied by, of both axes or of (y, x). At 0 the model computes what it
            did before, bit for bit in eager mode, unless the table is dropped (and but for one thing: when patches are
            dropped, distillation tokens stay, which timm drops). A setting, not state: raise it during training with
            :class:`ndpos.timm.Schedule` or ``model.strength = ...``, in a running average of the model too; a compiled
            model needs no new graph for it.

    Returns:
        The same model.

    Raises:
        TypeError: another class of model or of attention, with the reason, or a ``rope`` of another kind.
        ValueError: the model is wrapped already, or settings do not fit it or each other.

    Example:
        >>> import timm, torch, ndpos.timm
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), depth=2, num_classes=10)
        >>> model = ndpos.timm.add_rope(vit, reference_sizes=(2, 3), strength=0.0)
        >>> model.strength = 0.5                          # half the angles
        >>> model(torch.randn(1, 3, 32, 48)).shape
        torch.Size([1, 10])

    Source:
        Heo et al. 2024, RoPE-ViT, arXiv:2403.13298: axial, base 100, class token untouched. Reference sizes: Fang et
        al. 2023, EVA-02, arXiv:2303.11331.
    """
    caller = "ndpos.timm.add_rope"
    if isinstance(model, Encoded) and model.rope is not None:
        raise ValueError(f"{caller}: the model is wrapped already; wrapping twice would turn queries and keys twice.")
    check_model(caller, model)
    vit: Any = model
    heads, head_dim = _check_blocks(caller, vit)
    if not isinstance(learnable, bool):
        raise TypeError(f"{caller}: learnable is True or False, got {learnable!r}.")
    if rope is None:
        with torch.inference_mode(False):  # frequencies born in inference mode could not be trained
            rope = RotaryEmbedding(split(head_dim, 2), base=100.0 if base is None else base, learnable=learnable)
    elif base is not None or learnable:
        left_out = f"base={base!r}" if base is not None else "learnable=True"
        raise ValueError(f"{caller}: rope has its own frequencies; leave {left_out} out.")
    _check_rope(caller, rope, head_dim, heads, len(vit.blocks))
    naflex = isinstance(vit, tuple(kind for kind in ENCODED if issubclass(EncodedNaFlexVit, kind)))
    if naflex and rope.layers is not None:
        raise ValueError(f"{caller}: a NaFlexVit hands all blocks the same rotation; rope has {rope.layers} layers.")
    check_absolute(caller, absolute)
    strength = check_strength(caller, strength)
    reference = _reference(caller, reference_sizes)
    if absolute != "keep" and (naflex or getattr(vit, "pos_embed", None) is None):
        inside = ": that of a NaFlexVit is made inside its patch embedding" if naflex else ""
        raise ValueError(f"{caller}: the model has no pos_embed to {absolute}{inside}; leave absolute out.")

    # Learned frequencies stay float32 in a half-precision model: rounded to bfloat16 they would be 0.4 % off.
    rope = rope.to(device=next(vit.parameters()).device)
    _encode(vit)
    vit.rope = rope
    vit.reference_sizes, vit.absolute, vit.strength = reference, absolute, strength
    if absolute == "drop":
        vit.pos_embed.requires_grad_(False)  # out of DDP's way, which waits for a gradient of what is trained
    for block in vit.blocks:
        for place in turning_places(block):
            place.__class__ = TURNING.get(type(place), type(place))
    return model


def set_table(model: nn.Module, embedding: nn.Module, *, reference_sizes: Sequence[int] | None = None) -> nn.Module:
    """Put an additive ndpos encoding in the place of a timm ViT's learned table, in place.

    ``pos_embed`` becomes None, and the encoding is ``model.table``: a learned one has its parameters in the state dict,
    a fixed one has none. Before or after :func:`add_rope`, whose ``absolute`` is over with ``pos_embed``.

    Args:
        model: A ``timm.models.VisionTransformer`` or ``VisionTransformerDistilled``, of that exact class, whatever its
            blocks; or one that :func:`add_rope` or this function has changed.
        embedding: ``SinusoidalEmbedding``, ``LearnedEmbedding``, ``IntegerEmbedding`` or ``BinaryEmbedding`` of two
            axes (y, x) and the model's width. A learned one resamples itself to other grids, or repeats itself if it
            was built with ``outside="wrap"``; its ``num_prefix`` rows are added to as many of the leading tokens,
            in the order class, distillation, registers. It is moved to the device and dtype of the model.
        reference_sizes: Patches per axis, (height, width), whose coordinates are kept at other image sizes (cell
            borders coincide); grid steps if not given. Not for learned and binary ones.

    Returns:
        The same model.

    Raises:
        TypeError: another class of model, or an embedding that is not additive.
        ValueError: axes, width or prefix rows that do not fit the model, or ``reference_sizes`` for an encoding that
            cannot take them.

    Example:
        >>> import ndpos, ndpos.timm, timm, torch
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10, dynamic_img_size=True)
        >>> model = ndpos.timm.set_table(vit, ndpos.SinusoidalEmbedding(ndpos.split(192, 2)))
        >>> model(torch.randn(1, 3, 64, 96)).shape, "pos_embed" in model.state_dict()
        (torch.Size([1, 10]), False)

    Source:
        Sinusoidal tables in ViTs: Chen et al. 2021, MoCo v3, arXiv:2104.02057; He et al. 2021, MAE, arXiv:2111.06377.
    """
    caller = "ndpos.timm.set_table"
    check_model(caller, model, TABLED)
    if not isinstance(embedding, ADDITIVE):
        named = ", ".join(kind.__name__ for kind in ADDITIVE)
        raise TypeError(f"{caller}: embedding is one of {named}, got {type(embedding).__name__}.")
    vit, kind = cast("Any", model), cast("Any", embedding)
    learned = isinstance(embedding, LearnedEmbedding)
    axes, dim = (len(kind.sizes), kind.dim) if learned else (kind.split.axes, kind.split.dim)
    if axes != 2 or dim != vit.embed_dim:
        raise ValueError(
            f"{caller}: the embedding has {axes} axes and {dim} channels; the model's patches have 2 axes (y, x) and "
            f"{vit.embed_dim} channels."
        )
    if learned and kind.num_prefix > vit.num_prefix_tokens:
        raise ValueError(
            f"{caller}: the embedding has {kind.num_prefix} prefix rows, the model {vit.num_prefix_tokens} "
            f"prefix tokens (class, distillation, registers)."
        )
    reference = _reference(caller, reference_sizes)
    if reference is not None and (learned or isinstance(embedding, BinaryEmbedding)):
        raise ValueError(
            f"{caller}: reference_sizes make coordinates fractional, which {type(embedding).__name__} does not take"
            f"{'; it resamples itself to other grids' if learned else ''}. Leave them out."
        )

    like = next(vit.parameters())
    _encode(vit)
    vit.pos_embed, vit.absolute = None, "keep"
    vit.table, vit.table_reference_sizes = embedding.to(device=like.device, dtype=like.dtype), reference
    return model


def check_model(caller: str, model: Any, kinds: Collection[type] = tuple(ENCODED), *, may_rotate: bool = False) -> None:
    """Raise unless ``model`` is one of timm's classes ``kinds`` with a forward of its own, or encoded already."""
    if type(model) not in (*kinds, *(ENCODED[kind] for kind in kinds)):
        inside = [name for name, child in _children(model) if type(child) in kinds]
        cure = f" Its {inside[0]!r} is one: hand in that." if inside else ""
        names = ", ".join(kind.__name__ for kind in kinds)
        above = next((kind.__name__ for kind in kinds if isinstance(model, kind)), None)
        why = f"a subclass of {above}" if above else "one of those is inside" if inside else why_not(model)
        raise TypeError(
            f"{caller}: takes a timm model of the exact class {names}; got {type(model).__name__}: {why}. A subclass "
            f"or a wrapper may have a forward of its own, which would be bypassed.{cure}"
        )
    if not may_rotate and getattr(model, "rope", None) is not None and not isinstance(model, Encoded):
        raise TypeError(
            f"{caller}: this {type(model).__name__} rotates already, by {type(model.rope).__name__}; twice would turn "
            f"queries and keys twice. ndpos.timm.rope_of(model) reads how, set_rope changes it, fuse_rope speeds it up."
        )
    own = [name for name in REPLACED if name in vars(model)]
    if own:
        raise TypeError(
            f"{caller}: {', '.join(own)} of the model has been replaced on this instance, which would bypass the "
            f"encoding. Wrap the model first, then replace."
        )
    if (
        type(model.blocks) not in (nn.Sequential, nn.ModuleList)
        or model.blocks._forward_hooks
        or model.blocks._forward_pre_hooks
    ):
        raise TypeError(
            f"{caller}: model.blocks is a {type(model.blocks).__name__} with a forward or hooks of its own, which "
            f"would be bypassed: blocks are called one by one. Take a plain torch.nn.Sequential, and "
            f"hooks on its blocks."
        )
    drop = getattr(model, "patch_drop", None)
    if drop is not None and type(drop) not in (nn.Identity, PatchDropout, PatchDropoutWithIndices):
        raise TypeError(
            f"{caller}: model.patch_drop is a {type(drop).__name__}, which does not tell the patches it "
            f"keeps; timm's PatchDropout or none."
        )
    patches = model.embeds if hasattr(model, "embeds") else model.patch_embed
    if not hasattr(patches, "dynamic_feat_size") or not (hasattr(model, "embeds") or hasattr(patches, "grid_size")):
        raise TypeError(
            f"{caller}: the patch embedding {type(patches).__name__} does not say the grid of an image "
            f"(dynamic_feat_size, grid_size), so patches cannot be placed."
        )


def _children(model: Any) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules()) if isinstance(model, nn.Module) else []


def _check_blocks(caller: str, model: Any) -> tuple[int, int]:
    """(heads, head_dim) of all blocks, whose queries and keys must be made where timm makes them."""
    heads = set()
    for index, block in enumerate(model.blocks):
        places = list(turning_places(block))
        if not places:
            raise TypeError(
                f"{caller}: blocks hold timm's Attention, or are timm's parallel or differential ones; block {index} "
                f"is {type(block).__name__} with {type(getattr(block, 'attn', None)).__name__}, whose queries and keys "
                f"are out of reach."
            )
        if any("forward" in vars(module) for module in (block, *places)):
            raise TypeError(
                f"{caller}: forward of block {index} has been replaced on this instance, which would bypass the "
                f"rotation. Wrap the model first, then replace."
            )
        heads |= {heads_of(place) for place in places}
    if len(heads) != 1:
        raise ValueError(f"{caller}: every block has the same heads; got (num_heads, head_dim) {sorted(heads)}.")
    return heads.pop()


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


def _reference(caller: str, sizes: Sequence[int] | None) -> tuple[int, int] | None:
    if sizes is None:
        return None
    height, width = sizes_per_axis(caller, sizes, name="reference_sizes", minimum=1, axes=2)
    if max(height, width) >= 2**31:
        raise ValueError(f"{caller}: reference_sizes are patches per axis, got {(height, width)}.")
    return height, width


def _encode(model: Any) -> None:
    """Change the class of a model that has passed all checks; nothing it computes changes by that."""
    if isinstance(model, Encoded):
        return
    for name in ("rope", "table"):
        vars(model).pop(name, None)  # a plain None of timm's
        model.register_module(name, None)
    model.absolute = "keep"
    model.reference_sizes = model.table_reference_sizes = None
    model.__class__ = ENCODED[type(model)]
    model.strength = 1.0
    if type(getattr(model, "patch_embed", None)) is PatchEmbed:
        model.patch_embed.__class__ = OpenPatchEmbed
