"""Interleaved pairs as integers: the same bits as the plain formula, and only where a graph of the CPU is compiled."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import ndpos
from ndpos.kernels import choice, lanes
from ndpos.kernels.lanes import LANES, _bits, _channels, lane_of, turn_lanes
from ndpos.kernels.pairing import Turning
from ndpos.kernels.plain import turn_plain

needs_compiler = pytest.mark.skipif(bool(choice.compiler_missing(torch.device("cpu"))), reason="needs a C++ compiler")


def tells_exports_apart():
    """Whether a graph that is compiled knows that it is not exported: PyTorch 2.9 does not."""
    told = torch.compile(lambda x: x + torch.compiler.is_exporting(), backend="eager")
    return told(torch.zeros(1)).item() == 0


needs_lanes = pytest.mark.skipif(not tells_exports_apart(), reason="this PyTorch takes every graph for an export")
every_dtype = pytest.mark.parametrize("dtype", list(LANES))
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 3e38, 65280.0]


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(one, other):
    """Equal bit for bit, but for which of the NaNs a NaN is."""
    kind = torch.int16 if one.dtype == torch.bfloat16 else torch.int32
    same = (one.contiguous().view(kind) == other.contiguous().view(kind)) | (one.isnan() & other.isnan())
    return one.dtype == other.dtype and one.shape == other.shape and bool(same.all())


@every_dtype
@settings(max_examples=80)
@given(
    tokens=st.integers(0, 4),
    prefix=st.integers(0, 2),
    suffix=st.integers(0, 2),
    rest=st.integers(0, 2),
    per_head=st.booleans(),
    inverse=st.booleans(),
    token_dim=st.sampled_from([-2, -3]),
    special=st.lists(st.sampled_from(SPECIAL), max_size=8),
    seed=st.integers(0, 99),
)
def test_lanes_are_the_plain_formula_bit_for_bit(
    dtype, tokens, prefix, suffix, rest, per_head, inverse, token_dim, special, seed
):
    how = Turning("interleaved", None, token_dim, prefix, suffix, inverse)
    x = numbers(2, 3, prefix + tokens + suffix, 6 + 2 * rest, seed=seed, dtype=dtype)
    flat = x.view(-1)
    flat[: len(special)] = torch.tensor(special[: len(flat)], dtype=dtype)
    cos, sin = (numbers(3 if per_head else 1, tokens, 3, seed=seed + place) for place in (1, 2))
    if token_dim == -3:
        x, cos, sin = (part.transpose(-2, -3) for part in (x, cos, sin))
    lane = lane_of(x, cos, how)
    assert lane is not None
    turned = turn_lanes(x.view(lane.dtype), cos, sin, how, lane).view(dtype)
    assert same_bits(turned, turn_plain(x, cos, sin, how))


def test_a_float32_is_rounded_to_a_bfloat16_as_pytorch_does_it():
    high = torch.arange(2**16, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    every = (high[:, None] | low).view(torch.float32)  # each bfloat16, its halfway points, and what lies beside them
    rounded = (_bits(every, LANES[torch.bfloat16]) & 0xFFFF).to(torch.int16).view(torch.bfloat16)
    assert same_bits(rounded, every.bfloat16())


@every_dtype
def test_a_lane_holds_the_first_channel_low_and_the_second_high(dtype):
    x = torch.tensor([[1.5, -2.0, 0.25, -0.0]], dtype=dtype)
    first, second = _channels(x.view(LANES[dtype].dtype), LANES[dtype])
    assert first.tolist() == [[1.5, 0.25]]
    assert second.tolist() == [[-2.0, -0.0]]


def test_what_lies_otherwise_or_is_of_another_kind_has_no_lane():
    how, cos = Turning("interleaved"), torch.ones(4, 3)
    x = numbers(2, 4, 6)
    assert lane_of(x, cos, how) == LANES[torch.float32]
    others = {
        "odd head_dim": numbers(2, 4, 7),
        "odd strides": numbers(2, 4, 7)[..., :6],
        "channels apart": numbers(2, 4, 12)[..., ::2],
        "float16": x.half(),
        "float64": x.double(),
        "another device": x.to("meta"),
    }
    assert {name: lane_of(each, cos, how) for name, each in others.items()} == dict.fromkeys(others)
    assert lane_of(x, cos.double(), how) is None
    assert lane_of(x, cos, Turning("half")) is None


@pytest.fixture
def every_size_pays(monkeypatch):
    monkeypatch.setattr(lanes, "LANES", {kind: lane._replace(pays=0) for kind, lane in LANES.items()})


def rope_for(dtype, **settings):
    turn = ndpos.RotaryEmbedding(ndpos.split(8, 2), pairing="interleaved").on_grid((2, 3), num_prefix=1)
    return turn, numbers(2, 5, 7, 24, dtype=dtype)


@needs_compiler
@needs_lanes
@pytest.mark.parametrize("dtype", [*LANES, torch.float16])
def test_a_graph_of_the_users_reads_lanes_and_its_gradients_are_those_of_eager_mode(every_size_pays, dtype):
    turn, x = rope_for(dtype)

    def attend(x):  # a slice of packed channels, as attention has it, is not where its storage begins
        return turn(x[..., 8:16]) * 2

    compiled = torch.compile(attend, fullgraph=True)
    with torch.no_grad():
        seen, (code,) = run_and_get_code(compiled, x)
    lane = LANES[torch.float32 if dtype == torch.float16 else dtype]  # float16 is widened
    assert str(lane.dtype).removeprefix("torch.") + "_t*" in code
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(seen, attend(x), **tolerance)

    above = numbers(2, 5, 7, 8, seed=3, dtype=dtype)
    gradients = []
    for run in (attend, compiled, lambda x: checkpoint(compiled, x, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        run(leaf).backward(above.expand(2, 5, 7, 8))
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], gradients[0], **tolerance)
    torch.testing.assert_close(gradients[2], gradients[0], **tolerance)


@needs_compiler
@needs_lanes
def test_few_numbers_and_exports_keep_the_plain_formula():
    turn, x = rope_for(torch.bfloat16)
    x = x[..., :8].contiguous()
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(lambda x: turn(x)), x)
        many = x.expand(1 + LANES[torch.bfloat16].pays // x.numel(), *x.shape).flatten(0, 1)
        _, (code_of_many,) = run_and_get_code(torch.compile(lambda x: turn(x)), many)

        class Turned(torch.nn.Module):
            def forward(self, x):
                return turn(x)

        program = torch.export.export(Turned(), (many,), strict=True)
    assert "int32_t*" not in code
    assert "int32_t*" in code_of_many
    assert "bfloat16" in str(program.graph)
    assert "view.dtype" not in str(program.graph)


@needs_compiler
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_in_a_graph_see_the_plain_formula(every_size_pays, transform):
    turn, x = rope_for(torch.float32)
    x = x[..., :8].contiguous()
    transformed = {
        "vmap": lambda x: torch.func.vmap(turn)(x),
        "grad": torch.func.grad(lambda x: (turn(x) * x.roll(1, -1)).sum()),
        "jvp": lambda x: torch.func.jvp(turn, (x,), (x.roll(1, -1),))[1],
    }[transform]
    torch.testing.assert_close(torch.compile(transformed)(x), transformed(x))


@needs_compiler
def test_learned_frequencies_get_their_gradients_from_a_graph(every_size_pays):
    rope = ndpos.RotaryEmbedding(ndpos.split(8, 2), pairing="interleaved", learnable=True)
    x = numbers(2, 5, 6, 8)

    def loss(x):
        return (rope.on_grid((2, 3))(x) * x.roll(1, -1)).sum()

    expected = torch.autograd.grad(loss(x), rope.frequencies)
    torch.testing.assert_close(torch.autograd.grad(torch.compile(loss)(x), rope.frequencies), expected)


@needs_compiler
@every_dtype
def test_the_compiled_way_turns_what_begins_at_an_odd_place_too(dtype):
    turn = ndpos.RotaryEmbedding(ndpos.split(8, 2), pairing="interleaved", backend="compiled").on_grid((2, 3))
    for start, more in ((0, 1), (0, 0), (1, 0), (1, 1)):  # where it begins, and whether its storage is whole pairs
        size = start + 96 + more
        x = numbers(size, dtype=dtype)[start:][:96].view(2, 6, 8)
        out = torch.empty(size, dtype=dtype)[start:][:96].view(2, 6, 8)
        expected = ndpos.rotate(x, turn.sin.atan2(turn.cos)[0], pairing="interleaved")
        close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(turn(x), expected, **close)
        torch.testing.assert_close(turn(x, out=out), expected, **close)
        torch.testing.assert_close(turn(x, out=x), expected, **close)


@needs_compiler
def test_a_gradient_may_begin_at_an_odd_place(every_size_pays):
    turn, x = rope_for(torch.float32)
    head, above = numbers(1), numbers(2 * 5 * 7 * 8 + 1, seed=4)

    def joined(run):
        leaf = x[..., :8].contiguous().requires_grad_()
        torch.cat((head, run(leaf).flatten())).mul(above).sum().backward()
        return leaf.grad

    expected = joined(turn)
    torch.testing.assert_close(joined(torch.compile(turn, fullgraph=True)), expected)
    whole = torch.compile(lambda x: torch.cat((head, turn(x).flatten())).mul(above).sum(), fullgraph=True)
    leaf = x[..., :8].contiguous().requires_grad_()
    whole(leaf).backward()
    torch.testing.assert_close(leaf.grad, expected)


@needs_compiler
def test_forward_mode_in_a_graph_keeps_its_tangents(every_size_pays):
    turn, x = rope_for(torch.float32)
    x = x[..., :8].contiguous()

    def tangent(x, direction):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(turn(forward_ad.make_dual(x, direction))).tangent

    torch.testing.assert_close(torch.compile(tangent)(x, x.roll(1, -1)), turn(x.roll(1, -1)))


class Labelled(torch.Tensor):
    """A subclass that changes nothing."""


@needs_compiler
def test_subclasses_in_a_graph_see_the_plain_formula(every_size_pays):
    turn, x = rope_for(torch.float32)
    x = x[..., :8].contiguous()
    turned = torch.compile(turn)(x.as_subclass(Labelled))
    torch.testing.assert_close(turned.as_subclass(torch.Tensor), turn(x))


@needs_compiler
@needs_lanes
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("pays", [0, 2**30])
def test_the_result_of_a_graph_lies_as_that_of_eager_mode(monkeypatch, pairing, pays):
    monkeypatch.setattr(lanes, "LANES", {kind: lane._replace(pays=pays) for kind, lane in LANES.items()})
    turn = ndpos.RotaryEmbedding(ndpos.split(8, 2), pairing=pairing).on_grid((2, 3), num_prefix=1)
    for x in (numbers(2, 7, 5, 8).transpose(1, 2), numbers(2, 5, 7, 8)):
        turned = torch.compile(turn, fullgraph=True)(x)
        assert turned.stride() == turn(x).stride()
        torch.testing.assert_close(turned, turn(x))
