"""Every model that timm registers: whether it can be given RoPE, has it already, or why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import timm
import torch
from torch import nn

from ndpos.timm.blocks import turning_places
from ndpos.timm.families import ENCODED
from ndpos.timm.reasons import why_not
from ndpos.timm.rotating import rope_of
from ndpos.timm.wrap import add_rope

__all__ = ["SupportRow", "timm_support"]

State = Literal["supported", "rotates already", "not supported"]


class SupportRow(NamedTuple):
    """One registered model: its name, the file of timm that it comes from, its state, and what there is to say.

    Raises:
        Nothing.

    Example:
        >>> from ndpos.timm import SupportRow
        >>> SupportRow("vit_base_patch16_224", "vision_transformer", "supported", "VisionTransformer of Block").state
        'supported'

    Args:
        name, family, state, note: As above; the note is the classes, the convention, or the reason.

    Source:
        None of its own.
    """

    name: str
    family: str
    state: State
    note: str


def timm_support(pattern: str | Sequence[str] = "", *, names: Sequence[str] | None = None) -> Iterator[SupportRow]:
    """Go through timm's registry on the meta device: which models :func:`ndpos.timm.add_rope` takes, and why not more.

    A model is supported if its class, blocks and attention are ones that ndpos turns; each such combination runs
    forward, backward, compiled and under the law of displacement in the tests.

    Args:
        pattern: As ``timm.list_models`` takes it: ``"vit_*"``; all without one.
        names: Names instead.

    Returns:
        A :class:`ndpos.timm.SupportRow` for each model, one by one: hundreds take minutes.

    Raises:
        RuntimeError: a name that timm does not register.

    Example:
        >>> import ndpos.timm
        >>> [(row.name, row.state) for row in ndpos.timm.timm_support("vit_*_patch16_rope_224")][:1]
        [('vit_base_patch16_rope_224', 'rotates already')]

    Source:
        timm's registry of models.
    """
    for name in timm.list_models(pattern) if names is None else names:
        with torch.device("meta"):
            model = timm.create_model(name)
        yield SupportRow(name, type(model).__module__.rpartition(".")[2], *_state(model))


def _state(model: nn.Module) -> tuple[State, str]:
    try:
        found = rope_of(model)
    except ValueError:
        pass
    else:
        where = "x first" if found.order == (1, 0) else "y first"
        return "rotates already", f"{found.ladder}, base {found.base}, {found.pairing}, {where}, {found.place}"
    try:
        signature = signature_of(model)
        add_rope(model, strength=0.0)
    except (TypeError, ValueError) as refused:
        return "not supported", why_not(model) if type(model) not in ENCODED else str(refused).partition("\n")[0]
    return "supported", signature


def signature_of(model: Any) -> str:
    """The class of a model, its blocks, where these make queries and keys, and what else sets its forward apart."""
    blocks = sorted({type(block).__name__ for block in getattr(model, "blocks", ())})
    places = [place for block in getattr(model, "blocks", ()) for place in turning_places(block)]
    kinds = sorted({type(place).__name__ for place in places})
    flags = {
        "norms": any(not isinstance(getattr(place, "q_norm", nn.Identity()), nn.Identity) for place in places),
        "gate": any(getattr(place, "gate", None) is not None for place in places),
        "separate projections": any(getattr(place, "qkv", 0) is None for place in places),
        "shared bias": any(getattr(model, name, None) is not None for name in ("rel_pos_bias", "shared_rel_pos")),
    }
    said = ", ".join(name for name, holds in flags.items() if holds)
    named = f"{type(model).__name__} of {' and '.join(blocks)}"
    named += "" if kinds == blocks else f" with {' and '.join(kinds)}"
    return f"{named} ({said})" if said else named


def summary(rows: Sequence[SupportRow]) -> str:
    """A Markdown table: how many models of each family are in which state, and why."""
    counts = Counter((row.family, row.state, _short(row)) for row in rows)
    order = {"supported": 0, "rotates already": 1, "not supported": 2}
    lines = ["| family in timm | models | state | |", "| --- | --- | --- | --- |"]
    for (family, state, note), count in sorted(counts.items(), key=lambda each: (order[each[0][1]], each[0])):
        lines.append(f"| {family} | {count} | {state} | {note} |")
    return "\n".join(lines)


def _short(row: SupportRow) -> str:
    """Without what differs inside a family: numbers of a convention, flags."""
    return row.note.partition(", base")[0].partition(" (")[0]
