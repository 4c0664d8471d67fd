"""Angles spent as a table of sines: Vaswani's numbers, the laws behind them, and exactness whatever is done to it."""

import math

import pytest
import references
import torch
from hypothesis import given
from hypothesis import strategies as st

import ndpos
import ndpos.positions
from ndpos import AxisSplit, SinusoidalEmbedding

some_channels = st.lists(st.integers(0, 4).map(lambda pairs: 2 * pairs), min_size=1, max_size=3).filter(any)
layouts = st.sampled_from(["interleaved", "sin_cos", "axis_sin_cos"])
seeds = st.integers(0, 2**32).map(lambda seed: torch.Generator().manual_seed(seed))


def line(dim, positions):
    """The table of one axis in float64."""
    coords = torch.tensor(positions, dtype=torch.float64)[:, None]
    return SinusoidalEmbedding(ndpos.split(dim, 1))(coords, dtype=torch.float64)


@given(some_channels, layouts, st.integers(0, 2), seeds, st.randoms())
def test_a_table_is_that_of_vaswani_axis_by_axis_on_channels_of_its_own(channels, layout, rest, rng, random):
    order = list(range(len(channels)))
    random.shuffle(order)
    split = AxisSplit(channels, order=order, dim=sum(channels) + rest)
    coords = 50 * torch.randn(4, len(channels), generator=rng, dtype=torch.float64)
    expected = references.sinusoids(coords.tolist(), channels, 1e3, order=order, layout=layout, dim=split.dim)
    table = SinusoidalEmbedding(split, base=1e3, layout=layout)(coords, dtype=torch.float64)
    torch.testing.assert_close(table, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_four_channels_are_vaswanis_to_three_decimals():
    assert [[round(value, 3) for value in row] for row in line(4, [0, 1, 2, 3]).tolist()] == [
        [0, 1, 0, 1],
        [0.841, 0.540, 0.010, 1.000],
        [0.909, -0.416, 0.020, 1.000],
        [0.141, -0.990, 0.030, 1.000],
    ]
    assert line(20, [10])[0, 4].item() == pytest.approx(math.sin(10 / 6.31), abs=5e-5)
    assert round(line(20, [10])[0, 4].item(), 3) == 1.000


def test_wavelengths_run_from_one_turn_to_base_turns():
    for dim, longest in ((16, 19_869), (512, 60_611)):
        wavelengths = 2 * math.pi / ndpos.geometric(ndpos.split(dim, 1))[0]
        assert wavelengths[0].item() == 2 * math.pi
        assert round(wavelengths[-1].item()) == longest
    wavelength = 2 * math.pi / ndpos.geometric(ndpos.split(16, 1))[0, 3].item()
    assert round(wavelength) == 199
    torch.testing.assert_close(line(16, [0.0, wavelength])[:, 6:8], line(16, [0.0, 0.0])[:, 6:8], rtol=0, atol=1e-12)


def test_dot_products_are_the_published_ones():
    three, eight = line(16, [3, 8])
    assert round((three @ eight).item(), 2) == 6.14
    assert line(16, range(50)).square().sum(1).tolist() == pytest.approx([8.0] * 50)
    one, seven = line(8, [1, 7])
    assert round((one @ seven).item(), 2) == 3.78


@given(some_channels, layouts, seeds)
def test_dot_products_depend_on_the_displacement_and_on_nothing_else(channels, layout, rng):
    emb = SinusoidalEmbedding(AxisSplit(channels), layout=layout)
    p, q, shift = 100 * torch.randn(3, 1, len(channels), generator=rng, dtype=torch.float64)
    one, two, one_on, two_on = (emb(at, dtype=torch.float64) for at in (p, q, p + shift, q + shift))
    torch.testing.assert_close((one_on * two_on).sum(), (one * two).sum(), rtol=0, atol=1e-11)
    speeds = [(axis, speed) for axis, count in enumerate(channels) for speed in references.ladder(count // 2, 1e4)]
    cosines = sum(math.cos(speed * (p - q)[0, axis].item()) for axis, speed in speeds)
    assert (one * two).sum().item() == pytest.approx(cosines, abs=1e-11)
    for axis, count in enumerate(channels):  # the twin: no axis that has channels is ignored
        step = torch.eye(len(channels), dtype=torch.float64)[axis]
        assert ((emb(p + step) - emb(p)).abs().max() > 1e-2) == (count > 0)


@given(some_channels, st.integers(-9, 9), seeds)
def test_a_shift_of_any_axis_is_one_fixed_rotation_of_its_pairs(channels, step, rng):
    emb = SinusoidalEmbedding(AxisSplit(channels))
    coords = 20 * torch.randn(6, len(channels), generator=rng, dtype=torch.float64)
    for axis in range(len(channels)):
        rotation = torch.eye(sum(channels), dtype=torch.float64)
        for pair, speed in enumerate(references.ladder(channels[axis] // 2, 1e4)):
            at = sum(channels[:axis]) + 2 * pair
            cos, sin = math.cos(speed * step), math.sin(speed * step)
            rotation[at : at + 2, at : at + 2] = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
        moved = coords.clone()
        moved[:, axis] += step
        before, after = emb(coords, dtype=torch.float64), emb(moved, dtype=torch.float64)
        torch.testing.assert_close(after, before @ rotation.mT, rtol=0, atol=1e-12)


def test_integer_coordinates_give_sines_and_not_zeros_and_ones():
    table = SinusoidalEmbedding(ndpos.split(4, 2))(torch.ones(1, 2, dtype=torch.int64))
    assert table.dtype == torch.float32
    assert table.tolist()[0] == pytest.approx([0.8415, 0.5403] * 2, abs=5e-5)


def test_an_odd_width_has_exactly_its_channels_and_no_position_on_the_last():
    for dim in (5, 127):
        split = AxisSplit((dim - 1,), dim=dim)
        for layout in ("interleaved", "sin_cos", "axis_sin_cos"):
            table = SinusoidalEmbedding(split, layout=layout).on_grid((7,))
            assert table.shape == (7, dim)
            assert not table[:, -1].any()
        even = SinusoidalEmbedding(ndpos.split(dim - 1, 1), layout=layout).on_grid((7,))
        assert torch.equal(table[:, :-1], even)


@pytest.mark.parametrize("layout", ["interleaved", "sin_cos", "axis_sin_cos"])
def test_an_axis_moves_its_own_channels_and_no_others(layout, rng):
    split = AxisSplit((4, 2, 6), order=(2, 0, 1))
    emb = SinusoidalEmbedding(split, layout=layout)
    coords = torch.randn(5, 3, generator=rng)
    seen = []
    for axis in range(3):
        moved = emb(coords + torch.eye(3)[axis]) != emb(coords)
        assert torch.equal(moved.any(0), moved.all(0))
        seen.append(moved.any(0))
        assert seen[-1].sum() == split.channels[axis]
    assert (sum(channels.int() for channels in seen) == 1).all()


def test_positions_have_codes_of_their_own_in_half_precision_too():
    emb, coords = SinusoidalEmbedding(ndpos.split(32, 1)), ndpos.grid((3000,))
    for dtype, count in ((torch.float16, 3000), (torch.bfloat16, 1000)):
        table = emb.to(dtype)(coords[:count], dtype=dtype)
        assert torch.equal(table, emb(coords[:count], dtype=torch.float64).to(dtype))  # rounded once, at the end
        assert len(torch.unique(table.float(), dim=0)) == count


def test_position_zero_tells_layouts_apart():
    zero = torch.zeros(1, 1)
    assert SinusoidalEmbedding(ndpos.split(10, 1))(zero).tolist() == [[0, 1] * 5]
    assert SinusoidalEmbedding(ndpos.split(10, 1), layout="sin_cos")(zero).tolist() == [[0] * 5 + [1] * 5]


def test_width_first_swaps_the_halves_of_height_first_as_in_mae():
    coords = ndpos.grid((2, 3)).flatten(0, -2)
    width, height = (
        SinusoidalEmbedding(AxisSplit((4, 4), order=order), layout="axis_sin_cos")(coords) for order in ((1, 0), (0, 1))
    )
    assert torch.equal(width, height.roll(4, dims=-1))
    assert not torch.equal(width, height)
    assert torch.equal(width[0::3, :4], width[:1, :4].expand(2, -1))  # the first column: x alike, y not
    assert not torch.equal(width[0, 4:], width[3, 4:])


def test_the_second_token_of_a_clip_differs_from_the_first_in_the_block_of_x_alone():
    split = ndpos.split(18, 3)
    table = SinusoidalEmbedding(split).on_grid((2, 3, 4))
    assert (table[1] != table[0]).nonzero().flatten().tolist() == list(range(12, 18))
    assert (table[4] != table[0]).nonzero().flatten().tolist() == list(range(6, 12))
    assert (table[12] != table[0]).nonzero().flatten().tolist() == list(range(6))
    scalar, listed = (SinusoidalEmbedding(split, base=base).on_grid((2, 3, 4)) for base in (50.0, (50.0,) * 3))
    assert torch.equal(scalar, listed)


COORDS = ndpos.grid((5, 3), start=(65536, 7)).flatten(0, -2)
SPLIT = AxisSplit((8, 12), order=(1, 0), dim=22)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), layouts, st.integers(-5, 5), st.sampled_from([1, 0.3]))
def test_a_table_on_a_grid_is_the_table_at_its_cells_bit_for_bit(sizes, layout, start, step):
    split = AxisSplit(range(2, 2 * len(sizes) + 2, 2), order=tuple(reversed(range(len(sizes)))), dim=14)
    emb = SinusoidalEmbedding(split, layout=layout)
    coords = ndpos.grid(sizes, start=start, step=step).flatten(0, -2)
    on_grid = emb.on_grid(sizes, start=start, step=step)
    assert on_grid.shape == (len(coords), 14)
    assert torch.equal(on_grid, emb(coords))


def test_a_table_on_a_grid_evaluates_a_row_per_place_of_each_axis(witness):
    emb = SinusoidalEmbedding(ndpos.split(64, 3))
    with witness:
        emb.on_grid((16, 64, 64))
    assert witness.elements("cos") == witness.elements("sin") == 16 * 10 + 64 * 11 + 64 * 11
    assert witness.elements("constant_pad_nd") < 16 * 64 * 64  # rows alone: nothing is put after whole cells


LADDERS = ndpos.geometric(ndpos.split(24, 2))


@pytest.mark.parametrize(
    "matrix",
    [
        torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        ndpos.keep_highest(LADDERS, 0.5),
        ndpos.interleave_axes(LADDERS),
        LADDERS[:, [11, 0, 6, 1, 2, 7]],
        torch.zeros(2, 3, dtype=torch.float64),
    ],
    ids=["dense", "dropped", "in turns", "shuffled", "still"],
)
@pytest.mark.parametrize("layout", ["interleaved", "sin_cos"])
def test_any_columns_may_be_given_and_give_the_same_on_a_grid_as_at_its_cells(matrix, layout):
    pairs, coords = matrix.shape[1], ndpos.grid((3, 4), start=-1, step=0.5).flatten(0, -2)
    emb = SinusoidalEmbedding(AxisSplit((14, 12), dim=27), frequencies=matrix, layout=layout)
    slow = torch.tensor(references.angles(coords.tolist(), matrix.tolist()), dtype=torch.float64)
    expected = torch.stack((slow.sin(), slow.cos()), -1 if layout == "interleaved" else -2).flatten(-2)
    table = emb(coords, dtype=torch.float64)
    torch.testing.assert_close(table[:, : 2 * pairs], expected, rtol=0, atol=1e-12)
    assert not table[:, 2 * pairs :].any()
    assert torch.equal(emb.on_grid((3, 4), start=-1, step=0.5), emb(coords))


def test_batches_devices_and_empty_grids_are_followed(rng):
    emb = SinusoidalEmbedding(ndpos.split(8, 2))
    coords = torch.randn(3, 5, 2, generator=rng)
    assert torch.equal(emb(coords), torch.stack([emb(sample) for sample in coords]))
    assert torch.equal(emb(coords), torch.vmap(emb)(coords))
    assert emb(coords.to("meta")).device.type == emb.on_grid((2, 3), device="meta").device.type == "meta"
    assert emb.on_grid((0, 4)).shape == emb(ndpos.grid((0, 4)).flatten(0, -2)).shape == (0, 8)
    assert emb(coords.bfloat16()).dtype == torch.float32  # the dtype of coordinates is never that of the table


@pytest.mark.parametrize("layout", ["interleaved", "sin_cos", "axis_sin_cos"])
def test_nothing_of_float64_is_made_on_a_device_without_it(layout, witness, monkeypatch):
    emb = SinusoidalEmbedding(SPLIT, layout=layout)
    monkeypatch.setattr(ndpos.positions, "WITHOUT_FLOAT64", frozenset({"cpu", "meta"}))
    with witness:
        for device in ("cpu", "meta"):
            table = emb.on_grid((5, 3), device=device)
            emb(ndpos.grid((5, 3), step=0.5, device=device).flatten(0, -2))
            ndpos.add(torch.zeros(15, 22, dtype=torch.bfloat16, device=device), table, scale="sqrt_dim")
            ndpos.IntegerEmbedding(SPLIT)(COORDS.to(device))
            ndpos.BinaryEmbedding(ndpos.split(8, 2))(ndpos.grid((2, 3), device=device).flatten(0, -2))
    assert torch.float32 in witness.dtypes
    assert torch.float64 not in witness.dtypes


EMB = SinusoidalEmbedding(ndpos.split(8, 2))
FOUR = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: SinusoidalEmbedding(8), TypeError, "split is an AxisSplit, got 8. ndpos.split(dim, axes) makes one."),
        (
            lambda: SinusoidalEmbedding(SPLIT, layout="cos"),
            ValueError,
            "layout is one of ('interleaved', 'sin_cos', 'axis",
        ),
        (
            lambda: SinusoidalEmbedding(EMB.split, frequencies=FOUR, base=10.0),
            ValueError,
            "frequencies already say how fast each pair turns; leave base and endpoint out.",
        ),
        (
            lambda: SinusoidalEmbedding(EMB.split, frequencies=FOUR, endpoint="closed"),
            ValueError,
            "leave base and endp",
        ),
        (
            lambda: SinusoidalEmbedding(EMB.split, frequencies=torch.ones(2, 5)),
            ValueError,
            "frequencies are (axes, pairs) with 2 axes and at most 4 pairs; got (2, 5).",
        ),
        (
            lambda: SinusoidalEmbedding(EMB.split, frequencies=torch.ones(3, 4)),
            ValueError,
            "at most 4 pairs; got (3, 4).",
        ),
        (
            lambda: SinusoidalEmbedding(EMB.split, frequencies=FOUR[:, :3], layout="axis_sin_cos"),
            ValueError,
            "'axis_sin_cos' needs a column for each of the 4 pairs, in the blocks of the split, axes (0, 0, 1, 1); got",
        ),
        (
            lambda: SinusoidalEmbedding(
                EMB.split, frequencies=ndpos.interleave_axes(ndpos.geometric(EMB.split)), layout="axis_sin_cos"
            ),
            ValueError,
            "got columns for (0, 1, 0, 1).",
        ),
        (
            lambda: SinusoidalEmbedding(EMB.split, frequencies=FOUR.cfloat()),
            TypeError,
            "a floating tensor (..., axes, pairs), got torch.complex64",
        ),
        (
            lambda: SinusoidalEmbedding(EMB.split, frequencies=[[1.0]]),
            TypeError,
            "a floating tensor (..., axes, pairs), got list.",
        ),
        (lambda: EMB(torch.zeros(3, 1)), ValueError, "the encoding has 2 axes, the coordinates have 1: (3, 1)"),
        (
            lambda: EMB(torch.zeros(3, 2), dtype=torch.int64),
            ValueError,
            "sines are floating numbers, got dtype torch.int64",
        ),
        (
            lambda: EMB.on_grid((3,)),
            ValueError,
            "ndpos.SinusoidalEmbedding.on_grid: the encoding has 2 axes, sizes are (3,)",
        ),
        (lambda: EMB.on_grid((3, 4.0)), TypeError, "ndpos.SinusoidalEmbedding.on_grid: sizes are integers, got 4.0."),
    ],
)
def test_an_error_names_the_rule_and_what_was_seen(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)
