"""A live timm ViT moved to another image size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.models._input import update_model_input_size
from torch import nn

from ndpos.encode.learned import LearnedEmbedding
from ndpos.parameters import check_movable, move
from ndpos.patches import patch_sizes
from ndpos.resample import Like, changes
from ndpos.sizes import sizes_per_axis
from ndpos.timm.encoded import Encoded
from ndpos.timm.families import TABLED
from ndpos.timm.loading import table_prefix
from ndpos.timm.wrap import check_model

__all__ = ["resize"]


def resize(
    model: nn.Module,
    image_size: Sequence[int],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    like: Like = "timm",
) -> nn.Module:
    """Move a live timm ViT to another image size, in place: its learned table, its patch grid, and nothing else.

    The table stays the same Parameter, ``requires_grad`` included, so that an optimiser, hooks and averages that hold
    it go on. It is resampled by cubic convolution with antialias, as timm does, or as those do from whom the weights
    come; rows of class and register tokens come back bit-identical. A rotation follows the new grid by itself, at the
    coordinates of ``reference_sizes`` if there are any. The same size changes nothing.

    Args:
        model: A ``timm.models.VisionTransformer`` or ``VisionTransformerDistilled``, of that exact class, or one
            changed by :func:`ndpos.timm.add_rope` or :func:`ndpos.timm.set_table`. Not yet in DDP or sharded.
        image_size: Pixels, (height, width), multiples of the patch size.
        optimizer: One that trains the model: what it keeps about the table is moved too, momenta as the table, averages
            of squares linearly. Without it, an optimiser that has stepped fails at its next step. The gradient of the
            table is dropped: call this between steps.
        like: Whose convention moves ``pos_embed``, as in :func:`ndpos.resize`: ``"transformers-dinov2"`` for DINOv2
            weights as transformers runs them. A table given by ``set_table`` has its own.

    Returns:
        The same model.

    Raises:
        TypeError: another class of model or of patch embedding, or sizes that are not integers.
        ValueError: an image that patches do not divide, a sharded table, or an optimiser that keeps other shapes.

    Example:
        >>> import ndpos.timm, timm, torch
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)
        >>> optimizer = torch.optim.AdamW(vit.parameters())
        >>> vit(torch.randn(1, 3, 64, 64)).sum().backward(); optimizer.step()
        >>> ndpos.timm.resize(vit, (64, 96), optimizer=optimizer)(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 10])

    Source:
        Dosovitskiy et al. 2020, ViT, arXiv:2010.11929, section 3.2; timm's ``set_input_size``, which makes a new
        Parameter instead.
    """
    caller = "ndpos.timm.resize"
    check_model(caller, model, TABLED)
    ours: Any = model
    patches = ours.patch_embed
    if not isinstance(patches, PatchEmbed) or patches.grid_size is None:
        raise TypeError(
            f"{caller}: the grid of a {type(patches).__name__} without an image size or of another kind than timm's "
            f"PatchEmbed cannot be set."
        )
    if isinstance(image_size, int):
        raise TypeError(
            f"{caller}: image_size is (height, width), got {image_size}. Square? ({image_size}, {image_size})."
        )
    height, width = sizes_per_axis(caller, image_size, name="image_size", minimum=1, axes=2)
    if (height, width) == tuple(patches.img_size):
        return model
    try:
        new = patch_sizes((height, width), patch=patches.patch_size)
    except ValueError as error:
        raise ValueError(
            f"{caller}: patches of {patches.patch_size[0]} x {patches.patch_size[1]} do not divide an image of "
            f"{height} x {width} pixels; give the nearest multiples."
        ) from error
    old = tuple(patches.grid_size)
    encoding = ours.table if isinstance(ours, Encoded) else None
    if ours.pos_embed is not None:
        check_movable(caller, [ours.pos_embed], optimizer)
        if old != new:
            change = changes(new, old_sizes=old, num_prefix=table_prefix(ours), like=like)
            move(ours.pos_embed, change, optimizer)()
    if isinstance(encoding, LearnedEmbedding):
        encoding.resize_(new, optimizer=optimizer)
    patches.img_size, patches.grid_size, patches.num_patches = (height, width), new, new[0] * new[1]
    update_model_input_size(ours, (height, width))
    return model
