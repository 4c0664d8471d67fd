"""What add_rope costs a timm ViT-S/16: bytes kept for the backward, and time, as ratios over the unwrapped model."""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor, nn

from tests.benchmarks.paired import paired


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that a forward keeps for its backward."""
    storages: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        kept.append(tensor)  # alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(storages.values())


def report(pairs: int) -> None:
    """Print a line for each measure; nothing where timm is absent."""
    try:
        import timm

        import ndpos.timm
    except ImportError:
        print("timm is absent: the wrap is not measured", file=sys.stderr)
        return
    plain = timm.create_model("vit_small_patch16_224", num_classes=10).train()
    x = torch.randn(4, 3, 224, 224)
    before = kept_bytes(plain, x)
    for name, settings in {"fixed": {}, "learnable": {"learnable": True}}.items():
        wrapped = ndpos.timm.add_rope(copy.deepcopy(plain), **settings)
        after = kept_bytes(wrapped, x)
        limit = "  (at most 1.01)" if name == "fixed" else ""
        print(f"{f'ViT-S/16, batch 4, {name}: bytes kept, wrapped / plain':<66} {after / before:8.4f}{limit}")
    wrapped = ndpos.timm.add_rope(copy.deepcopy(plain))
    seen = paired(lambda: wrapped(x).sum().backward(), lambda: plain(x).sum().backward(), pairs=pairs)
    print(f"{'ViT-S/16, batch 4: a training step, wrapped / plain':<66} {seen.ratio:8.3f}")
    with torch.inference_mode():
        seen = paired(lambda: wrapped(x), lambda: plain(x), pairs=pairs)
    print(f"{'ViT-S/16, batch 4: a forward, wrapped / plain':<66} {seen.ratio:8.3f}")
