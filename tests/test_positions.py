"""Where tokens stand: row-major cells whatever the numbers in them, exact, and moved at random only in training."""

import math
from fractions import Fraction

import numpy as np
import pytest
import references
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import ndpos
import ndpos.positions

some_sizes = st.lists(st.integers(0, 5), min_size=1, max_size=4)
halves = st.integers(-8, 8).map(lambda number: number / 2)

NORMALISED = [(by, at) for by in ("axis", "shortest", "longest") for at in ("centre", "start", "ends")]
EVERY_GRID = [
    *(lambda sizes, by=by, at=at, **more: ndpos.normalised_grid(sizes, by=by, at=at, **more) for by, at in NORMALISED),
    *(
        lambda sizes, align=align, **more: ndpos.scaled_grid(
            sizes, reference_sizes=(4,) * len(sizes), align=align, **more
        )
        for align in ("index", "centre", "corner")
    ),
    lambda sizes, **more: ndpos.centred_grid(sizes, step=0.5, **more),
    lambda sizes, **more: ndpos.grid(sizes, start=0.5, **more),
    lambda sizes, **more: ndpos.grid(sizes, **more),
]


def rows(coords):
    return coords.flatten(0, -2).tolist()


@given(some_sizes, st.integers(-9, 9), st.integers(-3, 3))
def test_a_grid_counts_its_cells_as_an_odometer_does(sizes, start, step):
    coords = ndpos.grid(sizes, start=start, step=step)
    assert coords.dtype == torch.int64
    assert coords.shape == (*sizes, len(sizes))
    assert rows(coords) == references.cells(sizes, start, step)


@given(some_sizes, halves, halves)
def test_a_grid_in_fractions_counts_likewise_in_float64(sizes, start, step):
    coords = ndpos.grid(sizes, start=start, step=step)
    assert coords.dtype == torch.float64
    assert rows(coords) == references.cells(sizes, start, step)


def test_tokens_of_a_rectangle_run_along_x_first():
    y, x = ndpos.grid((2, 3)).flatten(0, -2).mT
    assert (y.tolist(), x.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2])
    y, x = ndpos.grid((3, 4)).flatten(0, -2).mT
    assert (y.tolist(), x.tolist()) == ([0] * 4 + [1] * 4 + [2] * 4, [0, 1, 2, 3] * 3)


def test_each_axis_may_have_its_own_start_and_step():
    assert rows(ndpos.grid((2, 2), start=(10, -1), step=(1, 3))) == [[10, -1], [10, 2], [11, -1], [11, 2]]
    mixed = ndpos.grid((1, 2), start=(10, 0), step=(1, 0.5))
    assert mixed.dtype == torch.float64  # one dtype for all axes
    assert rows(mixed) == [[10.0, 0.0], [10.0, 0.5]]


def test_a_scalar_start_is_the_tuple_of_that_start():
    assert torch.equal(ndpos.grid((2, 3, 4), start=5, step=2), ndpos.grid((2, 3, 4), start=(5,) * 3, step=(2,) * 3))


def test_integers_of_numpy_start_a_grid_of_integers():
    assert ndpos.grid((2,), start=np.int64(5), step=np.uint8(2)).dtype == torch.int64
    assert rows(ndpos.grid((2,), start=np.int64(5), step=np.uint8(2))) == [[5], [7]]
    assert ndpos.grid((2,), start=np.float64(5.0)).dtype == torch.float64


def test_neighbours_stay_apart_past_the_last_integer_of_float32():
    assert rows(ndpos.grid((3,), start=2**24)) == [[2**24], [2**24 + 1], [2**24 + 2]]
    assert rows(ndpos.grid((3,), start=2**24, step=0.5)) == [[2**24], [2**24 + 0.5], [2**24 + 1]]


@pytest.mark.parametrize("make", EVERY_GRID)
@pytest.mark.parametrize("sizes", [(0, 4), (3, 0), (0,), (1,), (2, 1, 3)])
def test_every_grid_may_be_empty_or_one_token_thin(make, sizes):
    coords = make(sizes)
    assert coords.shape == (*sizes, len(sizes))
    assert coords.double().isfinite().all()


@pytest.mark.parametrize("make", EVERY_GRID)
def test_every_grid_is_made_on_the_device_that_is_asked_for_or_the_default_one(make):
    assert make((2, 3), device="meta").device.type == "meta"
    with torch.device("meta"):
        assert make((2, 3)).device.type == "meta"
        assert make((2, 3), device="cpu").device.type == "cpu"
    assert make((2, 3)).device.type == "cpu"


@pytest.mark.parametrize("make", EVERY_GRID)
def test_nothing_of_float64_is_made_on_a_device_without_it(make, witness, monkeypatch):
    wide = make((2, 3))
    monkeypatch.setattr(ndpos.positions, "WITHOUT_FLOAT64", frozenset({"cpu"}))
    with witness:
        narrow = make((2, 3), device="cpu")
        ndpos.augment(narrow, shift=1.0, jitter=2.0, rescale=2.0, training=True)
    assert witness.made
    assert torch.float64 not in witness.dtypes
    torch.testing.assert_close(narrow.double(), wide.double(), rtol=1e-6, atol=1e-6)


def test_float64_is_withheld_from_no_other_device(witness):
    with witness:
        ndpos.centred_grid((2,))
    assert torch.float64 in witness.dtypes


@given(some_sizes.filter(lambda sizes: 0 not in sizes), st.sampled_from(NORMALISED))
def test_normalised_coordinates_are_fractions_of_the_length_that_counts(sizes, choice):
    by, at = choice
    expected = []
    for cell in references.cells(sizes):
        row = []
        for index, size in zip(cell, sizes, strict=True):
            length = {"axis": size, "shortest": min(sizes), "longest": max(sizes)}[by]
            half = {"centre": Fraction(index * 2 + 1, 2) / length, "start": Fraction(index, length)}
            ends = Fraction(index, length - 1) if length > 1 else Fraction(index)
            row.append(float(-1 + 2 * half.get(at, ends)))
        expected.append(row)
    coords = ndpos.normalised_grid(sizes, by=by, at=at).flatten(0, -2)
    torch.testing.assert_close(coords, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)


def test_one_length_for_all_axes_keeps_steps_square_and_a_length_each_does_not():
    for by, square in (("axis", False), ("shortest", True), ("longest", True)):
        down, right = (ndpos.normalised_grid((4, 8), by=by).diff(dim=axis)[0, 0, axis].item() for axis in (0, 1))
        assert (down == right) is square


def test_a_span_places_the_ends_where_it_says():
    assert rows(ndpos.normalised_grid((3,), at="ends", span=(10.0, 20.0))) == [[10.0], [15.0], [20.0]]
    assert rows(ndpos.normalised_grid((2,), span=(0.0, 1.0))) == [[0.25], [0.75]]


def test_the_centre_of_four_cells_is_an_eighth_off_their_corners():
    assert rows(ndpos.normalised_grid((4,))) == [[-0.75], [-0.25], [0.25], [0.75]]
    assert rows(ndpos.normalised_grid((4,), at="start", span=(0.0, 1.0))) == [[0.0], [0.25], [0.5], [0.75]]


def test_a_grid_twice_as_tall_as_its_reference_advances_by_half_steps():
    coords = ndpos.scaled_grid((4, 2), reference_sizes=(2, 2), align="index")
    assert coords[:, 0, 0].tolist() == [0, 0.5, 1, 1.5]
    assert coords[0, :, 1].tolist() == [0, 1]


@pytest.mark.parametrize("align", ["index", "centre", "corner"])
@given(some_sizes)
def test_a_grid_laid_over_itself_stands_still(align, sizes):
    same = ndpos.scaled_grid(sizes, reference_sizes=[max(size, 1) for size in sizes], align=align)
    assert torch.equal(same, ndpos.grid(sizes).double())


@pytest.mark.parametrize(("align", "corners"), [("centre", False), ("corner", True)])
@pytest.mark.parametrize(("now", "then"), [(6, 4), (9, 3), (3, 7), (5, 5), (8, 2)])
def test_centre_and_corner_are_where_torch_samples_a_resized_ramp(align, corners, now, then):
    ramp = torch.arange(then, dtype=torch.float64)
    resized = F.interpolate(ramp[None, None], size=(now,), mode="linear", align_corners=corners)[0, 0]
    coords = ndpos.scaled_grid((now,), reference_sizes=(then,), align=align).flatten().clamp(0, then - 1)
    torch.testing.assert_close(coords, resized, rtol=0, atol=1e-12)


@given(some_sizes, halves)
def test_a_centred_grid_is_a_grid_whose_coordinates_sum_to_zero(sizes, step):
    centred = ndpos.centred_grid(sizes, step=step).flatten(0, -2)
    assert centred.sum(0).abs().max() == 0
    shift = centred - ndpos.grid(sizes, step=step).flatten(0, -2)
    assert torch.equal(shift, shift[:1].expand_as(shift))


FAR = torch.tensor([[1.0, -2.0], [3.0, 4.0]], dtype=torch.float64)


def draws(count, **moves):
    source = torch.Generator().manual_seed(1)
    return torch.stack([ndpos.augment(FAR, training=True, generator=source, **moves) for _ in range(count)])


def test_coordinates_move_in_training_and_stand_still_otherwise():
    moves = {"shift": 1.0, "jitter": 2.0, "rescale": 2.0}
    assert ndpos.augment(FAR, **moves) is FAR
    assert ndpos.augment(FAR, training=True) is FAR  # nothing asked for
    assert not torch.equal(ndpos.augment(FAR, training=True, **moves), FAR)
    before = torch.get_rng_state()
    ndpos.augment(FAR, **moves)
    assert torch.equal(torch.get_rng_state(), before)  # nor does evaluation draw in secret


@pytest.mark.parametrize("move", ["shift", "jitter", "rescale"])
def test_a_seed_decides_the_draw_and_every_call_draws_anew(move):
    one, two = draws(2, **{move: 1.5}), draws(2, **{move: 1.5})
    assert torch.equal(one, two)
    assert not torch.equal(one[0], one[1])


def test_two_layers_that_share_one_draw_see_the_same_coordinates():
    moved = ndpos.augment(FAR, rescale=2.0, training=True)
    split = ndpos.split(8, 2)
    first, second = ndpos.SinusoidalEmbedding(split), ndpos.SinusoidalEmbedding(split)
    assert torch.equal(first(moved), second(moved))


def test_a_shift_moves_all_tokens_by_one_number_per_axis_that_fills_its_reach():
    shift = draws(300, shift=0.5) - FAR
    torch.testing.assert_close(shift[:, 0], shift[:, 1], rtol=0, atol=1e-15)
    assert not torch.equal(shift[:, 0, 0], shift[:, 0, 1])
    assert 0.49 < shift.abs().max() <= 0.5
    assert (shift > 0.4).any()
    assert (shift < -0.4).any()


@pytest.mark.parametrize(("move", "shared"), [("jitter", False), ("rescale", True)])
def test_a_factor_is_log_uniform_and_rescale_shares_it_between_axes(move, shared):
    factor = draws(2000, **{move: 4.0}) / FAR
    torch.testing.assert_close(factor[:, 0], factor[:, 1], rtol=1e-14, atol=0)  # every token of one draw
    assert torch.allclose(factor[:, 0, 0], factor[:, 0, 1]) is shared
    logs = factor[:, 0, 0].log() / math.log(4.0)
    assert -1 <= logs.min() < -0.99 < 0.99 < logs.max() <= 1
    quarters = torch.histc(logs, bins=4, min=-1, max=1) / len(logs)  # uniform draws in place of logs give 0.1 to 0.4
    torch.testing.assert_close(quarters, torch.full_like(quarters, 0.25), rtol=0, atol=0.04)


def test_integers_are_moved_in_float64_and_the_given_tensor_is_left_alone():
    coords = ndpos.grid((2, 2))
    kept = coords.clone()
    assert ndpos.augment(coords, shift=1.0, training=True).dtype == torch.float64
    assert torch.equal(coords, kept)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ndpos.grid((2, -3)), ValueError, "ndpos.grid: sizes are integers of at least 0, got -3."),
        (lambda: ndpos.grid((2, 3), start=(0,)), ValueError, "start is one number or one per axis; got 1 for 2 axes"),
        (lambda: ndpos.grid((2,), start="0"), TypeError, "plain numbers, got '0'. Add tensors to the coordinates."),
        (lambda: ndpos.grid((2,), step=True), TypeError, "start and step are plain numbers, got True."),
        (lambda: ndpos.grid((2,), start=torch.tensor(3)), TypeError, "got tensor(3). Add tensors to the coordinates."),
        (lambda: ndpos.centred_grid((2.0,)), TypeError, "ndpos.centred_grid: sizes are integers, got 2.0."),
        (
            lambda: ndpos.centred_grid((2,), step=(1, 2)),
            ValueError,
            "ndpos.centred_grid: step is one number or one per",
        ),
        (
            lambda: ndpos.normalised_grid((2,), by="area"),
            ValueError,
            "by is 'axis', 'shortest' or 'longest', got 'area'.",
        ),
        (lambda: ndpos.normalised_grid((2,), at="end"), ValueError, "at is 'centre', 'start' or 'ends', got 'end'."),
        (
            lambda: ndpos.scaled_grid((2, 3), reference_sizes=(2,), align="index"),
            ValueError,
            "ndpos.scaled_grid: reference_sizes has 1 axes (2,), 2 were expected.",
        ),
        (
            lambda: ndpos.scaled_grid((2,), reference_sizes=(0,), align="index"),
            ValueError,
            "reference_sizes are integers of at least 1, got 0.",
        ),
        (
            lambda: ndpos.scaled_grid((2,), reference_sizes=(2,), align="center"),
            ValueError,
            "align is 'index', 'centre' or 'corner', got 'center'.",
        ),
        (lambda: ndpos.augment(FAR, shift=-1.0), ValueError, "ndpos.augment: shift is at least 0, got -1.0."),
        (
            lambda: ndpos.augment(FAR, jitter=0.5),
            ValueError,
            "jitter is a factor of at least 1, got 0.5. For no jitter",
        ),
        (lambda: ndpos.augment(FAR, rescale=math.nan), ValueError, "rescale is a factor of at least 1, got nan."),
    ],
)
def test_an_error_names_the_rule_and_what_was_seen(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)


def test_the_alignment_of_two_grids_has_no_default_since_the_wrong_one_is_silent():
    with pytest.raises(TypeError, match="align"):
        ndpos.scaled_grid((4,), reference_sizes=(2,))
