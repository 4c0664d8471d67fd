"""Real images that ship inside scikit-learn, drawn at any size: nothing is downloaded."""

from __future__ import annotations

from typing import NamedTuple

import numpy
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

CLASSES = 10
SOURCE_SIZE = 8  # the digits are 8 x 8 pixels with brightness 0 to 16


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


def load() -> tuple[Digits, Digits]:
    """scikit-learn's 1,797 digits as (train, held out): 1,347 and 450 images, each digit in proportion.

    The partition is always the same, whatever the seed of the training, so accuracies of different runs compare.
    """
    images, labels = load_digits(return_X_y=True)
    pixels = images.reshape(-1, SOURCE_SIZE, SOURCE_SIZE).astype(numpy.uint8)
    parts = train_test_split(pixels, labels, test_size=0.25, stratify=labels, random_state=0)
    train_pixels, held_out_pixels, train_labels, held_out_labels = (torch.from_numpy(part) for part in parts)
    return Digits(train_pixels, train_labels.long()), Digits(held_out_pixels, held_out_labels.long())


def render(pixels: Tensor, size: int) -> Tensor:
    """Draw digits at another size without inventing detail: Pillow's NEAREST repeats pixels.

    At 32 each source pixel becomes a 4 x 4 square, exactly one patch of the model: a token then knows one brightness
    and nothing about where it is. At 48 the square is 6 x 6: the grid is 12 x 12 and some patches straddle squares.

    Args:
        pixels: (images, 8, 8) uint8, brightness 0 to 16.
        size: Height and width to draw at, in pixels.

    Returns:
        (images, 1, size, size) float32 from -1 (brightness 0) to 1 (brightness 16).
    """
    drawn = [Image.fromarray(image).resize((size, size), Image.Resampling.NEAREST) for image in pixels.numpy()]
    return torch.from_numpy(numpy.stack([numpy.asarray(image) for image in drawn])).unsqueeze(1) / 8 - 1
