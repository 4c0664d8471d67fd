"""Tasks that need no labels, on real photos that ship inside packages: nothing is downloaded.

A crop of a photo is turned by quarters of a circle. Each patch is to tell where in the picture it stands, the class
token by how much the picture was turned. Because of the turns little can be told of a place from what is seen there:
the sky may be anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import matplotlib.cbook
import numpy
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_sample_image
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor, nn

from vision_demo.data import Size
from vision_demo.problems import Problem

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, with which the ViT was trained
PATCH = 14
FOLDS = 3  # a third of the photos is held out
NAMES = (
    *("astronaut", "china", "chelsea"),
    *("rocket", "camera", "flower"),
    *("grace_hopper", "motorcycle", "coffee"),
)  # photo n is held out of every seed that is n modulo FOLDS


class Draw(NamedTuple):
    """One crop, at whatever size it is drawn.

    Attributes:
        photo: Its number.
        quarters: Turned anticlockwise so many times by 90 degrees.
        place: Three numbers from 0 to 1: how large a part of the photo, and where in it, downwards and to the right.
    """

    photo: int
    quarters: int
    place: tuple[float, float, float]


def load_photos() -> list[Tensor]:
    """The photos of ``NAMES``, each (3, height, width) float32, normalised as for the ViT.

    Raises:
        Problem: scikit-image is absent.
    """
    if find_spec("skimage") is None:
        raise Problem("most of the photos come with scikit-image, which is not installed: pip install scikit-image")
    from skimage import data

    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    found = []
    for name in NAMES:
        if name in ("china", "flower"):
            pixels = load_sample_image(f"{name}.jpg")
        elif name == "grace_hopper":
            path = matplotlib.cbook.get_sample_data(f"{name}.jpg", asfileobj=False)
            with Image.open(path) as image:
                pixels = numpy.asarray(image.convert("RGB"))
        else:
            pixels = data.stereo_motorcycle()[0] if name == "motorcycle" else getattr(data, name)()
        photo = torch.tensor(pixels).float() / 255
        photo = photo.movedim(-1, 0) if photo.ndim == 3 else photo.expand(3, -1, -1)  # one of them is grey
        found.append((photo - mean) / std)
    return found


def fold(seed: int) -> tuple[list[int], list[int]]:
    """Which photos to train on and which are held out; after ``FOLDS`` seeds, each has been held out once."""
    held_out = list(range(seed % FOLDS, len(NAMES), FOLDS))
    return [photo for photo in range(len(NAMES)) if photo not in held_out], held_out


def draws(photos: Sequence[int], count: int, random: torch.Generator) -> list[Draw]:
    """So many random crops, photos and quarters in turn, so that each is as frequent as it can be."""
    order = torch.randperm(4 * len(photos), generator=random).tolist()
    chosen = [order[index % len(order)] for index in range(count)]
    places = torch.rand(count, 3, generator=random).tolist()
    return [Draw(photos[each // 4], each % 4, tuple(place)) for each, place in zip(chosen, places, strict=True)]


def drawn(photos: Sequence[Tensor], wanted: Sequence[Draw], size: Size) -> Tensor:
    """The crops at ``size`` (height, width): (crops, 3, height, width)."""
    return torch.stack([crop(photos[each.photo], each, size) for each in wanted])


def crop(photo: Tensor, wanted: Draw, size: Size) -> Tensor:
    """One crop, of the aspect ratio of ``size``; from 0.4 to all of the longest side that fits into the photo."""
    height, width = size if wanted.quarters % 2 == 0 else size[::-1]  # before it is turned
    share, down, right = wanted.place
    scale = min(photo.shape[-2] / height, photo.shape[-1] / width) * (0.4 + 0.6 * share)
    tall, wide = (max(1, int(side * scale)) for side in (height, width))
    top, left = int(down * (photo.shape[-2] - tall)), int(right * (photo.shape[-1] - wide))
    part = photo[None, :, top : top + tall, left : left + wide]
    part = F.interpolate(part, (height, width), mode="bilinear", antialias=True)
    return torch.rot90(part[0], wanted.quarters, (-2, -1))


def cells(size: Size) -> tuple[int, int]:
    """Patches per axis, (rows, columns)."""
    return size[0] // PATCH, size[1] // PATCH


def places(size: Size) -> Tensor:
    """The middles of the patches, (rows * columns, 2), from -1 to 1 between the borders of the picture: the same
    place has the same numbers at every size."""
    axes = [(2 * torch.arange(count) + 1) / count - 1 for count in cells(size)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)


class Heads(nn.Module):
    """What reads both answers off the tokens: one linear map each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.place, self.quarters = nn.Linear(width, 2), nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, 1 + patches, width), the class token first -> places (batch, patches, 2), logits (batch, 4)."""
        return self.place(tokens[:, 1:]), self.quarters(tokens[:, 0])


def fitted(tokens: Tensor, wanted: Sequence[Draw], size: Size) -> Heads:
    """Heads for tokens that are not trained, by ridge and logistic regression: what a tuning sets out from.

    Heads of random weights would send the first gradients in any direction, and spoil what was trained.
    """
    tokens = tokens.cpu()
    heads, right = Heads(tokens.shape[-1]), places(size).repeat(len(tokens), 1)
    ridge = Ridge(alpha=1e4).fit(tokens[:, 1:].flatten(0, 1).numpy(), right.numpy())
    turns = LogisticRegression(C=1e-3, max_iter=2000).fit(tokens[:, 0].numpy(), [each.quarters for each in wanted])
    with torch.no_grad():
        for head, found in ((heads.place, ridge), (heads.quarters, turns)):
            head.weight.copy_(torch.from_numpy(found.coef_))
            head.bias.copy_(torch.from_numpy(found.intercept_))
    return heads


def loss(heads: Heads, tokens: Tensor, wanted: Sequence[Draw], size: Size) -> Tensor:
    """What training lowers: the squared error of places, over its 1/3 for no idea, and the cross-entropy of quarters,
    over its ln 4 for no idea."""
    found, logits = heads(tokens)
    right = places(size).to(tokens.device).expand_as(found)
    quarters = torch.tensor([each.quarters for each in wanted], device=tokens.device)
    return 3 * F.mse_loss(found, right) + F.cross_entropy(logits, quarters) / math.log(4)


class Answers(NamedTuple):
    """How well both tasks are done at one size.

    Attributes:
        cell: Share of patches whose row and column are both told exactly.
        distance: Mean distance from the told place to the right one, in patches.
        quarters: Share of crops whose turn is told rightly.
    """

    cell: float
    distance: float
    quarters: float


def answers(found: Tensor, logits: Tensor, wanted: Sequence[Draw], size: Size) -> Answers:
    """Measure places (crops, patches, 2) and logits (crops, 4) at ``size``."""
    counts, right = torch.tensor(cells(size)), places(size)
    steps = (found.cpu() - right) * counts / 2  # from -1 to 1 there are as many patches as cells
    exact = (steps.abs() < 0.5).all(dim=-1)
    quarters = torch.tensor([each.quarters for each in wanted])
    told = logits.cpu().argmax(dim=-1) == quarters
    return Answers(*(values.float().mean().item() for values in (exact, steps.norm(dim=-1), told)))


def chance(size: Size) -> Answers:
    """Of one who knows nothing: any cell, the middle for a place, any turn."""
    rows, columns = cells(size)
    distance = (places(size) * torch.tensor([rows, columns]) / 2).norm(dim=-1).mean().item()
    return Answers(1 / (rows * columns), distance, 0.25)
