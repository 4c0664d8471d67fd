"""Compiled or exported, the same numbers come out, of one graph for all sizes, without complex ones."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, export

import ndpos

SIZES = [(4, 6), (5, 9), (12, 3), (7, 8), (3, 3)]
EMB = ndpos.SinusoidalEmbedding(ndpos.split(16, 2), layout="axis_sin_cos")
ROPE = ndpos.RotaryEmbedding(ndpos.split(16, 2))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def cells(sizes):
    return ndpos.grid(sizes).flatten(0, -2)


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize(
    "make",
    [
        lambda height, width: EMB.on_grid((height, width)),
        lambda height, width: EMB.on_grid((height, width), start=(width, 0), step=height),
        lambda height, width: EMB(ndpos.normalised_grid((height, width)).flatten(0, -2)),
        lambda height, width: EMB(
            ndpos.scaled_grid((height, width), reference_sizes=(4, 4), align="centre").flatten(0, -2)
        ),
        lambda height, width: EMB.on_grid(ndpos.patch_sizes((8 * height, 8 * width), patch=8)),
    ],
)
def test_five_sizes_make_no_third_graph(make, dynamic):
    counter = CompileCounter()
    compiled = torch.compile(make, backend=counter, fullgraph=True, dynamic=dynamic)
    for sizes in SIZES:
        torch.testing.assert_close(compiled(*sizes), make(*sizes), rtol=0, atol=1e-6)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "emb", [EMB, ndpos.IntegerEmbedding(ndpos.split(8, 2)), ndpos.BinaryEmbedding(ndpos.split(8, 2))]
)
def test_five_sets_of_coordinates_make_no_third_graph(emb):
    counter = CompileCounter()
    compiled = torch.compile(emb, backend=counter, fullgraph=True, dynamic=True)
    for sizes in SIZES:
        assert torch.equal(compiled(cells(sizes)), emb(cells(sizes)))
    assert counter.frame_count <= 2


class Added(torch.nn.Module):
    def forward(self, x):
        return ndpos.add(x.flatten(1, 2), EMB.on_grid(x.shape[1:3]))


class Turned(torch.nn.Module):
    def forward(self, x):
        return ROPE.on_grid(x.shape[1:3])(x.flatten(1, 2))


class Placed(torch.nn.Module):
    def forward(self, x):
        return EMB(x)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Added(), lambda height, width: torch.rand(2, height, width, 16)),
        (Turned(), lambda height, width: torch.rand(2, height, width, 16)),
        (Placed(), lambda height, width: torch.rand(1, height, width, 2)),
    ],
)
def test_an_exported_graph_takes_other_sizes_and_holds_no_complex_number(module, inputs):
    sizes = {1: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    exported = export(module, (inputs(4, 6),), dynamic_shapes=(sizes,))
    seen = {value.dtype for node in exported.graph.nodes for value in [node.meta.get("val")] if hasattr(value, "dtype")}
    assert torch.float32 in seen
    assert not any(dtype.is_complex for dtype in seen)
    for height, width in SIZES[1:]:
        x = inputs(height, width)
        torch.testing.assert_close(exported.module()(x), module(x), rtol=0, atol=1e-6)


def test_the_witness_of_complex_numbers_can_see_one():
    class Complex(torch.nn.Module):
        def forward(self, x):
            return torch.view_as_complex(x).real

    nodes = export(Complex(), (torch.rand(3, 2),)).graph.nodes
    assert any(node.meta["val"].dtype.is_complex for node in nodes if hasattr(node.meta.get("val"), "dtype"))
