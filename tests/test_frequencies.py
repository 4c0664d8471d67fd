"""How fast each pair turns: plain float64 numbers, each in the block of its axis."""

import math

import pytest
import references
import torch
from hypothesis import given
from hypothesis import strategies as st

import ndpos
from ndpos import AxisSplit

some_channels = st.lists(st.integers(0, 6).map(lambda pairs: 2 * pairs), min_size=1, max_size=4).filter(any)
BLOCKWISE = [
    ndpos.geometric,
    lambda split: ndpos.geometric(split, 100.0, endpoint="closed"),
    ndpos.pixel_bands,
    lambda split: ndpos.pixel_bands(split, max_frequency=10.0, spacing="log"),
    lambda split: ndpos.periodic(split, base=100.0),
    lambda split: ndpos.periodic(split, shortest=0.1, longest=9.0),
]


@pytest.mark.parametrize("make", BLOCKWISE)
@given(some_channels, st.randoms())
def test_each_axis_turns_pairs_of_its_own_and_none_of_another(make, channels, random):
    order = list(range(len(channels)))
    random.shuffle(order)
    split = AxisSplit(channels, order=order, dim=sum(channels) + 2)
    matrix = make(split)
    assert matrix.shape == (split.axes, split.pairs)
    assert matrix.dtype == torch.float64
    assert ((matrix != 0).sum(0) == 1).all()
    assert (matrix != 0).int().argmax(0).tolist() == list(split.pair_axes)
    for axis, count in enumerate(channels):  # an axis turns its pairs as it would alone
        if count:
            assert torch.equal(matrix[axis][matrix[axis] != 0], make(AxisSplit((count,)))[0])


@pytest.mark.parametrize("endpoint", ["open", "closed"])
@given(st.integers(1, 40), st.floats(1.5, 1e6))
def test_a_geometric_ladder_is_that_of_vaswani(endpoint, pairs, base):
    matrix = ndpos.geometric(AxisSplit((2 * pairs,)), base, endpoint=endpoint)
    expected = torch.tensor([references.ladder(pairs, base, closed=endpoint == "closed")], dtype=torch.float64)
    torch.testing.assert_close(matrix, expected, rtol=1e-14, atol=0)


def test_a_closed_ladder_reaches_its_base_and_an_open_one_stops_short():
    split = AxisSplit((8,))
    closed, open_ = (ndpos.geometric(split, 1e3, endpoint=endpoint) for endpoint in ("closed", "open"))
    assert closed[0, -1].item() == pytest.approx(1e-3, rel=1e-14)
    assert open_[0, -1].item() == pytest.approx(1e3**-0.75, rel=1e-14)
    for endpoint in ("closed", "open"):
        assert ndpos.geometric(AxisSplit((2,)), endpoint=endpoint).tolist() == [[1.0]]  # a lone pair


def test_a_base_per_axis_is_that_base_in_its_block():
    split = AxisSplit((4, 0, 6))
    matrix = ndpos.geometric(split, (10.0, 7.0, 1000.0))
    assert torch.equal(matrix[0], ndpos.geometric(split, 10.0)[0])
    assert torch.equal(matrix[2], ndpos.geometric(split, 1000.0)[2])
    assert torch.equal(ndpos.geometric(split, (10.0,) * 3), ndpos.geometric(split, 10.0))


def test_pixel_bands_run_from_half_a_turn_per_unit_to_the_nyquist_rate():
    linear = ndpos.pixel_bands(AxisSplit((10,)), max_frequency=18.0)[0] / math.pi
    torch.testing.assert_close(linear, torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0]).double(), rtol=1e-14, atol=0)
    log = ndpos.pixel_bands(AxisSplit((8,)), max_frequency=16.0, spacing="log")[0] / math.pi
    torch.testing.assert_close(log, torch.tensor([1.0, 2.0, 4.0, 8.0]).double(), rtol=1e-14, atol=0)
    assert ndpos.pixel_bands(AxisSplit((4,)))[0, -1].item() == pytest.approx(112 * math.pi)


def test_a_period_of_coordinate_is_one_full_turn():
    by_base = ndpos.periodic(AxisSplit((8,)), base=16.0)[0]
    assert (2 * math.pi / by_base).tolist() == pytest.approx([1.0, 2.0, 4.0, 8.0])
    by_ends = ndpos.periodic(AxisSplit((6,)), shortest=0.5, longest=8.0)[0]
    assert (2 * math.pi / by_ends).tolist() == pytest.approx([0.5, 2.0, 8.0])
    turned = torch.tensor([[0.3], [1.3]], dtype=torch.float64)
    table = ndpos.SinusoidalEmbedding(AxisSplit((2,)), frequencies=by_base[None, :1])(turned, dtype=torch.float64)
    torch.testing.assert_close(table[0], table[1])


@pytest.mark.parametrize(("axes", "pairs"), [(1, 3), (2, 4), (2, 7), (3, 9), (3, 10), (4, 6)])
def test_mixed_frequencies_climb_a_ladder_along_perpendicular_directions(axes, pairs, rng):
    matrix = ndpos.mixed(axes, pairs, heads=3, layers=2, base=100.0, generator=rng)
    assert matrix.shape == (2, 3, axes, pairs)
    assert matrix.dtype == torch.float64
    split = ndpos.split(2 * pairs, axes)
    ladders = [speed for count in split.blocks for speed in references.ladder(count, 100.0)]
    speeds = torch.tensor(ladders, dtype=torch.float64)
    torch.testing.assert_close(matrix.norm(dim=-2), speeds.expand(2, 3, -1), rtol=1e-12, atol=0)
    along = torch.nn.functional.normalize(matrix, dim=-2)
    owner = torch.tensor(split.pair_axes)
    same = (owner[:, None] == owner).double().expand(2, 3, -1, -1)
    torch.testing.assert_close(along.mT @ along, same, rtol=0, atol=1e-12)
    heads = along[..., 0].flatten(0, 1)
    assert axes == 1 or len(torch.unique(heads, dim=0)) == 6  # every head and layer looks elsewhere


def test_mixed_frequencies_of_two_axes_are_those_of_rope_vit(rng):
    """``init_random_2d_freqs`` of Heo et al.: x turns by mag * cos, y by mag * sin, of one angle and a quarter more."""
    matrix = ndpos.mixed(2, 8, heads=5, base=10.0, generator=rng)
    y, x = matrix[:, 0], matrix[:, 1]
    turn = torch.atan2(y[:, :1], x[:, :1])
    speed = torch.tensor(references.ladder(4, 10.0), dtype=torch.float64)
    torch.testing.assert_close(x, torch.cat((speed * turn.cos(), speed * (turn + math.pi / 2).cos()), 1))
    torch.testing.assert_close(y, torch.cat((speed * turn.sin(), speed * (turn + math.pi / 2).sin()), 1))


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_mixed_directions_favour_no_axis_and_no_sign(axes, rng):
    along = ndpos.mixed(axes, axes, heads=4000, generator=rng)
    assert along.mean(0).abs().max() < 0.05
    second = (along[..., 0, None] * along[:, None, :, 0]).mean(0)
    torch.testing.assert_close(second, torch.eye(axes).double() / axes, rtol=0, atol=0.03)


def test_a_seed_decides_mixed_frequencies():
    def draw(seed):
        return ndpos.mixed(3, 6, heads=2, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert ndpos.mixed(2, 4, heads=2).shape == (2, 2, 4)


@pytest.mark.parametrize("make", [*BLOCKWISE, lambda split: ndpos.mixed(split.axes, split.pairs, heads=2)])
def test_frequencies_are_float64_numbers_on_the_cpu_whatever_the_defaults(make):
    try:
        torch.set_default_dtype(torch.float16)
        with torch.device("meta"):
            matrix = make(AxisSplit((8, 8)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert (matrix.device.type, matrix.dtype) == ("cpu", torch.float64)
    if matrix.ndim == 2:
        assert torch.equal(matrix, make(AxisSplit((8, 8))))


SPLIT = AxisSplit((8, 8))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ndpos.geometric(SPLIT, 0.0), "ndpos.geometric: base is a positive finite number, got 0.0."),
        (lambda: ndpos.geometric(SPLIT, (10.0, math.inf)), "base is a positive finite number, got inf."),
        (lambda: ndpos.geometric(SPLIT, math.nan), "base is a positive finite number, got nan."),
        (lambda: ndpos.geometric(SPLIT, (1.0, 2.0, 3.0)), "base is one number or one per axis; got 3 for 2 axes."),
        (lambda: ndpos.geometric(SPLIT, endpoint="close"), "endpoint is 'open' or 'closed', got 'close'."),
        (lambda: ndpos.pixel_bands(SPLIT, max_frequency=-1), "ndpos.pixel_bands: max_frequency is a positive finite"),
        (lambda: ndpos.pixel_bands(SPLIT, spacing="lin"), "spacing is 'linear' or 'log', got 'lin'."),
        (
            lambda: ndpos.periodic(SPLIT),
            "ndpos.periodic: give either base, or both shortest and longest; got base=None, shortest=None,",
        ),
        (lambda: ndpos.periodic(SPLIT, base=2.0, longest=1.0), "got base=2.0, shortest=None, longest=1.0."),
        (lambda: ndpos.periodic(SPLIT, shortest=1.0), "got base=None, shortest=1.0, longest=None."),
        (lambda: ndpos.periodic(SPLIT, shortest=-1.0, longest=1.0), "shortest is a positive finite number, got -1.0."),
        (lambda: ndpos.mixed(3, 2, heads=1), "ndpos.mixed: every axis needs a pair; got 2 pairs for 3 axes."),
        (lambda: ndpos.mixed(2, 2, heads=0), "ndpos.mixed: heads are integers of at least 1, got 0."),
        (lambda: ndpos.mixed(2, 2, heads=1, layers=0), "ndpos.mixed: layers are integers of at least 1, got 0."),
        (lambda: ndpos.mixed(2, 2, heads=1, base=-3.0), "ndpos.mixed: base is a positive finite number, got -3.0."),
    ],
)
def test_an_error_names_the_rule_and_what_was_seen(call, text):
    with pytest.raises(ValueError) as raised:
        call()
    assert text in str(raised.value)
