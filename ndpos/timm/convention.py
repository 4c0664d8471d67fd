"""How a model turns its patches, in ndpos's terms: where they stand, and how fast each pair turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ndpos.encode.rotary import RotaryEmbedding
from ndpos.frequencies import geometric, matrix_of, periodic, pixel_bands, positive
from ndpos.kernels import Pairing
from ndpos.positions import augment, grid, normalised_grid
from ndpos.radians import turns
from ndpos.rotation import Rotation
from ndpos.sizes import finite, sizes_per_axis
from ndpos.subspaces import AxisSplit

__all__ = ["Convention"]

Ladder = Literal["geometric", "periodic", "pixel_linear", "pixel_log", "interleaved_sections", "learned"]
Place = Literal["steps", "axis", "shortest", "longest", "ends"]


@dataclass(frozen=True)
class Convention:
    """What :func:`ndpos.timm.rope_of` reads in a model, and :func:`ndpos.timm.set_rope` changes.

    A plain value: ``dataclasses.replace(found, base=500.0)`` is another one. Axes are (y, x) whatever the order of the
    channels; :attr:`frequencies` says which pair listens to which.

    Args:
        head_dim: Channels of a head.
        pairing: Which two channels make a pair.
        ladder: What frequencies are: ``"geometric"`` base^(-i/n) per axis; ``"periodic"`` 2 pi base^(-i/n) or 2 pi over
            periods; ``"pixel_linear"``, ``"pixel_log"`` bands; ``"interleaved_sections"`` one ladder over all pairs,
            which the axes take in turn, those of time at 0 (M-RoPE for images); ``"learned"``.
        place: Coordinates: ``"steps"`` of the grid; cell centres from -1 to 1 of each ``"axis"``, of the ``"shortest"``
            or ``"longest"`` one; or ``"ends"``, the first and the last patch at -1 and 1.
        base: The theta of the ladder; None where ``periods``, bands or learned numbers take its place.
        order: The axis of each block of channels, (1, 0) for x first.
        start: What is added to the index of a patch.
        reference_sizes: Patches per axis of the grid over which another one is laid, first cells together; or None.
        periods: Shortest and longest period, in place of a base.
        max_frequency: Pixels across the range, of the two kinds of bands.
        sections: Pairs of (t, y, x), for ``"interleaved_sections"``.
        learned: The frequencies, ``(layers, heads, 2, pairs)``, for ``"learned"``; not compared.
        shift, jitter, rescale: What training does to coordinates, as :func:`ndpos.augment`.
        num_prefix: Tokens in front that are not turned.

    Raises:
        ValueError: a setting out of range, or one that the ladder or the place does not use.

    Example:
        >>> import dataclasses, ndpos.timm, timm
        >>> model = timm.create_model("vit_small_patch16_rope_224", img_size=64, depth=1)
        >>> found = ndpos.timm.rope_of(model)
        >>> found.base, found.order, found.pairing, found.coords((2, 2)).tolist()
        (100.0, (1, 0), 'interleaved', [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> found.rotation((4, 4))
        Rotation(tokens=16, pairs=32, heads=1, pairing='interleaved', num_prefix=1)

    Source:
        timm's ``pos_embed_sincos.py`` and ``gemma4_vit.py``.
    """

    head_dim: int
    pairing: Pairing
    ladder: Ladder = "geometric"
    place: Place = "steps"
    base: float | None = None
    order: tuple[int, int] = (0, 1)
    start: float = 0.0
    reference_sizes: tuple[int, int] | None = None
    periods: tuple[float, float] | None = None
    max_frequency: float | None = None
    sections: tuple[int, int, int] | None = None
    learned: Tensor | None = field(default=None, compare=False)
    shift: float | None = None
    jitter: float | None = None
    rescale: float | None = None
    num_prefix: int = 0

    def __post_init__(self) -> None:
        caller = "ndpos.timm.Convention"
        needed = {
            "geometric": ("base",),
            "periodic": ("periods",) if self.periods is not None else ("base",),
            "pixel_linear": ("max_frequency",),
            "pixel_log": ("max_frequency",),
            "interleaved_sections": ("base", "sections"),
            "learned": ("learned",),
        }
        if self.ladder not in needed:
            raise ValueError(f"{caller}: ladder is one of {', '.join(needed)}, got {self.ladder!r}.")
        given = {"base", "periods", "max_frequency", "sections", "learned"}
        given = {name for name in given if getattr(self, name) is not None}
        if given != set(needed[self.ladder]):
            raise ValueError(
                f"{caller}: a {self.ladder} ladder is given by {' and '.join(needed[self.ladder])} alone, got "
                f"{', '.join(sorted(given)) or 'nothing'}."
            )
        for name in ("base", "max_frequency"):
            if getattr(self, name) is not None:
                positive(caller, name, getattr(self, name))
        finite(caller, "start", self.start)
        if self.place not in ("steps", "axis", "shortest", "longest", "ends"):
            raise ValueError(
                f"{caller}: place is 'steps', 'axis', 'shortest', 'longest' or 'ends', got {self.place!r}."
            )
        if self.reference_sizes is not None:
            sizes = sizes_per_axis(caller, self.reference_sizes, name="reference_sizes", minimum=1, axes=2)
            object.__setattr__(self, "reference_sizes", sizes)
            if self.place != "steps":
                raise ValueError(
                    f"{caller}: reference_sizes are for coordinates in steps; these are fractions of the picture "
                    f"(place={self.place!r}), which keep their range at every size."
                )
        augment(torch.zeros(1, 2), shift=self.shift, jitter=self.jitter, rescale=self.rescale)

    @property
    def frequencies(self) -> Tensor:
        """Radians per unit of coordinate ``(2, pairs)``, rows y and x; learned ones ``(layers, heads, 2, pairs)``."""
        if self.learned is not None:
            return self.learned
        if self.sections is not None:
            return self._of_sections(self.sections)
        split = AxisSplit((self.head_dim // 4 * 2,) * 2, order=self.order, dim=self.head_dim)
        if self.ladder == "periodic":
            low, high = self.periods or (None, None)
            return periodic(split, base=self.base, shortest=low, longest=high)
        if self.max_frequency is not None:
            spacing: Any = self.ladder.removeprefix("pixel_")
            return pixel_bands(split, max_frequency=self.max_frequency, spacing=spacing)
        return geometric(split, self.base or 1.0)

    def _of_sections(self, sections: tuple[int, int, int]) -> Tensor:
        """One ladder over all pairs; y takes 1, 4, 7, ... and x 2, 5, 8, ... while their count lasts, the rest nothing.

        The stops are cut at the last pair, as timm and its reference cut them: (8, 12, 12) of 32 is 11, 11, 10.
        """
        pairs, base = self.head_dim // 2, self.base or 1.0
        axis_of: list[int | None] = [None] * pairs
        for axis in (0, 1):
            for pair in range(axis + 1, min(3 * sections[axis + 1], pairs), 3):
                axis_of[pair] = axis
        values = [0.0 if axis is None else base ** (-pair / pairs) for pair, axis in enumerate(axis_of)]
        return matrix_of(2, [axis or 0 for axis in axis_of], values)

    def coords(
        self, sizes: Sequence[int], *, training: bool = False, device: torch.device | str | None = None
    ) -> Tensor:
        """Where the patches of a grid of ``sizes`` stand, ``(tokens, 2)``, (y, x); drawn anew each time in training."""
        per_axis = sizes_per_axis("ndpos.timm.Convention.coords", sizes, axes=2)
        if self.place == "steps":
            placed = grid(per_axis, start=float(self.start), device=device)
            if self.reference_sizes is not None:
                placed = placed * placed.new_tensor(
                    [r / n for r, n in zip(self.reference_sizes, per_axis, strict=True)]
                )
        elif self.place == "ends":
            placed = normalised_grid(per_axis, at="ends", device=device)
        else:
            placed = normalised_grid(per_axis, by=self.place, device=device)
            if self.start:
                whole = {"axis": per_axis, "shortest": [min(per_axis)] * 2, "longest": [max(per_axis)] * 2}
                placed = placed + 2 * self.start / placed.new_tensor(whole[self.place])
        return augment(
            placed.flatten(0, -2), shift=self.shift, jitter=self.jitter, rescale=self.rescale, training=training
        )

    def tables(
        self, sizes: Sequence[int], *, training: bool = False, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cos and sin ``(..., tokens, pairs)`` float32 on a grid; learned frequencies take gradients from them."""
        coords = self.coords(sizes, training=training, device=device)
        return turns(coords, self.frequencies.to(coords.device), torch.float32)

    def embedding(self) -> RotaryEmbedding:
        """A :class:`ndpos.RotaryEmbedding` with these frequencies, at what they are now if they are learned."""
        split = AxisSplit((self.head_dim // 4 * 2,) * 2, order=self.order, dim=self.head_dim)
        return RotaryEmbedding(split, pairing=self.pairing, frequencies=self.frequencies.detach())

    def rotation(self, sizes: Sequence[int], *, training: bool = False) -> Rotation:
        """The :class:`ndpos.Rotation` of a grid of ``sizes`` behind the prefix tokens of the model."""
        turn: Rotation = self.embedding()(self.coords(sizes, training=training), num_prefix=self.num_prefix)
        return turn
