"""Sizes are whole numbers given per axis; whatever else looks like one is refused with its cure."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ndpos
from ndpos.sizes import numbers_per_axis, product, refuse_outside, refuse_unless, sizes_per_axis, whole


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5), st.sampled_from([tuple, list, np.array, torch.Size]))
def test_any_sequence_of_integers_is_the_same_tuple_of_plain_integers(numbers, container):
    read = sizes_per_axis("door", container(numbers))
    assert read == tuple(numbers)
    assert all(type(size) is int for size in read)


@pytest.mark.parametrize("like_an_integer", [np.int64(7), np.uint8(7), torch.tensor(7)])
def test_integers_of_other_libraries_are_integers(like_an_integer):
    assert whole("door", "sizes", like_an_integer) == 7


@pytest.mark.parametrize("near_miss", [7.0, 7.5, True, float("nan"), np.float32(7.0), torch.tensor(7.0), "7", None, 1j])
def test_floats_booleans_and_texts_are_no_sizes_even_where_they_equal_one(near_miss):
    with pytest.raises(TypeError, match=r"^door: sizes are integers, got "):
        whole("door", "sizes", near_miss)
    with pytest.raises(TypeError, match=r"^ndpos.grid: sizes are integers, got "):
        ndpos.grid((2, near_miss))


def test_a_float_size_is_told_that_sizes_are_counted():
    with pytest.raises(TypeError, match=r"got 16\.0\. Sizes are counted, not divided or rooted\.$"):
        ndpos.grid((196 / 14 + 2, 14))


@pytest.mark.parametrize("lone", [16, 16.0, None, "16", b"16", np.int64(16), np.array(16), torch.tensor(16)])
def test_a_lone_number_is_refused_since_it_could_be_one_axis_or_a_square(lone):
    with pytest.raises(TypeError, match=r"^ndpos.grid: sizes take one integer per axis, got .*For one axis write \("):
        ndpos.grid(lone)


@pytest.mark.parametrize(("minimum", "number"), [(0, -1), (1, 0), (2, 1)])
def test_a_number_below_its_minimum_is_refused_with_both_numbers(minimum, number):
    with pytest.raises(ValueError, match=rf"^door: sizes are integers of at least {minimum}, got {number}\.$"):
        sizes_per_axis("door", (5, number), minimum=minimum)
    assert sizes_per_axis("door", (5, minimum), minimum=minimum) == (5, minimum)


def test_no_axis_at_all_is_refused():
    with pytest.raises(ValueError, match=r"^ndpos.grid: sizes need at least one axis, got \(\)\.$"):
        ndpos.grid(())


def test_another_number_of_axes_than_expected_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"^door: sizes has 3 axes \(2, 3, 4\), 2 were expected\.$"):
        sizes_per_axis("door", (2, 3, 4), axes=2)


@given(st.floats(allow_nan=False), st.integers(1, 5))
def test_one_number_for_all_axes_is_that_number_for_each(number, axes):
    assert numbers_per_axis("door", "step", number, axes) == (number,) * axes
    assert numbers_per_axis("door", "step", [number] * axes, axes) == (number,) * axes


@pytest.mark.parametrize("scalar", [np.float64(2.0), np.array(2.0), torch.tensor(2.0)])
def test_a_scalar_of_another_library_is_one_number_for_all_axes(scalar):
    assert [float(number) for number in numbers_per_axis("door", "base", scalar, 2)] == [2.0, 2.0]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_number_per_axis_for_other_axes_is_refused_with_both_counts(count):
    with pytest.raises(ValueError, match=rf"^door: step is one number or one per axis; got {count} for 2 axes\.$"):
        numbers_per_axis("door", "step", [1.0] * count, 2)


@given(st.lists(st.integers(0, 50), max_size=4))
def test_a_grid_has_as_many_cells_as_its_sizes_multiply_to(sizes):
    cells = 0 if 0 in sizes else 1
    for size in sizes:
        cells = sum(cells for _ in range(size))
    assert product(sizes) == cells


def test_a_value_outside_is_refused_with_the_rule_the_value_and_the_shape():
    values = torch.tensor([[0, 3], [4, -1]])
    refuse_outside(values.clamp(0, 3), 4, "unused")
    with pytest.raises(ValueError, match=r"^y is below 4\. Seen: 4\. Shape \(2, 2\)\.$"):
        refuse_outside(values, 4, "y is below 4.")


@pytest.mark.parametrize("outside", [-1, 4, 3.5, float("nan"), float("inf"), -0.25])
def test_minus_one_is_not_the_last_row_and_nan_fits_nowhere(outside):
    with pytest.raises(ValueError, match="Seen: "):
        refuse_outside(torch.tensor([1.0, outside]), 4, "rule.")


def test_a_value_outside_is_refused_for_every_sample_of_a_vmap():
    def keep(values):
        refuse_outside(values, 4, "rule.")
        return values

    inside = torch.tensor([[0, 1], [2, 3]])
    assert torch.equal(torch.vmap(torch.vmap(keep))(inside), inside)
    with pytest.raises(ValueError, match=r"^rule\."):
        torch.vmap(torch.vmap(keep))(inside + 1)


def test_values_are_not_read_where_there_are_none_and_not_awaited_under_a_compiler():
    refuse_unless(torch.zeros(3, dtype=torch.bool, device="meta"), torch.zeros(3, device="meta"), "unused")
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def keep(values):
        refuse_outside(values, 4, "rule.")
        return values + 1

    torch.compile(keep, backend=backend, fullgraph=True)(torch.tensor([1, 2]))
    assert len(graphs) == 1  # one graph: nothing in it waits for a value
    assert any("assert_async" in str(node.target) for node in graphs[0].graph.nodes)
