"""How much of each old token goes into each new one, along one axis."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__: list[str] = []

Kernel = Literal["nearest", "nearest-exact", "linear", "cubic", "keys"]
Align = Literal["centre", "corner"]

GATHERS = ("nearest", "nearest-exact")  # kernels that copy rows: no weights, no antialias, no corner alignment
REACH = 2  # columns that the widest kernel (cubic) reaches past either border


def weights(old: int, new: int, kernel: Kernel, antialias: bool, align: Align, shift: float, unit: Tensor) -> Tensor:
    """How much of each old token goes into each new one: ``(new, old)``, rows that sum to one.

    ``shift`` is added to ``new`` where places are found, and nowhere else; ``unit`` has the dtype and device of the
    result. Built elementwise, so that one graph serves all sizes. Most of it is zero: next to nothing for the axes of a
    grid, but a single axis of 4096 tokens taken to 8192 costs 2 GB and some seconds.
    """
    row = torch.arange(new, dtype=unit.dtype, device=unit.device)[:, None]
    column = torch.arange(old, dtype=unit.dtype, device=unit.device)
    one = torch.ones_like(unit)
    if align == "centre":
        spacing = one * old / (new + shift)
        centre = (row + 0.5) * old / (new + shift) - 0.5
    else:
        # torch widens by the same spacing but puts antialiased centres half a token off, so that its corners drift.
        gaps = (one * (new - 1)).clamp(min=1)
        centre = row * (old - 1) / gaps
        spacing = centre[-1] / gaps  # 0 for a lone token, which so stays unwidened: it is the first row
    if antialias:
        inside = curve((centre - column) / spacing.clamp(min=1), kernel, antialias)
        return inside / inside.sum(dim=-1, keepdim=True)
    wide = torch.arange(-REACH, old + REACH, dtype=unit.dtype, device=unit.device)
    found = curve(centre - wide, kernel, antialias)
    before = found[:, :REACH].sum(dim=-1, keepdim=True)
    after = found[:, -REACH:].sum(dim=-1, keepdim=True)
    return found[:, REACH:-REACH] + before * (column == 0) + after * (column == old - 1)


def curve(distance: Tensor, kernel: Kernel, antialias: bool) -> Tensor:
    """Weight at a distance counted in (widened) columns; exactly 1 at 0 and 0 at every other integer."""
    x = distance.abs()
    if kernel == "linear":
        return (1 - x).clamp(min=0)
    a = -0.75 if kernel == "cubic" and not antialias else -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (x - 1) * (2 - x).clamp(min=0) ** 2
    return torch.where(x <= 1, near, far)
