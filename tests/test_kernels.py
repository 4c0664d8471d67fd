"""The rotation itself, against loops over plain numbers: values, gradients, shapes, strides, dtypes, saved tensors."""

import math

import pytest
import references
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import ndpos
from ndpos.kernels import PAIRINGS
from ndpos.kernels.plain import turn_pairs

every_pairing = pytest.mark.parametrize("pairing", PAIRINGS)
HALVES = (torch.float16, torch.bfloat16)
ODD = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e30, 1e-45])  # numbers that arithmetic would not leave alone


@st.composite
def turnings(draw):
    """Shapes of a rotation: leading dimensions, tokens, blocks of pairs, channels left over, and a seed."""
    leading = draw(st.lists(st.integers(1, 3), max_size=2))
    tokens = draw(st.integers(0, 4))
    blocks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(sum))
    return (*leading, tokens), tuple(blocks), draw(st.integers(0, 3)), draw(st.integers(0, 2**31))


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def blocks_of(pairing, blocks):
    return blocks if pairing == "half_per_axis" else None


def rotate(x, angles, pairing, blocks=None, **settings):
    return ndpos.rotate(x, angles, pairing=pairing, blocks=blocks_of(pairing, blocks), **settings)


def slowly(x, angles, pairing, blocks=None):
    if x.ndim > 2:
        return torch.stack([slowly(each, angles, pairing, blocks) for each in x])
    turned = references.rotation(x.tolist(), angles.tolist(), pairing, blocks)
    return torch.tensor(turned, dtype=torch.float64).reshape(x.shape)


@every_pairing
@given(turnings())
def test_every_pair_turns_as_the_slow_loop_turns_it(pairing, turning):
    shape, blocks, rest, seed = turning
    x, angles = numbers(*shape, 2 * sum(blocks) + rest, seed=seed), 9 * numbers(shape[-1], sum(blocks), seed=seed)
    expected = slowly(x, angles, pairing, blocks)
    torch.testing.assert_close(rotate(x, angles, pairing, blocks), expected, rtol=1e-13, atol=1e-13)
    single = rotate(x.float(), angles.float(), pairing, blocks)
    torch.testing.assert_close(
        single.double(), slowly(x.float(), angles.float(), pairing, blocks), rtol=1e-6, atol=1e-6
    )


@every_pairing
@given(turnings())
def test_gradients_are_those_of_the_slow_loop(pairing, turning):
    shape, blocks, rest, seed = turning
    tokens, pairs = shape[-1], sum(blocks)
    x = numbers(tokens, 2 * pairs + rest, seed=seed).requires_grad_()
    angles = numbers(tokens, pairs, seed=seed + 1).requires_grad_()
    above = numbers(tokens, 2 * pairs + rest, seed=seed + 2)
    rotate(x, angles, pairing, blocks).backward(above)
    expected = references.rotation_gradients(x.tolist(), angles.tolist(), above.tolist(), pairing, blocks)
    for got, want in zip((x.grad, angles.grad), expected, strict=True):
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64).reshape(got.shape))


@every_pairing
def test_first_and_second_derivatives_agree_with_finite_differences(pairing):
    x, angles = numbers(2, 3, 11).requires_grad_(), numbers(3, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, angles: rotate(x, angles, pairing, (2, 3)), (x, angles))
    assert torch.autograd.gradgradcheck(lambda x, angles: rotate(x, angles, pairing, (2, 3)), (x, angles))


@every_pairing
@pytest.mark.parametrize("rest", [0, 3])
def test_strides_of_the_input_change_a_last_bit_at_most(pairing, rest):
    width = 10 + rest
    angles = numbers(6, 5, dtype=torch.float32)
    fused = numbers(2, 6, 3, 4, width, dtype=torch.float32)  # (batch, tokens, qkv, heads, head_dim)
    views = {
        "sliced from qkv": fused[:, :, 1].transpose(1, 2),
        "transposed channels": numbers(2, 4, width, 6, dtype=torch.float32).mT,
        "expanded heads": numbers(2, 1, 6, width, dtype=torch.float32).expand(2, 4, 6, width),
        "expanded tokens": numbers(2, 4, 1, width, dtype=torch.float32).expand(2, 4, 6, width),
        "every second channel": numbers(2, 4, 6, 2 * width, dtype=torch.float32)[..., ::2],
        "with an offset": numbers(2, 4, 7, width, dtype=torch.float32)[:, :, 1:],
    }
    for name, x in views.items():
        before = x.clone()
        turned, packed = rotate(x, angles, pairing, (2, 3)), rotate(x.contiguous(), angles, pairing, (2, 3))
        assert (turned - packed).abs().max() <= torch.finfo(torch.float32).eps * x.abs().max() * 2, name
        assert torch.equal(x, before), name  # and nothing is turned in place


@every_pairing
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("precise", [torch.float32, torch.float64], ids=str)
def test_the_result_has_the_dtype_of_x_and_is_rounded_once(pairing, dtype, precise):
    x, angles = numbers(2, 9, 12, dtype=dtype), 5 * numbers(9, 5, dtype=precise)
    turned = rotate(x, angles, pairing, (1, 4))
    assert turned.dtype == dtype
    wider = torch.promote_types(torch.promote_types(dtype, precise), torch.float32)
    assert torch.equal(turned, rotate(x.to(wider), angles, pairing, (1, 4)).to(dtype))


@every_pairing
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_queries_are_within_one_unit_of_the_exact_turn_at_1200_positions(pairing, dtype):
    rope = ndpos.RotaryEmbedding(ndpos.split(32, 1), pairing=pairing)
    turn, x = rope.on_grid((1200,)), numbers(1, 32).expand(1200, 32)
    exact, halved = rope.on_grid((1200,), dtype=torch.float64)(x.to(dtype).double()), turn(x.to(dtype))
    unit = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).smallest_normal
    assert ((halved.double() - exact).abs() <= unit).all()
    assert len(halved.unique(dim=0)) == len(turn(x.float()).unique(dim=0)) == 1200


@every_pairing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_channels_past_the_pairs_come_back_bit_for_bit(pairing, dtype):
    x = numbers(4, 10 + len(ODD), dtype=dtype)
    x[:, 10:] = ODD.to(dtype)
    turned = rotate(x, 100 * numbers(4, 5, dtype=torch.float32), pairing, (2, 3))
    whole = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(turned[:, 10:].contiguous().view(whole), x[:, 10:].contiguous().view(whole))
    assert turned[:, :10].isfinite().all()  # and what is odd past the pairs stays there


@every_pairing
def test_samples_of_one_token_turn_by_their_own_positions(pairing):
    angles = ndpos.angles(torch.tensor([[[0]], [[1]]]), torch.ones(1, 2)).unsqueeze(-3)
    turned = rotate(torch.ones(2, 1, 1, 4), angles, pairing, (1, 1))
    assert turned[0].flatten().tolist() == [1.0] * 4
    expected = [math.cos(1) - math.sin(1)] * 2 + [math.cos(1) + math.sin(1)] * 2
    assert turned[1].flatten().sort().values.tolist() == pytest.approx(expected)


@every_pairing
def test_the_two_layouts_of_heads_are_transposes_of_each_other(pairing):
    for angles in (numbers(5, 4), numbers(2, 1, 5, 4), numbers(1, 3, 5, 4), numbers(2, 3, 5, 4)):
        x = numbers(2, 3, 5, 8, seed=1)  # (batch, heads, tokens, head_dim)
        turned = rotate(x, angles, pairing, (2, 2))
        other = rotate(x.transpose(1, 2), angles, pairing, (2, 2), token_dim=-3)
        assert torch.equal(other.transpose(1, 2), turned)
        assert torch.equal(rotate(x, angles, pairing, (2, 2), token_dim=2), turned)
        for sample in range(2):  # angles are (..., heads|1, tokens, pairs) whatever token_dim
            for head in range(3):
                own = angles if angles.ndim == 2 else angles.expand(2, 3, 5, 4)[sample, head]
                torch.testing.assert_close(turned[sample, head], slowly(x[sample, head], own, pairing, (2, 2)))


def saved_by(make):
    """Dtype and shape of every tensor that autograd keeps for the backward of ``make()``."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = make()
    return out.dtype, [(tensor.dtype, tuple(tensor.shape)) for tensor in saved]


@every_pairing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tables_cast_by_a_hook_change_neither_the_dtype_nor_what_is_saved(pairing, dtype):
    """Checkpointing compares the tensors saved by the forward, whose tables a hook has cast, and by the recompute."""
    x, angles = numbers(2, 3, 8, dtype=dtype).requires_grad_(), numbers(3, 4, dtype=torch.float32)
    kept = saved_by(lambda: turn_pairs(x, angles.cos(), angles.sin(), pairing, (1, 3)))
    cast = saved_by(lambda: turn_pairs(x, angles.cos().bfloat16(), angles.sin().bfloat16(), pairing, (1, 3)))
    assert kept == cast
    assert kept[0] == dtype


@every_pairing
def test_autocast_and_default_dtype_change_no_bit(pairing):
    x, angles = numbers(2, 3, 8, dtype=torch.float32), numbers(3, 4, dtype=torch.float32)
    expected = rotate(x, angles, pairing, (2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotate(x, angles, pairing, (2, 2)), expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(rotate(x, angles, pairing, (2, 2)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@every_pairing
@pytest.mark.parametrize(("blocks", "rest"), [((4,), 0), ((0, 4), 0), ((3, 0, 1), 2), ((1, 3), 1)])
def test_a_traced_graph_has_real_numbers_and_no_empty_pieces(pairing, blocks, rest):
    x, angles = numbers(3, 8 + rest, dtype=torch.float32), numbers(3, 4, dtype=torch.float32)
    graph = make_fx(lambda x, angles: rotate(x, angles, pairing, blocks), tracing_mode="fake")(x, angles).graph
    for node in graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            assert not value.dtype.is_complex, node
        if "cat" in str(node.target):
            assert all(part.meta["val"].shape[-1] > 0 for part in node.args[0]), node


@every_pairing
def test_no_tokens_come_back_as_no_tokens(pairing):
    assert rotate(torch.empty(1, 1, 0, 8), torch.empty(0, 4), pairing, (2, 2)).shape == (1, 1, 0, 8)


def x(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("args", "settings", "error", "says"),
    [
        ((x(3, 4), x(2, 2)), {}, ValueError, ["0 + 2 + 0 tokens", "x has 3", "(3, 4)", "num_prefix", "token_dim=-3"]),
        ((x(2, 4), x(2, 3)), {}, ValueError, ["3 pairs need 6 channels", "x has 4", "Fewer pairs"]),
        ((x(2, 4), x(2)), {}, ValueError, ["angles are (tokens, pairs)", "(2,)", "unsqueeze(-3)"]),
        ((x(4), x(2)), {}, ValueError, ["angles are (tokens, pairs)", "(4,)", "(2,)"]),
        ((x(2, 3, 5, 4), x(2, 5, 2)), {}, ValueError, ["as many dimensions as x", "(2, 5, 2)", "unsqueeze(-3)"]),
        ((x(2, 3, 5, 4), x(4, 1, 5, 2)), {}, ValueError, ["are (4, 1), of x (2, 3)", "coords without a batch"]),
        ((x(2, 3, 5, 4), x(1, 6, 5, 2)), {}, ValueError, ["are (1, 6), of x (2, 3)", "turn.head"]),
        ((x(3, 5, 4), x(5, 2)), {"token_dim": 0}, ValueError, ["token_dim 0", "0 + 5 + 0", "x has 3"]),
        ((x(5, 4), x(5, 2)), {"token_dim": -1}, ValueError, ["token_dim is -2 or -3", "head_dim"]),
        ((x(5, 4), x(5, 2)), {"token_dim": -3}, ValueError, ["token_dim is -2 or -3", "(5, 4)"]),
        (
            (x(5, 4), x(5, 2, dtype=torch.bfloat16)),
            {},
            ValueError,
            ["float32 or float64", "bfloat16", "cast the result"],
        ),
        ((x(5, 4), [0.0]), {}, ValueError, ["float32 or float64", "list"]),
        ((x(5, 4), x(5, 2)), {"pairing": "neox"}, ValueError, ["'interleaved', 'half', 'half_per_axis'", "'neox'"]),
        ((x(5, 4), x(5, 2)), {"pairing": "half_per_axis"}, ValueError, ["2 in all", "None", "split.blocks"]),
        ((x(5, 4), x(5, 2)), {"pairing": "half_per_axis", "blocks": (1, 2)}, ValueError, ["2 in all", "(1, 2)"]),
        (
            (x(5, 4, dtype=torch.int64), x(5, 2)),
            {},
            TypeError,
            ["float16, bfloat16, float32 or float64", "torch.int64"],
        ),
        (([1.0], x(5, 2)), {}, TypeError, ["float16, bfloat16, float32 or float64", "list"]),
        (([1.0], x(1, 5, 2)), {}, TypeError, ["float16, bfloat16, float32 or float64", "list"]),
        ((x(5, 4, dtype=torch.complex64), x(5, 2)), {}, TypeError, ["torch.complex64"]),
    ],
)
def test_a_refused_rotation_names_the_rule_what_was_seen_and_a_cure(args, settings, error, says):
    with pytest.raises(error) as refused:
        ndpos.rotate(*args, **{"pairing": "half", **settings})
    assert str(refused.value).startswith("ndpos.rotate: ")
    for part in says:
        assert part in str(refused.value)


def test_the_pairing_has_no_default():
    with pytest.raises(TypeError, match="pairing"):
        ndpos.rotate(torch.zeros(1, 2), torch.zeros(1, 1))
