"""Positional encodings for any number of axes, each axis on its own channels.

The path: coordinates ``(..., axes)`` meet one frequency matrix ``(axes, pairs)`` and become angles ``(..., pairs)``;
everything else makes coordinates (``positions``), says which channels listen to which axis (``subspaces``), makes
frequencies (``frequencies``), or spends angles (``rotate``, ``encode``). A learned table looks coordinates up instead.

Words, one per thing: *axis*, a direction of position (t, y, x), slowest first; *dim*, a tensor dimension; *coords*
``(..., axes)``; *sizes*, tokens per axis; *pairs*, channel pairs that turn together; *angles*, radians; *frequencies*,
radians per unit of coordinate; *period*, 2 pi / frequency; *pairing*, which two channels make a pair; *num_prefix*,
leading tokens without a position; *table*, a learned grid of vectors; *base*, the theta of a geometric ladder.
"""

from ndpos.positions import (
    augment,
    centred_grid,
    grid,
    normalised_grid,
    scaled_grid,
)
from ndpos.patches import clip_grid, patch_grid, patch_sizes, spectrogram_grid
from ndpos.subspaces import AxisSplit, split
from ndpos.frequencies import geometric, mixed, periodic, pixel_bands
from ndpos.patterns import alternating, interleave_axes, keep_highest, sections
from ndpos.radians import angles
from ndpos.kernels import backends
from ndpos.rotation import Rotation
from ndpos.resample import inflate_patch_kernel, resize, resize_bias, resize_patch_kernel
from ndpos.encode.sinusoidal import SinusoidalEmbedding, add
from ndpos.encode.baselines import BinaryEmbedding, IntegerEmbedding
from ndpos.encode.rotary import RotaryEmbedding, rotate
from ndpos.encode.learned import LearnedEmbedding
from ndpos.convert import convert_pairing

__version__ = "0.1.0"

__all__ = [
    "AxisSplit",
    "BinaryEmbedding",
    "IntegerEmbedding",
    "LearnedEmbedding",
    "RotaryEmbedding",
    "Rotation",
    "SinusoidalEmbedding",
    "add",
    "alternating",
    "angles",
    "augment",
    "backends",
    "centred_grid",
    "clip_grid",
    "convert_pairing",
    "geometric",
    "grid",
    "inflate_patch_kernel",
    "interleave_axes",
    "keep_highest",
    "mixed",
    "normalised_grid",
    "patch_grid",
    "patch_sizes",
    "periodic",
    "pixel_bands",
    "resize",
    "resize_bias",
    "resize_patch_kernel",
    "rotate",
    "scaled_grid",
    "sections",
    "spectrogram_grid",
    "split",
]
