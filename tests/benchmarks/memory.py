"""Peak memory of a call beyond its result, by what the allocator reports; and what a wrapped model keeps.

On the CPU every allocation and release that torch's profiler sees is added up in order, which counts what a kernel
allocates inside an operation too; memory that a kernel takes past torch's allocator stays unseen. On CUDA the peak is
the allocator's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import ndpos
from tests.benchmarks import wrapped
from tests.benchmarks.paired import Ratio
from tests.benchmarks.peers import peers
from tests.benchmarks.rotation import SHAPES, Shape, turns
from tests.benchmarks.rows import DIRECTIONS, PAIRINGS, Bound, Job, Row, Settings

SHAPES_MEASURED = ("vit-b-224", "clip-8k")
DTYPES_MEASURED = ("float32", "bfloat16")


def peak(function: Callable[[], Any], device: str = "cpu") -> int:
    """The most bytes at any time of a call beyond those before it, its result included."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        result = function()
    del result
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events = [event for event in events if abs(event.nbytes()) >= 64]  # less is a number that PyTorch wraps
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):  # stable: ties stay in the order of report
        held += event.nbytes()
        most = max(most, held)
    return most


def beyond(function: Callable[[], Any], device: str = "cpu", *, given: Sequence[Tensor] = (), tables: int = 0) -> int:
    """The peak of a call beyond its result and ``tables`` bytes; a result that lies in ``given`` takes nothing."""
    for _ in range(2):  # compiled, and whatever is kept from a first call
        result = function()
    made = {leaf.untyped_storage().data_ptr(): storage(leaf) for leaf in tree_leaves(result)}
    kept = sum(nbytes for place, nbytes in made.items() if place not in {x.untyped_storage().data_ptr() for x in given})
    del result
    return max(0, peak(function, device) - kept - tables)


def storage(tensor: Tensor) -> int:
    """Bytes as its allocator counts them: CUDA's hands out multiples of 512."""
    nbytes = tensor.untyped_storage().nbytes()
    return -(-nbytes // 512) * 512 if tensor.is_cuda else nbytes


def jobs(settings: Settings) -> Iterator[Job]:
    shapes = settings.shapes or SHAPES_MEASURED
    for name in shapes:
        for dtype in [each for each in DTYPES_MEASURED if each in settings.dtypes]:
            for direction in DIRECTIONS:
                case = f"{name} {dtype} {direction}"
                yield Job(f"{case}, peak memory", lambda case=case: measure(settings, case))
    if not settings.quick:
        yield Job("ViT-S/16, bytes kept", lambda: wrapped.rows(settings))


def measure(settings: Settings, case: str) -> Iterator[Row]:
    torch.compiler.reset()
    name, dtype, direction = case.split()
    shape = SHAPES[name]
    q = shape.queries(settings, dtype)
    for pairing in PAIRINGS:
        for who, turn, tables in measured(settings, shape, pairing, q):
            bytes_beyond = spent(turn, q, direction, tables)
            limit = None
            if who.startswith("ndpos") and direction == "forward":
                limit = Bound(1 / 8) if " eager" in who else Bound(0.0)
            share = bytes_beyond / q.nbytes
            yield Row("memory", case, f"{who}, {pairing}", "x", Ratio(share, share, share), limit)


def measured(
    settings: Settings, shape: Shape, pairing: str, q: Tensor
) -> Iterator[tuple[str, Callable[[Tensor], Tensor], int]]:
    """A name, what turns, and the bytes of the tables that it makes itself."""
    angles = None
    for backend, turn in turns(settings, shape, pairing):
        if angles is None:
            prefix = turn.cos.new_zeros(shape.num_prefix, turn.cos.shape[-1])
            angles = torch.cat([prefix, torch.atan2(turn.sin, turn.cos).flatten(0, -2)])
        yield f"ndpos {backend}, turn(q)", turn, 0
        chosen = {"backend": backend} if "backend" in {part.name for part in dataclasses.fields(turn)} else {}

        def rotated(x: Tensor, angles: Tensor = angles, chosen: dict[str, str] = chosen) -> Tensor:
            return ndpos.rotate(x, angles, pairing=pairing, **chosen)

        yield f"ndpos {backend}, rotate(q, angles)", rotated, 2 * storage(angles)
    if angles is not None:
        for each in peers(settings, angles, pairing, q.dtype):
            yield f"{each.who} {each.mode}", each.turn, 0


def spent(turn: Callable[[Tensor], Tensor], q: Tensor, direction: str, tables: int) -> int:
    """Bytes beyond the result: of a forward without gradients, or of a backward beyond what the forward kept."""
    device = q.device.type
    if direction == "forward":
        with torch.inference_mode():
            return beyond(lambda: turn(q), device, given=[q], tables=tables)
    leaf, grad = q.detach().clone().requires_grad_(), torch.randn_like(q)
    torch.autograd.grad(turn(leaf), leaf, grad)
    outs = [turn(leaf) for _ in range(3)]  # one for each call that `beyond` makes
    return beyond(lambda: torch.autograd.grad(outs.pop(), leaf, grad), device)
