"""A state dict made to fit an encoded model before it is loaded, and what is told where it cannot."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__: list[str] = []

# What other RoPE code saves beside weights: functions of the grid, made anew here.
DERIVED = ("freqs_cos", "freqs_sin", "freqs_t_x", "freqs_t_y", "inv_freq", "periods")

WRAPPERS = ("module.", "_orig_mod.")  # DDP's and the compiler's

log = logging.getLogger(__name__)


def fit_state_dict(model: Any, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Change ``state_dict``, torch's own copy of the caller's, so that an encoded ``model`` can be loaded from it.

    Tables of angles are left out, with a debug message; learned frequencies that weights from before the wrap do not
    have are the initial ones; a table of another grid is told in ``errors`` with both grids and the cure.
    """
    tail = tuple(f".{name}" for name in DERIVED)
    derived = [key for key in state_dict if key.startswith(prefix) and f".{key[len(prefix) :]}".endswith(tail)]
    if derived:
        own = {f"{prefix}{name}" for name, _ in (*model.named_parameters(), *model.named_buffers())}
        derived = [key for key in derived if key not in own]  # a user's buffer may have such a name
    for key in derived:
        del state_dict[key]
    if derived:
        log.debug("ndpos.timm: %s are functions of the grid, not weights; they were left out.", derived)
    if model.rope is not None and model.rope.learnable:
        there, initial = model.rope.frequencies, model.rope.initial_frequencies()
        initial = initial.to(dtype=there.dtype, device="cpu" if there.is_meta else there.device)
        state_dict.setdefault(f"{prefix}rope.frequencies", initial)
    given = state_dict.get(f"{prefix}pos_embed")
    if isinstance(given, Tensor) and model.pos_embed is not None and given.shape != model.pos_embed.shape:
        errors.append(_other_grid(model, f"{prefix}pos_embed", given))


def without_wrappers(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state_dict`` without the prefix that DDP, ``torch.compile`` or both put before every key."""
    stripped = state_dict
    while stripped and (
        found := next((name for name in WRAPPERS if all(key.startswith(name) for key in stripped)), "")
    ):
        stripped = {key[len(found) :]: value for key, value in stripped.items()}
    if stripped is not state_dict:
        log.info("ndpos.timm: the state dict is of a model in DDP or compiled; the prefix of its keys was left out.")
    return stripped


def table_prefix(model: Any) -> int:
    """How many rows of ``pos_embed`` stand before the grid; the model may have more prefix tokens than those."""
    return 0 if getattr(model, "no_embed_class", False) else int(model.num_prefix_tokens)


def _other_grid(model: Any, key: str, given: Tensor) -> str:
    own, num_prefix = model.patch_embed.grid_size, table_prefix(model)
    rows = given.shape[-2] - num_prefix if given.ndim >= 2 else 0
    square = int(max(rows, 0) ** 0.5)
    guess = f"({square}, {square}) if it is square" if square**2 == rows > 0 else "no square, so its grid must be known"
    return (
        f"ndpos.timm: {key} is {tuple(given.shape)}, this model's is {tuple(model.pos_embed.shape)} for a grid of "
        f"{tuple(own)} behind {num_prefix} prefix rows. The grid of {rows} rows is {guess}. Build the model at the "
        f"size of the weights, load them, and move both with ndpos.timm.resize(model, image_size); or move the table "
        f"alone: ndpos.resize(table, {tuple(own)}, old_sizes=..., num_prefix={num_prefix})."
    )
