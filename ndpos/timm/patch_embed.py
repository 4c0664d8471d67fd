"""timm's patch embedding with sizes left open: a compiled model takes every image size in one graph."""

from __future__ import annotations

import torch.nn.functional as F
from timm.layers import PatchEmbed
from timm.layers.format import Format, nchw_to
from torch import Tensor

__all__: list[str] = []


class OpenPatchEmbed(PatchEmbed):  # type: ignore[misc]  # timm is untyped
    """timm's ``PatchEmbed``, the same numbers; made by class change, never built by hand.

    timm formats its assertions before it asks them, and a symbolic size in a text is fixed into the graph: one graph
    per image size. Here a text is made only for an error.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.proj.in_channels:
            raise ValueError(
                f"ndpos.timm: the model takes images (batch, channels, height, width) with {self.proj.in_channels} "
                f"channels, got {tuple(x.shape)}. Channels last? images.movedim(-1, 1)."
            )
        height, width = x.shape[-2:]
        rows, columns = self.patch_size
        if self.img_size is not None and self.strict_img_size and not (height, width) == tuple(self.img_size):
            raise ValueError(
                f"ndpos.timm: the model takes images of {self.img_size[0]} x {self.img_size[1]} pixels, got {height} x "
                f"{width}. ndpos.timm.resize(model, ({height}, {width})) moves it there; dynamic_img_size=True when "
                f"it is built takes any size."
            )
        divided = height % rows == 0 and width % columns == 0
        if self.img_size is not None and not self.strict_img_size and not self.dynamic_img_pad and not divided:
            raise ValueError(
                f"ndpos.timm: patches of {rows} x {columns} do not divide an image of {height} x {width} pixels. "
                f"Resize or pad the image, or build the model with dynamic_img_pad=True."
            )
        if self.dynamic_img_pad:
            x = F.pad(x, (0, -width % columns, 0, -height % rows))
        x = self.proj(x)
        if self.flatten:
            x = x.flatten(2).transpose(1, 2)
        elif self.output_fmt != Format.NCHW:
            x = nchw_to(x, self.output_fmt)
        normed: Tensor = self.norm(x)
        return normed
