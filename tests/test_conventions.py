"""Learned tables moved to other grids as other libraries do it, each by its name."""

import functools
import math
from typing import get_args

import pytest
import references
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ndpos.resample import Like, resize
from ndpos.resample.conventions import CONVENTIONS

closely = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-10)
KINDS = [(like, each.axes) for like, known in CONVENTIONS.items() for each in known if "tile_y" not in each.axes]


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slowly(table, like, old, new):
    """``(prod(old), dim)`` times the matrices of all axes."""
    axes = []
    for size, steps in zip(old, references.convention_matrices(like, old, new), strict=True):
        axis = torch.eye(size, dtype=torch.float64)
        for matrix in steps:
            axis = torch.tensor(matrix, dtype=torch.float64) @ axis
        axes.append(axis)
    return functools.reduce(torch.kron, axes) @ table


def test_every_name_has_its_axes():
    assert set(CONVENTIONS) == set(get_args(Like))


@pytest.mark.parametrize(("like", "axes"), KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_each_equals_its_formula(like, axes, data):
    sizes = st.tuples(*[st.integers(1, 9)] * len(axes))
    old, new = data.draw(sizes), data.draw(sizes)
    if like == "passt":
        new = tuple(map(min, new, old))
    table = drawn(2 + math.prod(old), 3)
    ours = resize(table, new, old_sizes=old, num_prefix=2, like=like)
    assert torch.equal(ours[:2], table[:2])
    closely(ours[2:], slowly(table[2:], like, old, new))
    assert torch.equal(resize(table, new, old_sizes=old, num_prefix=2, like=like, axes=axes), ours)


@pytest.mark.parametrize(("like", "axes"), KINDS)
def test_real_sizes_equal_the_formula(like, axes):
    moves = {
        1: [((64,), (37,)), ((24,), (60,))],
        2: [((37, 37), (16, 24)), ((14, 14), (24, 10)), ((12, 101), (12, 50))],
        3: [((8, 14, 14), (16, 16, 10)), ((16, 6, 7), (9, 6, 7)), ((16, 6, 7), (9, 7, 6))],
    }
    for old, new in moves[len(axes)]:
        if like == "passt" and new > old:
            continue
        table = drawn(math.prod(old), 2)
        closely(resize(table, new, old_sizes=old, like=like), slowly(table, like, old, new))


@pytest.mark.parametrize(("base", "sizes"), [(14, (61, 115, 122)), (37, (39, 43, 78, 86, 115, 123))])
def test_dinov2_has_its_offset_and_every_row(base, sizes):
    """n rows come out, at DINOv2's places, also where a scale factor of n / base gives n - 1 rows (dinov2 #378)."""
    table = drawn(base * base, 1)
    for n in (*sizes, 16, base + 1):
        ours = resize(table, (n, n), old_sizes=(base, base), like="dinov2")
        grid = table.reshape(1, 1, base, base)
        theirs = F.interpolate(grid, scale_factor=((n + 0.1) / base,) * 2, mode="bicubic")
        assert theirs.shape[-1] == n
        closely(ours.reshape(1, 1, n, n), theirs)
        exact = resize(table, (n, n), old_sizes=(base, base), like="transformers-dinov2")
        assert exact.shape == ours.shape
        assert (exact - ours).abs().max() > 1e-3


@pytest.mark.parametrize("new", [(14, 20), (9, 14)])
def test_the_offset_of_dinov2_moves_an_axis_whose_size_stays(new):
    table = drawn(14 * 14, 2)
    grid = table.reshape(1, 14, 14, 2).permute(0, 3, 1, 2)
    theirs = F.interpolate(grid, scale_factor=[(n + 0.1) / 14 for n in new], mode="bicubic")
    closely(resize(table, new, old_sizes=(14, 14), like="dinov2"), theirs[0].permute(1, 2, 0).flatten(0, 1))
    assert torch.equal(resize(table, (14, 14), old_sizes=(14, 14), like="dinov2"), table)


@pytest.mark.parametrize(("like", "axes"), KINDS)
def test_a_graph_of_any_size_gives_what_each_size_gives(like, axes):
    """Symbolic sizes cannot be asked whether an axis stays; what is done instead is the same."""
    old = (4,) * len(axes)
    table = drawn(4 ** len(axes), 2)
    torch._dynamo.reset()
    graph = torch.compile(
        lambda x, new: resize(x, new, old_sizes=old, like=like), backend="aot_eager", dynamic=True, fullgraph=True
    )
    for new in [(2, 3, 3), (3, 4, 2), (4, 4, 4)] + [(5, 4, 7), (4, 7, 4)] * (like != "passt"):
        new = new[: len(axes)]
        closely(graph(table, new), resize(table, new, old_sizes=old, like=like))


def test_the_offset_is_not_silently_swapped():
    table = drawn(37 * 37, 384)
    one, other = (resize(table, (16, 16), old_sizes=(37, 37), like=like) for like in ("dinov2", "transformers-dinov2"))
    assert 0.5 < (one - other).abs().max() < 2


@pytest.mark.parametrize("like", ["qwen3-vl", "torchtune", "big_vision"])
def test_corners_of_a_rectangle_are_not_transposed(like):
    table = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1).flatten(0, 1)
    new = resize(table, (2, 3), old_sizes=(4, 4), like=like)
    assert new.T.tolist() == [[0, 0, 0, 3, 3, 3], [0, 1.5, 3, 0, 1.5, 3]]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.data())
@settings(max_examples=60)
def test_tiles_are_one_picture_and_their_prefix_another(tiles_y, tiles_x, height, width, num_prefix, data):
    old = (tiles_y, tiles_x, height, width)
    new = data.draw(st.tuples(*[st.integers(1, 4)] * 4))
    table = drawn(tiles_y, tiles_x, num_prefix + height * width, 3)
    ours = resize(table, new, old_sizes=old, num_prefix=num_prefix, like="torchtune")
    picture = torch.empty(tiles_y * height, tiles_x * width, 3, dtype=torch.float64)
    for row in range(tiles_y * height):
        for column in range(tiles_x * width):
            within = num_prefix + (row % height) * width + column % width
            picture[row, column] = table[row // height, column // width, within]
    sizes = (new[0] * new[2], new[1] * new[3])
    picture = slowly(picture.flatten(0, 1), "torchtune", picture.shape[:2], sizes).reshape(*sizes, 3)
    assert ours.shape == (*new[:2], num_prefix + new[2] * new[3], 3)
    for row in range(sizes[0]):
        for column in range(sizes[1]):
            within = num_prefix + (row % new[2]) * new[3] + column % new[3]
            closely(ours[row // new[2], column // new[3], within], picture[row, column])
    for place in range(num_prefix):
        closely(
            ours[:, :, place].flatten(0, 1), slowly(table[:, :, place].flatten(0, 1), "torchtune", old[:2], new[:2])
        )


def test_an_ast_table_is_cut_in_the_middle_and_interpolated_where_it_grows():
    """24 x 24 to 12 x 100 (ast #45): rows 6 to 17; 5 rows of 24 are 10 to 14."""
    table = drawn(24 * 24, 2)
    grid = table.reshape(24, 24, 2)
    new = resize(table, (12, 100), old_sizes=(24, 24), like="ast", axes=("f", "t")).reshape(12, 100, 2)
    closely(new, F.interpolate(grid[6:18].movedim(-1, 1), size=100, mode="linear").movedim(1, -1))
    assert torch.equal(resize(table, (5, 24), old_sizes=(24, 24), like="ast").reshape(5, 24, 2), grid[10:15])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"like": "dino"}, ["like is None or one of", "'dinov2'", "got 'dino'"]),
        (
            {"like": "timm", "old_sizes": (1, 3, 4), "new_sizes": (2, 3, 4)},
            ["defined for axes ('y', 'x'), and old_sizes has 3", "kernel='cubic', antialias=True, align='centre'"],
        ),
        (
            {"like": "torchvision", "old_sizes": (12,), "new_sizes": (2,)},
            ["kernel='cubic', antialias=False, align='corner'"],
        ),
        ({"like": "v-jepa"}, ["('t', 'y', 'x')", "kernel='linear'"]),
        ({"like": "passt"}, ["time table"]),
        ({"like": "naflex-factorised"}, ["('y',) or ('x',)", "resize each"]),
        ({"like": "ast", "axes": ("t", "f")}, ["axes of like='ast' are ('f', 't')", "got ('t', 'f')"]),
        ({"like": "timm", "kernel": "linear"}, ["like='timm' decides kernel", "kernel='linear'", "Leave"]),
        ({"like": "timm", "antialias": False}, ["antialias=False"]),
        ({"like": "timm", "align": "corner"}, ["align='corner'"]),
        (
            {"like": "passt", "old_sizes": (12,), "new_sizes": (150,)},
            ["axis 't' is to be cut to 150 tokens", "the table has 12", "largest grid possible is (12,)"],
        ),
        (
            {"like": "torchtune", "old_sizes": (2, 1, 2, 3), "new_sizes": (1, 1, 2, 3)},
            ["(tile_y, tile_x, num_prefix + y * x, dim)", "(2, 1, 6, 'dim')", "got (12, 2)"],
        ),
    ],
)
def test_a_refusal_says_what_was_seen_and_what_to_write(settings, says):
    given = {"old_sizes": (3, 4), "new_sizes": (4, 4), **settings}
    with pytest.raises(ValueError, match=r"ndpos\.resize") as refused:
        resize(torch.zeros(12, 2), given.pop("new_sizes"), **given)
    for part in says:
        assert part in str(refused.value)
