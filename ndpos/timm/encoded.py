"""A timm ViT that takes its positions from ndpos: the forward that hands the rotation to every block.

Sizes come from the image; table and rotation are made once per forward and passed on, so that two threads can run two
image sizes through one model. What is kept of them between calls is asked for by all that it depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from timm.layers import PatchDropoutWithIndices, resample_abs_pos_embed
from timm.layers.patch_dropout import patch_dropout_forward
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ndpos.resample import resize as resize_table
from ndpos.rotation import Rotation
from ndpos.timm.attention import Carried
from ndpos.timm.blocks import TURNING
from ndpos.timm.loading import fit_state_dict, table_prefix, without_wrappers
from ndpos.timm.settings import Settings
from ndpos.timm.tables import table_rows

__all__: list[str] = []


class Encoded(Settings):
    """What the encoded classes of all families share, beside the settings of the rotation:

    Attributes:
        table: The additive encoding set by ``set_table`` in place of ``pos_embed``, or None.
        table_reference_sizes: Patches per axis whose coordinates it keeps, or None for grid steps.
    """

    table: nn.Module | None
    table_reference_sizes: tuple[int, int] | None
    patch_embed: Any
    patch_drop: Any
    blocks: Any
    norm_pre: Any
    norm: Any
    pos_embed: Any
    pos_drop: Any
    dynamic_img_size: bool
    grad_checkpointing: bool
    drops_without_table = False  # whether timm's forward drops entries of the tokens of a model without a table

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


def _of_layer(turn: Rotation | None, index: int) -> Rotation | None:
    return turn if turn is None or turn.num_layers is None else turn.layer(index)
