"""Which parameters weight decay should leave alone, whatever they are wrapped in."""

from __future__ import annotations

from torch import nn

from ndpos.encode.learned import LearnedEmbedding
from ndpos.encode.rotary import RotaryEmbedding

__all__ = ["no_weight_decay"]


def no_weight_decay(model: nn.Module) -> set[str]:
    """Full names of the parameters that weight decay should leave alone, whatever the model is wrapped in.

    Those are all learned tables, prefix rows and frequencies of ndpos, and what the ``no_weight_decay`` of any timm
    model inside names: ``pos_embed``, class, distillation and register tokens. timm itself asks the outermost module
    alone, so that tables inside a wrapper are decayed.

    Args:
        model: Any module: a timm ViT, one inside another module, in DDP, or compiled.

    Returns:
        Names as in ``model.named_parameters()``. Fixed encodings contribute none.

    Raises:
        TypeError: ``model`` is no module.

    Example:
        >>> import ndpos.timm, timm, torch
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
        >>> student = torch.nn.ModuleDict({"backbone": ndpos.timm.add_rope(vit, learnable=True)})
        >>> sorted(ndpos.timm.no_weight_decay(student))
        ['backbone.cls_token', 'backbone.pos_embed', 'backbone.rope.frequencies']

    Source:
        timm's ``VisionTransformer.no_weight_decay``; Touvron et al. 2021, DeiT, arXiv:2012.12877, decays no table.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ndpos.timm.no_weight_decay: takes a torch.nn.Module, got {type(model).__name__}.")
    spared: set[int] = set()
    for module in model.modules():
        if isinstance(module, (RotaryEmbedding, LearnedEmbedding)):
            spared |= {id(parameter) for parameter in module.parameters()}
        names = getattr(module, "no_weight_decay", None)
        if callable(names):
            named = dict(module.named_parameters(remove_duplicate=False))
            spared |= {id(named[name]) for name in names() if name in named}
    return {name for name, parameter in model.named_parameters() if id(parameter) in spared}
