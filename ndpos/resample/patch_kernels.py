"""Patch-embedding kernels moved to another patch size: patches are resized, and the tokens should stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ndpos.positions import exact_dtype, outside_autocast
from ndpos.resample.moving import check_resizable
from ndpos.resample.table import Changes
from ndpos.resample.weights import Kernel, weights
from ndpos.sizes import sizes_per_axis, whole

__all__ = ["inflate_patch_kernel", "resize_patch_kernel"]

PatchKernel = Literal["linear", "cubic", "keys"]


def resize_patch_kernel(
    weight: Tensor, new_sizes: Sequence[int], *, kernel: PatchKernel = "cubic", antialias: bool = True
) -> Tensor:
    """Resize the kernel of a patch embedding so that resized patches give the tokens that they gave before.

    Patches resized by a matrix ``B`` meet the kernel ``pinv(B^T) w``: exactly the same tokens where patches grow, and
    the nearest in the mean of squares where they shrink. Resizing the kernel like an image gives others.

    Args:
        weight: ``(..., *old_sizes)``, as of ``torch.nn.Conv1d``, ``Conv2d`` or ``Conv3d``: any channels in front.
        new_sizes: The new patch, slowest axis first: time, height, width.
        kernel: How patches are thought to be resized, as in :func:`ndpos.resize`. timm: ``"cubic"`` with antialias;
            FlexiViT: ``"linear"`` without.
        antialias: As in :func:`ndpos.resize`.

    Returns:
        ``(..., *new_sizes)`` in the dtype of ``weight``, computed in float64 where the device has it and rounded once.

    Raises:
        TypeError: sizes that are not integers.
        ValueError: sizes below 1, more of them than ``weight`` has dimensions, an unknown kernel, or an integer weight.

    Example:
        >>> import ndpos, torch
        >>> weight, patch = torch.randn(384, 3, 16, 16), torch.randn(1, 3, 16, 16)
        >>> larger = ndpos.resize_patch_kernel(weight, (32, 32), kernel="linear", antialias=False)
        >>> resized = torch.nn.functional.interpolate(patch, (32, 32), mode="bilinear")
        >>> before, after = torch.conv2d(patch, weight), torch.conv2d(resized, larger)
        >>> torch.allclose(before, after, atol=1e-3)
        True

    Source:
        Beyer et al. 2023, FlexiViT, arXiv:2212.08013, section 3.4, equations 3 to 5; timm's ``resample_patch_embed``.
    """
    caller = "ndpos.resize_patch_kernel"
    new = sizes_per_axis(caller, new_sizes, name="new_sizes", minimum=1)
    check_resizable(caller, "weight", weight)
    if kernel not in ("linear", "cubic", "keys"):
        raise ValueError(f"{caller}: kernel is one of ('linear', 'cubic', 'keys'), got {kernel!r}.")
    if not isinstance(antialias, bool):
        raise TypeError(f"{caller}: antialias is True or False, got {antialias!r}.")
    if weight.ndim < len(new) or 0 in weight.shape[weight.ndim - len(new) :]:
        raise ValueError(
            f"{caller}: weight is (..., *old_sizes) with one size for each of new_sizes {new}; got "
            f"{tuple(weight.shape)}."
        )
    return _along_axes(weight, new, lambda old, size, unit: _inverse(old, size, kernel, antialias, unit))


def patch_kernel_changes(new: Sequence[int]) -> Changes:
    """The move of a kernel by timm's setting, and of what an optimiser keeps about it.

    A gradient is a sum of patches, and moves as patches do; its squares as patches do by weights that are not negative.
    """

    def patches(kernel: Kernel) -> Callable[[Tensor], Tensor]:
        return lambda kept: _along_axes(
            kept, new, lambda old, size, unit: weights(old, size, kernel, True, "centre", 0.0, unit)
        )

    return Changes(lambda weight: resize_patch_kernel(weight, new), patches("cubic"), patches("linear"))


def _inverse(old: int, new: int, kernel: Kernel, antialias: bool, unit: Tensor) -> Tensor:
    """``pinv(B^T)``, ``(new, old)``, of the matrix ``B`` that takes one axis of a patch from ``old`` to ``new``."""
    inverse: Tensor = torch.linalg.pinv(weights(old, new, kernel, antialias, "centre", 0.0, unit).mT)
    return inverse


def _along_axes(x: Tensor, new: Sequence[int], matrix: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    """The last axes of ``x`` each multiplied by their matrix: one of a product of axes is a product of theirs."""
    unit = torch.empty((), dtype=exact_dtype(x.device), device=x.device)
    with outside_autocast(x.device):
        moved = x.to(unit.dtype)
        for dim, size in enumerate(new, -len(new)):
            if x.shape[dim] != size:
                mix = matrix(x.shape[dim], size, unit)
                moved = (moved.movedim(dim, -1) @ mix.mT).movedim(-1, dim)
        return moved.to(x.dtype).contiguous()


def inflate_patch_kernel(weight: Tensor, frames: int, *, how: Literal["mean", "centre"] = "mean") -> Tensor:
    """A kernel of pictures made one of clips: a still clip gives the tokens that its picture gave.

    Args:
        weight: ``(out, in, height, width)`` of a ``torch.nn.Conv2d``, or any ``(out, in, *sizes)``.
        frames: Frames of the new patch.
        how: ``"mean"``: every frame has the kernel divided by their number. ``"centre"``: frame ``frames // 2`` has it
            whole, the others have zeros.

    Returns:
        ``(out, in, frames, height, width)`` in the same dtype.

    Raises:
        TypeError: ``frames`` that is no integer.
        ValueError: frames below 1, an unknown ``how``, or a weight without ``(out, in)``.

    Example:
        >>> import ndpos, torch
        >>> weight, picture = torch.randn(8, 3, 16, 16), torch.randn(1, 3, 16, 16)
        >>> clip = picture[:, :, None].expand(-1, -1, 2, -1, -1)
        >>> tokens = torch.conv3d(clip, ndpos.inflate_patch_kernel(weight, 2))
        >>> torch.allclose(tokens[:, :, 0], torch.conv2d(picture, weight), atol=1e-4)
        True

    Source:
        Carreira and Zisserman 2017, I3D, arXiv:1705.07750, section 2.4 ("mean"); Arnab et al. 2021, ViViT,
        arXiv:2103.15691, section 3.4 ("centre").
    """
    caller = "ndpos.inflate_patch_kernel"
    frames = whole(caller, "frames", frames, minimum=1)
    if how not in ("mean", "centre"):
        raise ValueError(f"{caller}: how is 'mean' or 'centre', got {how!r}.")
    check_resizable(caller, "weight", weight)
    if weight.ndim < 3:
        raise ValueError(f"{caller}: weight is (out, in, *sizes); got {tuple(weight.shape)}.")
    one = weight.unsqueeze(2)
    if how == "mean":
        return (one / frames).repeat_interleave(frames, dim=2)
    place = torch.arange(frames, device=weight.device).view(-1, *(1,) * (weight.ndim - 2))
    return torch.where(place == frames // 2, one, torch.zeros_like(one))
