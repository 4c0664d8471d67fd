"""A wrapped ViT compiled, exported, run by ONNX Runtime, sharded over processes; and what its backward keeps."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import ndpos

pytest.importorskip("timm", reason="needs timm")
import timm

import ndpos.timm
from tests.benchmarks.wrapped import kept_bytes
from tests.test_timm import assert_same, images, vit

FIVE = ((14, 14), (16, 12), (10, 20), (6, 8), (4, 4))  # grids, square and not
TABLES = {
    "learned": lambda: ndpos.LearnedEmbedding((14, 14), 32, num_prefix=1),
    "sinusoidal": lambda: ndpos.SinusoidalEmbedding(ndpos.split(32, 2)),
    "binary": lambda: ndpos.BinaryEmbedding(ndpos.split(32, 2)),
}


def dynamic(*, table=None, **settings):
    model = vit(sizes=(14, 14), depth=1, dynamic_img_size=True)
    model = ndpos.timm.set_table(model, TABLES[table]()) if table else model
    return ndpos.timm.add_rope(model, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"absolute": "drop", "reference_sizes": (14, 14)},
        {"absolute": "fade", "strength": 0.5, "learnable": True},
        {"table": "learned"},
        {"table": "sinusoidal"},
        {"table": "binary"},
    ],
    ids=str,
)
@torch.no_grad()
def test_five_image_sizes_make_at_most_two_graphs_and_strengths_none(settings):
    torch._dynamo.reset()
    model, counter = dynamic(**settings), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for sizes in FIVE:
        assert_same(compiled(images(*sizes)), model(images(*sizes)))
    assert counter.frame_count <= 2
    for strength in (0.0, 0.1, 0.7, 1.0):
        compiled.strength = strength
        assert model.strength == strength
        assert_same(compiled(images(4, 4)), model(images(4, 4)))
    assert counter.frame_count <= 2


def test_a_compiled_model_trains_at_other_sizes_batches_and_strengths_in_two_graphs():
    torch._dynamo.reset()
    plain = vit(sizes=(14, 14), depth=1, dynamic_img_size=True, patch_drop_rate=0.25)
    model = ndpos.timm.add_rope(plain, learnable=True, reference_sizes=(14, 14)).train()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, sizes in zip((2, 3, 4), FIVE[1:4], strict=True):
        torch.manual_seed(0)
        compiled(images(*sizes, batch=batch)).square().sum().backward()
        seen = {name: each.grad.clone() for name, each in model.named_parameters()}
        model.zero_grad()
        torch.manual_seed(0)
        model(images(*sizes, batch=batch)).square().sum().backward()
        for name, each in model.named_parameters():
            torch.testing.assert_close(seen[name], each.grad, atol=1e-3, rtol=1e-3, msg=name)
        model.zero_grad()
        model.strength = 0.9 * model.strength
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


def test_a_strength_set_in_inference_mode_takes_part_in_compiled_training():
    torch._dynamo.reset()
    model = dynamic(absolute="fade", learnable=True).train()
    with torch.inference_mode():
        model.strength = 0.5
    torch.compile(model, backend="eager", fullgraph=True)(images(4, 4)).square().sum().backward()
    assert model.rope.frequencies.grad.abs().max() > 0


@torch.no_grad()
def test_checkpointed_blocks_compile_whole():
    torch._dynamo.reset()
    model = dynamic(learnable=True)
    model.set_grad_checkpointing(True)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    with torch.enable_grad():
        assert_same(compiled(images(4, 4)), model(images(4, 4)))


def exported(model, x, *, resizable):
    batch = torch.export.Dim("batch", min=1, max=64)
    height, width = (16 * torch.export.Dim(name, min=2, max=64) for name in ("height", "width"))
    shapes = {0: batch, 2: height, 3: width} if resizable else {0: batch}
    return torch.export.export(model, (x,), dynamic_shapes=(shapes,))


@pytest.mark.parametrize(
    "settings", [{}, {"absolute": "drop", "reference_sizes": (4, 6)}, {"learnable": True}], ids=str
)
@pytest.mark.parametrize("resizable", [False, True])
@torch.no_grad()
def test_an_exported_model_takes_other_batches_and_if_dynamic_other_sizes(resizable, settings):
    model = ndpos.timm.add_rope(vit(sizes=(4, 6), dynamic_img_size=resizable), **settings)
    program = exported(model, images(4, 6), resizable=resizable)
    x = images(8, 3, batch=3) if resizable else images(4, 6, batch=3)
    torch.testing.assert_close(program.module()(x), model(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("resizable", [False, True])
@torch.no_grad()
def test_onnx_runtime_answers_the_same_and_a_fixed_grid_is_folded_into_constants(resizable, tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("onnxscript", reason="needs onnxscript")
    model = ndpos.timm.add_rope(vit(sizes=(4, 6), dynamic_img_size=resizable))
    program = exported(model, images(4, 6), resizable=resizable)
    torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "vit.onnx")
    session = runtime.InferenceSession(tmp_path / "vit.onnx", providers=["CPUExecutionProvider"])
    x = images(8, 3, batch=3) if resizable else images(4, 6, batch=3)
    (seen,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = model(x)
    torch.testing.assert_close(torch.from_numpy(seen), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
    operations = {node.op_type for node in onnx.load(tmp_path / "vit.onnx").graph.node}
    assert "Conv" in operations
    assert "Resize" not in operations
    assert ({"Cos", "Sin"} <= operations) == resizable


@pytest.mark.parametrize("settings", [{}, {"absolute": "drop", "strength": 0.5}], ids=str)
def test_training_keeps_at_most_one_per_cent_more_than_unwrapped(settings):
    plain = timm.create_model("vit_small_patch16_224", depth=2, num_classes=10).train()
    x = torch.randn(2, 3, 224, 224)
    before = kept_bytes(plain, x)
    assert kept_bytes(ndpos.timm.add_rope(copy.deepcopy(plain), **settings), x) <= 1.01 * before
    for block in plain.blocks:  # the twin: a table kept as queries are would be seen
        block.attn.q_norm, block.attn.k_norm = torch.nn.LayerNorm(64), torch.nn.LayerNorm(64)
    assert kept_bytes(plain, x) > 1.05 * before
