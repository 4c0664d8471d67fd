"""Where tokens stand: coordinates ``(..., axes)``, the last dimension one number per axis, slowest axis first.

Everything here is a choice of coordinates and nothing else. Grids are row-major over the named axes in every
function: options choose what number a cell gets, never the order of the cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ndpos.sizes import numbers_per_axis, sizes_per_axis

__all__ = [
    "augment",
    "centred_grid",
    "clip_grid",
    "grid",
    "normalised_grid",
    "patch_grid",
    "patch_sizes",
    "scaled_grid",
    "spectrogram_grid",
]

WITHOUT_FLOAT64 = frozenset({"mps"})

Numbers = float | Sequence[float]


def exact_dtype(device: torch.device | str | None) -> torch.dtype:
    """The widest float of ``device``: float64, or float32 where there is no float64 (Apple's MPS)."""
    kind = torch.device(device).type if device is not None else torch.get_default_device().type
    return torch.float32 if kind in WITHOUT_FLOAT64 else torch.float64


def axis_coords(sizes: Sequence[int], start: Any, step: Any, device: Any, *, caller: str = "ndpos.grid") -> list[Tensor]:
    """The coordinates of a grid axis by axis: one tensor ``(size,)`` each, before any cell is made.

    int64 when every start and step is an integer, since float32 steps by two from 2**24 on; one dtype for all axes.
    """
    sizes = sizes_per_axis(caller, sizes)
    starts = numbers_per_axis(caller, "start", start, len(sizes))
    steps = numbers_per_axis(caller, "step", step, len(sizes))
    for number in (*starts, *steps):
        if isinstance(number, (bool, str, Tensor)):
            raise TypeError(f"{caller}: start and step are plain numbers, got {number!r}. Add tensors to the coordinates.")
    if all(isinstance(number, (int, torch.SymInt)) for number in (*starts, *steps)):
        counts = [torch.arange(size, dtype=torch.int64, device=device) for size in sizes]
        return [first + count * by for count, first, by in zip(counts, starts, steps, strict=True)]
    dtype = exact_dtype(device)
    counts = [torch.arange(size, dtype=dtype, device=device) for size in sizes]
    return [float(first) + count * float(by) for count, first, by in zip(counts, starts, steps, strict=True)]


def cells(per_axis: Sequence[Tensor]) -> Tensor:
    """Coordinates of every cell ``(*sizes, axes)``, row-major, from the coordinates of each axis ``(size,)``."""
    return torch.stack(torch.meshgrid(*per_axis, indexing="ij"), dim=-1)


def grid(
    sizes: Sequence[int], *, start: Numbers = 0, step: Numbers = 1, device: torch.device | str | None = None
) -> Tensor:
    """Coordinates of every cell of a grid, counted from ``start`` in steps of ``step``.

    Args:
        sizes: Tokens per axis, slowest axis first: ``(height, width)``, ``(frames, height, width)``. Zero is allowed.
        start: Coordinate of the first cell, for all axes or one per axis.
        step: Distance between neighbours, for all axes or one per axis.
        device: Where the coordinates are made; torch's default device if not given.

    Returns:
        ``(*sizes, axes)``: int64 when ``start`` and ``step`` are integers, else float64 (float32 where the device has
        none). Flatten it with ``.flatten(0, -2)`` for one row per token; rows are then in row-major order.

    Raises:
        TypeError: ``sizes`` is a lone number or holds a float or a boolean.
        ValueError: a size is negative, there is no axis, or ``start``/``step`` have another number of axes.

    Example:
        >>> import ndpos
        >>> ndpos.grid((2, 3)).flatten(0, -2).tolist()
        [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
        >>> ndpos.grid((3,), start=10, step=0.5).flatten().tolist()
        [10.0, 10.5, 11.0]

    Source:
        Patch order of Dosovitskiy et al. 2020, arXiv:2010.11929, for any number of axes.
    """
    return cells(axis_coords(sizes, start, step, device))


def centred_grid(
    sizes: Sequence[int], *, step: Numbers = 1, device: torch.device | str | None = None
) -> Tensor:
    """Coordinates with zero in the middle of every axis: ``(i - (size - 1) / 2) * step``.

    Args:
        sizes: Tokens per axis, slowest first.
        step: Distance between neighbours, for all axes or one per axis.
        device: Where the coordinates are made.

    Returns:
        ``(*sizes, axes)`` float64 (float32 where the device has none).

    Raises:
        TypeError, ValueError: as :func:`ndpos.grid`.

    Example:
        >>> import ndpos
        >>> ndpos.centred_grid((4,)).flatten().tolist()
        [-1.5, -0.5, 0.5, 1.5]

    Source:
        Wei et al. 2025, VideoRoPE, arXiv:2502.05173, section 3 (diagonal layout centres the spatial axes).
    """
    axes = axis_coords(sizes, 0.0, 1.0, device, caller="ndpos.centred_grid")
    steps = numbers_per_axis("ndpos.centred_grid", "step", step, len(axes))
    middle = [(coords - (size - 1) / 2) * float(by) for coords, size, by in zip(axes, sizes, steps, strict=True)]
    return cells(middle)


def normalised_grid(
    sizes: Sequence[int],
    *,
    by: Literal["axis", "shortest", "longest"] = "axis",
    at: Literal["centre", "start", "ends"] = "centre",
    span: tuple[float, float] = (-1.0, 1.0),
    device: torch.device | str | None = None,
) -> Tensor:
    """Coordinates as a fraction of the picture, so that a larger picture has finer steps and the same range.

    Args:
        sizes: Tokens per axis, slowest first.
        by: The length that counts as the whole: each axis by itself (which distorts the aspect ratio), the
            shortest axis, or the longest.
        at: Where in its cell a token stands: ``"centre"`` ``(i + 1/2) / length``, ``"start"`` ``i / length``,
            ``"ends"`` ``i / (length - 1)``, first and last token on the ends of the range (0 for a length of one).
        span: Coordinates of fraction 0 and fraction 1.
        device: Where the coordinates are made.

    Returns:
        ``(*sizes, axes)`` float64 (float32 where the device has none).

    Raises:
        ValueError: an unknown ``by`` or ``at``; otherwise as :func:`ndpos.grid`.

    Example:
        >>> import ndpos
        >>> ndpos.normalised_grid((4,)).flatten().tolist()
        [-0.75, -0.25, 0.25, 0.75]

    Source:
        Siméoni et al. 2025, DINOv3, arXiv:2508.10104: ``rope_position_encoding.py`` ("separate", "min", "max").
    """
    caller = "ndpos.normalised_grid"
    axes = axis_coords(sizes, 0.0, 1.0, device, caller=caller)
    if by not in ("axis", "shortest", "longest"):
        raise ValueError(f"{caller}: by is 'axis', 'shortest' or 'longest', got {by!r}.")
    if at not in ("centre", "start", "ends"):
        raise ValueError(f"{caller}: at is 'centre', 'start' or 'ends', got {at!r}.")
    lengths = list(sizes) if by == "axis" else [min(sizes) if by == "shortest" else max(sizes)] * len(axes)
    offset, less = {"centre": (0.5, 0), "start": (0.0, 0), "ends": (0.0, 1)}[at]
    low, high = span
    # A length of one has no distance between its ends; max() keeps that cell at fraction 0 in place of 0 / 0.
    fractions = [(coords + offset) / max(length - less, 1) for coords, length in zip(axes, lengths, strict=True)]
    return cells([low + fraction * (high - low) for fraction in fractions])


def scaled_grid(
    sizes: Sequence[int],
    *,
    reference_sizes: Sequence[int],
    align: Literal["index", "centre", "corner"],
    device: torch.device | str | None = None,
) -> Tensor:
    """Coordinates of a grid laid over a reference grid, in the reference's own steps.

    A model trained on ``reference_sizes`` sees the range of coordinates that it knows, whatever the new grid is.

    Args:
        sizes: Tokens per axis now, slowest first.
        reference_sizes: Tokens per axis of the grid whose coordinates are to be kept.
        align: What of the two grids coincides, with n the size and r the reference size. ``"index"``: the first
            cells, ``i * r / n`` (EVA-02). ``"centre"``: cell borders, ``(i + 1/2) * r / n - 1/2``, as images are
            resized. ``"corner"``: first and last cell, ``i * (r - 1) / (n - 1)``. No default: the wrong one is silent.
        device: Where the coordinates are made.

    Returns:
        ``(*sizes, axes)`` float64 (float32 where the device has none).

    Raises:
        ValueError: the two grids have different numbers of axes, or ``align`` is unknown.

    Example:
        >>> import ndpos
        >>> ndpos.scaled_grid((4,), reference_sizes=(2,), align="index").flatten().tolist()
        [0.0, 0.5, 1.0, 1.5]
        >>> ndpos.scaled_grid((4,), reference_sizes=(2,), align="centre").flatten().tolist()
        [-0.25, 0.25, 0.75, 1.25]

    Source:
        Fang et al. 2023, EVA-02, arXiv:2303.11331 (``ref_feat_shape`` in timm); Chen et al. 2023, arXiv:2306.15595.
    """
    caller = "ndpos.scaled_grid"
    axes = axis_coords(sizes, 0.0, 1.0, device, caller=caller)
    reference = sizes_per_axis(caller, reference_sizes, name="reference_sizes", minimum=1, axes=len(axes))
    if align not in ("index", "centre", "corner"):
        raise ValueError(f"{caller}: align is 'index', 'centre' or 'corner', got {align!r}.")
    scaled = []
    for coords, now, then in zip(axes, sizes, reference, strict=True):
        if align == "corner":
            scaled.append(coords * (then - 1) / max(now - 1, 1))
        else:
            half = 0.5 if align == "centre" else 0.0
            scaled.append((coords + half) * then / now - half)
    return cells(scaled)


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
                f"{caller}: axis {axis} leaves {room % by} of {image} pixels over: (size + 2*padding - patch) is {room}, "
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
    start = (float(start_seconds),) + (0.0,) * (axes - 1)
    return grid(sizes, start=start, step=(float(seconds_per_frame),) + (1.0,) * (axes - 1), device=device)


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
    return grid(sizes, start=(0.0, float(start_seconds)), step=(1.0, float(seconds_per_column)), device=device)


def refuse_outside(values: Tensor, low: int, high: int, caller: str, name: str, advice: str) -> None:
    """Raise unless ``low <= values < high`` everywhere, NaN included, before anything is gathered.

    Reading values on the CPU costs nothing that a gather would not; on an accelerator it would wait for the device,
    and under a compiler it would break the graph, so there an asynchronous assertion does the same.
    """
    inside = ((values >= low) & (values < high)).all()
    text = f"{caller}: {name} are at least {low} and below {high}. {advice}"
    while torch._C._functorch.is_batchedtensor(inside):
        inside = torch._C._functorch.get_unwrapped(inside).all()
    if torch.compiler.is_compiling() or inside.device.type not in ("cpu", "meta") or type(inside) is not Tensor:
        torch._assert_async(inside, text)
    elif inside.device.type == "cpu" and not bool(inside):
        worst = values[~((values >= low) & (values < high))].flatten()[0].item()
        raise ValueError(f"{text} Seen: {worst}, in {tuple(values.shape)}.")


def augment(
    coords: Tensor,
    *,
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Coordinates moved and stretched at random, so that a model does not learn one grid by heart.

    One draw per call: make the coordinates once per forward and hand them to every layer.

    Args:
        coords: ``(..., axes)``.
        shift: Every axis moves by a number drawn from [-shift, shift].
        jitter: Every axis is multiplied by a factor drawn log-uniformly from [1 / jitter, jitter].
        rescale: All axes are multiplied by one factor drawn log-uniformly from [1 / rescale, rescale].
        training: ``coords`` come back untouched unless true, as in ``torch.nn.functional.dropout``.
        generator: Source of the draw, for reproducible runs; its device is where the draw is made.

    Returns:
        Like ``coords``; float64 (float32 where the device has none) when anything was drawn.

    Raises:
        ValueError: ``shift`` is negative, or ``jitter`` or ``rescale`` is below 1.

    Example:
        >>> import ndpos, torch
        >>> coords = ndpos.normalised_grid((2, 2))
        >>> draw = lambda: ndpos.augment(coords, jitter=1.5, training=True, generator=torch.Generator().manual_seed(0))
        >>> torch.equal(draw(), draw())
        True
        >>> ndpos.augment(coords, jitter=1.5) is coords
        True

    Source:
        Siméoni et al. 2025, DINOv3, arXiv:2508.10104: ``rope_position_encoding.py``, in its order.
    """
    if shift is not None and not shift >= 0:
        raise ValueError(f"ndpos.augment: shift is at least 0, got {shift!r}.")
    for name, factor in (("jitter", jitter), ("rescale", rescale)):
        if factor is not None and not factor >= 1:
            raise ValueError(f"ndpos.augment: {name} is a factor of at least 1, got {factor!r}. For no {name} pass None.")
    if not training or (shift is None and jitter is None and rescale is None):
        return coords
    source = generator.device if generator is not None else coords.device
    moved = coords.to(exact_dtype(coords.device))

    def draw(count: int, reach: float) -> Tensor:
        uniform = torch.rand(count, dtype=exact_dtype(source), device=source, generator=generator)
        return ((2 * uniform - 1) * reach).to(moved)

    if shift is not None:
        moved = moved + draw(coords.shape[-1], shift)
    if jitter is not None:
        moved = moved * draw(coords.shape[-1], math.log(jitter)).exp()
    if rescale is not None:
        moved = moved * draw(1, math.log(rescale)).exp()
    return moved
