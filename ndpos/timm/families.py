"""The families of timm's ViTs that take their positions from ndpos, each by how its blocks are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit, create_attention_mask
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn

from ndpos.positions import exact_dtype
from ndpos.rotation import Rotation
from ndpos.timm.encoded import Encoded

__all__: list[str] = []


class EncodedVisionTransformer(Encoded, VisionTransformer):  # type: ignore[misc]  # timm is untyped
    """timm's ``VisionTransformer`` with positions from ndpos; made by ``add_rope`` and ``set_table``."""


class EncodedVisionTransformerDistilled(Encoded, VisionTransformerDistilled):  # type: ignore[misc]  # likewise
    """timm's ``VisionTransformerDistilled`` with positions from ndpos; made by ``add_rope`` and ``set_table``."""


class EncodedEva(Encoded, Eva):  # type: ignore[misc]  # likewise
    """timm's ``Eva`` without a rotation of its own; its blocks take one already."""

    drops_without_table = True

    def _call(self, block: nn.Module, x: Tensor, turn: Rotation | None, mask: Tensor | None, is_causal: bool) -> Tensor:
        if self.rope is None:
            plain: Tensor = block(x, attn_mask=mask, is_causal=is_causal)
            return plain
        out: Tensor = block(x, rope=self._carried(turn, None), attn_mask=mask, is_causal=is_causal)
        return out


class Biased(Encoded):
    """A model whose blocks take a relative position bias, the same for all, and no mask."""

    dynamic_img_size = False
    no_embed_class = False

    def _mask(self, mask: Tensor | None, is_causal: bool) -> Tensor | None:
        if mask is not None or is_causal:
            raise TypeError(
                f"ndpos.timm: timm's {type(self).__mro__[2].__name__} takes no attention mask: its blocks add a bias."
            )
        return self._bias()

    def _bias(self) -> Tensor | None:
        raise NotImplementedError


class EncodedBeit(Biased, Beit):  # type: ignore[misc]  # likewise
    """timm's ``Beit`` with its bias kept."""

    rel_pos_bias: Any
    drops_without_table = True

    def _bias(self) -> Tensor | None:
        bias: Tensor | None = None if self.rel_pos_bias is None else self.rel_pos_bias()
        return bias

    def _call(self, block: nn.Module, x: Tensor, turn: Rotation | None, mask: Tensor | None, is_causal: bool) -> Tensor:
        out: Tensor = block(x, shared_rel_pos_bias=self._carried(turn, mask))
        return out


class EncodedVisionTransformerRelPos(Biased, VisionTransformerRelPos):  # type: ignore[misc]  # likewise
    """timm's ``VisionTransformerRelPos`` with its bias kept."""

    shared_rel_pos: Any
    pos_embed = None  # of the class, not of the module: this family has no table

    def _bias(self) -> Tensor | None:
        bias: Tensor | None = None if self.shared_rel_pos is None else self.shared_rel_pos.get_bias()
        return bias

    def _call(self, block: nn.Module, x: Tensor, turn: Rotation | None, mask: Tensor | None, is_causal: bool) -> Tensor:
        out: Tensor = block(x, shared_rel_pos=self._carried(turn, mask))
        return out


class EncodedNaFlexVit(Encoded, NaFlexVit):  # type: ignore[misc]  # likewise
    """timm's ``NaFlexVit``: a grid per image, padding masked; every patch turned by its own coordinates.

    Its forwards stay timm's; the rotation is made in front of the blocks and goes along with the mask.
    """

    embeds: Any
    pos_embed = None  # its table is part of its patch embedding, and stays there

    forward_features = NaFlexVit.forward_features
    forward_intermediates = NaFlexVit.forward_intermediates

    def _forward_embeds(self, x: Tensor, patch_coord: Any, patch_valid: Any, attn_mask: Any) -> dict[str, Any]:
        """Tokens in front of the blocks, with their rotation beside the mask, where timm's has tables of its own."""
        tokens, sizes = self.embeds(x, patch_coord=patch_coord, patch_valid=patch_valid)
        if patch_coord is not None:
            turn = self._rotation_at(patch_coord, tokens)
        else:
            turn = self._rotation(sizes, tokens)
        kept = None
        if self.training and self.patch_drop is not None:
            tokens, kept = self.patch_drop(tokens)
        if kept is not None:
            turn = turn if turn is None else turn.take(kept)
            patch_valid = None if patch_valid is None else patch_valid.gather(1, kept)
        if attn_mask is None:
            attn_mask = create_attention_mask(
                patch_valid,
                num_prefix_tokens=self.num_prefix_tokens,
                symmetric=not self.use_key_only_attn_mask,
                q_len=1 if self.use_key_only_attn_mask else None,
                dtype=tokens.dtype,
            )
        found = {"patches": self.norm_pre(tokens), "patch_valid": patch_valid, "keep_indices": kept}
        return found | {"attn_mask": self._carried(turn, attn_mask)}

    def _rotation_at(self, coords: Tensor, x: Tensor) -> Rotation | None:
        """``coords`` ``(batch, patches, 2)``, (y, x); laid over ``reference_sizes`` grid by grid if there are any."""
        settings = self._settings(x)
        if settings is None or self.rope is None:
            return None
        if self.reference_sizes is not None:
            sizes = coords.amax(dim=-2, keepdim=True) + 1
            exact = coords.to(exact_dtype(coords.device))
            coords = (exact + 0.5) * exact.new_tensor(self.reference_sizes) / sizes - 0.5
        turn: Rotation = self.rope(coords, **settings)
        return turn


ENCODED: Mapping[type[nn.Module], type[Encoded]] = {
    VisionTransformer: EncodedVisionTransformer,
    VisionTransformerDistilled: EncodedVisionTransformerDistilled,
    Eva: EncodedEva,
    Beit: EncodedBeit,
    VisionTransformerRelPos: EncodedVisionTransformerRelPos,
    NaFlexVit: EncodedNaFlexVit,
}
# Those whose learned table is rows of ``pos_embed`` that a grid of patches reads.
TABLED = (VisionTransformer, VisionTransformerDistilled, Eva)
