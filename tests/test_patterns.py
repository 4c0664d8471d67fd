"""Other patterns of the same matrix: axes in turn, sections of one ladder, columns that keep still."""

import pytest
import references
import torch
from hypothesis import given
from hypothesis import strategies as st

import ndpos

some_channels = st.lists(st.integers(0, 6).map(lambda pairs: 2 * pairs), min_size=1, max_size=4).filter(any)


def listens(matrix):
    assert ((matrix != 0).sum(0) == 1).all()
    return (matrix != 0).int().argmax(0).tolist()


@given(st.integers(1, 4), st.integers(1, 5), st.floats(2.0, 1e5))
def test_axes_that_take_turns_share_one_ladder_step_by_step(axes, each, base):
    split = ndpos.AxisSplit((2 * each,) * axes, order=tuple(reversed(range(axes))))
    matrix = ndpos.alternating(split, base)
    assert listens(matrix) == list(split.pair_axes)
    ladder = references.ladder(axes * each, base)
    for axis in range(axes):
        steps = torch.tensor(ladder[axis::axes], dtype=torch.float64)
        torch.testing.assert_close(matrix[axis][matrix[axis] != 0], steps, rtol=1e-13, atol=0)


@given(some_channels)
def test_interleaved_axes_take_turns_and_keep_their_own_ladders(channels):
    split = ndpos.AxisSplit(channels)
    matrix = ndpos.geometric(split)
    left, expected = [count // 2 for count in channels], []
    while any(left):
        for axis in range(split.axes):
            if left[axis]:
                expected.append(axis)
                left[axis] -= 1
    turned = ndpos.interleave_axes(matrix)
    assert listens(turned) == expected
    for axis in range(split.axes):  # fastest first, as before
        assert torch.equal(turned[axis][turned[axis] != 0], matrix[axis][matrix[axis] != 0])


def test_interleaving_starts_with_the_axis_whose_block_stands_first():
    matrix = ndpos.geometric(ndpos.AxisSplit((4, 4), order=(1, 0)))
    assert listens(ndpos.interleave_axes(matrix)) == [1, 0, 1, 0]


@pytest.mark.parametrize("layout", ["chunked", "interleaved"])
@pytest.mark.parametrize("counts", [(24, 20, 20), (3, 2, 1), (5,), (4, 4), (2, 2, 2, 2), (4, 0, 2)])
def test_sections_give_every_axis_its_count_of_one_ladder(counts, layout):
    matrix = ndpos.sections(counts, 1e6, layout=layout)
    axes = listens(matrix)
    assert [axes.count(axis) for axis in range(len(counts))] == list(counts)
    ladder = torch.tensor(references.ladder(sum(counts), 1e6), dtype=torch.float64)
    torch.testing.assert_close(matrix.sum(0), ladder, rtol=1e-13, atol=0)


def test_sections_lie_in_chunks_or_in_turns_that_end_with_time():
    assert listens(ndpos.sections((24, 20, 20))) == [0] * 24 + [1] * 20 + [2] * 20
    assert listens(ndpos.sections((24, 20, 20), layout="interleaved")) == [0, 1, 2] * 20 + [0] * 4


@pytest.mark.parametrize("layout", ["chunked", "interleaved"])
def test_sections_at_equal_coordinates_are_one_axis_of_rotary(layout, rng):
    positions = torch.tensor([[0], [1], [7], [1000], [2**20 + 1]])
    line = ndpos.geometric(ndpos.AxisSplit((128,)))
    matrix = ndpos.sections((24, 20, 20), layout=layout)
    assert torch.equal(ndpos.angles(positions.expand(-1, 3), matrix), ndpos.angles(positions, line))

    q = torch.randn(1, 2, 5, 128, generator=rng)
    split = ndpos.AxisSplit((48, 40, 40))
    text = ndpos.RotaryEmbedding(ndpos.AxisSplit((128,)))(positions)
    turn = ndpos.RotaryEmbedding(split, frequencies=matrix)
    assert torch.equal(turn(positions.expand(-1, 3))(q), text(q))
    apart = positions * torch.tensor([1, 1, 2])  # the twin: unequal coordinates are no line
    assert not torch.allclose(turn(apart)(q), text(q))


@pytest.mark.parametrize(
    ("counts", "axis", "last"), [((8, 12, 12), 1, 34), ((0, 4, 4), 1, 10), ((1, 0, 4), 2, 11), ((3, 4), 1, 7)]
)
def test_sections_that_do_not_fit_their_turns_are_refused_and_never_recounted(counts, axis, last):
    with pytest.raises(ValueError) as raised:
        ndpos.sections(counts, layout="interleaved")
    axes, count = len(counts), counts[axis]
    assert str(raised.value) == (
        f"ndpos.sections: sections {counts} sum to {sum(counts)} pairs and cannot be interleaved: axis {axis} takes "
        f"every {axes}. pair from {axis} on, {count} times, up to pair {last}. Give the first axis more pairs, or take "
        f"layout='chunked'."
    )


def test_sections_that_do_not_sum_to_the_heads_pairs_are_refused_where_they_meet():
    with pytest.raises(ValueError, match=r"at most 64 pairs; got \(3, 65\)"):
        ndpos.SinusoidalEmbedding(ndpos.split(128, 3), frequencies=ndpos.sections((25, 20, 20)))


@given(some_channels, st.integers(0, 10))
def test_the_fastest_share_of_every_axis_is_kept_and_the_rest_keeps_still(channels, tenths):
    split = ndpos.AxisSplit(channels)
    matrix = ndpos.geometric(split)
    kept = ndpos.keep_highest(matrix, tenths / 10)
    assert kept.shape == matrix.shape
    for axis, count in enumerate(channels):
        row = [speed for speed in matrix[axis].tolist() if speed]
        fastest = row[: int(tenths / 10 * (count // 2))]  # a ladder falls: the fastest stand first
        assert [speed for speed in kept[axis].tolist() if speed] == fastest
    assert torch.equal(kept[kept != 0], matrix[kept != 0])  # in their places, with their own exponents


def test_the_fastest_are_kept_wherever_they_stand_and_whatever_their_sign():
    matrix = torch.tensor([[0.1, -3.0, 0.0, 2.0, 0.0], [0.0, 0.0, 5.0, 0.0, 0.0]])
    assert ndpos.keep_highest(matrix, 0.7).tolist() == [[0, -3, 0, 2, 0], [0, 0, 0, 0, 0]]
    assert ndpos.keep_highest(torch.tensor([[0.1, 3.0, 0.0, 2.0]]), 0.7).tolist() == [[0.0, 3.0, 0.0, 2.0]]
    assert torch.equal(ndpos.keep_highest(matrix, 1.0), matrix)


def test_no_pattern_writes_into_the_matrix_that_it_was_given():
    matrix = ndpos.geometric(ndpos.split(12, 2))
    before = matrix.clone()
    ndpos.keep_highest(matrix, 0.5).fill_(7.0)
    ndpos.interleave_axes(matrix).fill_(7.0)
    assert torch.equal(matrix, before)


DENSE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: ndpos.alternating(ndpos.AxisSplit((4, 2))),
            "ndpos.alternating: axes take turns, so each has equally many channels; got (4, 2).",
        ),
        (
            lambda: ndpos.alternating(ndpos.split(8, 2), 0.0),
            "ndpos.alternating: base is a positive finite number, got 0.0.",
        ),
        (
            lambda: ndpos.interleave_axes(torch.ones(1, 2, 3)),
            "ndpos.interleave_axes: frequencies are (axes, pairs), got (1, 2, 3).",
        ),
        (
            lambda: ndpos.interleave_axes(DENSE),
            "every column listens to exactly one axis; got [2, 2, 2] non-zero entries per column. Interleave first, "
            "then drop frequencies with keep_highest.",
        ),
        (lambda: ndpos.interleave_axes(torch.zeros(2, 1)), "got [0] non-zero entries per column."),
        (lambda: ndpos.sections((0, 0)), "ndpos.sections: at least one pair, got counts (0, 0)."),
        (lambda: ndpos.sections((4, -1)), "ndpos.sections: counts are integers of at least 0, got -1."),
        (lambda: ndpos.sections((4, 4), layout="mixed"), "layout is 'chunked' or 'interleaved', got 'mixed'."),
        (lambda: ndpos.sections((4, 4), -1.0), "ndpos.sections: base is a positive finite number, got -1.0."),
        (lambda: ndpos.keep_highest(torch.eye(2), 1.5), "fraction is a share between 0 and 1, got 1.5."),
        (lambda: ndpos.keep_highest(torch.eye(2), float("nan")), "fraction is a share between 0 and 1, got nan."),
        (
            lambda: ndpos.keep_highest(DENSE, 0.5),
            "ndpos.keep_highest: frequencies are (axes, pairs) with at most one axis per column, got shape (2, 3).",
        ),
        (lambda: ndpos.keep_highest(torch.ones(3), 0.5), "at most one axis per column, got shape (3,)."),
    ],
)
def test_an_error_names_the_rule_and_what_was_seen(call, text):
    with pytest.raises(ValueError) as raised:
        call()
    assert text in str(raised.value)
