"""``python -m vision_demo compare``: the same model trained with each encoding over several seeds, and a table."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from vision_demo import comparison, data
from vision_demo.comparison import Comparison, Pair, Plan, Training, key_of
from vision_demo.data import Dataset
from vision_demo.devices import ALONE, compiler_problem
from vision_demo.jobs import Tick, all_done
from vision_demo.model import ENCODINGS, TRAINED_SIZE, build_model, use_raw_coordinates
from vision_demo.pictures import can_write, name
from vision_demo.problems import Problem, Stopped
from vision_demo.runs import versions
from vision_demo.single import measured, sizes
from vision_demo.train import Recipe, train


class Work(NamedTuple):
    """All that a process needs to train any pair."""

    plan: Plan
    dataset: Dataset
    device: torch.device
    threads: int
    compiled: bool


def run(options: argparse.Namespace) -> int:
    """Compare as ``options`` of :func:`vision_demo.cli.parse` say; returns the exit status."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise Problem("compare trains whole models side by side: say --jobs N, without torchrun", status=2)
    started = time.perf_counter()
    dataset = data.digits()
    if options.resume:
        found = resumed(options, dataset)
    else:
        found = comparison.begin(options.run, new_plan(options, dataset))
    pairs = found.remaining()
    print(
        f"{len(found.plan.encodings)} encodings, seeds {', '.join(map(str, found.plan.seeds))}, "
        f"{found.plan.recipe['epochs']} epochs on {found.plan.train_images} images at {name(TRAINED_SIZE)}: "
        f"{len(pairs)} of {len(found.plan.pairs())} trainings to do, on {options.device}"
    )
    work = Work(found.plan, dataset, options.device, options.threads, options.compile)
    try:
        carry_out(pairs, work, found, options.jobs)
        found.write()  # whatever was killed between two files, or deleted, is there again
    except (Stopped, Problem) as ended:
        cure = f"; go on with: python -m vision_demo compare --resume {shlex.quote(str(found.folder))}"
        if isinstance(ended, Stopped):
            ended.cure = cure
            raise
        raise Problem(f"{ended}{cure}", status=ended.status) from ended
    print("\n" + found.table("±" if can_write("±") else "+-"))
    print(f"\n{found.folder}: table.md, accuracy.png, {comparison.FILE}\n{time.perf_counter() - started:.0f} seconds")
    return 0


def new_plan(options: argparse.Namespace, dataset: Dataset) -> Plan:
    """What the command line asks for."""
    recipe = asdict(Recipe(epochs=options.epochs, batch_size=options.batch_size))
    del recipe["seed"]
    return Plan(
        encodings=options.encodings,
        seeds=tuple(range(options.seed, options.seed + options.seeds)),
        recipe=recipe,
        sizes=tuple(sizes(TRAINED_SIZE)),
        classes=len(dataset.classes),
        train_images=options.train_images or len(dataset.train.labels),
        held_out_images=len(dataset.held_out.labels),
        source=dataset.source,
    )


def resumed(options: argparse.Namespace, dataset: Dataset) -> Comparison:
    """The comparison that is to go on, unless the command line or the images contradict it."""
    found = comparison.find(options.resume)
    plan = found.plan
    had = {
        "encodings": plan.encodings,
        "seed": plan.seeds[0],
        "seeds": len(plan.seeds),
        "epochs": plan.recipe["epochs"],
        "batch_size": plan.recipe["batch_size"],
        "train_images": plan.train_images,
    }
    for key in had:
        if key in options.typed and getattr(options, key) != had[key]:
            option = "--" + key.replace("_", "-")
            new, old = (",".join(each) if type(each) is tuple else each for each in (getattr(options, key), had[key]))
            raise Problem(f"{option} {new} contradicts {found.folder}, which has {old}; leave {option} out", status=2)
    if (dataset.source, len(dataset.held_out.labels)) != (plan.source, plan.held_out_images):
        raise Problem(f"{found.folder}: was begun with other images; it cannot go on")
    return found


def carry_out(pairs: Sequence[Pair], work: Work, found: Comparison, jobs: int) -> None:
    """Train all pairs behind one progress bar, keeping each result as soon as it is there."""
    if not pairs:
        return
    jobs = min(jobs, len(pairs))
    here = machine(work, jobs)
    with tqdm(total=len(pairs) * work.plan.recipe["epochs"], desc=f"{len(pairs)} trainings", unit="epoch") as bar:
        with closing(all_done(train_pair, pairs, work, jobs, bar.update)) as trained:  # that ends the processes
            for training in trained:
                found.keep(training, here)
                share = training["accuracy"][key_of(TRAINED_SIZE)]
                title = f"{ENCODINGS[training['encoding']]}, seed {training['seed']}"
                bar.write(f"{title:<36}{share:>7.1%}{training['seconds']:>7.0f} s", file=sys.stdout)


def train_pair(pair: Pair, work: Work, tick: Tick) -> Training:
    """One training from first weights to the accuracy at all sizes; the numbers depend on nothing but the arguments.

    Args:
        pair: The encoding and the seed.
        work: Everything else.
        tick: Called after every epoch.
    """
    torch.set_num_threads(work.threads)  # this may be a process of its own
    encoding, seed = pair
    started = time.perf_counter()
    part = work.dataset.train.take(range(work.plan.train_images))
    model = build_model(
        encoding, seed=seed, classes=work.plan.classes, channels=work.dataset.channels, image_size=TRAINED_SIZE
    ).to(work.device)
    if work.compiled:
        model.compile(dynamic=True)
    recipe = replace(Recipe(**work.plan.recipe), seed=seed)
    try:
        images = part.draw(TRAINED_SIZE)
        records = train(model, images, part.labels, recipe, title=None, after_epoch=lambda state: tick())
        accuracy = accuracies(model, work)
        raw = accuracies(model, work) if use_raw_coordinates(model) else None
    except torch.OutOfMemoryError as error:
        raise Problem("the device has too little memory: a smaller --batch-size or fewer --jobs need less") from error
    except RuntimeError as error:
        problem = compiler_problem(error) if work.compiled else None
        if problem is None:
            raise
        raise problem from error
    return {
        "encoding": encoding,
        "seed": seed,
        "accuracy": accuracy,
        "accuracy_raw_steps": raw,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.perf_counter() - started, 3),
        "epochs": records,
    }


def accuracies(model: torch.nn.Module, work: Work) -> dict[str, float]:
    """The share of held-out images told right, by size."""
    return {key_of(size): measured(model, work.dataset.held_out, size, ALONE) for size in work.plan.sizes}


def machine(work: Work, jobs: int) -> dict[str, Any]:
    """What the numbers and the seconds were made on."""
    on_gpu = work.device.type == "cuda"
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": work.threads,
        "jobs": jobs,
        "device": torch.cuda.get_device_name(work.device) if on_gpu else work.device.type,
        "compiled": work.compiled,
        "system": platform.system(),
        "versions": versions(),
    }


def cpu_name() -> str:
    """The name of the processor; its architecture where the system does not tell."""
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()
