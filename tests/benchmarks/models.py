"""A ViT-B/16 end to end: plain, timm's own with rotary embeddings, and the plain one wrapped by ``add_rope``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import ndpos
from tests.benchmarks.paired import Task, in_turn
from tests.benchmarks.rows import PAIRINGS, Bound, Job, Row, Settings

OVERHEAD = Bound(1.02, judged="high", aim=1.01)
MODES, DIRECTIONS = ("eager", "torch.compile"), ("forward", "forward + backward")


def jobs(settings: Settings) -> Iterator[Job]:
    for direction in DIRECTIONS:
        for mode in MODES[:1] if settings.quick else MODES:
            case = f"{'ViT-S/16 of two blocks' if settings.quick else 'ViT-B/16'} at 224, {mode}, {direction}"
            yield Job(case, lambda case=case, mode=mode, way=direction: measure(settings, case, mode, way))


def measure(settings: Settings, case: str, mode: str, direction: str) -> Iterator[Row]:
    """Each model over the plain one, the same input in float32, a batch of one."""
    torch.compiler.reset()
    models = dict(built(settings, mode))
    if not models:
        return
    training = direction != "forward"
    x = torch.randn(1, 3, 224, 224, device=settings.device)
    run = step if training else forward
    tasks = {}
    for name, model in models.items():
        model = model.to(settings.device).train(training)
        tasks[name] = run(torch.compile(model) if mode == "torch.compile" else model, x)
    plain = tasks.pop("plain")
    with torch.inference_mode(not training):
        times = in_turn(tasks, plain, pairs=settings.pairs, clock=settings.clock, label=case)
    for name in tasks:
        held = settings.device == "cpu" and not settings.quick and name in bounded(mode)
        yield Row("models", case, name, "plain", times.over_reference(name), OVERHEAD if held else None)


def bounded(mode: str) -> tuple[str, ...]:
    return ("ndpos eager, interleaved",) if mode == "eager" else tuple(f"ndpos, {pairing}" for pairing in PAIRINGS)


def built(settings: Settings, mode: str) -> Iterator[tuple[str, nn.Module]]:
    """The models by name, "plain" first; none where timm is absent."""
    try:
        import timm

        import ndpos.timm
    except ImportError as error:
        settings.skip("models", f"not installed ({error})")
        return
    size, depth = ("small", {"depth": 2}) if settings.quick else ("base", {})
    plain = timm.create_model(f"vit_{size}_patch16_224", **depth)
    yield "plain", plain
    yield "the same again", copy.deepcopy(plain)  # what the ratio of equals is on this machine
    # As published it has layer scale too, which the plain ViT has not; left out, so that the rotation is what differs.
    yield "timm", timm.create_model(f"vit_{size}_patch16_rope_224", init_values=None, **depth)
    for name, rope in ropes(settings, mode):
        yield name, ndpos.timm.add_rope(copy.deepcopy(plain), rope=rope)


def ropes(settings: Settings, mode: str) -> Iterator[tuple[str, ndpos.RotaryEmbedding]]:
    """In eager mode one for each backend that is ready, under ``torch.compile`` the default; both pairings."""
    split = ndpos.split(64, 2)
    for pairing in PAIRINGS:
        if mode == "torch.compile":
            yield f"ndpos, {pairing}", ndpos.RotaryEmbedding(split, base=100.0, pairing=pairing)
            continue
        if not hasattr(ndpos, "backends"):
            yield f"ndpos eager, {pairing}", ndpos.RotaryEmbedding(split, base=100.0, pairing=pairing)
            continue
        for backend in ndpos.backends():
            runs = backend.ready and not (backend.name == "triton" and settings.device == "cpu")
            if runs and (backend.name == "eager" or not settings.quick):
                rope = ndpos.RotaryEmbedding(split, base=100.0, pairing=pairing, backend=backend.name)
                yield f"ndpos {backend.name}, {pairing}", rope


def forward(model: Callable[[Tensor], Tensor], x: Tensor) -> Task:
    return Task(lambda: model(x))


def step(model: Any, x: Tensor) -> Task:
    """Forward and backward to every parameter's gradient, which is dropped again."""

    def run() -> None:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    return Task(run)
