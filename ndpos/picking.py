"""Some of the tokens, layers or heads of a rotation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ndpos.kernels import Backend, Lattice, reads_sources
from ndpos.sizes import refuse_outside, whole

__all__: list[str] = []

PARTS = (
    "cos",
    "sin",
    "amplitude",
    "key_phase",
    "basis",
    "source_cos",
    "source_sin",
    "source_rows",
)  # the tensors of a Rotation; all other fields are settings

Turn = TypeVar("Turn", bound="Picked")


def replaced(turn: Turn, **parts: Any) -> Turn:
    """``turn`` with other parts."""
    return dataclasses.replace(turn, **parts)  # type: ignore[type-var]  # a Rotation is a dataclass


class Picked:
    """What :class:`ndpos.Rotation` picks from itself; the fields are declared there."""

    cos: Tensor
    sin: Tensor
    amplitude: Tensor | None
    num_layers: int | None
    num_prefix: int
    num_suffix: int
    backend: Backend | None
    source_cos: Tensor | None
    source_sin: Tensor | None
    source_rows: Tensor | None
    lattice: Lattice | None

    def __getitem__(self: Turn, tokens: Any) -> Turn:
        """The rotation of some tokens, for all samples alike: a slice, a mask ``(tokens,)`` or indices ``(kept,)``.

        Counts the rotated tokens only: prefix and suffix are kept. An integer keeps its dimension, as ``[i : i + 1]``.
        """
        count = self.cos.shape[-2]
        if isinstance(tokens, slice):
            return self._each_token(lambda part: part[..., tokens, :])
        if isinstance(tokens, int) and not isinstance(tokens, bool):
            if not -count <= tokens < count:
                raise IndexError(f"ndpos.Rotation: token {tokens} of {count}.")
            return self[slice(tokens % count, tokens % count + 1)]
        try:
            index = torch.as_tensor(tokens, device=self.cos.device)
            seen = f"{tuple(index.shape)} {index.dtype}"
        except (RuntimeError, TypeError, ValueError):
            index, seen = torch.empty(()), repr(tokens)
        if index.ndim != 1 or (index.dtype == torch.bool and index.shape[0] != count):
            raise ValueError(
                f"ndpos.Rotation[...]: a slice, a mask ({count},) or indices (kept,); got {seen}. Another subset per "
                f"sample: turn.take(indices), indices (batch, kept)."
            )
        return self.take(index.nonzero().flatten() if index.dtype == torch.bool else index)

    def take(self: Turn, indices: Tensor) -> Turn:
        """The rotation of kept or re-ordered tokens.

        Args:
            indices: ``(kept,)`` for all samples or ``(batch, kept)``, integers in [0, tokens), prefix not counted.

        Returns:
            A Rotation of ``kept`` tokens, with a batch dimension if ``indices`` has one. ``turn.take(i)(x[i])`` equals
            ``turn(x)[i]``.

        Raises:
            ValueError: indices that are not integers, out of range, or of another rank or batch.
        """
        dtype = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise ValueError(f"ndpos.Rotation.take: indices are integers, got {dtype}. A mask goes in turn[mask].")
        batch = tuple(self.cos.shape[self.num_layers is not None : -3])
        per_sample = indices.ndim == 2 and len(batch) < 2 and all(size in (1, indices.shape[0]) for size in batch)
        if indices.ndim != 1 and not per_sample:
            raise ValueError(
                f"ndpos.Rotation.take: indices are (kept,) or (batch, kept), got {tuple(indices.shape)} for a rotation "
                f"of batch {batch}."
            )
        if indices.device != self.cos.device:
            raise ValueError(
                f"ndpos.Rotation.take: indices are on {indices.device}, the rotation is on {self.cos.device}."
            )
        indices = indices.to(torch.int64)  # narrower integers cannot hold the number of tokens they are compared with
        refuse_outside(
            indices,
            self.cos.shape[-2],
            "ndpos.Rotation.take: indices are at least 0 and below the {size} rotated tokens; they do not count the "
            "prefix, so subtract num_prefix from positions in the sequence.",
        )
        if indices.ndim == 1:
            taken = self._each_token(lambda part: part.index_select(-2, indices))
            if not reads_sources(self.backend, self.cos.device):
                return taken
            cos, sin = (self.cos, self.sin) if self.source_cos is None else (self.source_cos, self.source_sin)
            rows = indices if self.source_rows is None else self.source_rows[indices]
            return replaced(taken, source_cos=cos, source_sin=sin, source_rows=rows, lattice=self.lattice)
        unbatched = 3 + (self.num_layers is not None)

        def gather(part: Tensor) -> Tensor:
            while part.ndim < 3:
                part = part.unsqueeze(0)
            part = part.unsqueeze(-4) if part.ndim <= unbatched else part
            # Not take_along_dim: it fixes the number of tokens into a compiled graph.
            kept, shape = indices.shape[1], (*part.shape[:-4], indices.shape[0], part.shape[-3])
            index = indices[:, None, :, None].expand(*shape, kept, part.shape[-1])
            return part.expand(*shape, -1, -1).gather(-2, index)

        return self._each_token(gather)

    def packed(self: Turn, cu_seqlens: Tensor, tokens: int) -> Turn:
        """The rotation of sequences of different lengths laid end to end: each starts at the first token again.

        Args:
            cu_seqlens: Cumulative lengths ``(sequences + 1,)``, integers from 0 to ``tokens``, as flash-attn has them.
            tokens: All tokens of the pack; asked for, since reading it from a GPU would wait for the device.

        Returns:
            A Rotation of ``tokens`` tokens.

        Raises:
            ValueError: lengths that are not cumulative over ``tokens`` or longer than the rotation, or a rotation with
                prefix or suffix tokens, which stand in the middle of a pack.
        """
        caller = "ndpos.Rotation.packed"
        tokens = whole(caller, "tokens", tokens)
        if self.num_prefix or self.num_suffix:
            raise ValueError(
                f"{caller}: num_prefix={self.num_prefix}, num_suffix={self.num_suffix} count tokens of one sequence; "
                f"in a pack they stand in the middle. Give them coordinates of their own, or pack the rest alone."
            )
        fits = isinstance(cu_seqlens, Tensor) and cu_seqlens.ndim == 1 and cu_seqlens.shape[0] >= 2
        if not fits or cu_seqlens.dtype not in (torch.int32, torch.int64):
            seen = f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}" if isinstance(cu_seqlens, Tensor) else cu_seqlens
            raise ValueError(f"{caller}: cu_seqlens are int32 or int64 (sequences + 1,), got {seen}.")
        cumulative = cu_seqlens.to(self.cos.device, torch.int64)
        ends = torch.stack((cumulative[0], tokens - cumulative[-1]))
        refuse_outside(
            torch.cat((ends, (cumulative[:-1] > cumulative[1:]).long())),
            1,
            f"{caller}: cu_seqlens start at 0, never fall, and end at the {tokens} tokens of the pack.",
        )
        place = torch.arange(tokens, device=cumulative.device)
        sequence = torch.searchsorted(cumulative, place, right=True) - 1
        return self.take(place - cumulative[sequence])

    def layer(self: Turn, index: int) -> Turn:
        """The rotation of one layer, for encodings with a frequency matrix per layer."""
        if self.num_layers is None or isinstance(index, bool) or not 0 <= index < self.num_layers:
            raise ValueError(
                f"ndpos.Rotation.layer: layer {index} of {self.num_layers or 'a rotation without layers'}."
            )
        rank = self.cos.ndim
        chosen: dict[str, Any] = {
            name: part.select(0, index) if part.ndim == rank else part
            for name, part in self._parts()
            if name != "basis"
        }
        return replaced(self, num_layers=None, **chosen)

    def head(self: Turn, heads: slice) -> Turn:
        """The rotation of some heads, for encodings with a frequency matrix per head (grouped keys, sharded heads)."""
        if not isinstance(heads, slice) or not len(range(self.cos.shape[-3])[heads]):
            raise ValueError(f"ndpos.Rotation.head: heads are a slice of {self.cos.shape[-3]} heads, got {heads!r}.")
        kept: dict[str, Any] = {
            name: part[..., heads, :, :] if part.ndim >= 3 and part.shape[-3] > 1 else part
            for name, part in self._parts()
        }
        return replaced(self, **kept)

    def _parts(self) -> list[tuple[str, Tensor]]:
        return [(name, getattr(self, name)) for name in PARTS if getattr(self, name) is not None]

    def _each_token(self: Turn, pick: Callable[[Tensor], Tensor]) -> Turn:
        """``pick`` applied to every part that has a value per token."""
        count = self.cos.shape[-2]
        picked: dict[str, Any] = {"cos": pick(self.cos), "sin": pick(self.sin), "lattice": None}
        picked |= {name: None for name in PARTS if name.startswith("source")}
        if self.amplitude is not None and self.amplitude.ndim >= 2 and self.amplitude.shape[-2] == count:
            picked["amplitude"] = pick(self.amplitude)
        return replaced(self, **picked)
