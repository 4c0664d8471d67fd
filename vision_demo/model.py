"""The model: timm's Vision Transformer, small, and the one line that gives it positions."""

from __future__ import annotations

from typing import Literal

import torch
from timm.models import VisionTransformer

import ndpos.timm
from vision_demo.data import CLASSES

Positions = Literal["none", "rope"]

TRAINED_SIZE = 32  # pixels: a grid of 8 x 8 patches
PATCH_SIZE = 4
WIDTH = 64
HEADS = 4  # head_dim 16: RoPE turns 4 channel pairs by y and 4 by x


def build_model(positions: Positions, *, seed: int) -> VisionTransformer:
    """A Vision Transformer of about 100,000 parameters; the same seed gives the same weights whatever ``positions``.

    The head reads the mean over all patches, not a class token: RoPE then enters only as differences between patches.

    Args:
        positions: ``"none"``, attention over an unordered bag of patches; ``"rope"``, queries and keys turned by where
            their patch stands on the (y, x) grid. RoPE adds no parameter.
        seed: Of the initial weights; the caller's random state is left as it was.

    Returns:
        A module from (batch, 1, height, width), both multiples of 4, to logits (batch, 10).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VisionTransformer(
            img_size=TRAINED_SIZE,
            patch_size=PATCH_SIZE,
            in_chans=1,
            num_classes=CLASSES,
            embed_dim=WIDTH,
            depth=3,
            num_heads=HEADS,
            mlp_ratio=2.0,
            class_token=False,
            global_pool="avg",
            pos_embed="none",  # no learned table: the position-less model has no idea where a patch is
            weight_init="reset",  # PyTorch's own: at 64 wide timm's are so small that attention stays flat for epochs
            dynamic_img_size=True,  # any grid, so that one model is measured at several sizes
        )
    return ndpos.timm.add_rope(model) if positions == "rope" else model
