"""``python -m tests.benchmarks``: what tables and the timm wrap cost, as ratios of one run."""

from __future__ import annotations

import argparse
import platform

import torch
import torch.nn.functional as F

import ndpos
from tests.benchmarks import wrapped
from tests.benchmarks.paired import paired

CLIP = (16, 64, 64)


def cases():
    """Name, ndpos, the plain way, and the bound that the ratio is to stay under."""
    cells = ndpos.grid(CLIP).flatten(0, -2)
    rope = ndpos.RotaryEmbedding(ndpos.split(64, 3))
    yield "rope.on_grid 16x64x64, 64 channels / every cell", lambda: rope.on_grid(CLIP), lambda: rope(cells), 0.2
    for layout in ("interleaved", "sin_cos"):
        emb = ndpos.SinusoidalEmbedding(ndpos.split(64, 3), layout=layout)
        name = f"sinusoidal.on_grid 16x64x64, 64 channels, {layout} / every cell"
        yield name, lambda emb=emb: emb.on_grid(CLIP), lambda emb=emb: emb(cells), 0.2
    table = torch.randn(64, 64, 1024)

    def peer():  # as a table has to be taken there and back: channels first, resampled, channels last
        image = table.permute(2, 0, 1)[None]
        return F.interpolate(image, size=(96, 96), mode="bicubic", antialias=True)[0].permute(1, 2, 0).contiguous()

    yield "resize 64x64x1024 to 96x96, cubic / F.interpolate", lambda: resize(table, (96, 96), (64, 64)), peer, 1.0
    volume = torch.randn(16, 32, 32, 768)
    name = "resize 16x32x32x768 to 32x48x48, cubic / clone of the result"
    result = torch.empty(32, 48, 48, 768)
    yield name, lambda: resize(volume, (32, 48, 48), (16, 32, 32)), lambda: result.clone(), None


def resize(table, new, old):
    return ndpos.resize(table, new, old_sizes=old)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--pairs", type=int, default=41, help="paired runs of each case (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {options.threads} threads, {platform.machine()}; medians of {options.pairs} pairs"
    )
    for name, ours, other, bound in cases():
        pairs = options.pairs if bound is not None else max(3, options.pairs // 8)
        with torch.inference_mode():
            seen = paired(ours, other, pairs=pairs)
        limit = "" if bound is None else f"  (at most {bound})"
        print(f"{name:<66} {seen.ratio:8.3f}   {seen.a_ms:8.2f} ms / {seen.b_ms:8.2f} ms{limit}")
    wrapped.report(max(3, options.pairs // 8))


if __name__ == "__main__":
    main()
