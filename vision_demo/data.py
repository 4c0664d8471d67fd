"""Real images that ship inside scikit-learn, drawn at any size: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

CLASSES = 10
SOURCE_SIZE = 8  # the digits are 8 x 8 pixels with brightness 0 to 16

Size = tuple[int, int]  # (height, width) in pixels


class Part(Protocol):
    """Images that are trained on, or held out: kept in whatever way, drawn when asked for.

    Attributes:
        labels: (images,) int64, the class of each.
    """

    @property
    def labels(self) -> Tensor: ...

    def take(self, indices: Sequence[int]) -> Part:
        """Some of the images, in the order of ``indices``."""

    def draw(self, size: Size) -> Tensor:
        """(images, channels, height, width) float32 from -1, black, to 1, white."""


class Dataset(NamedTuple):
    """What a model learns to tell apart.

    Attributes:
        classes: The name of each class.
        channels: 1 for grey, 3 for RGB.
        train: Images to train on, in random order: the first so many are a fair sample.
        held_out: Images to measure on, in random order.
        source: What the images are, in plain values: a run that goes on later compares it.
    """

    classes: tuple[str, ...]
    channels: int
    train: Part
    held_out: Part
    source: dict[str, str | int]


class Digits(NamedTuple):
    """Handwritten digits as they were scanned.

    Attributes:
        pixels: (images, 8, 8) uint8, brightness 0 to 16.
        labels: (images,) int64, the digit 0 to 9.
    """

    pixels: Tensor
    labels: Tensor

    def first(self, count: int) -> Digits:
        """The first ``count`` images; they are in random order, so every digit is among a few dozen."""
        return Digits(self.pixels[:count], self.labels[:count])

    def take(self, indices: Sequence[int]) -> Digits:
        """Some of the images, in the order of ``indices``."""
        return Digits(self.pixels[list(indices)], self.labels[list(indices)])

    def draw(self, size: Size) -> Tensor:
        """The images at ``size``: :func:`render`."""
        return render(self.pixels, size)


def load() -> tuple[Digits, Digits]:
    """scikit-learn's 1,797 digits as (train, held out): 1,347 and 450 images, each digit in proportion.

    The partition is always the same, whatever the seed of the training, so accuracies of different runs compare.
    """
    images, labels = load_digits(return_X_y=True)
    pixels = images.reshape(-1, SOURCE_SIZE, SOURCE_SIZE).astype(numpy.uint8)
    parts = train_test_split(pixels, labels, test_size=0.25, stratify=labels, random_state=0)
    train_pixels, held_out_pixels, train_labels, held_out_labels = (torch.from_numpy(part) for part in parts)
    return Digits(train_pixels, train_labels.long()), Digits(held_out_pixels, held_out_labels.long())


def digits() -> Dataset:
    """The digits of :func:`load` with their names."""
    seen, held_out = load()
    return Dataset(tuple("0123456789"), 1, seen, held_out, {"name": "scikit-learn's handwritten digits"})


def render(pixels: Tensor, size: Size) -> Tensor:
    """Draw digits at another size without inventing detail: Pillow's NEAREST repeats pixels.

    At 32 x 32 each source pixel becomes a 4 x 4 square, exactly one patch of the model: a token then knows one
    brightness and nothing about where it is. At 48 x 48 the square is 6 x 6: the grid is 12 x 12 and some patches
    straddle squares.

    Args:
        pixels: (images, 8, 8) uint8, brightness 0 to 16.
        size: (height, width) to draw at, in pixels.

    Returns:
        (images, 1, height, width) float32 from -1 (brightness 0) to 1 (brightness 16).
    """
    height, width = size
    drawn = [Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST) for image in pixels.numpy()]
    return torch.from_numpy(numpy.stack([numpy.asarray(image) for image in drawn])).unsqueeze(1) / 8 - 1
