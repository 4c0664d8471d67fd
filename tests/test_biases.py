"""Tables of relative position bias moved to other windows, with the bias of offset 0 where it was."""

import functools
import itertools
import math

import pytest
import references
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import ndpos
from ndpos.resample import bias_changes, resize_bias

closely = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-10)


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows_of(sizes):
    return math.prod(2 * n - 1 for n in sizes)


def slowly(image, old, new, kernel, align):
    """``(prod(2 old - 1), heads)`` by the matrices of all axes of offsets; a lone token has offset 0 alone."""
    matrices = [
        references.rows_taken(2 * o - 1, [o - 1])
        if n == 1
        else references.resample_matrix(2 * o - 1, 2 * n - 1, kernel, False, align)
        for o, n in zip(old, new, strict=True)
    ]
    return functools.reduce(torch.kron, [torch.tensor(each, dtype=torch.float64) for each in matrices]) @ image


windows = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3).map(
    lambda pairs: tuple(zip(*pairs, strict=True))
)


@settings(max_examples=80)
@given(windows, st.sampled_from(["linear", "cubic", "keys"]), st.sampled_from(["corner", "centre"]), st.booleans())
def test_offsets_are_an_image_and_class_rows_stay(sizes, kernel, align, beit):
    old, new = sizes
    table = drawn(rows_of(old) + 3 * beit, 4)
    ours = resize_bias(table, new, old_sizes=old, kind="beit" if beit else "swin", kernel=kernel, align=align)
    assert ours.shape == (rows_of(new) + 3 * beit, 4)
    closely(ours[: rows_of(new)], slowly(table[: rows_of(old)], old, new, kernel, align))
    if beit:
        assert torch.equal(ours[-3:], table[-3:])
    centre, was = ours[rows_of(new) // 2], table[rows_of(old) // 2]
    assert torch.equal(centre, was) if align == "corner" else (centre - was).abs().max() < 1e-12


@settings(max_examples=60)
@given(windows, st.sampled_from(["linear", "cubic"]))
def test_absolute_offsets_are_the_mirrored_image(sizes, kernel):
    old, new = sizes
    table = drawn(4, math.prod(old))
    ours = resize_bias(table, new, old_sizes=old, kind="levit", kernel=kernel)
    full = torch.empty(rows_of(old), 4, dtype=torch.float64)
    for row, offset in enumerate(itertools.product(*(range(1 - n, n) for n in old))):
        place = 0
        for step, n in zip(offset, old, strict=True):
            place = place * n + abs(step)
        full[row] = table[:, place]
    moved = slowly(full, old, new, kernel, "corner")
    for row, offset in enumerate(itertools.product(*(range(1 - n, n) for n in new))):
        place = 0
        for step, n in zip(offset, new, strict=True):
            place = place * n + abs(step)
        closely(ours[:, place], moved[row])
    assert torch.equal(ours[:, 0], table[:, 0])


def test_a_window_of_7_becomes_one_of_8_or_of_7_by_14():
    """Swin #139: 169 rows become 225, and the centre row stays."""
    table = drawn(169, 3)
    for new, rows in (((8, 8), 225), ((7, 14), 351)):
        ours = resize_bias(table, new, old_sizes=(7, 7), kind="swin")
        assert ours.shape == (rows, 3)
        assert torch.equal(ours[rows // 2], table[84])


def test_centre_alignment_is_what_swin_interpolates():
    table = drawn(13 * 13, 3)
    theirs = F.interpolate(table.T.reshape(1, 3, 13, 13), size=(15, 19), mode="bicubic")
    ours = resize_bias(table, (8, 10), old_sizes=(7, 7), kind="swin", align="centre")
    closely(ours, theirs.reshape(3, -1).T)


def test_a_decomposed_table_is_interpolated_as_sam_does():
    table = drawn(27, 64)
    theirs = F.interpolate(table.T[None], size=39, mode="linear")[0].T
    closely(resize_bias(table, (20,), old_sizes=(14,), kind="decomposed", kernel="linear", align="centre"), theirs)


def test_batches_dtypes_and_equal_sizes():
    table = drawn(2, 169 + 3, 3).bfloat16()
    how = {"old_sizes": (7, 7), "kind": "beit"}
    ours = resize_bias(table, (5, 9), **how)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours[1], resize_bias(table[1].float(), (5, 9), **how).bfloat16())
    assert torch.equal(resize_bias(table, (7, 7), **how), table)


def test_a_model_of_timm_moves_its_bias_to_the_same_centre():
    layers = pytest.importorskip("timm.layers", reason="parity with timm needs timm")
    bias = layers.RelPosBias((7, 7), 4)
    table = bias.relative_position_bias_table.detach().clone()
    bias.set_window_size((7, 14))
    ours = resize_bias(table, (7, 14), old_sizes=(7, 7), kind="swin")
    assert ours.shape == bias.relative_position_bias_table.shape
    torch.testing.assert_close(ours[len(ours) // 2], bias.relative_position_bias_table[len(ours) // 2])


def test_averages_of_squares_never_turn_negative():
    spike = torch.zeros(13 * 13, 1)
    spike[40] = 1.0
    move = bias_changes((9, 10), old_sizes=(7, 7), kind="swin")
    assert move.squares(spike).min() >= 0
    assert move.table(spike).min() < -0.05
    assert torch.equal(move.averages(spike), move.table(spike))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "log-cpb"}, ["log-CPB", "no table to resize", "new window"]),
        ({"kind": "alibi"}, ["kind is one of ('swin', 'beit', 'levit', 'decomposed')", "'alibi'"]),
        ({"kernel": "nearest"}, ["kernel is one of ('linear', 'cubic', 'keys')", "'nearest'"]),
        ({"kind": "decomposed"}, ["one table per axis", "2 axes"]),
        ({"kind": "beit"}, ["(25, 2)", "prod(2 * old_sizes - 1) + 3 = 28"]),
        ({"kind": "levit"}, ["(25, 2)", "dimension -1 has prod(old_sizes) = 9"]),
        ({"old_sizes": (3, 2)}, ["dimension -2 has prod(2 * old_sizes - 1) = 15", "trained on"]),
        ({"table": torch.zeros(25, 2).long()}, ["torch.int64 cannot be resampled"]),
        ({"new_sizes": (0, 3)}, ["at least 1"]),
    ],
)
def test_a_refusal_says_what_was_seen_and_the_cure(settings, says):
    given = {"table": torch.zeros(25, 2), "new_sizes": (4, 4), "old_sizes": (3, 3), "kind": "swin", **settings}
    with pytest.raises(ValueError, match=r"ndpos\.resize_bias") as refused:
        ndpos.resize_bias(given.pop("table"), given.pop("new_sizes"), **given)
    for part in says:
        assert part in str(refused.value)
