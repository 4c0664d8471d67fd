"""Which channels listen to which axis: disjoint blocks that are counted once, whatever the order and the remainder."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ndpos
from ndpos import AxisSplit

some_channels = st.lists(st.integers(0, 6).map(lambda pairs: 2 * pairs), min_size=1, max_size=5).filter(any)
POLICIES = ["last", "first", "all_first", "tail"]


@st.composite
def splits(draw):
    channels = draw(some_channels)
    order = draw(st.permutations(range(len(channels))))
    return AxisSplit(channels, order=order, dim=sum(channels) + draw(st.integers(0, 5)))


@given(splits())
def test_every_pair_listens_to_exactly_one_axis_and_every_axis_has_its_channels(split):
    blocks = []
    for axis in split.order:
        blocks += [axis] * (split.channels[axis] // 2)
    assert split.pair_axes == tuple(blocks)
    assert [split.pair_axes.count(axis) for axis in range(split.axes)] == [count // 2 for count in split.channels]
    assert split.pairs == len(split.pair_axes) == sum(split.blocks)
    assert [split.blocks[place] for place in range(split.axes)] == [split.channels[axis] // 2 for axis in split.order]
    assert 2 * split.pairs <= split.dim
    assert split.axes == len(split.channels)


@given(splits())
def test_a_split_is_a_plain_value(split):
    assert eval(repr(split), {"AxisSplit": AxisSplit}) == split
    for twin in (copy.deepcopy(split), pickle.loads(pickle.dumps(split)), dataclasses.replace(split)):
        assert twin == split
        assert hash(twin) == hash(split)
    with pytest.raises(dataclasses.FrozenInstanceError):
        split.dim = 4


def test_splits_that_differ_in_anything_are_different():
    values = [AxisSplit((4, 2)), AxisSplit((2, 4)), AxisSplit((4, 2), order=(1, 0)), AxisSplit((4, 2), dim=8)]
    assert len(set(values)) == len({repr(value) for value in values}) == 4
    assert AxisSplit([np.int64(4), 2], order=[0, 1], dim=6) == AxisSplit((4, 2))


@pytest.mark.parametrize("remainder", POLICIES)
@given(st.integers(1, 60), st.integers(1, 5))
def test_a_division_over_axes_keeps_every_channel_and_says_where_the_rest_goes(remainder, pairs, axes):
    if pairs < axes:
        with pytest.raises(ValueError, match=r"^ndpos\.split: dim is even and gives every axis at least one pair"):
            ndpos.split(2 * pairs, axes, remainder=remainder)
        return
    split = ndpos.split(2 * pairs, axes, remainder=remainder)
    counts = [count // 2 for count in split.channels]
    fewest, extra = pairs // axes, pairs % axes
    expected = [fewest] * axes
    if remainder == "all_first":
        expected[0] += extra
    for place in range(extra):
        if remainder in ("first", "last"):
            expected[place if remainder == "first" else -1 - place] += 1
    assert counts == expected
    assert split.dim == 2 * pairs
    assert sum(split.channels) == (2 * fewest * axes if remainder == "tail" else split.dim)
    assert split.order == tuple(range(axes))
    if remainder in ("first", "last"):
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("remainder", "channels"),
    [("last", (20, 22, 22)), ("first", (22, 22, 20)), ("all_first", (24, 20, 20)), ("tail", (20, 20, 20))],
)
def test_sixty_four_channels_over_three_axes(remainder, channels):
    assert ndpos.split(64, 3, remainder=remainder) == AxisSplit(channels, dim=64)
    assert ndpos.split(64, 3) == AxisSplit((20, 22, 22))
    assert ndpos.split(128, 3, remainder="all_first") == AxisSplit((44, 42, 42))


@pytest.mark.parametrize(("dim", "axes"), [(9, 1), (3, 3), (2, 2), (4, 3), (0, 1), (63, 3)])
@pytest.mark.parametrize("remainder", POLICIES)
def test_widths_that_leave_an_axis_without_a_pair_fail_at_construction(dim, axes, remainder):
    with pytest.raises(ValueError) as raised:
        ndpos.split(dim, axes, remainder=remainder)
    assert str(raised.value) == (
        f"ndpos.split: dim is even and gives every axis at least one pair; got dim {dim} for {axes} axes (at least "
        f"{2 * axes}). Name the channels of each axis with ndpos.AxisSplit to leave an axis out."
    )


def test_two_pairs_over_two_axes_and_small_heads_are_not_refused():
    assert [ndpos.split(dim, 2).channels for dim in (4, 6, 10)] == [(2, 2), (2, 4), (4, 6)]
    assert ndpos.split(2, 1).channels == (2,)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: AxisSplit((3, 4)),
            ValueError,
            "channels come in pairs, so each axis has an even number of them; got (3, 4). ndpos.split(dim, axes) makes",
        ),
        (lambda: AxisSplit((4, -2)), ValueError, "ndpos.AxisSplit: channels are integers of at least 0, got -2."),
        (lambda: AxisSplit((4.0,)), TypeError, "ndpos.AxisSplit: channels are integers, got 4.0."),
        (lambda: AxisSplit(4), TypeError, "channels take one integer per axis, got 4. For one axis write (4,)"),
        (lambda: AxisSplit(()), ValueError, "channels need at least one axis, got ()."),
        (lambda: AxisSplit((0, 0)), ValueError, "at least one axis has channels, got (0, 0)."),
        (
            lambda: AxisSplit((4, 2), order=(0, 0)),
            ValueError,
            "order names each of the 2 axes once, got (0, 0); (1, 0)",
        ),
        (lambda: AxisSplit((4, 2), order=(1,)), ValueError, "order names each of the 2 axes once, got (1,)"),
        (lambda: AxisSplit((4, 2), order=(2, 1)), ValueError, "got (2, 1); (1, 0) is x first."),
        (
            lambda: AxisSplit((4, 2), dim=5),
            ValueError,
            "dim is at least the sum of the channels; got dim 5, channels (4, 2) = 6.",
        ),
        (lambda: AxisSplit((4,), dim=8.0), TypeError, "ndpos.AxisSplit: dim are integers, got 8.0."),
        (lambda: ndpos.split(64 / 2, 2), TypeError, "ndpos.split: dim are integers, got 32.0. Sizes are counted"),
        (lambda: ndpos.split(8, 0), ValueError, "ndpos.split: axes are integers of at least 1, got 0."),
        (
            lambda: ndpos.split(8, 2, remainder="even"),
            ValueError,
            "ndpos.split: remainder is 'last', 'first', 'all_first' or 'tail', got 'even'.",
        ),
    ],
)
def test_an_error_names_the_rule_and_what_was_seen(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)
