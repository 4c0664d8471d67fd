"""The run folder: what a training leaves behind, and what it goes on from after an interruption.

``state.pt`` alone decides how training goes on. Everything else is made from it and replaced after it, each file as a
whole: a run killed between two of them repairs the rest when it is resumed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import timm
import torch
from torch import Tensor

import ndpos
from vision_demo.devices import first_line
from vision_demo.model import ENCODINGS, PATCH_SIZE, build_model
from vision_demo.pictures import curves
from vision_demo.problems import Problem
from vision_demo.train import Recipe, State

FORMAT = 1
PARTIAL = ".partial"  # the end of the name of a file that is still being written


@dataclass(frozen=True)
class Config:
    """All that is needed to build the model again and to train it again."""

    encoding: str
    classes: tuple[str, ...]
    channels: int
    image_size: tuple[int, int]  # (height, width) in pixels
    recipe: Recipe
    seed: int  # of the weights; the recipe's own is that of the order
    train_images: int
    source: dict[str, str | int]  # the data

    def build(self) -> torch.nn.Module:
        """The model before its training."""
        return build_model(
            self.encoding,
            seed=self.seed,
            classes=len(self.classes),
            channels=self.channels,
            image_size=self.image_size,
        )

    def text(self) -> str:
        """As config.json has it, with the versions that are at work."""
        return json.dumps({"format": FORMAT, **asdict(self), "versions": versions()}, indent=2) + "\n"


def versions() -> dict[str, str]:
    """What is at work, by name."""
    at_work = {"ndpos": ndpos.__version__, "timm": timm.__version__, "torch": str(torch.__version__)}
    return {**at_work, "python": platform.python_version()}


def read_config(text: str) -> Config:
    """The reverse of :meth:`Config.text`; an exception of whatever kind if that is not possible."""
    found = json.loads(text)
    if found.pop("format") != FORMAT:
        raise ValueError("another format than this version writes")
    del found["versions"]
    found["recipe"] = Recipe(**found["recipe"])
    found["classes"], found["image_size"] = tuple(found["classes"]), tuple(found["image_size"])
    config = Config(**found)
    if config.encoding not in ENCODINGS:
        raise ValueError(f"encoding {config.encoding!r} is unknown")
    if not all(type(name) is str for name in config.classes) or len(config.classes) < 2:
        raise ValueError("classes are two names or more")
    if config.channels not in (1, 3) or type(config.source) is not dict:
        raise ValueError("channels or source make no sense")
    (height, width), recipe = config.image_size, config.recipe
    counts = (height, width, config.train_images, recipe.epochs, recipe.batch_size, config.seed + 1, recipe.seed + 1)
    if not all(type(number) is int and number > 0 for number in counts) or height % PATCH_SIZE or width % PATCH_SIZE:
        raise ValueError("sizes, counts or seeds make no sense")
    if not all(isinstance(number, (int, float)) for number in asdict(recipe).values()):
        raise ValueError("the recipe makes no sense")
    return config


class Run:
    """One run folder: :func:`begin` makes it, :func:`find` opens it."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.config = folder, config

    def save(self, state: State) -> None:
        """Keep the state after an epoch, and what is made from it."""
        content = io.BytesIO()
        torch.save({"config": json.loads(self.config.text()), **state}, content)
        replace(self.folder / "state.pt", content.getvalue())
        self.publish(state)

    def publish(self, state: State) -> None:
        """Make metrics, weights and curves from a state."""
        weights = {name: tensor.cpu().contiguous() for name, tensor in state["model"].items()}
        lines = "".join(json.dumps(record) + "\n" for record in state["records"])
        replace(self.folder / "metrics.jsonl", lines.encode())
        replace(self.folder / "weights.safetensors", safetensors.torch.save(weights, {"sha256": digest(weights)}))
        replace(self.folder / "curves.png", curves(state["records"], self.folder.name))

    def state(self) -> State | None:
        """What was last saved; ``None`` if the run ended before its first epoch did.

        Raises:
            Problem: It is missing although there was one, damaged, or of another run.
        """
        path = self.folder / "state.pt"
        if not path.exists() and not (self.folder / "metrics.jsonl").exists():
            return None
        content = read(path)
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                if archive.testzip() is not None:  # torch.load itself does not look at the checksums
                    raise ValueError("its checksum is wrong")
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            config = state.pop("config")
            assert state.keys() >= {"model", "optimizer", "schedule", "shuffle", "random", "records"}
        except Exception as error:  # a damaged file may raise anything
            raise Problem(f"{path}: damaged: {first_line(error)}; the run cannot go on") from error
        if {**config, "versions": 0} != {**json.loads(self.config.text()), "versions": 0}:
            raise Problem(
                f"{path}: does not belong to config.json beside it, or that was changed; the run cannot go on"
            )
        return state

    def weights(self) -> dict[str, Tensor]:
        """The weights after the last epoch, checked.

        Raises:
            Problem: They are missing or damaged.
        """
        path = self.folder / "weights.safetensors"
        if not path.exists() and not (self.folder / "metrics.jsonl").exists():
            raise Problem(f"{self.folder}: no epoch has ended yet, so there are no weights; use --resume first")
        read(path)  # a missing or unreadable file is told apart from a damaged one
        try:
            with safetensors.safe_open(path, "pt") as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}
                told = (file.metadata() or {})["sha256"]
            if told != digest(weights):
                raise ValueError("its checksum is wrong")
        except Exception as error:  # as above
            raise Problem(f"{path}: damaged: {first_line(error)}") from error
        return weights

    def model(self) -> torch.nn.Module:
        """The trained model, ready to predict, on the CPU."""
        model, weights = self.config.build(), self.weights()
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise Problem(f"{self.folder}: weights and config.json do not belong together") from error
        return model.eval()

    def keep_results(self, results: dict[str, float]) -> None:
        """Keep the accuracy at each size, "HEIGHTxWIDTH": share."""
        replace(self.folder / "results.json", (json.dumps(results, indent=2) + "\n").encode())

    def results(self) -> dict[str, float] | None:
        """What :meth:`keep_results` was given; ``None`` if it was not, or cannot be read: it can be measured again."""
        try:
            results = json.loads((self.folder / "results.json").read_text())
            return {str(size): float(share) for size, share in results.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return None


def begin(folder: Path | None, config: Config) -> Run:
    """A new run in ``folder``, or in one named after the time, the encoding and the seed.

    Raises:
        Problem: Something is in that folder already.
    """
    if folder is None:
        name = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{config.encoding}-seed{config.seed}"
        folder = Path("runs", name)
        while folder.exists():  # begun in the same second
            folder = Path("runs", f"{name}-{int(time.time() * 1000) % 1000:03d}")
    vacant(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / "config.json", config.text().encode())
    return Run(folder, config)


def vacant(folder: Path) -> None:
    """Refuse a folder in which something is already."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise Problem(f"{folder}: is a file; --run takes a new folder")
    if (folder / "config.json").exists():
        raise Problem(f"{folder}: holds a run already, which is never overwritten; go on with --resume {folder}")
    if any(not path.name.endswith(PARTIAL) for path in folder.iterdir()):
        raise Problem(f"{folder}: holds other files; --run takes a new folder")


def find(folder: Path) -> Run:
    """The run in ``folder``.

    Raises:
        Problem: There is none, or it was written by another version, or is damaged.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise Problem(f"{folder}: {'not a run folder' if folder.exists() else 'no such run folder'}")
    if not path.exists():
        raise Problem(f"{folder}: not a run folder, it has no config.json")
    try:
        return Run(folder, read_config(read(path).decode()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Problem(f"{path}: damaged: {type(error).__name__}: {first_line(error)}") from error


def read(path: Path) -> bytes:
    """The bytes of a file of the run."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise Problem(f"{path}: damaged run folder: {error.strerror}") from error


def replace(path: Path, content: bytes) -> None:
    """Write a file so that at every moment, kill -9 included, either all of the old or all of the new one is there."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # or the new name may reach the disk before the content does
    os.replace(partial, path)


def digest(weights: dict[str, Tensor]) -> str:
    """A checksum of names and values."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode())
        total.update(weights[name].contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()
