"""The same rotation as other libraries apply it, their tables ready.

All of them get tables over every token, with an angle of zero for prefix tokens: as their formulas stand, they would
have to cut the prefix off and join it again, which is slower. Two numbers per pair become two per channel, as they do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tests.benchmarks.rows import Settings

Turn = Callable[[Tensor], Tensor]


class Contender(NamedTuple):
    """A rotation to be timed: whose, how it is run, and which channels it pairs."""

    who: str
    mode: str  # a backend of ndpos, "eager", "torch.compile" or "kernel"
    pairing: str
    turn: Turn

    @property
    def name(self) -> str:
        return f"{self.who} {self.mode}, {self.pairing}"


def timm_rope(angles: Tensor, pairing: str, dtype: torch.dtype) -> Turn:
    """``apply_rot_embed_cat``: sin and cos in one float32 table, the result cast back."""
    apply = importlib.import_module("timm.layers").apply_rot_embed_cat
    table = torch.cat([per_channel(angles.sin(), pairing), per_channel(angles.cos(), pairing)], dim=-1)
    return lambda q: apply(q, table, half=pairing == "half")


def transformers_rope(angles: Tensor, pairing: str, dtype: torch.dtype) -> Turn:
    """The line of Llama's ``apply_rotary_pos_emb`` that turns q, around its own ``rotate_half``.

    The function itself turns q and k, which would be twice the work. cos and sin are in x's dtype, as its models pass
    them: cheaper than float32, and less exact.
    """
    rotate_half = importlib.import_module("transformers.models.llama.modeling_llama").rotate_half
    cos, sin = (per_channel(part, pairing).to(dtype)[None] for part in (angles.cos(), angles.sin()))

    def turn(q: Tensor) -> Tensor:
        return (q * cos.unsqueeze(1)) + (rotate_half(q) * sin.unsqueeze(1))

    return turn


def lucid_rope(angles: Tensor, pairing: str, dtype: torch.dtype) -> Turn:
    """``apply_rotary_emb``: takes angles, and forms cos and sin at each call, for q and again for k."""
    apply = importlib.import_module("rotary_embedding_torch").apply_rotary_emb
    freqs = per_channel(angles, pairing)
    return lambda q: apply(freqs, q)


def liger_rope(angles: Tensor, pairing: str, dtype: torch.dtype) -> Turn:
    """Liger's kernel turns q and k in one: k has one head here, and its time counts."""
    apply = importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb
    cos, sin = (per_channel(part, pairing).to(dtype)[None] for part in (angles.cos(), angles.sin()))
    return lambda q: apply(q, q[:, :1], cos, sin)[0]


def flash_rope(angles: Tensor, pairing: str, dtype: torch.dtype) -> Turn:
    """flash-attn's kernel takes heads after tokens, strided as they come, and tables in x's dtype."""
    apply = importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return lambda q: apply(q.transpose(1, 2), cos, sin, interleaved=pairing == "interleaved").transpose(1, 2)


PEERS = {  # name: how it turns, the pairings it knows
    "timm": (timm_rope, ("interleaved", "half")),
    "transformers": (transformers_rope, ("half",)),
    "rotary-embedding-torch": (lucid_rope, ("interleaved",)),
}
KERNELS = {"liger": (liger_rope, ("half",)), "flash-attn": (flash_rope, ("interleaved", "half"))}


def peers(settings: Settings, angles: Tensor, pairing: str, dtype: torch.dtype) -> Iterator[Contender]:
    """Every peer that knows the pairing: in eager mode, and under ``torch.compile`` unless the run is quick."""
    for who, (make, pairings) in (PEERS | (KERNELS if angles.is_cuda else {})).items():
        if pairing not in pairings:
            continue
        try:
            turn = make(angles, pairing, dtype)
        except ImportError as error:
            settings.skip(who, f"not installed ({error})")
            continue
        if who in KERNELS:
            yield Contender(who, "kernel", pairing, turn)
            continue
        yield Contender(who, "eager", pairing, turn)
        if not settings.quick:
            yield Contender(who, "torch.compile", pairing, torch.compile(turn))


def per_channel(table: Tensor, pairing: str) -> Tensor:
    """``(tokens, pairs)`` to ``(tokens, head_dim)``: each pair's number at both of its channels."""
    return table.repeat_interleave(2, dim=-1) if pairing == "interleaved" else torch.cat([table, table], dim=-1)
