"""A rotation kept from one forward to the next: making it takes as long as turning two blocks by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ndpos.encode.rotary import RotaryEmbedding
from ndpos.rotation import Rotation

__all__: list[str] = []

# The last one of each embedding, beside the module and not in it: copies, pickles and state dicts hold no tables.
_KEPT: WeakKeyDictionary[RotaryEmbedding, tuple[Any, tuple[Any, ...], Rotation]] = WeakKeyDictionary()


def on_grid(rope: RotaryEmbedding, sizes: Sequence[int], **settings: Any) -> Rotation:
    """``rope.on_grid(sizes, **settings)``, the one made last if nothing that it depends on has changed."""
    if not _can_keep(rope, settings["device"]):
        return rope.on_grid(sizes, **settings)
    numbers = (rope.pairing, rope.blocks, rope.split, rope.heads, rope.layers, rope.backend, tuple(sizes))
    asked = (*numbers, *settings.items())
    matrix, known, turn = _KEPT.get(rope, (None, None, None))
    if matrix is not rope.matrix or known != asked or turn is None:  # a matrix of each layer is long to compare
        with torch.inference_mode(False):  # tensors of inference could not be trained with later
            turn = rope.on_grid(sizes, **settings)
        _KEPT[rope] = rope.matrix, asked, turn
    return turn


def _can_keep(rope: RotaryEmbedding, device: torch.device) -> bool:
    """Fixed frequencies whose making nobody watches, on the CPU: elsewhere a table belongs to a stream or a graph."""
    return (
        device.type == "cpu"
        and type(rope) is RotaryEmbedding
        and not rope.learnable
        and not (rope._forward_hooks or rope._forward_pre_hooks or "forward" in vars(rope))
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
    )
