"""Tables of relative position bias moved to another window: images of offsets, whose centre is offset 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ndpos.resample.moving import check_resizable
from ndpos.resample.table import Changes, changes
from ndpos.resample.weights import Align
from ndpos.sizes import product, sizes_per_axis

__all__ = ["resize_bias"]

BiasKind = Literal["swin", "beit", "levit", "decomposed"]
BiasKernel = Literal["linear", "cubic", "keys"]

CALLER = "ndpos.resize_bias"
CLASS_ROWS = 3  # of BEiT: class to token, token to class, class to class


def resize_bias(
    table: Tensor,
    new_sizes: Sequence[int],
    *,
    old_sizes: Sequence[int],
    kind: BiasKind,
    kernel: BiasKernel = "cubic",
    align: Align = "corner",
) -> Tensor:
    """Resample a table of relative position bias from the window it was trained on to another one.

    Offsets from -(n - 1) to n - 1 along an axis of n tokens are an image of 2n - 1 rows, which is resampled without
    antialias, so that the bias of offset 0 comes back exactly. A bias that is computed from offsets (log-CPB of
    SwinV2, MLPs) has no table: it needs the new window alone.

    Args:
        table: ``"swin"``: ``(*batch, prod(2 * old_sizes - 1), heads)``, row-major over offsets. ``"beit"``: the same
            and three rows for the class token, which come back bit-identical. ``"levit"``: ``(*batch, heads,
            prod(old_sizes))``, row-major over absolute offsets. ``"decomposed"``: ``(*batch, 2 * old_size - 1, dim)``,
            one axis by itself (SAM, MViTv2).
        new_sizes: Tokens per axis of the new window, slowest axis first; any number of axes.
        old_sizes: Tokens per axis of the trained window. No default: a guessed square is silently wrong.
        kind: Whose layout it is. No default.
        kernel: ``"cubic"``, ``"keys"`` or ``"linear"``, as in :func:`ndpos.resize`.
        align: ``"corner"``: the largest offsets stay the largest. ``"centre"``: cell borders coincide, as Swin, timm
            and SAM have it. Both leave offset 0 where it is.

    Returns:
        A table of the same layout and dtype for the new window. With equal sizes it may be ``table`` itself.

    Raises:
        TypeError: sizes that are not integers.
        ValueError: sizes below 1, another number of rows, an unknown kind or kernel, or ``kind="log-cpb"``, with the
            cure.

    Example:
        A window of 7 x 7 for 8 x 8 tokens: 169 rows become 225, and the row of offset 0 stays.

        >>> import ndpos, torch
        >>> table = torch.randn(13 * 13, 4)
        >>> new = ndpos.resize_bias(table, (8, 8), old_sizes=(7, 7), kind="swin")
        >>> new.shape, torch.equal(new[225 // 2], table[169 // 2])
        (torch.Size([225, 4]), True)

    Source:
        Swin, arXiv:2103.14030, section 3.2; BEiT, arXiv:2106.08254; LeViT, arXiv:2104.01136, section 4.2; MViTv2,
        arXiv:2112.01526, section 4.1. SwinV2's log-CPB: arXiv:2111.09883, section 3.3.
    """
    check_resizable(CALLER, "table", table)
    return bias_changes(new_sizes, old_sizes=old_sizes, kind=kind, kernel=kernel, align=align).table(table)


def bias_changes(
    new_sizes: Sequence[int],
    *,
    old_sizes: Sequence[int],
    kind: BiasKind,
    kernel: BiasKernel = "cubic",
    align: Align = "corner",
) -> Changes:
    """What :func:`resize_bias` does, for several tensors."""
    old = sizes_per_axis(CALLER, old_sizes, name="old_sizes", minimum=1)
    new = sizes_per_axis(CALLER, new_sizes, name="new_sizes", minimum=1, axes=len(old))
    _check(kind, kernel, len(old))
    names = [str(axis) for axis in range(len(old))]
    # A lone token has offset 0 alone, which is the middle of the image; a lone row aligned by corners is the first.
    kernels = {name: ("cut", "centre") if n == 1 else kernel for name, n in zip(names, new, strict=True)}
    offsets = changes(
        [2 * n - 1 for n in new],
        old_sizes=[2 * n - 1 for n in old],
        axes=names,
        kernel=kernels,
        antialias=False,
        align=align,
    )
    if kind == "levit":
        return Changes(*(_folded(move, old, new) for move in offsets))
    return Changes(*(_signed(move, old, CLASS_ROWS if kind == "beit" else 0) for move in offsets))


def _check(kind: str, kernel: str, axes: int) -> None:
    if kind == "log-cpb":
        raise ValueError(
            f"{CALLER}: a log-CPB bias is computed from offsets by an MLP: there is no table to resize. Give the model "
            f"its new window; the trained one stays its pretrained window, by which offsets are divided."
        )
    if kind not in get_args(BiasKind):
        raise ValueError(f"{CALLER}: kind is one of {get_args(BiasKind)}, got {kind!r}.")
    if kernel not in get_args(BiasKernel):
        raise ValueError(f"{CALLER}: kernel is one of {get_args(BiasKernel)}, got {kernel!r}.")
    if kind == "decomposed" and axes != 1:
        raise ValueError(f"{CALLER}: a decomposed bias has one table per axis: resize each; old_sizes has {axes} axes.")


def _signed(move: Callable[[Tensor], Tensor], old: Sequence[int], extra: int) -> Callable[[Tensor], Tensor]:
    def moved(table: Tensor) -> Tensor:
        rows = product([2 * n - 1 for n in old])
        _check_rows(table, -2, rows + extra, f"prod(2 * old_sizes - 1){f' + {extra}' if extra else ''}", old)
        offsets = move(table[..., :rows, :])
        return torch.cat([offsets, table[..., rows:, :]], dim=-2) if extra else offsets

    return moved


def _folded(move: Callable[[Tensor], Tensor], old: Sequence[int], new: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Absolute offsets: unfolded to signed ones, so that the kernel meets a mirror at 0 and no border."""

    def moved(table: Tensor) -> Tensor:
        _check_rows(table, -1, product(old), "prod(old_sizes)", old)
        image = torch.unflatten(table.mT, -2, tuple(old))
        first = -len(old) - 1
        for dim, size in enumerate(old, first):
            mirrored = torch.arange(1 - size, size, device=table.device).abs()
            image = image.index_select(dim, mirrored)
        image = torch.unflatten(move(image.flatten(first, -2)), -2, [2 * n - 1 for n in new])
        for dim, size in enumerate(new, first):
            image = image.narrow(dim, size - 1, size)
        return image.flatten(first, -2).mT.contiguous()

    return moved


def _check_rows(table: Tensor, dim: int, needed: int, rule: str, old: Sequence[int]) -> None:
    if table.ndim < 2 or table.shape[dim] != needed:
        raise ValueError(
            f"{CALLER}: the table is {tuple(table.shape)}, and dimension {dim} has {rule} = {needed} rows for "
            f"old_sizes {tuple(old)}. Pass in old_sizes the window that the table was trained on, and its kind."
        )
