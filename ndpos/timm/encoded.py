"""A timm ViT that takes its positions from ndpos: the forward that hands the rotation to every block.

Sizes come from the image; table and rotation are made once per forward and passed on, so that two threads can run two
image sizes through one model. What is kept of them between calls is asked for by all that it depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch
import torch.utils._pytree as pytree
from timm.layers import PatchDropoutWithIndices, resample_abs_pos_embed
from timm.layers.patch_dropout import patch_dropout_forward
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ndpos.encode.rotary import RotaryEmbedding
from ndpos.resample import resize as resize_table
from ndpos.rotation import Rotation
from ndpos.sizes import finite
from ndpos.timm.attention import Carried
from ndpos.timm.blocks import TURNING
from ndpos.timm.kept import on_grid
from ndpos.timm.loading import fit_state_dict, table_prefix, without_wrappers
from ndpos.timm.tables import table_rows

__all__: list[str] = []

Absolute = Literal["keep", "fade", "drop"]


class Encoded(nn.Module):
    """What the two encoded classes share. Settings, all plain numbers and never state:

    Attributes:
        rope: The RotaryEmbedding whose rotation every block gets, or None.
        table: The additive encoding set by ``set_table`` in place of ``pos_embed``, or None.
        absolute: What becomes of ``pos_embed``: ``"keep"``, ``"fade"`` (times 1 - fade), ``"drop"``.
        strength: From 0, no rotation, to 1: what angles are multiplied by, of both axes or of (y, x). Can be set at any
            time, and so can
        fade: How much of a fading table is gone, from 0 to 1; None follows the strength, the smaller one of two.
        reference_sizes: Patches per axis whose coordinates the rotation keeps, or None for grid steps.
        table_reference_sizes: The same for ``table``.
    """

    rope: RotaryEmbedding | None
    table: nn.Module | None
    absolute: Absolute
    reference_sizes: tuple[int, int] | None
    table_reference_sizes: tuple[int, int] | None
    patch_embed: Any
    patch_drop: Any
    blocks: Any
    norm_pre: Any
    norm: Any
    pos_embed: Any
    pos_drop: Any
    num_prefix_tokens: int
    dynamic_img_size: bool
    grad_checkpointing: bool
    drops_without_table = False  # whether timm's forward drops entries of the tokens of a model without a table
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

    # ---- the forward ------------------------------------------------------------------------------------------

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        x, turn, _, _ = self._enter(x)
        mask = self._mask(attn_mask, is_causal)
        for index, block in enumerate(self.blocks):
            x = self._through(block, x, _of_layer(turn, index), mask, is_causal)
        out: Tensor = self.norm(x)
        return out

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """As timm's: features after some of the blocks, and those of the last one."""
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"ndpos.timm: output_fmt is 'NCHW' or 'NLC', got {output_fmt!r}.")
        wanted, last = feature_take_indices(len(self.blocks), indices)
        x, turn, sizes, dropped = self._enter(x)
        if dropped and output_fmt == "NCHW":
            raise ValueError(
                "ndpos.timm: patches were dropped, so features are no (height, width) grid. Take output_fmt='NLC', or "
                "model.eval(), which drops none."
            )
        seen, mask = [], self._mask(attn_mask, is_causal)
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._through(block, x, _of_layer(turn, index), mask, is_causal)
            if index in wanted:
                seen.append(self.norm(x) if norm else x)
        prefix = [each[:, : self.num_prefix_tokens] for each in seen]
        patches = [each[:, self.num_prefix_tokens :] for each in seen]
        if output_fmt == "NCHW":
            patches = [each.mT.unflatten(-1, tuple(sizes)).contiguous() for each in patches]
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            found: dict[str, Any] = {"image_intermediates": patches}
            found |= {"image_intermediates_prefix": prefix} if with_prefix else {}
            return found if intermediates_only else found | {"image_features": self.norm(x)}
        features: list[Any] = list(zip(patches, prefix, strict=True)) if with_prefix else patches
        return features if intermediates_only else (self.norm(x), features)

    def _enter(self, image: Tensor) -> tuple[Tensor, Rotation | None, Sequence[int], bool]:
        """Tokens in front of the first block, their rotation, the grid of the patches, and whether some were dropped.

        Sizes come from the image, not from the patch embedding: its own grid may be another of equal count.
        """
        sizes = self.patch_embed.dynamic_feat_size(image.shape[-2:])
        patches = self.patch_embed(image)
        if patches.ndim == 4:
            sizes, patches = patches.shape[1:3], patches.flatten(1, 2)
        x = self._with_table(patches, sizes)
        drop: Any = getattr(self, "patch_drop", None)
        turn = self._rotation(sizes, x)
        dropped = bool(self.training and getattr(drop, "prob", 0.0) > 0)
        if dropped:
            # The model's count of prefix tokens: by timm's layer's own, distillation tokens are dropped like patches.
            x, kept = patch_dropout_forward(x, drop.prob, self.num_prefix_tokens, drop.ordered, training=True)
            turn = turn if turn is None else turn.take(kept)
        elif drop is not None and type(drop) is not PatchDropoutWithIndices:
            x = drop(x)
        norm_pre = getattr(self, "norm_pre", None)
        return x if norm_pre is None else norm_pre(x), turn, sizes, dropped

    def _through(
        self, block: nn.Module, x: Tensor, turn: Rotation | None, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """One block, checkpointed where timm would."""
        if self.rope is not None and (type(getattr(block, "attn", None)) in TURNING or type(block) in TURNING):
            raise ValueError(
                "ndpos.timm: a block with timm's plain Attention stands in a model wrapped by add_rope, where it would "
                "not be turned. Put blocks in before wrapping."
            )
        if not (self.grad_checkpointing and torch.is_grad_enabled()):
            return self._call(block, x, turn, mask, is_causal)
        # Reentrant checkpointing sees gradients of positional tensors only: learned frequencies reach it as those.
        tensors, spec = pytree.tree_flatten((turn, mask))

        def run(x: Tensor, *tensors: Tensor) -> Any:
            turn, mask = pytree.tree_unflatten(tensors, spec)
            return self._call(block, x, turn, mask, is_causal)

        again: Tensor = checkpoint(run, x, *tensors)
        return again

    def _mask(self, mask: Tensor | None, is_causal: bool) -> Tensor | None:
        """What all blocks add to their scores."""
        return mask

    def _call(self, block: nn.Module, x: Tensor, turn: Rotation | None, mask: Tensor | None, is_causal: bool) -> Tensor:
        """A block, with the rotation in the argument that it hands on to its attention."""
        out: Tensor = block(x, attn_mask=self._carried(turn, mask), is_causal=is_causal)
        return out

    def _carried(self, turn: Rotation | None, mask: Tensor | None) -> Any:
        """What a block gets for its ``attn_mask``: timm's own attention takes nothing but a mask."""
        return mask if self.rope is None else Carried(turn, mask)

    # ---- positions --------------------------------------------------------------------------------------------

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

    def _with_table(self, patches: Tensor, sizes: Sequence[int]) -> Tensor:
        """Prefix tokens, patches and whatever is added to them, in timm's order: class, distillation, registers."""
        prefix = [getattr(self, name, None) for name in ("cls_token", "dist_token", "reg_token")]
        tokens = [each.expand(patches.shape[0], -1, -1) for each in prefix if each is not None]
        table = self._rows(patches, sizes)
        if table is None:
            x = torch.cat([*tokens, patches], dim=1) if tokens else patches
            # timm's ViT drops no entries if it has no table; with one that is dropped or faded away it has one.
            never = self.pos_embed is None and self.table is None and not self.drops_without_table
            return x if never else self.pos_drop(x)
        spare = self.num_prefix_tokens + patches.shape[1] - table.shape[-2]
        if spare == self.num_prefix_tokens:
            x = torch.cat([*tokens, patches + table], dim=1) if tokens else patches + table
        else:
            if spare:  # rows for the first prefix tokens only: nothing is added to the others
                rows = self.num_prefix_tokens - spare
                nothing = table.new_zeros(*table.shape[:-2], spare, table.shape[-1])
                table = torch.cat((table[..., :rows, :], nothing, table[..., rows:, :]), dim=-2)
            x = torch.cat([*tokens, patches], dim=1) + table
        dropped: Tensor = self.pos_drop(x)
        return dropped

    def _rows(self, patches: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """The table of the grid with its prefix rows, or None."""
        if self.table is not None:
            # Under autocast a table stays float32, and so do the sums, as timm's own do.
            dtype = torch.float32 if torch.is_autocast_enabled(patches.device.type) else patches.dtype
            return table_rows(self.table, sizes, self.table_reference_sizes, dtype, patches.device)
        if self.pos_embed is None or self.absolute == "drop":
            return None
        table: Tensor = self.pos_embed
        old, num_prefix = self.patch_embed.grid_size, table_prefix(self)
        if self.dynamic_img_size and torch.compiler.is_compiling():
            table = resize_table(table, sizes, old_sizes=old, num_prefix=num_prefix)
        elif self.dynamic_img_size:
            table = resample_abs_pos_embed(table, new_size=sizes, old_size=old, num_prefix_tokens=num_prefix)
        elif tuple(sizes) != tuple(old):
            raise ValueError(
                f"ndpos.timm: the learned table is for {old[0]} x {old[1]} patches, the image has {sizes[0]} x "
                f"{sizes[1]}. ndpos.timm.resize(model, image_size) moves it; dynamic_img_size=True takes any size."
            )
        if self.absolute == "fade":
            table = table * (self._weight_in_graphs if torch.compiler.is_compiling() else self._table_weight())
        return table

    # ---- what training and loading ask of a model -------------------------------------------------------------

    def no_weight_decay(self) -> set[str]:
        """timm's set, with the learned frequencies and the tables of ndpos."""
        own = {f"table.{name}" for name, _ in self.table.named_parameters()} if self.table is not None else set()
        own |= {f"rope.{name}" for name, _ in self.rope.named_parameters()} if self.rope is not None else set()
        names: set[str] = super().no_weight_decay() | own  # type: ignore[misc]  # timm's, by the classes below
        return names

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's groups for layer-wise rates; tables and frequencies belong to the stem, as ``pos_embed`` does."""
        groups: dict[str, Any] = super().group_matcher(coarse)  # type: ignore[misc]  # likewise
        return groups | {"stem": rf"{groups['stem']}|^table|^rope"}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """torch's, for state dicts of the model in DDP (``module.``) or compiled (``_orig_mod.``) as well."""
        return super().load_state_dict(without_wrappers(state_dict), *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        fit_state_dict(self, state_dict, prefix, errors)
        super()._load_from_state_dict(state_dict, prefix, *rest)


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


def _of_layer(turn: Rotation | None, index: int) -> Rotation | None:
    return turn if turn is None or turn.num_layers is None else turn.layer(index)
