"""The rotary embeddings of timm's models, read into ndpos's terms and changed through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    RotaryEmbeddingMRope,
)
from timm.models.gemma4_vit import Gemma4RotaryEmbedding2D
from torch import Tensor, nn

from ndpos.timm.convention import Convention, Place

__all__ = ["rope_of", "set_rope"]


# What trained weights have learned to expect, and what can be changed under them.
BOUND = ("head_dim", "pairing", "order", "ladder", "sections", "max_frequency", "num_prefix")
SETTINGS = ("base", "periods", "place", "start", "reference_sizes", "shift", "jitter", "rescale")


def rope_of(model: nn.Module) -> Convention:
    """The convention of a timm model that already rotates, in ndpos's terms.

    Args:
        model: A model of timm with one rotary embedding inside: EVA-02, PE, DINOv3, RoPE-ViT axial and mixed, M-RoPE,
            NaFlexViT with RoPE, Qwen3, Gemma4 or DeepSeek vision models, or a wrapper around one.

    Returns:
        A :class:`ndpos.timm.Convention`: its frequencies equal timm's to 1e-6 relative; cos and sin to 1e-6 times the
        larger of 1 and the largest angle, since timm's angles are float32.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no such embedding inside, or more than one.

    Example:
        >>> import ndpos.timm, timm
        >>> model = timm.create_model("vit_small_patch16_dinov3", img_size=64, depth=1)
        >>> found = ndpos.timm.rope_of(model)
        >>> found.ladder, found.base, found.place, found.pairing, found.num_prefix
        ('periodic', 100.0, 'axis', 'half', 5)

    Source:
        timm's ``pos_embed_sincos.py`` (``RotaryEmbeddingCat``, ``Mixed``, ``DinoV3``, ``MRope``) and ``gemma4_vit.py``.
    """
    found = _only_rope("ndpos.timm.rope_of", model)
    prefixes = {getattr(module, "num_prefix_tokens", 0) for module in model.modules() if _turns(module)}
    num_prefix = prefixes.pop() if len(prefixes) == 1 else 0
    read = found.in_force() if isinstance(found, Set) else READERS[type(found)](found)
    return dataclasses.replace(read, num_prefix=num_prefix)


def set_rope(model: nn.Module, convention: Convention) -> nn.Module:
    """Change base, reference sizes, places or augmentation of a timm model that already rotates, in place.

    The state dict stays what it was, so checkpoints load unchanged. Tables are then made by ndpos for the grid of each
    forward, in float64 and rounded once. What trained weights are bound to stays: head_dim, pairing, the order of the
    axes, and learned frequencies.

    Args:
        model: As for :func:`ndpos.timm.rope_of`, whose answer, changed by ``dataclasses.replace``, is the other one.
        convention: What is to hold from now on.

    Returns:
        The same model.

    Raises:
        TypeError: no module, or no Convention.
        ValueError: a change of what belongs to the trained weights, or of what the model cannot follow.

    Example:
        >>> import dataclasses, ndpos.timm, timm, torch
        >>> model = timm.create_model("vit_small_patch16_rope_224", img_size=96, depth=1, num_classes=10)
        >>> found = ndpos.timm.rope_of(model)
        >>> slower = dataclasses.replace(found, base=400.0, reference_sizes=(4, 4), jitter=1.2)
        >>> ndpos.timm.set_rope(model, slower)(torch.randn(1, 3, 96, 96)).shape, ndpos.timm.rope_of(model).base
        (torch.Size([1, 10]), 400.0)

    Source:
        Reference sizes: EVA-02, arXiv:2303.11331. Another base for larger images: RoPE-ViT, arXiv:2403.13298.
    """
    caller = "ndpos.timm.set_rope"
    rope = _only_rope(caller, model)
    if not isinstance(convention, Convention):
        raise TypeError(
            f"{caller}: convention is a Convention, got {type(convention).__name__}. "
            f"dataclasses.replace(ndpos.timm.rope_of(model), base=...) makes one."
        )
    now = rope_of(model)
    changed = [name for name in BOUND if getattr(now, name) != getattr(convention, name)]
    changed += [] if _same_learned(now.learned, convention.learned) else ["learned"]
    if changed:
        raise ValueError(
            f"{caller}: {', '.join(changed)} belong to the trained weights; what can change is {', '.join(SETTINGS)}."
        )
    if isinstance(rope, Gemma4RotaryEmbedding2D):
        if dataclasses.replace(convention, base=now.base) != now:
            raise ValueError(
                f"{caller}: a Gemma4 model is given the coordinates of its patches; what can change is base alone."
            )
        rope.rope_theta = convention.base
        rope._init_buffers()
        return model
    rope.__class__ = SET.get(type(rope), type(rope))
    rope.settings = {name: getattr(convention, name) for name in SETTINGS}
    return model


def _same_learned(now: Tensor | None, given: Tensor | None) -> bool:
    if now is None or given is None:
        return now is given
    return now.shape == given.shape and (now.is_meta or given.is_meta or torch.equal(now, given.to(now)))


def _turns(module: nn.Module) -> bool:
    """Whether a module is an attention that turns: it alone knows how many prefix tokens it leaves."""
    return hasattr(module, "num_prefix_tokens") and hasattr(module, "q_norm")


def _only_rope(caller: str, model: nn.Module) -> Any:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: takes a torch.nn.Module, got {type(model).__name__}.")
    kinds = {*READERS, *SET.values()}
    found = {name: module for name, module in model.named_modules() if type(module) in kinds}
    if len(found) != 1:
        names = f"{len(found)}: {', '.join(found)}" if found else "none"
        raise ValueError(
            f"{caller}: takes a timm model with one rotary embedding inside; {type(model).__name__} has {names}. "
            f"ndpos.timm.add_rope(model) gives RoPE to a model without it."
        )
    return next(iter(found.values()))


def _augmentation(rope: Any) -> dict[str, Any]:
    return {"shift": rope.shift_coords, "jitter": rope.jitter_coords, "rescale": rope.rescale_coords}


def _order(rope: Any) -> tuple[int, int]:
    return (1, 0) if rope.grid_indexing == "xy" else (0, 1)


PLACES: Mapping[str, Place] = {"separate": "axis", "min": "shortest", "max": "longest"}


def _axial(rope: Any) -> Convention:
    places: Mapping[str, Place] = {"index": "steps", "pixel": "ends", "centered": PLACES[rope.normalize_coords]}
    ladder: dict[str, Any] = {"ladder": "geometric", "base": float(rope.temperature)}
    if rope.in_pixels:
        ladder = {"ladder": "pixel_linear" if rope.linear_bands else "pixel_log", "max_frequency": float(rope.max_res)}
    reference = None if rope.ref_feat_shape is None else tuple(rope.ref_feat_shape)
    return Convention(
        head_dim=rope.dim,
        pairing="half" if rope.rotate_half else "interleaved",
        place=places[rope.grid_type],
        order=_order(rope),
        start=float(rope.grid_offset) if rope.grid_type != "pixel" else 0.0,
        reference_sizes=reference,
        **ladder,
        **_augmentation(rope),
    )


def _periodic(rope: Any) -> Convention:
    by_ends = rope.min_period is not None and rope.max_period is not None
    return Convention(
        head_dim=rope.dim,
        pairing="half" if rope.rotate_half else "interleaved",
        ladder="periodic",
        place=PLACES[rope.normalize_coords],
        base=None if by_ends else rope.temperature,
        periods=(float(rope.min_period), float(rope.max_period)) if by_ends else None,
        order=_order(rope),
        start=float(rope.grid_offset),
        **_augmentation(rope),
    )


def _sections(rope: Any) -> Convention:
    return Convention(
        head_dim=rope.dim,
        pairing="half",
        ladder="interleaved_sections",
        base=float(rope.temperature),
        sections=tuple(rope.mrope_section),
        **_augmentation(rope),
    )


def _learned(rope: Any) -> Convention:
    first, second = rope.freqs  # (layers, heads, pairs) each, of the first and the second coordinate
    return Convention(
        head_dim=rope.dim // rope.num_heads,
        pairing="interleaved",
        ladder="learned",
        learned=torch.stack((second, first) if rope.grid_indexing == "xy" else (first, second), dim=-2),
        order=_order(rope),
        **_augmentation(rope),
    )


def _gemma4(rope: Any) -> Convention:
    return Convention(head_dim=rope.head_dim, pairing="half_per_axis", base=float(rope.rope_theta), order=(1, 0))


class Set(nn.Module):
    """A rotary embedding of timm that ndpos makes the tables of, by ``settings``; timm's layout, shapes and calls."""

    settings: dict[str, Any]

    def in_force(self) -> Convention:
        """What timm's own settings say, but for those that were changed."""
        read = next(reader for kind, reader in READERS.items() if isinstance(self, kind))
        changed: Convention = dataclasses.replace(read(self), **self.settings)
        return changed

    def get_embed(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        sizes = getattr(self, "feat_shape", None) if shape is None else shape
        if sizes is None:
            raise ValueError("ndpos.timm.set_rope: this embedding was built for no fixed grid, so it needs a shape.")
        device = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), None)
        convention = self.in_force()
        cos, sin = convention.tables(tuple(sizes), training=self.training, device=device)
        if convention.pairing == "half":
            laid = [torch.cat((table, table), dim=-1) for table in (sin, cos)]
        else:
            laid = [table.repeat_interleave(2, dim=-1) for table in (sin, cos)]
        return torch.cat(laid, dim=-1).to(dtype=dtype)

    def get_batch_embeds(
        self, shapes: Sequence[Sequence[int]], seq_len: int | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        made = [self.get_embed(shape, dtype) for shape in shapes]
        if seq_len is None or not made:
            return made
        padded = made[0].new_zeros(len(made), *made[0].shape[:-2], seq_len, made[0].shape[-1])
        for place, embed in zip(padded, made, strict=True):
            place[..., : embed.shape[-2], :] = embed
        return padded


class SetRotaryEmbeddingCat(Set, RotaryEmbeddingCat):  # type: ignore[misc]  # timm is untyped
    """Made by ``set_rope``."""


class SetRotaryEmbeddingDinoV3(Set, RotaryEmbeddingDinoV3):  # type: ignore[misc]  # likewise
    """Made by ``set_rope``."""


class SetRotaryEmbeddingMRope(Set, RotaryEmbeddingMRope):  # type: ignore[misc]  # likewise
    """Made by ``set_rope``."""


class SetRotaryEmbeddingMixed(Set, RotaryEmbeddingMixed):  # type: ignore[misc]  # likewise
    """Made by ``set_rope``."""


READERS: Mapping[type[nn.Module], Any] = {
    RotaryEmbeddingCat: _axial,
    RotaryEmbeddingDinoV3: _periodic,
    RotaryEmbeddingMRope: _sections,
    RotaryEmbeddingMixed: _learned,
    Gemma4RotaryEmbedding2D: _gemma4,
}
SET: Mapping[type[nn.Module], type[Set]] = {
    RotaryEmbeddingCat: SetRotaryEmbeddingCat,
    RotaryEmbeddingDinoV3: SetRotaryEmbeddingDinoV3,
    RotaryEmbeddingMRope: SetRotaryEmbeddingMRope,
    RotaryEmbeddingMixed: SetRotaryEmbeddingMixed,
}
