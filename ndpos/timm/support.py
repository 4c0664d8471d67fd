"""Every model that timm registers: whether it can be given RoPE, has it already, or why not."""

from __future__ import annotations

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

__all__: list[str] = []

State = Literal["supported", "rotates already", "not supported"]


class SupportRow(NamedTuple):
    """One registered model, the file of timm that it comes from, and its classes, its convention, or the reason."""

    name: str
    family: str
    state: State
    note: str


def timm_support(pattern: str | Sequence[str] = "", *, names: Sequence[str] | None = None) -> Iterator[SupportRow]:
    """Go through timm's registry on the meta device: which models :func:`ndpos.timm.add_rope` takes, and why not more.

    A model is supported if its class, blocks and attention are ones that ndpos turns; each such combination runs
    forward, backward, compiled and under the law of displacement in the tests. ``pattern`` as ``timm.list_models``
    takes it, or ``names`` instead. One row after the other, since hundreds take minutes.
    """
    for name in timm.list_models(pattern) if names is None else names:
        with torch.device("meta"):
            model = timm.create_model(name)
        yield SupportRow(name, timm.model_entrypoint(name).__module__.rpartition(".")[2], *_state(model))


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
    """A Markdown table: in which state how many models are, how or why, and the files of timm that they come from."""
    order: dict[str, int] = {"supported": 0, "rotates already": 1, "not supported": 2}
    kinds: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        kinds.setdefault((row.state, _short(row)), []).append(row.family)
    lines = ["| | how, or why not | models | files of timm |", "| --- | --- | --- | --- |"]
    for (state, note), families in sorted(kinds.items(), key=lambda each: (order[each[0][0]], -len(each[1]), each[0])):
        files = sorted(set(families))
        named = ", ".join(files) if len(files) < 20 else f"{len(files)} of them"
        lines.append(f"| {state} | {note} | {len(families)} | {named} |")
    return "\n".join(lines)


def _short(row: SupportRow) -> str:
    """Without what differs inside a kind: the base of a ladder, flags."""
    if row.state == "rotates already":
        return ", ".join(part for part in row.note.split(", ") if not part.startswith("base"))
    return row.note.partition(" (")[0] + (row.note.partition(")")[2] if row.state == "not supported" else "")
