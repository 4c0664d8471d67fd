"""What add_rope costs a timm ViT-S/16: bytes kept for the backward, as a ratio over the unwrapped model."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.benchmarks.paired import Ratio
from tests.benchmarks.rows import Bound, Row, Settings


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


def rows(settings: Settings) -> Iterator[Row]:
    """A row for each measure; none where timm is absent."""
    try:
        import timm

        import ndpos.timm
    except ImportError as error:
        settings.skip("the wrap of timm models", f"not installed ({error})")
        return
    plain = timm.create_model("vit_small_patch16_224", num_classes=10).train().to(settings.device)
    x = torch.randn(4, 3, 224, 224, device=settings.device)
    before = kept_bytes(plain, x)
    for name, learned in {"fixed": {}, "learnable": {"learnable": True}}.items():
        model = ndpos.timm.add_rope(copy.deepcopy(plain), **learned)
        share = kept_bytes(model, x) / before
        bound = Bound(1.01) if name == "fixed" else None
        yield Row("memory", "ViT-S/16, batch 4, bytes kept", f"add_rope, {name}", "plain", Ratio(*[share] * 3), bound)
