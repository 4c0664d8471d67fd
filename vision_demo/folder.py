"""A folder of class folders of images: FOLDER/cat/1.jpg, FOLDER/dog/2.png."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from vision_demo.data import Dataset, Size
from vision_demo.images import read
from vision_demo.problems import Problem, first_process

LITTER = ("thumbs.db", "desktop.ini", "__macosx")  # what systems leave behind, besides names that start with a dot
LARGEST = 2**33  # bytes of all images drawn at the size of the model, which are kept in memory


class Files(NamedTuple):
    """Image files, read when they are drawn.

    Attributes:
        paths: Where each is.
        labels: (images,) int64, the class of each.
    """

    paths: tuple[Path, ...]
    labels: Tensor

    def take(self, indices: Sequence[int]) -> Files:
        """Some of the images, in the order of ``indices``."""
        return Files(tuple(self.paths[i] for i in indices), self.labels[list(indices)])

    def draw(self, size: Size) -> Tensor:
        """(images, 3, height, width) float32 from -1 to 1; one file at a time is in memory at its own size.

        Raises:
            Problem: A file cannot be used, or all together would not fit in memory.
        """
        height, width = size
        needed = len(self.paths) * 3 * height * width * 4
        if needed > LARGEST:
            raise Problem(
                f"{len(self.paths)} images of {height} x {width} take {needed / 2**30:.0f} GiB, and "
                f"{LARGEST / 2**30:.0f} are allowed: give a smaller --image-size, or --train-images"
            )
        images = torch.empty(len(self.paths), 3, height, width)
        unseen = not first_process()
        for image, path in zip(images, tqdm(self.paths, "reading", leave=False, disable=unseen), strict=True):
            image.copy_(read(path, size, 3))
        return images


def load(folder: Path) -> Dataset:
    """The images of ``folder``, a quarter of every class held out.

    The partition depends on nothing but the names, so accuracies of different runs compare. Nothing but names is read
    here; files are opened when they are drawn.

    Raises:
        Problem: The folder is missing or no folder, has fewer than two classes, a class has fewer than two images, or
            something lies where it cannot be used. Hidden files and what systems leave behind are passed over.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        raise Problem(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; --data takes a folder")
    classes = visible(folder)
    if not classes:
        raise Problem(f"{folder}: is empty; --data takes a folder of class folders of images")
    for path in classes:
        if not path.is_dir():
            raise Problem(f"{path}: lies beside the class folders, not in one")
    if len(classes) == 1:
        raise Problem(f"{classes[0]}: is the only class; at least two are needed")
    seen, held_out = [], []
    for label, path in enumerate(classes):
        kept, apart = divide(path)
        seen += [(file, label) for file in kept]
        held_out += [(file, label) for file in apart]
    names = "\n".join(str(file.relative_to(folder)) for file, _ in seen + held_out)
    source: dict[str, str | int] = {
        "folder": str(folder),
        "images": len(seen) + len(held_out),
        "names": hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest(),
    }
    return Dataset(tuple(path.name for path in classes), 3, files(seen, 0), files(held_out, 1), source)


def visible(folder: Path) -> list[Path]:
    """What lies in a folder, by name, without hidden files and litter."""
    return sorted(
        path for path in folder.iterdir() if not path.name.startswith(".") and path.name.lower() not in LITTER
    )


def divide(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of one class as (train, held out): a quarter held out, and at least one."""
    paths = visible(folder)
    for path in paths:
        if path.is_dir():
            raise Problem(f"{path}: is a folder inside a class folder, where images are expected")
    if len(paths) < 2:
        held = f"holds {'a single image' if paths else 'no image'}"
        raise Problem(f"{folder}: {held}; a class needs two, one to train on and one held out")
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
    apart = max(1, round(len(paths) / 4))
    return [paths[i] for i in sorted(order[apart:])], [paths[i] for i in sorted(order[:apart])]


def files(labelled: list[tuple[Path, int]], seed: int) -> Files:
    """Paths and their labels in a fixed random order, so that the first so many are a fair sample."""
    order = torch.randperm(len(labelled), generator=torch.Generator().manual_seed(seed)).tolist()
    return Files(tuple(labelled[i][0] for i in order), torch.tensor([labelled[i][1] for i in order]))
