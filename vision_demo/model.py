"""The model: timm's Vision Transformer, small, and the one line for each encoding that gives it positions."""

from __future__ import annotations

import torch
from timm.layers import PatchEmbed
from timm.models import VisionTransformer
from torch import Tensor, nn

import ndpos
import ndpos.timm
from vision_demo.data import CLASSES

ENCODINGS: dict[str, str] = {  # name: title
    "none": "no positions",
    "integer": "integer",
    "binary": "binary",
    "sinusoidal-added": "sinusoidal, added",
    "sinusoidal-concatenated": "sinusoidal, concatenated",
    "learned-joint": "learned, joint",
    "learned-axial": "learned, axial",
    "learned-modulo": "learned, modulo",
    "rope-axial": "RoPE axial",
    "rope-mixed": "RoPE mixed",
    "rope-and-learned": "RoPE with learned table",
}

TRAINED_SIZE = (32, 32)  # (height, width) in pixels: a grid of 8 x 8 patches
PATCH_SIZE = 4
WIDTH = 64
DEPTH = 3
HEADS = 4
HEAD_DIM = WIDTH // HEADS  # 16: RoPE turns 4 channel pairs by y and 4 by x
PLACES = WIDTH // 2  # channels of the concatenated table; the others are enough for a patch of one brightness


def build_model(
    encoding: str,
    *,
    seed: int,
    classes: int = CLASSES,
    channels: int = 1,
    image_size: tuple[int, int] = TRAINED_SIZE,
) -> VisionTransformer:
    """A Vision Transformer of about 100,000 parameters; the same seed gives the same weights whatever the ``encoding``.

    The head reads the mean over all patches, not a class token: RoPE then enters only as differences between patches.
    At other sizes than ``image_size`` coordinates stay at the scale of the training: the grid is laid over the trained
    one, so that a digit drawn larger keeps its coordinates. :func:`use_raw_coordinates` counts patches instead. Learned
    tables have no coordinates: they are resampled, or repeated (modulo). Bits are those of the count of patches.

    Args:
        encoding: A name of :data:`ENCODINGS`. Of the weights that all encodings share only the patch embedding of
            ``"sinusoidal-concatenated"`` has another shape: it is the first half of the others'.
        seed: Of the initial weights; the caller's random state is left as it was.
        classes: Number of logits.
        channels: Of the images: 1 for grey, 3 for RGB.
        image_size: (height, width) of the training in pixels, multiples of 4.

    Returns:
        A module from (batch, channels, height, width), any multiples of 4, to logits (batch, classes).
    """
    if encoding not in ENCODINGS:
        raise ValueError(f"build_model: encoding is one of {', '.join(ENCODINGS)}, got {encoding!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VisionTransformer(
            img_size=image_size,
            patch_size=PATCH_SIZE,
            in_chans=channels,
            num_classes=classes,
            embed_dim=WIDTH,
            depth=DEPTH,
            num_heads=HEADS,
            mlp_ratio=2.0,
            class_token=False,
            global_pool="avg",
            pos_embed="none",  # no learned table of timm's: the position-less model has no idea where a patch is
            weight_init="reset",  # PyTorch's own: at 64 wide timm's are so small that attention stays flat for epochs
            dynamic_img_size=True,  # any grid, so that one model is measured at several sizes
        )
        # From here on randomness is the encoding's alone, anew from the seed: tables of one shape begin alike.
        torch.manual_seed(seed)
        return add_positions(model, encoding)


def add_positions(model: VisionTransformer, encoding: str) -> VisionTransformer:
    """Give the position-less ``model`` its encoding, in place; what is learned is drawn from torch's random state."""
    grid = model.patch_embed.grid_size  # (rows, columns) of patches at the trained size
    halves = ndpos.split(WIDTH, 2)  # 32 channels for y, 32 for x
    if encoding == "integer":
        ndpos.timm.set_table(model, ndpos.IntegerEmbedding(halves), reference_sizes=grid)
    elif encoding == "binary":
        ndpos.timm.set_table(model, ndpos.BinaryEmbedding(halves))
    elif encoding == "sinusoidal-added":
        ndpos.timm.set_table(model, ndpos.SinusoidalEmbedding(halves), reference_sizes=grid)
    elif encoding == "sinusoidal-concatenated":
        model.patch_embed = PatchEmbedWithPlaces(model.patch_embed)
    elif encoding == "learned-axial":
        ndpos.timm.set_table(model, ndpos.LearnedEmbedding(grid, WIDTH, kind="axial"))
    elif encoding == "learned-modulo":
        ndpos.timm.set_table(model, ndpos.LearnedEmbedding(grid, WIDTH, outside="wrap"))
    elif encoding in ("learned-joint", "rope-and-learned"):
        ndpos.timm.set_table(model, ndpos.LearnedEmbedding(grid, WIDTH))
    if encoding in ("rope-axial", "rope-and-learned"):
        ndpos.timm.add_rope(model, base=100.0, reference_sizes=grid)
    elif encoding == "rope-mixed":
        frequencies = ndpos.mixed(2, HEAD_DIM // 2, heads=HEADS, layers=DEPTH)
        rope = ndpos.RotaryEmbedding(ndpos.split(HEAD_DIM, 2), frequencies=frequencies, learnable=True)
        ndpos.timm.add_rope(model, rope=rope, reference_sizes=grid)
    return model


class PatchEmbedWithPlaces(PatchEmbed):
    """A patch embedding on the first channels, and on the others the sinusoidal table of where the patch stands.

    Nothing is added: what a patch shows and where it is meet only in the layers behind.

    Args:
        patches: timm's patch embedding of the whole width, (rows, columns) kept apart; its first channels are taken.

    Attributes:
        reference_sizes: (rows, columns) whose coordinates are kept at other sizes, or None for grid steps.
    """

    def __init__(self, patches: PatchEmbed) -> None:
        super().__init__(
            patches.img_size,
            PATCH_SIZE,
            patches.proj.in_channels,
            WIDTH - PLACES,
            output_fmt="NHWC",
            strict_img_size=False,
        )
        self.proj.weight = nn.Parameter(patches.proj.weight.detach()[: WIDTH - PLACES].clone())
        self.proj.bias = nn.Parameter(patches.proj.bias.detach()[: WIDTH - PLACES].clone())
        self.places = ndpos.SinusoidalEmbedding(ndpos.split(PLACES, 2))
        self.reference_sizes: tuple[int, int] | None = patches.grid_size

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, rows, columns, width of the model)."""
        patches = super().forward(x)
        batch, *sizes, _ = patches.shape
        if self.reference_sizes is None:
            coords = ndpos.grid(sizes, device=x.device)
        else:  # cell borders coincide, as set_table has it
            coords = ndpos.scaled_grid(sizes, reference_sizes=self.reference_sizes, align="centre", device=x.device)
        table = self.places(coords, dtype=patches.dtype)  # (rows, columns, PLACES)
        return torch.cat((patches, table.expand(batch, -1, -1, -1)), dim=-1)


def use_raw_coordinates(model: nn.Module) -> bool:
    """Let coordinates count patches at every size, in place; the weights and the trained size are not affected.

    Returns:
        Whether the model has coordinates at the scale of the training; if not, nothing has changed.
    """
    changed = False
    for module in model.modules():
        for name in ("reference_sizes", "table_reference_sizes"):
            if getattr(module, name, None) is not None:
                setattr(module, name, None)
                changed = True
    return changed
