"""The hinge: coordinates times frequencies, in float64, whatever stands around it."""

from fractions import Fraction

import pytest
import references
import torch
from hypothesis import given
from hypothesis import strategies as st

import ndpos
import ndpos.positions
from ndpos.positions import axis_coords
from ndpos.radians import PlainMatrix, turns, turns_on_grid

LINE = ndpos.geometric(ndpos.split(64, 1))
seeds = st.integers(0, 2**32).map(lambda seed: torch.Generator().manual_seed(seed))


def random_matrix(rng, axes, pairs, *leading, dense=False):
    """Frequencies of random columns: each listens to one axis or, now and then, to none; dense: to all of them."""
    values = torch.randn(*leading, axes, pairs, generator=rng, dtype=torch.float64)
    if dense:
        return values
    return values * (torch.arange(axes)[:, None] == torch.randint(-1, axes, (pairs,), generator=rng))


@given(st.integers(1, 4), st.integers(0, 5), st.integers(1, 6), st.booleans(), seeds)
def test_an_angle_is_the_sum_over_axes_of_coordinate_times_frequency(axes, tokens, pairs, dense, rng):
    coords = 100 * torch.randn(tokens, axes, generator=rng, dtype=torch.float64)
    matrix = random_matrix(rng, axes, pairs, dense=dense)
    expected = torch.tensor(references.angles(coords.tolist(), matrix.tolist()), dtype=torch.float64)
    got = ndpos.angles(coords, matrix)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected.reshape(tokens, pairs), rtol=1e-14, atol=1e-12)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_heads_stand_before_tokens_and_layers_before_everything(batch, rng):
    coords = torch.randn(*batch, 5, 3, generator=rng)
    matrix = random_matrix(rng, 3, 4, 7, 6, dense=True)  # layers, heads
    assert ndpos.angles(coords, matrix).shape == (7, *batch, 6, 5, 4)
    assert ndpos.angles(coords, matrix[0]).shape == (*batch, 6, 5, 4)
    for layer in (0, 6):
        for head in (0, 5):
            alone = ndpos.angles(coords, matrix[layer, head])
            assert torch.equal(ndpos.angles(coords, matrix)[layer].select(-3, head), alone)
            assert torch.equal(ndpos.angles(coords, matrix[layer]).select(-3, head), alone)


def test_a_batch_of_coordinates_is_its_samples_one_by_one_and_vmapped(rng):
    coords = torch.randn(3, 5, 2, generator=rng)
    matrix = random_matrix(rng, 2, 4, dense=True)
    together = ndpos.angles(coords, matrix)
    assert torch.equal(together, torch.stack([ndpos.angles(sample, matrix) for sample in coords]))
    assert torch.equal(together, torch.vmap(lambda sample: ndpos.angles(sample, matrix))(coords))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float32])
def test_angles_are_wide_whatever_the_coordinates_are(dtype):
    coords = torch.arange(100, dtype=torch.float64)[:, None]
    assert torch.equal(ndpos.angles(coords.to(dtype), LINE), ndpos.angles(coords, LINE))


@pytest.mark.parametrize("position", [65536, 10**6, 2**24 + 1, -(2**24) - 1])
def test_cosines_and_sines_are_right_to_a_millionth_far_beyond_float32(position):
    cos, sin = turns(torch.tensor([[position]]), LINE, torch.float32)
    assert cos.dtype == sin.dtype == torch.float32
    for pair in range(32):
        exact = references.exact_turn(position, Fraction(pair, 32))
        assert (cos[0, pair].item(), sin[0, pair].item()) == pytest.approx(exact, abs=1e-6)


def test_the_cosine_of_an_integer_that_float32_cannot_hold_is_its_own():
    cos, _ = turns(torch.tensor([[2**24], [2**24 + 1]]), torch.ones(1, 1), torch.float64)
    assert cos[1].item() == pytest.approx(0.99438396, abs=5e-9)
    rounded, _ = turns(torch.tensor([[2**24 + 1]]).float(), torch.ones(1, 1), torch.float64)
    assert rounded.item() == pytest.approx(0.6263, abs=5e-5)  # what coordinates kept in float32 would give


def test_five_hundred_positions_past_65536_are_exact_and_apart():
    coords = ndpos.grid((512,), start=65536)
    cos, sin = turns(coords, LINE, torch.float32)
    slow = [[references.exact_turn(65536 + row, Fraction(pair, 32)) for pair in (0, 1, 15, 31)] for row in range(512)]
    exact_cos, exact_sin = torch.tensor(slow, dtype=torch.float64).unbind(-1)
    columns = [0, 1, 15, 31]
    torch.testing.assert_close(cos[:, columns].double(), exact_cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, columns].double(), exact_sin, rtol=0, atol=1e-6)
    assert len(torch.unique(cos, dim=0)) == 512


def test_autocast_changes_no_bit_and_merges_no_patches():
    coords = ndpos.grid((8, 8), start=65536).flatten(0, -2)
    for matrix in (ndpos.geometric(ndpos.split(64, 2)), ndpos.mixed(2, 32, heads=2)):
        plain = ndpos.angles(coords, matrix)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = ndpos.angles(coords, matrix)
        assert cast.dtype == torch.float64
        assert torch.equal(cast, plain)
        assert len(torch.unique(cast.reshape(-1, 64, 32)[0].cos(), dim=0)) == 64


def test_queries_in_bfloat16_are_turned_as_if_in_float32_and_rounded_once(rng):
    x = torch.randn(1, 32, generator=rng).bfloat16().expand(1200, 32)
    angles = ndpos.angles(ndpos.grid((1200,)), ndpos.geometric(ndpos.split(32, 1)))
    narrow = ndpos.rotate(x, angles, pairing="half")
    wide = ndpos.rotate(x.float(), angles, pairing="half")
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide.bfloat16().float(), rtol=2**-8, atol=1e-6)
    assert len(torch.unique(wide, dim=0)) == len(torch.unique(narrow, dim=0)) == 1200


def test_every_sample_of_a_batch_turns_by_its_own_position_with_one_token_and_one_key_head():
    coords = torch.tensor([[[0]], [[1]]])
    turn = ndpos.RotaryEmbedding(ndpos.split(4, 1), pairing="half", frequencies=torch.ones(1, 2))(coords)
    q, k = torch.ones(2, 2, 1, 4), torch.ones(2, 1, 1, 4)
    for turned in (turn(q), turn.keys(k)):
        assert torch.equal(turned[0], torch.ones_like(turned[0]))
        torch.testing.assert_close(turned[1, 0, 0], torch.tensor([-0.3012, -0.3012, 1.3818, 1.3818]), rtol=0, atol=5e-5)


def test_a_negative_position_undoes_its_positive_one(rng):
    coords = torch.tensor([[-2.5], [0.0], [1.25]])
    there, back = ndpos.angles(coords, LINE), ndpos.angles(-coords, LINE)
    assert torch.equal(back, -there)
    torch.testing.assert_close(there, coords.double() * LINE, rtol=0, atol=0)
    x = torch.randn(3, 64, generator=rng)
    undone = ndpos.rotate(ndpos.rotate(x, there, pairing="half"), back, pairing="half")
    torch.testing.assert_close(undone, x, rtol=0, atol=1e-6)


def test_gradients_reach_learned_coordinates_and_frequencies(rng):
    coords = torch.randn(3, 2, generator=rng, dtype=torch.float64, requires_grad=True)
    matrix = random_matrix(rng, 2, 4, 2, dense=True).requires_grad_()
    assert torch.autograd.gradcheck(ndpos.angles, (coords, matrix))


def test_nothing_of_float64_is_made_on_a_device_without_it(witness, monkeypatch, rng):
    coords, matrix = torch.randint(0, 9, (5, 2), generator=rng), random_matrix(rng, 2, 6, 3).float()
    wide = ndpos.angles(coords, matrix)
    monkeypatch.setattr(ndpos.positions, "WITHOUT_FLOAT64", frozenset({"cpu"}))
    plain = PlainMatrix.of("test", matrix)
    with witness:
        narrow = ndpos.angles(coords, matrix)
        turns_on_grid(axis_coords((2, 3), 0.5, 1, "cpu"), plain.tensor("cpu"), plain.listens, torch.float32)
    assert torch.float64 not in witness.dtypes
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=1e-5)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 2), st.booleans(), seeds)
def test_a_grid_from_its_axes_is_the_grid_cell_by_cell_bit_for_bit(sizes, pairs, leading, dense, rng):
    matrix = random_matrix(rng, len(sizes), pairs, *(3, 2)[:leading], dense=dense)
    per_axis = axis_coords(sizes, -1.5, 0.75, "cpu")
    cells = ndpos.grid(sizes, start=-1.5, step=0.75).flatten(0, -2)
    on_grid = turns_on_grid(per_axis, matrix, PlainMatrix.of("test", matrix).listens, torch.float32)
    for ours, cell_by_cell in zip(on_grid, turns(cells, matrix, torch.float32), strict=True):
        assert torch.equal(ours, cell_by_cell)


def test_a_clip_costs_a_row_of_sines_per_frame_line_and_column_and_not_per_cell(witness):
    split = ndpos.split(64, 3)
    matrix = PlainMatrix.of("test", ndpos.geometric(split))
    with witness:
        turns_on_grid(axis_coords((16, 64, 64), 0, 1, "cpu"), matrix.tensor("cpu"), matrix.listens, torch.float32)
    rows = 16 * split.blocks[0] + 64 * split.blocks[1] + 64 * split.blocks[2]
    assert witness.elements("cos") == witness.elements("sin") == rows
    with type(witness)() as twin:  # cell by cell, which is what mixed columns must pay
        turns_on_grid(axis_coords((4, 5), 0, 1, "cpu"), torch.ones(2, 3), [None] * 3, torch.float32)
    assert twin.elements("cos") == 4 * 5 * 3


def test_a_plain_matrix_is_a_value_that_gives_the_matrix_back(rng):
    for matrix in (random_matrix(rng, 3, 5), random_matrix(rng, 2, 5, 4, 3), LINE):
        plain = PlainMatrix.of("test", matrix)
        assert torch.equal(plain.tensor("cpu"), matrix)
        assert hash(plain) == hash(PlainMatrix.of("test", matrix.clone()))
    listens = PlainMatrix.of("test", torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 3.0, 4.0, 0.0]])).listens
    assert listens == (0, 1, None, -1)
    two_heads = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]])  # each head one axis, but not the same one
    assert PlainMatrix.of("test", two_heads).listens == (None,)


@pytest.mark.parametrize(
    ("coords", "frequencies", "error", "text"),
    [
        (torch.zeros(4, 3), torch.ones(2, 5), ValueError, "coordinates have 3 axes, frequencies have 2.\n"),
        (torch.zeros(4, 3), torch.ones(2, 5), ValueError, "coords       (4, 3)  (*batch, tokens, axes)\n"),
        (torch.zeros(4, 3), torch.ones(2, 5), ValueError, "frequencies  (2, 5)  (..., axes, pairs)\n"),
        (torch.zeros(4, 3), torch.ones(2, 5), ValueError, "as the coordinates have: ndpos.split(dim, 3)."),
        (torch.zeros(4), torch.ones(1, 5), ValueError, "coordinates are (*batch, tokens, axes), got (4,)."),
        (torch.zeros(4, 1), torch.ones(5), ValueError, "(layers, heads, axes, pairs), got (5,)."),
        (
            torch.zeros(4, 1),
            torch.ones(1, 1, 1, 1, 5),
            ValueError,
            "(layers, heads, axes, pairs), got (1, 1, 1, 1, 5).",
        ),
        (torch.zeros(4, 1, dtype=torch.bool), LINE, TypeError, "coordinates are real numbers, got torch.bool."),
        (
            torch.zeros(4, 1, dtype=torch.complex64),
            LINE,
            TypeError,
            "coordinates are real numbers, got torch.complex64.",
        ),
        (torch.zeros(4, 1), LINE > 0, TypeError, "frequencies are real numbers, got torch.bool."),
        (
            torch.zeros(4, 1),
            LINE.to(torch.complex128),
            TypeError,
            "frequencies are real numbers, got torch.complex128.",
        ),
        ([[1.0]], LINE, TypeError, "coordinates are a tensor (..., axes), got list."),
        (torch.zeros(4, 1), [[1.0]], TypeError, "frequencies are a tensor (..., axes, pairs), got list."),
    ],
)
def test_an_error_names_the_rule_and_what_was_seen(coords, frequencies, error, text):
    with pytest.raises(error) as raised:
        ndpos.angles(coords, frequencies)
    assert str(raised.value).startswith("ndpos.angles: ")
    assert text in str(raised.value)
