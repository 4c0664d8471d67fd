"""The laws of a rotary encoding, through the front door: for any number of axes, splits of any shape, every pairing."""

import math
from itertools import permutations

import pytest
import references
import torch
import torch.nn.functional as F

import ndpos
from ndpos.kernels import PAIRINGS

SPLITS = [
    ndpos.AxisSplit((8,)),
    ndpos.AxisSplit((4, 12)),
    ndpos.AxisSplit((6, 2, 8), order=(2, 0, 1)),
    ndpos.AxisSplit((2, 4, 2, 6)),
    ndpos.AxisSplit((4, 6), dim=14),
]
every_split = pytest.mark.parametrize("split", SPLITS, ids=repr)
every_pairing = pytest.mark.parametrize("pairing", PAIRINGS)


def rotary(split, pairing="half", **settings):
    """Coordinates (axes,) to the turn of one token: the path that every law here walks."""
    rope = ndpos.RotaryEmbedding(split, pairing=pairing, **settings)
    return lambda at: rope(at.reshape(1, -1), dtype=torch.float64)


def normal(rng, *shape):
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


@every_split
@every_pairing
def test_a_turn_keeps_the_length_of_every_pair(split, pairing, rng):
    q = normal(rng, 1, split.dim)
    turned = rotary(split, pairing)(7 * normal(rng, split.axes))(q)
    for one, two in references.pair_places(pairing, split.pairs, split.blocks):
        torch.testing.assert_close(turned[0, one].hypot(turned[0, two]), q[0, one].hypot(q[0, two]))
    torch.testing.assert_close(turned.norm(), q.norm())
    assert (turned - q).abs().max() > 0.1  # the twin: doing nothing keeps lengths too


@every_split
@every_pairing
def test_a_score_sees_displacement_and_nothing_else_on_every_axis(split, pairing, rng):
    turn_at = rotary(split, pairing)
    q, k = normal(rng, 2, 1, split.dim)
    at_q, at_k, shift = 5 * normal(rng, 3, split.axes)

    def score(at_q, at_k):
        return (turn_at(at_q)(q) * turn_at(at_k).keys(k)).sum()

    torch.testing.assert_close(score(at_q + shift, at_k + shift), score(at_q, at_k))
    for axis in range(split.axes):
        step = torch.zeros_like(shift)
        step[axis] = 1.0
        torch.testing.assert_close(score(at_q + step, at_k + step), score(at_q, at_k))
        assert (score(at_q + step, at_k) - score(at_q, at_k)).abs() > 1e-3
        assert (score(at_q, at_k + step) - score(at_q, at_k)).abs() > 1e-3


@every_pairing
def test_a_score_under_mixed_directions_sees_displacement_too(pairing, rng):
    """Heads that listen to mixtures of all axes give up disjoint channels, not the law."""
    split = ndpos.split(12, 3)
    turn_at = rotary(split, pairing, frequencies=ndpos.mixed(3, 6, heads=2, generator=rng))
    q, k = normal(rng, 2, 2, 1, split.dim)
    at_q, at_k, shift = 3 * normal(rng, 3, split.axes)

    def scores(at_q, at_k):
        return (turn_at(at_q)(q) * turn_at(at_k).keys(k)).sum((-2, -1))

    torch.testing.assert_close(scores(at_q + shift, at_k + shift), scores(at_q, at_k))
    for step in torch.eye(3, dtype=torch.float64):
        assert (scores(at_q + step, at_k) - scores(at_q, at_k)).abs().min() > 1e-3


@every_split
@every_pairing
def test_a_step_along_one_axis_moves_the_channels_of_that_axis_alone(split, pairing, rng):
    turn_at = rotary(split, pairing)
    q, at = normal(rng, 1, split.dim), normal(rng, split.axes)
    places = references.pair_places(pairing, split.pairs, split.blocks)
    listening = torch.zeros(split.dim, dtype=torch.int64)
    for axis in range(split.axes):
        step = torch.zeros_like(at)
        step[axis] = 1.0
        moved = (turn_at(at + step)(q) != turn_at(at)(q)).flatten().nonzero().flatten().tolist()
        assert moved == sorted(
            channel for pair, each in zip(places, split.pair_axes, strict=True) if each == axis for channel in pair
        )
        listening[moved] += 1
    assert listening.tolist() == [1] * 2 * split.pairs + [0] * (split.dim - 2 * split.pairs)


@every_split
@every_pairing
def test_a_turn_by_minus_p_undoes_a_turn_by_p(split, pairing, rng):
    turn_at = rotary(split, pairing)
    q, there, further = normal(rng, 1, split.dim), 9 * normal(rng, split.axes), normal(rng, split.axes)
    torch.testing.assert_close(turn_at(-there)(turn_at(there)(q)), q)
    torch.testing.assert_close(turn_at(further)(turn_at(there)(q)), turn_at(there + further)(q))
    assert torch.equal(turn_at(0 * there)(q), q)


def test_fractional_and_negative_positions_are_turned_like_any_other():
    rope = ndpos.RotaryEmbedding(ndpos.split(8, 1))
    positions = torch.tensor([[-2.5], [0.0], [1.25]])
    q = torch.linspace(-1, 1, 24).view(3, 8)
    angles = references.angles(positions.tolist(), [references.ladder(4, 1e4)])
    expected = torch.tensor(references.rotation(q.tolist(), angles, "half"))
    torch.testing.assert_close(rope(positions)(q), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(rope(-positions)(rope(positions)(q)), q, atol=1e-6, rtol=0)


def test_the_first_step_of_a_row_major_clip_is_a_step_along_x_alone():
    rope = ndpos.RotaryEmbedding(ndpos.AxisSplit((2, 4, 6)), pairing="half_per_axis")
    turned = rope.on_grid((2, 3, 4))(torch.ones(24, 12))
    assert (turned[1] != turned[0]).tolist() == [False] * 6 + [True] * 6
    assert (turned[4] != turned[0]).tolist() == [False] * 2 + [True] * 4 + [False] * 6
    assert (turned[12] != turned[0]).tolist() == [True] * 2 + [False] * 10
    assert torch.equal(rope.on_grid((2, 3, 4), step=2).cos, rope.on_grid((2, 3, 4), step=(2, 2, 2)).cos)


@every_pairing
def test_one_pair_turns_as_the_worked_example_says(pairing):
    rope = ndpos.RotaryEmbedding(ndpos.split(2, 1), pairing=pairing)
    turned = rope(torch.tensor([[3], [7]]))(torch.tensor([[0.6, 0.4]] * 2))
    assert turned.mul(100).round().div(100).tolist() == torch.tensor([[-0.65, -0.31], [0.19, 0.70]]).tolist()


@every_pairing
@pytest.mark.parametrize(("offset", "score"), [(4, 1.18), (6, 1.97)])
def test_scores_of_four_equal_pairs_are_those_of_the_worked_example_at_any_shift(pairing, offset, score):
    rope = ndpos.RotaryEmbedding(ndpos.split(8, 1), pairing=pairing)
    places = references.pair_places(pairing, 4, [4])
    q = torch.empty(1, 8)
    for one, two in places:
        q[0, one], q[0, two] = 0.6, 0.4
    for at in (0, 1, 17, 1000):
        seen = (rope(torch.tensor([[at]]))(q) * rope(torch.tensor([[at + offset]])).keys(q)).sum().item()
        assert round(seen, 2) == score
        assert seen == pytest.approx(0.52 * sum(math.cos(offset * 1e4 ** (-pair / 4)) for pair in range(4)), abs=1e-6)


WORDS = {"dog": (0.8, 0.2), "bites": (0.1, 0.9), "man": (0.5, 0.6)}
SCORES = {
    ("dog", "dog"): 0.68,
    ("dog", "bites"): 0.26,
    ("dog", "man"): 0.52,
    ("bites", "bites"): 0.82,
    ("bites", "man"): 0.59,
    ("man", "man"): 0.61,
}


def attend(words, *, causal=False, turn=None):
    """Self-attention over the embeddings of ``words``: the word to what it takes from the sentence."""
    x = torch.tensor([WORDS[word] for word in words], dtype=torch.float64)
    q, k = (x, x) if turn is None else (turn(x), turn.keys(x))
    out = F.scaled_dot_product_attention(q[None], k[None], x[None], is_causal=causal)[0]
    expected = references.attention(q.tolist(), k.tolist(), x.tolist(), causal)
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64))
    return dict(zip(words, out, strict=True))


def test_words_without_positions_have_the_same_scores_in_every_order():
    for words in permutations(WORDS):
        x = torch.tensor([WORDS[word] for word in words], dtype=torch.float64)
        scores = (x @ x.mT).tolist()
        for row, one in zip(scores, words, strict=True):
            for score, two in zip(row, words, strict=True):
                known = SCORES[(one, two)] if (one, two) in SCORES else SCORES[(two, one)]
                assert score == pytest.approx(known)


def test_attention_without_positions_or_mask_cannot_tell_who_bites():
    first = attend(("dog", "bites", "man"))
    for words in permutations(WORDS):
        again = attend(words)
        for word in WORDS:
            torch.testing.assert_close(again[word], first[word])


@pytest.mark.parametrize("breaks", ["causal", "rotary"])
def test_a_causal_mask_or_a_rotation_tells_who_bites(breaks):
    turn = ndpos.RotaryEmbedding(ndpos.split(2, 1)).on_grid((3,)) if breaks == "rotary" else None
    dog_bites = attend(("dog", "bites", "man"), causal=breaks == "causal", turn=turn)
    man_bites = attend(("man", "bites", "dog"), causal=breaks == "causal", turn=turn)
    assert max((dog_bites[word] - man_bites[word]).abs().max() for word in WORDS) > 1e-2


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_rotary_attention_follows_coordinates_not_the_order_of_tokens(axes, rng):
    """With coordinates carried along, a permutation of tokens is a permutation of outputs and nothing more."""
    rope = ndpos.RotaryEmbedding(ndpos.split(12, axes))
    coords, order = ndpos.grid((4,) * axes).flatten(0, -2), torch.randperm(4**axes, generator=rng)
    x = normal(rng, 4**axes, 12)

    def attend(x, turn):
        return F.scaled_dot_product_attention(turn(x)[None], turn.keys(x)[None], x[None])[0]

    carried = attend(x[order], rope(coords[order], dtype=torch.float64))
    torch.testing.assert_close(carried, attend(x, rope(coords, dtype=torch.float64))[order])
    left_behind = attend(x[order], rope(coords, dtype=torch.float64))
    assert (left_behind - carried).abs().max() > 1e-3
