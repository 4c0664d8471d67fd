"""A live timm ViT moved to another image size, with all that its grid of patches decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.models._input import update_model_input_size
from timm.models.beit import Beit
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

from ndpos.encode.learned import LearnedEmbedding
from ndpos.parameters import check_movable, move
from ndpos.patches import patch_sizes
from ndpos.resample import Changes, Like, bias_changes, changes, patch_kernel_changes
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
    patch_size: Sequence[int] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    like: Like = "timm",
) -> nn.Module:
    """Move a live timm ViT to another image size, in place: all that its grid of patches decides, and nothing else.

    That is the learned table ``pos_embed`` or that of ``set_table``, tables of relative position bias, the rotation,
    and with ``patch_size`` the kernel of the patch embedding. Each stays the same Parameter, ``requires_grad``
    included, so that an optimiser, hooks and averages that hold it go on. Rows of class and register tokens come back
    bit-identical, and so does the bias of offset 0. A rotation follows the new grid by itself, at the coordinates of
    ``reference_sizes`` if there are any; a bias by an MLP (log-CPB) is computed for it. The same size changes nothing.

    Args:
        model: A ``timm.models.VisionTransformer``, ``VisionTransformerDistilled``, ``Eva``, ``Beit`` or
            ``VisionTransformerRelPos``, of that exact class, or one changed by :func:`ndpos.timm.add_rope` or
            :func:`ndpos.timm.set_table`. Not yet in DDP or sharded.
        image_size: Pixels, (height, width), multiples of the patch size.
        patch_size: Pixels of a patch, (height, width), if it changes: by :func:`ndpos.resize_patch_kernel`, as timm.
        optimizer: One that trains the model: what it keeps about these parameters is moved too, momenta as the
            parameter, averages of squares linearly. Without it, an optimiser that has stepped fails at its next step.
            Gradients of what moves are dropped: call this between steps.
        like: Whose convention moves ``pos_embed``, as in :func:`ndpos.resize`: ``"transformers-dinov2"`` for DINOv2
            weights as transformers runs them. A table given by ``set_table`` has its own.

    Returns:
        The same model.

    Raises:
        TypeError: another class of model or of patch embedding, or sizes that are not integers.
        ValueError: an image that patches do not divide, a sharded table, an unknown convention, or an optimiser that
            keeps other shapes.

    Example:
        >>> import ndpos.timm, timm, torch
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)
        >>> optimizer = torch.optim.AdamW(vit.parameters())
        >>> vit(torch.randn(1, 3, 64, 64)).sum().backward(); optimizer.step()
        >>> ndpos.timm.resize(vit, (64, 96), optimizer=optimizer)(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 10])

    Source:
        Dosovitskiy et al. 2020, ViT, arXiv:2010.11929, section 3.2; timm's ``set_input_size``, which makes new
        Parameters instead.
    """
    caller = "ndpos.timm.resize"
    check_model(caller, model, RESIZED, may_rotate=True)
    ours: Any = model
    patches = ours.patch_embed
    image, patch = _wanted(caller, patches, image_size, patch_size)
    if image == tuple(patches.img_size) and patch == tuple(patches.patch_size):
        return model  # before its patches are counted: timm builds models whose patches do not divide the image
    old, new = tuple(patches.grid_size), _grid(caller, image, patch)
    biases = _biases(ours) if old != new else []
    moves: list[tuple[nn.Parameter, Changes]] = [
        (module.relative_position_bias_table, _bias_changes(module, new))
        for module in biases
        if hasattr(module, "relative_position_bias_table")
    ]
    if getattr(ours, "pos_embed", None) is not None:
        moves.append((ours.pos_embed, changes(new, old_sizes=old, num_prefix=table_prefix(ours), like=like)))
    if patch != tuple(patches.patch_size):
        moves.append((patches.proj.weight, patch_kernel_changes(patch)))
    check_movable(caller, [parameter for parameter, _ in moves], optimizer)
    puts = [move(parameter, change, optimizer) for parameter, change in moves]
    encoding = ours.table if isinstance(ours, Encoded) else None
    if isinstance(encoding, LearnedEmbedding):
        encoding.resize_(new, optimizer=optimizer)
    for put in puts:
        put()
    for module in biases:
        _set_window(module, new)
    patches.proj.kernel_size = patches.proj.stride = patches.patch_size = patch
    patches.img_size, patches.grid_size, patches.num_patches = image, new, new[0] * new[1]
    if not isinstance(ours, Encoded) and hasattr(getattr(ours, "rope", None), "update_feat_shape"):
        ours.rope.update_feat_shape(new)
    update_model_input_size(ours, image, patch_size=patch)
    return model


# Those whose grid is that of their patch embedding, and whose parts that follow it are known.
RESIZED = (*TABLED, Beit, VisionTransformerRelPos)


def _wanted(
    caller: str, patches: Any, image_size: Sequence[int], patch_size: Sequence[int] | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Image and patch, (height, width) each."""
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
    patch = patches.patch_size if patch_size is None else patch_size
    down, right = sizes_per_axis(caller, patch, name="patch_size", minimum=1, axes=2)
    return (height, width), (down, right)


def _grid(caller: str, image: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    try:
        rows, columns = patch_sizes(image, patch=patch)
    except ValueError as error:
        raise ValueError(
            f"{caller}: patches of {patch[0]} x {patch[1]} do not divide an image of {image[0]} x {image[1]} pixels; "
            f"give the nearest multiples."
        ) from error
    return rows, columns


def _biases(model: nn.Module) -> list[Any]:
    """Modules with a relative position bias for the grid: a table of it, or what is computed for it."""
    return [each for each in model.modules() if getattr(each, "window_size", None) and hasattr(each, "set_window_size")]


def _bias_changes(module: Any, new: tuple[int, int]) -> Changes:
    height, width = module.window_size
    with_class = len(module.relative_position_bias_table) > (2 * height - 1) * (2 * width - 1)
    return bias_changes(new, old_sizes=(height, width), kind="beit" if with_class else "swin")


def _set_window(module: Any, new: tuple[int, int]) -> None:
    """timm's own indices and shapes for the new window, and the table that has been moved already."""
    table = getattr(module, "relative_position_bias_table", None)
    if table is None:
        module.set_window_size(new)
        return
    height, width = module.window_size
    # timm resizes a table of its own in passing; a stand-in of the old shape spares it ours.
    extra = 3 * (len(table) > (2 * new[0] - 1) * (2 * new[1] - 1))
    module.relative_position_bias_table = nn.Parameter(
        table.new_zeros((2 * height - 1) * (2 * width - 1) + extra, table.shape[-1])
    )
    module.set_window_size(new)
    module.relative_position_bias_table = table
