"""How much an added rotation turns, and what is left of the learned table: settings of a model, never its state."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ndpos.encode.rotary import RotaryEmbedding
from ndpos.rotation import Rotation
from ndpos.sizes import finite
from ndpos.timm.kept import on_grid

__all__: list[str] = []

Absolute = Literal["keep", "fade", "drop"]


class Settings(nn.Module):
    """All plain numbers, that copies and pickles carry and state dicts do not.

    Attributes:
        rope: The RotaryEmbedding whose rotation every block gets, or None.
        absolute: What becomes of ``pos_embed``: ``"keep"``, ``"fade"`` (times 1 - fade), ``"drop"``.
        strength: From 0, no rotation, to 1: what angles are multiplied by, of both axes or of (y, x). Can be set at any
            time, and so can
        fade: How much of a fading table is gone, from 0 to 1; None follows the strength, the smaller one of two.
        reference_sizes: Patches per axis whose coordinates the rotation keeps, or None for grid steps.
    """

    rope: RotaryEmbedding | None
    absolute: Absolute
    reference_sizes: tuple[int, int] | None
    num_prefix_tokens: int
    _strength: float | tuple[float, float]
    _fade: float | None = None
    # The same for graphs, into which numbers would be fixed. No buffers: never state, never moved or cast.
    _strength_in_graphs: Tensor
    _weight_in_graphs: Tensor

    @property
    def strength(self) -> float | tuple[float, float]:
        return self._strength

    @strength.setter
    def strength(self, value: float | Sequence[float]) -> None:
        self._strength = check_strength("ndpos.timm", value)
        self._keep_for_graphs()

    @property
    def fade(self) -> float | None:
        return self._fade

    @fade.setter
    def fade(self, value: float | None) -> None:
        self._fade = None if value is None else check_part("ndpos.timm", "fade", value)
        self._keep_for_graphs()

    def _keep_for_graphs(self) -> None:
        with torch.inference_mode(False):  # a tensor born in inference mode could not take part in training
            self._strength_in_graphs = torch.tensor(_per_axis(self._strength), dtype=torch.float64, device="cpu")
            self._weight_in_graphs = torch.tensor(self._table_weight(), dtype=torch.float64, device="cpu")

    def _table_weight(self) -> float:
        """What is left of a fading table: as much as the least turned axis still needs, unless ``fade`` says."""
        return 1 - (min(_per_axis(self._strength)) if self._fade is None else self._fade)

    def _rotation(self, sizes: Sequence[int], x: Tensor) -> Rotation | None:
        """The rotation of the patches on their grid, for tokens x; once per forward."""
        settings = self._settings(x)
        if settings is None or self.rope is None:
            return None
        if self.reference_sizes is not None:
            settings["reference_sizes"] = self.reference_sizes
        return on_grid(self.rope, sizes, device=x.device, **settings)

    def _settings(self, x: Tensor) -> dict[str, Any] | None:
        """How the rotation of tokens ``x`` is made, wherever they stand; None where nothing is to be turned."""
        if self.rope is None:
            return None
        settings: dict[str, Any] = {"num_prefix": self.num_prefix_tokens}
        if x.dtype == torch.float64:
            settings["dtype"] = torch.float64
        per_axis = _per_axis(self._strength)
        if torch.compiler.is_compiling():
            settings["strength"] = self._strength_in_graphs
        elif not any(per_axis) and not self.rope.learnable:
            return None  # the model as it was, bit for bit; a graph turns by 0 instead, to serve every strength
        elif per_axis != (1, 1):
            settings["strength"] = self._strength
        return settings


def check_strength(caller: str, value: Any) -> float | tuple[float, float]:
    """``value`` as a float from 0 to 1, or one for each of (y, x)."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != 2:
            raise ValueError(f"{caller}: strength is one number, or one for each axis (y, x), got {value!r}.")
        return check_part(caller, "strength", value[0]), check_part(caller, "strength", value[1])
    return check_part(caller, "strength", value)


def check_part(caller: str, name: str, value: Any) -> float:
    """``value`` as a float from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{caller}: {name} is a plain number, got {value!r}. A tensor or array? value.item().")
    part = finite(caller, name, value)
    if not 0 <= part <= 1:
        raise ValueError(f"{caller}: {name} is from 0, none of it, to 1, the whole of it; got {value!r}.")
    return part


def _per_axis(strength: float | tuple[float, float]) -> tuple[float, float]:
    return strength if isinstance(strength, tuple) else (strength, strength)


def check_absolute(caller: str, absolute: str) -> None:
    if absolute not in get_args(Absolute):
        raise ValueError(f"{caller}: absolute is one of {get_args(Absolute)}, got {absolute!r}.")
