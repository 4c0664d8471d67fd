"""Why a model of timm cannot be given RoPE, by the file of timm that it comes from."""

from __future__ import annotations

from torch import nn

__all__: list[str] = []

WINDOWED = "its attention runs within windows or over pooled tokens, each with a grid of its own: not supported yet"
STAGES = (
    "its attention is of its own kind, in stages, on parts of tokens or with a class token apart: not supported yet"
)
CHANNELS = "its attention runs over channels or is linear in the tokens, where a rotation says nothing of places"
BIASED = "its attention has keys of another width or a bias for every offset instead of places: not supported"
NONE = "it has no attention over tokens"
FAMILIES = {
    WINDOWED: "swin_transformer swin_transformer_v2 swin_transformer_v2_cr hiera hieradet_sam2 mvitv2 "
    "vision_transformer_sam maxxvit gcvit nest pvt_v2 twins",
    STAGES: "cait pit volo crossvit tnt visformer convit mobilevit nextvit coat cpubone iformer lowformer swiftformer "
    "shvit efficientformer_v2 csatv2",
    CHANNELS: "xcit davit edgenext efficientvit_mit efficientvim",
    BIASED: "levit efficientvit_msra tiny_vit efficientformer",
}


def why_not(model: object) -> str:
    """The reason, by family, or by what the model holds; for any object a sentence that stands alone."""
    if not isinstance(model, nn.Module):
        return "it is no model"
    file = type(model).__module__.rpartition(".")[2]
    for reason, files in FAMILIES.items():
        if file in files.split():
            return reason
    kinds = {name for name in (type(module).__name__ for module in model.modules()) if _attends(name)}
    if not kinds:
        return NONE
    return f"its forward or its attention ({', '.join(sorted(kinds))}) is of another kind: not supported"


def _attends(name: str) -> bool:
    """Whether a class is named after attention over tokens; that of channels and that which pools do not count."""
    name = name.lower()
    other = ("pool", "channel", "squeeze", "ecaattn", "cbam", "splitattn", "effectivese", "gatherexcite")
    return ("attn" in name or "attention" in name) and not any(part in name for part in other)
