"""Strength and fading raised step by step while a pretrained model is trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

from torch import nn

from ndpos.sizes import whole
from ndpos.timm.encoded import Encoded
from ndpos.timm.settings import check_strength

__all__ = ["Schedule"]


class Schedule:
    """Raise the strength of an added rotation during training, and fade the learned table on a schedule of its own.

    Used like torch's learning-rate schedules: made once, ``step()`` after every step of the optimiser. It sets
    ``model.strength`` (and ``model.fade``) of every model that it was given, such as a running average beside the
    trained one; compiled models need no new graph.

    Args:
        models: A model wrapped by :func:`ndpos.timm.add_rope`, or several; found inside DDP or ``torch.compile``.
        steps: Steps from the strength at which the model stands now up to ``to``.
        warmup: Steps before it begins to rise.
        to: Where it ends, from 0 to 1: of both axes, or of (y, x).
        curve: ``"cosine"`` (slow at both ends) or ``"linear"``.
        fade_steps: Steps over which the table of a model with ``absolute="fade"`` goes; None lets it follow the
            strength, as much of it left as the least turned axis lacks.
        fade_warmup: Steps before it begins to go.

    Raises:
        TypeError: no wrapped model inside one of ``models``, or counts that are not integers.
        ValueError: counts below 0 (``steps`` and ``fade_steps`` below 1), an unknown curve, a strength out of range, or
            ``fade_steps`` for a model whose table does not fade.

    Example:
        >>> import ndpos.timm, timm
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
        >>> model = ndpos.timm.add_rope(vit, strength=0.0, absolute="fade")
        >>> schedule = ndpos.timm.Schedule(model, steps=4, curve="linear", fade_warmup=2, fade_steps=4)
        >>> for _ in range(3):
        ...     schedule.step()  # after optimizer.step()
        >>> model.strength, model.fade
        (0.75, 0.25)

    Source:
        None of its own; the cosine of Loshchilov and Hutter 2016, SGDR, arXiv:1608.03983.
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        *,
        steps: int,
        warmup: int = 0,
        to: float | Sequence[float] = 1.0,
        curve: Literal["cosine", "linear"] = "cosine",
        fade_steps: int | None = None,
        fade_warmup: int = 0,
    ) -> None:
        caller = "ndpos.timm.Schedule"
        given = [models] if isinstance(models, nn.Module) else list(models)
        self.models = [_encoded(caller, model) for model in given]
        if not self.models:
            raise ValueError(f"{caller}: at least one model.")
        if curve not in ("cosine", "linear"):
            raise ValueError(f"{caller}: curve is 'cosine' or 'linear', got {curve!r}.")
        self.curve = curve
        self.steps = whole(caller, "steps", steps, minimum=1)
        self.warmup = whole(caller, "warmup", warmup)
        self.fade_warmup = whole(caller, "fade_warmup", fade_warmup)
        self.fade_steps = None if fade_steps is None else whole(caller, "fade_steps", fade_steps, minimum=1)
        if fade_steps is not None and any(model.absolute != "fade" for model in self.models):
            raise ValueError(f"{caller}: fade_steps are for add_rope(model, absolute='fade'); leave them out.")
        if fade_steps is None and self.fade_warmup:
            raise ValueError(
                f"{caller}: fade_warmup={fade_warmup} needs fade_steps; without, the table follows strength."
            )
        self.to = _both(check_strength(caller, to))
        self.start = _both(self.models[0].strength)
        self.taken = 0
        self._set()

    def step(self) -> None:
        """One step on; past the last one nothing changes any more."""
        self.taken += 1
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """The steps taken and where the strength began: what a resumed run needs."""
        return {"taken": self.taken, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`, and set the models accordingly."""
        caller = "ndpos.timm.Schedule.load_state_dict"
        self.taken = whole(caller, "taken", state["taken"])
        self.start = _both(check_strength(caller, state["start"]))
        self._set()

    def _set(self) -> None:
        done = self._progress(self.warmup, self.steps)
        both = tuple(low + done * (high - low) for low, high in zip(self.start, self.to, strict=True))
        for model in self.models:
            model.strength = both[0] if both[0] == both[1] else both
            if self.fade_steps is not None:
                model.fade = self._progress(self.fade_warmup, self.fade_steps)

    def _progress(self, warmup: int, steps: int) -> float:
        done = min(max(self.taken - warmup, 0) / steps, 1.0)
        return done if self.curve == "linear" or done == 1 else (1 - math.cos(math.pi * done)) / 2


def _encoded(caller: str, model: Any) -> Encoded:
    found = [each for each in model.modules() if isinstance(each, Encoded)] if isinstance(model, nn.Module) else []
    found = [each for each in found if each.rope is not None]
    if len(found) != 1:
        raise TypeError(
            f"{caller}: each model holds one that ndpos.timm.add_rope has wrapped; {type(model).__name__} holds "
            f"{len(found)}."
        )
    return found[0]


def _both(strength: Any) -> tuple[float, float]:
    return cast("tuple[float, float]", strength if isinstance(strength, tuple) else (strength, strength))
