"""Building tables: per-axis against every cell, resampling against torch's own, and next to the peers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import ndpos
from tests.benchmarks.paired import Task, in_turn
from tests.benchmarks.rows import Bound, Job, Row, Settings

CLIP, QUICK_CLIP = (16, 64, 64), (4, 8, 8)
IMAGE = (64, 64)

Case = tuple[str, str, Callable[[], Any], Callable[[], Any], Bound | None]  # case, over, ndpos, the plain way, bound


def jobs(settings: Settings) -> Iterator[Job]:
    with torch.device(settings.device):
        found = [*on_grid(settings)] if settings.quick else [*on_grid(settings), *resized(), *peer_tables(settings)]
    for case in found:
        yield Job(f"{case[0]} / {case[1]}", lambda case=case: measure(settings, *case))


def measure(
    settings: Settings, case: str, over: str, ours: Callable[[], Any], other: Callable[[], Any], bound: Bound | None
) -> Iterator[Row]:
    with torch.inference_mode(), torch.device(settings.device):
        times = in_turn({"ours": Task(ours)}, Task(other), pairs=settings.pairs, clock=settings.clock, label=case)
    held = bound if settings.device == "cpu" and not settings.quick else None
    yield Row("tables", case, "ndpos", over, times.over_reference("ours"), held)


def on_grid(settings: Settings) -> Iterator[Case]:
    clip = QUICK_CLIP if settings.quick else CLIP
    name = "x".join(map(str, clip))
    cells = ndpos.grid(clip).flatten(0, -2)
    rope = ndpos.RotaryEmbedding(ndpos.split(64, 3))
    yield f"rope.on_grid {name}, 64 channels", "every cell", lambda: rope.on_grid(clip), lambda: rope(cells), Bound(0.2)
    for layout in ("interleaved", "sin_cos"):
        emb = ndpos.SinusoidalEmbedding(ndpos.split(64, 3), layout=layout)
        case = f"sinusoidal.on_grid {name}, 64 channels, {layout}"
        yield case, "every cell", lambda emb=emb: emb.on_grid(clip), lambda emb=emb: emb(cells), Bound(0.2)


def resized() -> Iterator[Case]:
    table, volume = torch.randn(64, 64, 1024), torch.randn(16, 32, 32, 768)
    result = torch.empty(32, 48, 48, 768)

    def plain() -> torch.Tensor:  # as a table has to be taken there and back: channels first, resampled, channels last
        image = table.permute(2, 0, 1)[None]
        return F.interpolate(image, size=(96, 96), mode="bicubic", antialias=True)[0].permute(1, 2, 0).contiguous()

    def ours() -> torch.Tensor:
        return ndpos.resize(table, (96, 96), old_sizes=(64, 64))

    def grown() -> torch.Tensor:
        return ndpos.resize(volume, (32, 48, 48), old_sizes=(16, 32, 32))

    yield "resize 64x64x1024 to 96x96, cubic", "F.interpolate", ours, plain, Bound(1.0)
    yield "resize 16x32x32x768 to 32x48x48, cubic", "clone of the result", grown, result.clone, None


def peer_tables(settings: Settings) -> Iterator[Case]:
    """cos and sin of an image as the peers build them: float32 angles, a number per channel."""
    rope = ndpos.RotaryEmbedding(ndpos.split(64, 2), base=100.0)
    case = "rope.on_grid 64x64, 64 channels"
    try:
        build = importlib.import_module("timm.layers").build_rotary_pos_embed

        def timm_table() -> Any:
            return build(list(IMAGE), dim=64, temperature=100.0, in_pixels=False, device=torch.device(settings.device))

        yield case, "timm's build_rotary_pos_embed", lambda: rope.on_grid(IMAGE), timm_table, None
    except ImportError as error:
        settings.skip("timm's tables", f"not installed ({error})")
    try:
        lucid = importlib.import_module("rotary_embedding_torch").RotaryEmbedding(
            dim=32, theta=100, cache_if_possible=False
        )

        def lucid_table() -> Any:
            freqs = lucid.get_axial_freqs(*IMAGE)
            return freqs.cos(), freqs.sin()

        yield case, "rotary-embedding-torch's get_axial_freqs", lambda: rope.on_grid(IMAGE), lucid_table, None
    except ImportError as error:
        settings.skip("rotary-embedding-torch's tables", f"not installed ({error})")
