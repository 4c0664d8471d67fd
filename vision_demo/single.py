"""``python -m vision_demo``: one model, from its first weights to its accuracy at sizes it was not trained at."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from vision_demo import data, devices, folder, pictures, runs
from vision_demo.data import Dataset, Part, Size
from vision_demo.devices import Workers, compiler_problem
from vision_demo.model import ENCODINGS, PATCH_SIZE, TRAINED_SIZE
from vision_demo.problems import Problem, Stopped
from vision_demo.runs import Config, Run
from vision_demo.train import Recipe, State, accuracy, train

AT_ONCE = 512  # held-out images in memory while other sizes are measured


class Task(NamedTuple):
    """What is to be done: read, checked, and ready to start."""

    config: Config
    dataset: Dataset
    images: Tensor  # to train on (images, channels, height, width)
    labels: Tensor
    held_out: tuple[Tensor, Tensor]  # at the same size
    state: State | None  # that training goes on from
    run: Run | None = None  # None in the processes that write nothing


def run(options: argparse.Namespace) -> int:
    """Train as ``options`` of :func:`vision_demo.cli.parse` say; returns the exit status."""
    started = time.perf_counter()
    workers, device = devices.start(options.device)
    tell = print if workers.first else lambda *words: None
    with workers.together():
        old, state = resumed(options) if options.resume else (None, None)
    results = None
    if old is not None and state is not None and len(state["records"]) == old.config.recipe.epochs:
        tell(f"{old.folder}: finished already, after {old.config.recipe.epochs} epochs; these are its results")
        results = old.results()
    if results is None:
        with workers.together():
            task = prepare(options, old, state)
        with workers.together():  # last of all, and only if every process is ready: bad data leaves no run folder
            if workers.first:
                old = old or runs.begin(options.run, task.config)
                task = task._replace(run=old)
                draw_pictures(task, old.folder / "pictures.png")
        processes = f", {workers.count} processes" if workers.count > 1 else ""
        tell(
            f"{len(task.images)} images at {pictures.name(task.config.image_size)}, {ENCODINGS[task.config.encoding]}, "
            f"{task.config.recipe.epochs} epoch{'s' * (task.config.recipe.epochs > 1)}, on {device}{processes}"
            + (f", going on after epoch {len(state['records'])}" if state is not None else "")
        )
        results = trained(task, device, workers, compiled=options.compile)
    tell("\naccuracy on held-out images")
    for size, share in results.items():
        tell(f"{size.replace('x', ' x '):>12}{share:>9.1%}")
    tell(f"\nrun folder: {old.folder if old else ''}\n{time.perf_counter() - started:.0f} seconds in all")
    devices.leave()
    return 0


def resumed(options: argparse.Namespace) -> tuple[Run, State | None]:
    """The run that is to go on and its state, unless the command line contradicts it."""
    old = runs.find(options.resume)
    config = old.config
    had = {
        "encoding": config.encoding,
        "epochs": config.recipe.epochs,
        "batch_size": config.recipe.batch_size,
        "seed": config.seed,
        "train_images": config.train_images,
        "image_size": config.image_size,
        "data": config.source.get("folder"),
    }
    said: dict[str, Any] = {name: getattr(options, name) for name in had if name in options.typed}
    if "data" in said:
        said["data"] = str(said["data"].absolute())
    for name, value in said.items():
        if value != had[name]:
            option = "--" + name.replace("_", "-")
            new, begun = ("x".join(map(str, each)) if type(each) is tuple else each for each in (value, had[name]))
            begun = "the digits" if begun is None else begun
            raise Problem(f"{option} {new} contradicts {old.folder}, which has {begun}; leave {option} out", status=2)
    return old, old.state()


def prepare(options: argparse.Namespace, old: Run | None, state: State | None) -> Task:
    """Read all images, and find out before whatever can be found out before."""
    if old is None and options.run is not None:
        runs.vacant(options.run)
    source = options.data if old is None else old.config.source.get("folder")
    dataset = data.digits() if source is None else folder.load(Path(str(source)))
    if old is None:
        config = new_config(options, dataset)
    else:
        config = old.config
        if (dataset.source, dataset.classes) != (config.source, config.classes):
            raise Problem(f"{source or 'the digits'}: not the images that {old.folder} was begun with; it cannot go on")
    there = len(dataset.train.labels)
    if config.train_images > there:
        raise Problem(f"--train-images {config.train_images}: {source} has {there} images to train on", status=2)
    part = dataset.train.take(range(config.train_images))
    images = part.draw(config.image_size)
    held_out = (dataset.held_out.draw(config.image_size), dataset.held_out.labels)
    return Task(config, dataset, images, part.labels, held_out, state)


def new_config(options: argparse.Namespace, dataset: Dataset) -> Config:
    """What the command line asks for."""
    return Config(
        encoding=options.encoding,
        classes=dataset.classes,
        channels=dataset.channels,
        image_size=options.image_size or TRAINED_SIZE,
        recipe=Recipe(epochs=options.epochs, batch_size=options.batch_size, seed=options.seed),
        seed=options.seed,
        train_images=options.train_images or len(dataset.train.labels),
        source=dataset.source,
    )


def trained(task: Task, device: torch.device, workers: Workers, *, compiled: bool) -> dict[str, float]:
    """Train, saving after every epoch, and measure; -> the accuracy on held-out images by size."""

    def after_epoch(state: State) -> None:
        with workers.together():
            if task.run is not None:
                task.run.save(state)

    model: nn.Module = task.config.build().to(device)
    if compiled:
        model.compile(dynamic=True)  # one graph for all sizes; in place, so that the names of the weights stay
    try:
        if task.run is not None and task.state is not None:
            task.run.publish(task.state)  # the run may have been killed between two files
        train(
            model,
            task.images,
            task.labels,
            task.config.recipe,
            title=ENCODINGS[task.config.encoding],
            held_out=task.held_out,
            workers=workers,
            state=task.state,
            after_epoch=after_epoch,
        )
        held_out = task.dataset.held_out
        bar = tqdm(sizes(task.config.image_size), desc="measuring", unit="size", disable=not workers.first)
        results = {f"{size[0]}x{size[1]}": measured(model, held_out, size, workers) for size in bar}
        with workers.together():
            if task.run is not None:
                task.run.keep_results(results)
    except Stopped as stopped:
        stopped.cure = how_to_go_on(task)
        raise
    except OSError as error:  # such as a full disk; what was saved before is still there
        raise Problem(f"{error}{how_to_go_on(task)}") from error
    except RuntimeError as error:
        raise explained(error, task, workers, compiled=compiled) from error
    return results


def how_to_go_on(task: Task) -> str:
    """The end of a line about what broke off."""
    return f"; go on with: python -m vision_demo --resume {shlex.quote(str(task.run.folder))}" if task.run else ""


def explained(error: RuntimeError, task: Task, workers: Workers, *, compiled: bool) -> Exception:
    """A problem in one line, if this is one of the few errors that the user can do something about."""
    if isinstance(error, torch.OutOfMemoryError):
        return Problem(f"the device has too little memory: a smaller --batch-size needs less{how_to_go_on(task)}")
    if workers.count > 1 and ("peer" in str(error) or isinstance(error, torch.distributed.DistError)):
        return Problem(f"another process has ended, so this one ends too{how_to_go_on(task)}")
    return (compiler_problem(error) if compiled else None) or error


def sizes(trained_size: Size) -> list[Size]:
    """The trained size, then three quarters, one and a half and twice of it, and one that is wider than high."""
    height, width = trained_size
    shapes = [(1, 1), (0.75, 0.75), (1.5, 1.5), (2, 2), (1, 1.5)]
    return list(
        dict.fromkeys((multiple(height * tall), multiple(width * wide)) for tall, wide in shapes)
    )  # small ones may coincide


def multiple(side: float) -> int:
    """The nearest whole number of patches, in pixels, and at least one."""
    return max(1, round(side / PATCH_SIZE)) * PATCH_SIZE


def measured(model: nn.Module, part: Part, size: Size, workers: Workers) -> float:
    """The accuracy at ``size``; not all images are in memory at once, and not too many go through the model at once."""
    right = 0
    batch_size = min(64, max(1, 64 * 64 * 64 // (size[0] * size[1])))
    for indices in torch.arange(len(part.labels)).split(AT_ONCE):
        some = part.take(indices.tolist())
        with workers.together():
            images = some.draw(size)
        share = accuracy(model, images, some.labels, batch_size=batch_size, workers=workers)
        right += round(share * len(indices))
    return right / len(part.labels)


def draw_pictures(task: Task, path: Path) -> None:
    """Show a few images at each size, as the model gets them, and keep more of them in the file ``path``."""
    part = task.dataset.held_out
    few = part.take(pictures.one_of_each(part.labels, pictures.ON_SHEET))
    drawn = {size: few.draw(size) for size in sizes(task.config.image_size)}
    runs.replace(path, pictures.contact_sheet(drawn))
    pictures.show(drawn)
    print(f"more of them: {path}\n")
