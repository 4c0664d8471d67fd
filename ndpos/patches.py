"""Where the tokens of real inputs stand: patches of images, clips in seconds, spectrograms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ndpos.positions import grid
from ndpos.sizes import finite, numbers_per_axis, sizes_per_axis

__all__ = ["clip_grid", "patch_grid", "patch_sizes", "spectrogram_grid"]


def patch_sizes(
    image_sizes: Sequence[int],
    *,
    patch: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    remainder: Literal["raise", "drop", "pad"] = "raise",
) -> tuple[int, ...]:
    """How many patches a patch embedding cuts from an image, clip or spectrogram, per axis.

    Args:
        image_sizes: Pixels (frames, bins) per axis, slowest first.
        patch: Patch size, for all axes or one per axis.
        stride: Distance between patches; the patch size if not given. Smaller than the patch means overlap.
        padding: Pixels added on both sides of each axis before cutting, as in ``torch.nn.Conv2d``.
        remainder: What the embedding does with pixels that fill no whole patch: ``"raise"``, ``"drop"`` them as a
            convolution does, or ``"pad"`` the far side until they fill one.

    Returns:
        Patches per axis: ``(size + 2 * padding - patch) // stride + 1``, rounded up instead for ``"pad"``.

    Raises:
        ValueError: the image is smaller than one patch, pixels remain under ``"raise"``, or the number of axes differs.

    Example:
        >>> import ndpos
        >>> ndpos.patch_sizes((224, 224), patch=16, stride=8)
        (27, 27)
        >>> ndpos.patch_sizes((225, 230), patch=16, remainder="pad")
        (15, 15)

    Source:
        Output size of ``torch.nn.Conv2d``; overlapping patches of Gong et al. 2021, AST, arXiv:2104.01778.
    """
    caller = "ndpos.patch_sizes"
    images = sizes_per_axis(caller, image_sizes, name="image_sizes")
    axes = len(images)
    patches = sizes_per_axis(caller, numbers_per_axis(caller, "patch", patch, axes), name="patch", minimum=1)
    stride = patches if stride is None else numbers_per_axis(caller, "stride", stride, axes)
    strides = sizes_per_axis(caller, stride, name="stride", minimum=1)
    paddings = sizes_per_axis(caller, numbers_per_axis(caller, "padding", padding, axes), name="padding")
    if remainder not in ("raise", "drop", "pad"):
        raise ValueError(f"{caller}: remainder is 'raise', 'drop' or 'pad', got {remainder!r}.")
    counts = []
    for axis, (image, size, by, pad) in enumerate(zip(images, patches, strides, paddings, strict=True)):
        room = image + 2 * pad - size
        if room < 0 and remainder != "pad":
            raise ValueError(f"{caller}: axis {axis} has {image} pixels (+2*{pad}), less than one patch of {size}.")
        if remainder == "raise" and room % by:
            raise ValueError(
                f"{caller}: axis {axis} leaves {room % by} of {image} pixels over: size + 2*padding - patch is {room}, "
                f"stride is {by}. Resize the image, or say what the patch embedding does: remainder='drop' or 'pad'."
            )
        counts.append((max(-(-room // by), 0) if remainder == "pad" else room // by) + 1)
    return tuple(counts)


def patch_grid(
    image_sizes: Sequence[int],
    *,
    patch: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    remainder: Literal["raise", "drop", "pad"] = "raise",
    unit: Literal["patches", "pixels"] = "patches",
    device: torch.device | str | None = None,
) -> Tensor:
    """Coordinates of the patches of an image, clip or spectrogram.

    Args:
        image_sizes: Pixels per axis, slowest first.
        patch, stride, padding, remainder: As :func:`ndpos.patch_sizes`.
        unit: ``"patches"``: 0, 1, 2, ...; ``"pixels"``: the middle of each patch in pixels of the unpadded image,
            pixel centres at whole numbers.
        device: Where the coordinates are made.

    Returns:
        ``(*patch_sizes, axes)``: int64 in patches, float64 in pixels (float32 where the device has none).

    Raises:
        ValueError: as :func:`ndpos.patch_sizes`, or an unknown ``unit``.

    Example:
        >>> import ndpos
        >>> ndpos.patch_grid((4, 8), patch=4, unit="pixels").flatten(0, -2).tolist()
        [[1.5, 1.5], [1.5, 5.5]]

    Source:
        Dosovitskiy et al. 2020, arXiv:2010.11929; in pixels: the receptive field of ``torch.nn.Conv2d``.
    """
    sizes = patch_sizes(image_sizes, patch=patch, stride=stride, padding=padding, remainder=remainder)
    if unit not in ("patches", "pixels"):
        raise ValueError(f"ndpos.patch_grid: unit is 'patches' or 'pixels', got {unit!r}.")
    if unit == "patches":
        return grid(sizes, device=device)
    patches = numbers_per_axis("ndpos.patch_grid", "patch", patch, len(sizes))
    strides = numbers_per_axis("ndpos.patch_grid", "stride", patch if stride is None else stride, len(sizes))
    paddings = numbers_per_axis("ndpos.patch_grid", "padding", padding, len(sizes))
    middles = [(size - 1) / 2 - pad for size, pad in zip(patches, paddings, strict=True)]
    return grid(sizes, start=middles, step=strides, device=device)


def clip_grid(
    sizes: Sequence[int],
    *,
    seconds_per_frame: float,
    start_seconds: float = 0.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Coordinates of a video clip: seconds on the time axis, grid steps in space.

    Args:
        sizes: ``(frames, height, width)`` in tokens; any number of axes after the first.
        seconds_per_frame: Seconds between two tokens in time, tubelet size included.
        start_seconds: Time of the first frame.
        device: Where the coordinates are made.

    Returns:
        ``(*sizes, axes)`` float64 (float32 where the device has none).

    Raises:
        TypeError, ValueError: as :func:`ndpos.grid`.

    Example:
        >>> import ndpos
        >>> ndpos.clip_grid((3, 1, 1), seconds_per_frame=0.5)[:, 0, 0].tolist()
        [[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [1.0, 0.0, 0.0]]

    Source:
        Temporal positions in real time as in LTX-Video (HaCohen et al. 2024, arXiv:2501.00103).
    """
    axes = len(sizes_per_axis("ndpos.clip_grid", sizes))
    first = finite("ndpos.clip_grid", "start_seconds", start_seconds)
    by = finite("ndpos.clip_grid", "seconds_per_frame", seconds_per_frame)
    return grid(sizes, start=(first, *(0.0,) * (axes - 1)), step=(by, *(1.0,) * (axes - 1)), device=device)


def spectrogram_grid(
    sizes: Sequence[int],
    *,
    seconds_per_column: float,
    start_seconds: float = 0.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Coordinates of a spectrogram's patches: grid steps over frequency, seconds over time.

    Args:
        sizes: ``(bins, columns)`` in tokens.
        seconds_per_column: Seconds between two tokens in time, hop and stride included.
        start_seconds: Time of the first column.
        device: Where the coordinates are made.

    Returns:
        ``(bins, columns, 2)`` float64 (float32 where the device has none).

    Raises:
        TypeError, ValueError: as :func:`ndpos.grid`, or not two axes.

    Example:
        >>> import ndpos
        >>> ndpos.spectrogram_grid((1, 3), seconds_per_column=0.1)[0].tolist()
        [[0.0, 0.0], [0.0, 0.1], [0.0, 0.2]]

    Source:
        Axis order (frequency, time) of Gong et al. 2021, AST, arXiv:2104.01778.
    """
    sizes_per_axis("ndpos.spectrogram_grid", sizes, axes=2)
    first = finite("ndpos.spectrogram_grid", "start_seconds", start_seconds)
    by = finite("ndpos.spectrogram_grid", "seconds_per_column", seconds_per_column)
    return grid(sizes, start=(0.0, first), step=(1.0, by), device=device)
