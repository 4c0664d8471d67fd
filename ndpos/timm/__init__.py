"""A timm ViT given ndpos encodings. The only room that imports timm."""

from __future__ import annotations

try:
    import timm as _timm  # noqa: F401  # only asked whether it is there, for one message instead of eight
except ImportError as error:
    raise ImportError("ndpos.timm needs timm 1.0.31 or newer: pip install 'ndpos[timm]'.") from error

from ndpos.timm.convention import Convention
from ndpos.timm.decay import no_weight_decay
from ndpos.timm.fused import fuse_rope, unfuse_rope
from ndpos.timm.regrid import resize
from ndpos.timm.rotating import rope_of, set_rope
from ndpos.timm.schedule import Schedule
from ndpos.timm.wrap import add_rope, set_table

__all__ = [
    "Convention",
    "Schedule",
    "add_rope",
    "fuse_rope",
    "no_weight_decay",
    "resize",
    "rope_of",
    "set_rope",
    "set_table",
    "unfuse_rope",
]
