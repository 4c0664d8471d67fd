"""Turning queries: time over ``clone`` of the same tensor, and ndpos against the peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import ndpos
from tests.benchmarks.paired import Task, Times, in_turn
from tests.benchmarks.peers import PEERS, Contender, peers
from tests.benchmarks.rows import DIRECTIONS, PAIRINGS, Bound, Job, Row, Settings

LARGE = 10e6  # bytes: "10 MB and more"
LEFT_OUT = ("clip-32k", "float16")  # of a run of all shapes, for its time
BOTH_SHAPES = ("vit-s-224", "vit-b-224", "vit-l-518")
MANY_TOKENS = 8000  # from here on a CUDA run reports its bandwidth


class Shape(NamedTuple):
    """Queries ``(batch, heads, tokens, head_dim)`` of a grid with prefix tokens in front."""

    title: str
    batch: int
    heads: int
    head_dim: int
    sizes: tuple[int, ...]
    num_prefix: int = 0

    @property
    def tokens(self) -> int:
        return self.num_prefix + torch.Size(self.sizes).numel()

    def queries(self, settings: Settings, dtype: str) -> Tensor:
        size = (settings.batch * self.batch, self.heads, self.tokens, self.head_dim)
        return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(settings.device, settings.dtype(dtype))


SHAPES = {
    "vit-s-224": Shape("ViT-S/16 at 224", 1, 6, 64, (14, 14), 1),
    "vit-b-224": Shape("ViT-B/16 at 224, batch 8", 8, 12, 64, (14, 14), 1),
    "vit-l-518": Shape("ViT-L/14 at 518 with registers, batch 2", 2, 16, 64, (37, 37), 5),
    "image-1024": Shape("image of 1024 x 1024, patches of 16", 1, 16, 64, (64, 64)),
    "clip-8k": Shape("clip of 8192 tokens, head_dim 128", 1, 6, 128, (8, 32, 32)),
    "clip-32k": Shape("clip of 32768 tokens", 1, 6, 64, (32, 32, 32)),
}


def turns(
    settings: Settings, shape: Shape, pairing: str, heads: int | None = None
) -> Iterator[tuple[str, ndpos.Rotation]]:
    """A ready Rotation for every backend that this machine can run, by the backend's name."""
    rope = ndpos.RotaryEmbedding(ndpos.split(shape.head_dim, len(shape.sizes)), pairing=pairing, heads=heads)
    turn = rope.on_grid(shape.sizes, num_prefix=shape.num_prefix, device=settings.device)
    if not hasattr(ndpos, "backends") or "backend" not in {part.name for part in dataclasses.fields(turn)}:
        settings.skip("ndpos compiled, Triton", "this ndpos has no backends")
        yield "eager", turn
        return
    for backend in ndpos.backends():
        if not backend.ready:
            settings.skip(f"ndpos {backend.name}", backend.why)
        elif backend.name == "triton" and settings.device == "cpu":
            settings.skip("ndpos triton", "turns CUDA tensors alone")
        elif settings.quick and backend.name != "eager":
            settings.skip(f"ndpos {backend.name}", "a quick run compiles nothing")
        else:
            yield backend.name, dataclasses.replace(turn, backend=backend.name)


def contenders(settings: Settings, shape: Shape, pairing: str, dtype: torch.dtype) -> Iterator[Contender]:
    """ndpos by each backend and inside a user's ``torch.compile``, then the peers by the same angles."""
    ready = dict(turns(settings, shape, pairing))
    for backend, turn in ready.items():
        yield Contender("ndpos", backend, pairing, turn)
    turn = ready["eager"]
    if not settings.quick:
        free = dataclasses.replace(turn, backend=None) if hasattr(turn, "backend") else turn
        compiled = torch.compile(lambda q, turn: turn(q))
        yield Contender("ndpos", "torch.compile", pairing, lambda q: compiled(q, free))
    angles = torch.atan2(turn.sin, turn.cos).flatten(0, -2)
    prefix = angles.new_zeros(shape.num_prefix, angles.shape[-1])
    yield from peers(settings, torch.cat([prefix, angles]), pairing, dtype)


def jobs(settings: Settings) -> Iterator[Job]:
    for name in settings.shapes or SHAPES:
        for dtype in settings.dtypes:
            if (name, dtype) == LEFT_OUT and not settings.shapes:
                settings.skip(f"{name} {dtype}", "takes minutes, and has no bound; measured where --shapes names it")
                continue
            for direction in DIRECTIONS:
                case = f"{name} {dtype} {direction}"
                yield Job(case, lambda case=case: measure(settings, case))


def measure(settings: Settings, case: str) -> Iterator[Row]:
    """The rows of one case: over clone, then against the peers."""
    torch.compiler.reset()  # else later shapes meet graphs with open sizes, or the limit of recompilations
    name, dtype_name, direction = case.split()
    shape, dtype = SHAPES[name], settings.dtype(dtype_name)
    forward = direction == "forward"
    q = shape.queries(settings, dtype_name).requires_grad_(not forward)
    found = [each for pairing in PAIRINGS for each in contenders(settings, shape, pairing, dtype)]
    with torch.inference_mode(forward):
        agree(found, q)
        tasks = {each.name: task(each.turn, q) for each in found}
        times = in_turn(tasks, Task(q.detach().clone), pairs=settings.pairs, clock=settings.clock, label=case)
    copied = bandwidth_of_copy(settings) if q.is_cuda and shape.tokens >= MANY_TOKENS else None
    moved = 2 * q.nbytes + 4 * shape.tokens * shape.head_dim  # x, the result, and cos and sin in float32
    for each in found:
        seen = times.over_reference(each.name)
        share = None if copied is None else moved / (seen.a_ms * 1e-3) / copied
        bound = None if q.is_cuda else over_clone(each, dtype_name, direction, q.nbytes)
        yield Row("rotation", case, each.name, "clone", seen, bound, share)
    yield from against_peers(case, found, times, q)


def task(turn: Callable[[Tensor], Tensor], q: Tensor) -> Task:
    """A forward; or, where q requires a gradient, a backward alone after a forward that is not timed."""
    if not q.requires_grad:
        return Task(lambda: turn(q))
    grad = torch.randn_like(q, requires_grad=False)
    return Task(lambda out: torch.autograd.grad(out, q, grad), lambda: (turn(q),))


def agree(found: list[Contender], q: Tensor) -> None:
    """Refuse to time anything that is not the same rotation."""
    exact = {each.pairing: each.turn(q.float()) for each in found if each.who == "ndpos" and each.mode == "eager"}
    allowed = 3 * max(torch.finfo(q.dtype).eps, 1e-5) * q.abs().max().item()
    for each in found:
        off = (each.turn(q).float() - exact[each.pairing]).abs().max().item()
        if not off <= allowed:
            raise RuntimeError(f"{each.name} is not the same rotation: {off:.2g} off, at most {allowed:.2g} allowed")


def over_clone(each: Contender, dtype: str, direction: str, nbytes: int) -> Bound | None:
    """What time over clone is held to, on the CPU and forward."""
    if each.who != "ndpos" or direction != "forward" or dtype not in ("float32", "bfloat16"):
        return None
    if each.mode == "eager":
        return Bound(6.0 if dtype == "bfloat16" else {"interleaved": 1.6, "half": 4.5}[each.pairing])
    if nbytes < LARGE:
        return None
    return Bound(2.0, aim=1.3) if dtype == "float32" else Bound(4.0, aim=2.0)


def against_peers(case: str, found: list[Contender], times: Times, q: Tensor) -> Iterator[Row]:
    """How much faster than each eager peer, and whether anywhere slower than the fastest peer of the same mode."""
    dtype, direction = case.split()[1:]
    for pairing in PAIRINGS:
        ours = {each.mode: each.name for each in found if each.who == "ndpos" and each.pairing == pairing}
        theirs = [each for each in found if each.who in PEERS and each.pairing == pairing]
        fast = ours.get("triton" if q.is_cuda else "compiled")
        for each in theirs:
            if fast and each.mode == "eager":
                held = direction == "forward" and q.nbytes >= LARGE and dtype != "float16" and not q.is_cuda
                factor = 1.4 if each.who == "transformers" and dtype == "bfloat16" else 3.0
                bound = Bound(factor, "at least") if held else None
                yield Row("rotation", case, each.name, fast, times.over(each.name, fast), bound)
        for mode, name in ours.items():
            as_run = "torch.compile" if mode == "torch.compile" else "eager"
            rivals = [each.name for each in theirs if each.mode == as_run]
            if rivals:
                best = times.fastest(rivals)
                bound = None if q.is_cuda else Bound(1.0, judged="low")  # slower where the whole interval is above 1
                yield Row("rotation", case, name, f"fastest peer: {best}", times.over(name, best), bound)


def bandwidth_of_copy(settings: Settings) -> float:
    """Bytes a second, read and written, of the device's own copy of half a gibibyte."""
    source = torch.empty(2**29, dtype=torch.uint8, device=settings.device)
    target, clock = torch.empty_like(source), settings.clock
    copy = Task(lambda: target.copy_(source))
    return 2 * source.nbytes / (1e-3 * sorted(clock.sample(copy, 1) for _ in range(11))[5])


def both_jobs(settings: Settings) -> Iterator[Job]:
    """``turn.both(q, k)`` against ``turn(q), turn.keys(k)``."""
    if not hasattr(ndpos.Rotation, "both"):
        settings.skip("turn.both", "this ndpos does not have it")
        return
    for name in settings.shapes or BOTH_SHAPES:
        yield Job(f"{name} float32 both", lambda name=name: measure_both(settings, name))


def measure_both(settings: Settings, name: str) -> Iterator[Row]:
    torch.compiler.reset()
    case = f"{name} float32 both"
    q = SHAPES[name].queries(settings, "float32")
    k = q.flip(0).contiguous()
    for pairing in PAIRINGS:
        for backend, turn in turns(settings, SHAPES[name], pairing):
            both, apart = Task(lambda turn=turn: turn.both(q, k)), Task(lambda turn=turn: (turn(q), turn.keys(k)))
            with torch.inference_mode():
                times = in_turn({"both": both}, apart, pairs=settings.pairs, clock=settings.clock, label=case)
            seen = times.over_reference("both")
            yield Row("rotation", case, f"ndpos {backend}, {pairing}: both(q, k)", "turn(q), turn.keys(k)", seen)


def heads_jobs(settings: Settings) -> Iterator[Job]:
    """An angle for each head (RoPE-Mixed) against one for all of them."""
    for name in settings.shapes or BOTH_SHAPES:
        for dtype in settings.dtypes:
            yield Job(f"{name} {dtype} heads", lambda name=name, dtype=dtype: measure_heads(settings, name, dtype))


def measure_heads(settings: Settings, name: str, dtype: str) -> Iterator[Row]:
    torch.compiler.reset()
    case = f"{name} {dtype} heads"
    q = SHAPES[name].queries(settings, dtype)
    k = q.flip(0).contiguous()
    for pairing in PAIRINGS:
        shared = dict(turns(settings, SHAPES[name], pairing))
        for backend, apart in turns(settings, SHAPES[name], pairing, SHAPES[name].heads):
            with torch.inference_mode():
                times = in_turn(
                    {"apart": Task(lambda apart=apart: apart.both(q, k))},
                    Task(lambda turn=shared[backend]: turn.both(q, k)),
                    pairs=settings.pairs,
                    clock=settings.clock,
                    label=case,
                )
            seen = times.over_reference("apart")
            yield Row("rotation", case, f"ndpos {backend}, {pairing}: an angle for each head", "one for all", seen)
