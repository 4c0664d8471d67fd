"""Weights carried from one pairing to another: scores stay, bits come back."""

import pytest
import torch

import ndpos

ROUTES = [(source, target) for source in ("interleaved", "half", "half_per_axis") for target in ("interleaved", "half")]


def scores(q, k, pairing, blocks=None):
    angles = ndpos.angles(ndpos.grid((5,)), ndpos.geometric(ndpos.AxisSplit((2 * sum(blocks or (4,)),))))
    blocks = blocks if pairing == "half_per_axis" else None
    turned = [ndpos.rotate(x, angles, pairing=pairing, blocks=blocks) for x in (q, k)]
    return turned[0] @ turned[1].mT


def test_converted_rows_give_the_same_scores_and_unconverted_ones_do_not():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    w_q, w_k = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
    expected = scores(x @ w_q.T, x @ w_k.T, "interleaved")
    c_q, c_k = (ndpos.convert_pairing(w, head_dim=8, source="interleaved", target="half") for w in (w_q, w_k))
    torch.testing.assert_close(scores(x @ c_q.T, x @ c_k.T, "half"), expected, rtol=0, atol=1e-6)
    assert (scores(x @ w_q.T, x @ w_k.T, "half") - expected).abs().max() > 1


def test_interleaved_to_half_takes_even_channels_first():
    rows = ndpos.convert_pairing(torch.arange(8), head_dim=8, source="interleaved", target="half")
    assert rows.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize(("source", "target"), ROUTES)
@pytest.mark.parametrize("pairs", [4, 3])
def test_every_route_scores_alike_and_comes_back_bit_for_bit(source, target, pairs, rng):
    blocks = (1, pairs - 1)
    q, k = torch.randn(2, 5, 8, generator=rng, dtype=torch.float64)

    def convert(x, to, back):
        given = blocks if "half_per_axis" in (to, back) else None
        return ndpos.convert_pairing(x.T, head_dim=8, source=to, target=back, pairs=pairs, blocks=given).T

    there = [convert(x, source, target) for x in (q, k)]
    torch.testing.assert_close(scores(*there, target, blocks), scores(q, k, source, blocks))
    assert torch.equal(convert(there[0], target, source), q)
    assert torch.equal(there[0][:, 2 * pairs :], q[:, 2 * pairs :]), "channels that do not turn stay in place"


def test_fused_projections_keep_v_and_convert_every_head_of_q_and_k(rng):
    weight = torch.randn((4 + 2 + 2) * 6, 3, generator=rng)
    parts = (("q", 4), ("k", 2), ("v", 2))
    whole = ndpos.convert_pairing(weight, head_dim=6, source="half", target="interleaved", fused=parts)
    q, k, v = weight.split([24, 12, 12])
    assert torch.equal(whole[:24], ndpos.convert_pairing(q, head_dim=6, source="half", target="interleaved"))
    assert torch.equal(whole[24:36], ndpos.convert_pairing(k, head_dim=6, source="half", target="interleaved"))
    assert torch.equal(whole[36:], v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float64])
def test_biases_and_any_dtype_are_carried_exactly(dtype):
    bias = torch.arange(12).to(dtype)
    moved = ndpos.convert_pairing(bias, head_dim=6, source="half", target="interleaved")
    assert moved.dtype == dtype
    assert moved.tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"head_dim": 5}, r"rows are whole heads of 5 channels, got \(8, 2\)"),
        ({"head_dim": 8, "pairs": 5}, "5 pairs need 10 channels, head_dim is 8"),
        ({"head_dim": 8, "source": "split"}, "pairing is one of .*got 'split'"),
        ({"head_dim": 8, "source": "half_per_axis"}, "needs the pairs of each axis block, 4 in all, got blocks=None"),
        ({"head_dim": 8, "blocks": (2, 2)}, "blocks belong to 'half_per_axis'; got 'half' to 'interleaved'"),
        ({"head_dim": 4, "fused": (("q", 1), ("k", 2))}, r"for 2 heads in \(8, 2\)"),
        ({"head_dim": 4, "fused": (("q", 1), ("x", 1))}, "part 'q', 'k' or 'v'"),
    ],
)
def test_errors_say_what_was_seen(settings, text):
    with pytest.raises(ValueError, match=text):
        ndpos.convert_pairing(torch.zeros(8, 2), **{"source": "half", "target": "interleaved", **settings})
