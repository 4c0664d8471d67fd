"""Axes of a table that are cut, repeated or padded instead of interpolated, each by its name in one call."""

import functools
import math

import pytest
import references
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ndpos.resample import changes, resize

closely = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-10)


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slowly(old, new, kernel):
    """For each new row the old one that it copies, None for a row that is new; or a matrix."""
    match kernel:
        case "repeat":
            return [i % old for i in range(new)]
        case ("cut", "centre"):
            return [old // 2 - new // 2 + i for i in range(new)]
        case ("cut", offset):
            return [offset + i for i in range(new)]
        case ("pad", _):
            return [i if i < old else None for i in range(new)]
        case ("pad", _, "centre"):
            before = new // 2 - old // 2
            return [i - before if before <= i < before + old else None for i in range(new)]
    return references.resample_matrix(old, new, kernel, True, "centre")


def apply(grid, axis, rows, value):
    """The rows of one axis taken one by one."""
    parts = grid.unbind(axis)
    if isinstance(rows[0], list):
        return torch.stack([sum(w * part for w, part in zip(row, parts, strict=True)) for row in rows], axis)
    return torch.stack([torch.full_like(parts[0], value) if row is None else parts[row] for row in rows], axis)


@st.composite
def axes(draw):
    """An old size, a new size and a kernel or policy that fits them."""
    old, new = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    few, many = sorted((old, new))
    value = draw(st.sampled_from([0.0, 1.5, -2.0]))
    return draw(
        st.sampled_from(
            [
                (few, many, "repeat"),
                (few, many, ("pad", value)),
                (few, many, ("pad", value, "centre")),
                (many, few, ("cut", "centre")),
                (many, few, ("cut", draw(st.integers(0, many - few)))),
                (old, new, "linear"),
                (old, new, "cubic"),
            ]
        )
    )


@settings(max_examples=200)
@given(st.lists(axes(), min_size=1, max_size=4), st.integers(0, 2))
def test_any_mixture_equals_rows_taken_one_by_one(ways, num_prefix):
    old, new, kernels = zip(*ways, strict=True)
    names = "tzyx"[: len(old)]
    grid = drawn(*old, 2)
    table = torch.cat([drawn(num_prefix, 2, seed=1), grid.flatten(0, -2)])
    expected = grid
    for axis, (before, after, kernel) in enumerate(ways):
        if before != after:
            value = kernel[1] if kernel[0] == "pad" else None
            expected = apply(expected, axis, slowly(before, after, kernel), value)
    by_name = dict(zip(names, kernels, strict=True))
    ours = resize(table, new, old_sizes=old, num_prefix=num_prefix, kernel=by_name, axes=names)
    assert torch.equal(ours[:num_prefix], table[:num_prefix])
    closely(ours[num_prefix:].reshape(*new, 2), expected)


def test_the_call_that_moves_a_picture_to_a_clip():
    picture = drawn(1 + 14 * 16, 8)
    kernel = {"t": "repeat", "y": "cubic", "x": ("cut", 3)}
    settings = {"old_sizes": (1, 14, 16), "num_prefix": 1, "axes": ("t", "y", "x"), "kernel": kernel}
    clip = resize(picture, (5, 20, 9), **settings)
    assert torch.equal(clip[0], picture[0])
    frames = clip[1:].reshape(5, 20, 9, 8)
    one = resize(picture[1:], (20, 16), old_sizes=(14, 16)).reshape(20, 16, 8)[:, 3:12]
    for frame in frames:
        closely(frame, one)
    with pytest.raises(ValueError, match=r"axis 'x' is to be cut to 14 tokens from token 3 on, and the table has 16"):
        resize(picture, (5, 20, 14), **settings)


@pytest.mark.parametrize("frames", [2, 16, 15])
def test_a_new_axis_repeats_holds_the_centre_or_pads(frames):
    picture = drawn(12, 4)

    def inflated(kernel):
        kernel = {"t": kernel, "y": "cubic", "x": "cubic"}
        clip = resize(picture, (frames, 3, 4), old_sizes=(1, 3, 4), axes=("t", "y", "x"), kernel=kernel)
        return clip.reshape(frames, 12, 4)

    assert all(torch.equal(frame, picture) for frame in inflated("repeat"))
    centre = inflated(("pad", 0.0, "centre"))
    assert torch.equal(centre[frames // 2], picture)
    assert centre.count_nonzero() == picture.numel()
    first = inflated(("pad", 0))
    assert torch.equal(first[0], picture)
    assert not first[1:].any()


def test_four_frames_become_eight_by_zeros_nearest_or_linear():
    """frozen-in-time #43: three answers, each by its name."""
    table = drawn(4, 3)
    zeros = resize(table, (8,), old_sizes=(4,), kernel=("pad", 0))
    assert torch.equal(zeros, torch.cat([table, torch.zeros(4, 3, dtype=torch.float64)]))
    assert torch.equal(resize(table, (8,), old_sizes=(4,), kernel="nearest"), table.repeat_interleave(2, 0))
    linear = F.interpolate(table.T[None], size=8, mode="linear")[0].T
    closely(resize(table, (8,), old_sizes=(4,), kernel="linear"), linear)


def test_a_spectrogram_of_half_the_length_keeps_its_prefix_and_its_bins():
    """AST, 12 x 101 and two prefix rows to 12 x 50 (ast #121): cut or interpolated, time alone."""
    table = drawn(2 + 12 * 101, 3)
    grid = table[2:].reshape(12, 101, 3)
    how = {"old_sizes": (12, 101), "num_prefix": 2, "axes": ("f", "t")}
    cut = resize(table, (12, 50), kernel={"f": "linear", "t": ("cut", "centre")}, **how)
    assert torch.equal(cut[:2], table[:2])
    assert torch.equal(cut[2:].reshape(12, 50, 3), grid[:, 25:75])
    linear = resize(table, (12, 50), kernel="linear", antialias=False, **how)
    assert torch.equal(linear[:2], table[:2])
    closely(linear[2:].reshape(12, 50, 3), F.interpolate(grid.movedim(-1, 1), size=50, mode="linear").movedim(1, -1))


def test_a_random_window_is_one_for_the_batch_and_drawn_by_torch():
    """PaSST #42: contiguous, the same for the whole batch, repeatable by torch's seed, and never in eval by mistake."""
    table = torch.arange(99.0)[:, None].expand(5, 99, 300_000 // 99)  # wide: more than one piece
    starts = set()
    for seed in range(40):
        torch.manual_seed(seed)
        window = resize(table, (40,), old_sizes=(99,), kernel=("cut", "random"))
        torch.manual_seed(seed)
        assert torch.equal(resize(table, (40,), old_sizes=(99,), kernel=("cut", "random")), window)
        start = int(window[0, 0, 0])
        assert torch.equal(window, table[:, start : start + 40])
        starts.add(start)
    assert len(starts) > 15
    assert min(starts) < 10
    assert max(starts) > 49
    pairs = [resize(table[0, :3], (2,), old_sizes=(3,), kernel=("cut", "random")) for _ in range(64)]
    assert {pair[0, 0].item() for pair in pairs} == {table[0, 0, 0].item(), table[0, 1, 0].item()}  # the last one too
    assert torch.equal(resize(table, (40,), old_sizes=(99,), kernel=("cut", 0)), table[:, :40])
    with pytest.raises(
        ValueError, match=r"cut to 150 tokens, and the table has 99\. The largest grid possible is \(99,"
    ):
        resize(table, (150,), old_sizes=(99,), kernel=("cut", "random"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["repeat", ("cut", 1), ("cut", "centre"), ("pad", 0.5), ("pad", -1, "centre")])
def test_rows_that_are_taken_are_bit_identical(kernel, dtype):
    table = drawn(6, 5).to(dtype)
    new = 3 if kernel[0] == "cut" else 9
    ours = resize(table, (new,), old_sizes=(6,), kernel=kernel)
    rows = slowly(6, new, kernel)
    assert ours.dtype == dtype
    for row, source in zip(ours, rows, strict=True):
        assert torch.equal(row, torch.full_like(row, kernel[1]) if source is None else table[source])


@pytest.mark.parametrize("kernel", ["repeat", ("cut", 1), ("pad", 0.5)])
def test_graphs_and_gradients_are_those_of_rows_taken(kernel):
    table = drawn(4 * 6, 3).requires_grad_()
    new = (4, 4) if kernel[0] == "cut" else (4, 9)
    how = {"old_sizes": (4, 6), "axes": ("y", "x"), "kernel": {"y": "cubic", "x": kernel}}
    above = drawn(math.prod(new), 3, seed=2)
    ours = resize(table, new, **how)
    (grad,) = torch.autograd.grad((ours * above).sum(), table)
    slow = apply(table.reshape(4, 6, 3), 1, slowly(6, new[1], kernel), 0.5).flatten(0, 1)
    (expected,) = torch.autograd.grad((slow * above).sum(), table)
    closely(grad, expected)
    torch._dynamo.reset()
    closely(torch.compile(lambda x: resize(x, new, **how), backend="aot_eager", fullgraph=True)(table), ours)


@pytest.mark.parametrize(
    "kernel", ["cubic", "keys", "linear", "nearest", "repeat", ("pad", 3.0), "timm", "torchvision"]
)
def test_averages_of_squares_never_turn_negative(kernel):
    """Cubic makes 0.14 of a spike negative; what stands for it is linear, and new rows know nothing yet."""
    spike = torch.zeros(8, 8, 1, dtype=torch.float64)
    spike[3, 3] = 1.0
    how = {"like": kernel} if kernel in ("timm", "torchvision") else {"kernel": kernel, "antialias": False}
    moved = changes((11, 13), old_sizes=(8, 8), **how).squares(spike.flatten(0, 1))
    assert moved.shape == (143, 1)
    assert moved.min() >= 0
    assert moved.max() <= 1
    assert moved.sum() > 0
    if kernel in ("cubic", "keys", "timm", "torchvision"):
        assert resize(spike.flatten(0, 1), (11, 13), old_sizes=(8, 8), **how).min() < -0.01


def test_one_move_of_several_tensors_has_one_window_and_new_rows_know_nothing():
    torch.manual_seed(1)
    rows = torch.arange(99.0)[:, None]
    for _ in range(5):
        move = changes((40,), old_sizes=(99,), kernel=("cut", "random"))
        window = move.table(rows)
        assert torch.equal(window, rows[int(window[0]) :][:40])
        assert torch.equal(move.averages(rows), window)
        assert torch.equal(move.squares(rows), window)
        assert torch.equal(move.table(rows), window)
    padded = changes((5,), old_sizes=(2,), kernel=("pad", 3.0))
    new = [getattr(padded, name)(rows[:2])[2:].unique().tolist() for name in ("table", "averages", "squares")]
    assert new == [[3.0], [0.0], [0.0]]


@pytest.mark.parametrize("sizes", [(24, 24), (16, 20)])
def test_a_smooth_table_taken_up_and_back_keeps_98_percent_of_its_energy(sizes):
    """Band-limited to a quarter of Nyquist: waves of at least eight rows."""
    torch.manual_seed(0)
    places = torch.stack(torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in sizes), indexing="ij"), -1)
    waves = (torch.rand(64, 2, dtype=torch.float64) - 0.5) * (torch.pi / 2)  # to pi / 4 radians per row each way
    table = (places.flatten(0, 1) @ waves.T + torch.rand(64, dtype=torch.float64) * 7).sin()
    up = tuple(3 * n // 2 for n in sizes)
    back = resize(resize(table, up, old_sizes=sizes), sizes, old_sizes=up)
    assert 0.98 <= (back.square().sum() / table.square().sum()).item() <= 1.02
    assert (back - table).square().sum() <= 0.02 * table.square().sum()


@pytest.mark.parametrize("kernel", ["linear", "keys"])
@pytest.mark.parametrize(("old", "new"), [(8, 13), (13, 8), (24, 37), (37, 16)])
def test_a_ramp_is_exact_in_the_interior(kernel, old, new):
    ramp = torch.arange(old, dtype=torch.float64)[:, None]
    ours = resize(ramp, (new,), old_sizes=(old,), kernel=kernel, antialias=False)[:, 0]
    exact = (torch.arange(new, dtype=torch.float64) + 0.5) * old / new - 0.5
    inside = (exact >= 1) & (exact <= old - 2)
    assert inside.sum() >= new // 2
    closely(ours[inside], exact[inside])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kernel": "cut"}, ["kernel is one of", "('cut', \"offset, 'centre' or 'random'\")", "got 'cut'"]),
        ({"kernel": ("cut", "middle")}, ["got ('cut', 'middle')"]),
        ({"kernel": ("cut", -1)}, ["offsets of a cut", "at least 0", "got -1"]),
        ({"kernel": ("cut",)}, ["got ('cut',)"]),
        ({"kernel": ("pad", float("nan"))}, ["the value of a pad is a finite number, got nan"]),
        ({"kernel": ("pad", 0, "end")}, ["got ('pad', 0, 'end')"]),
        ({"kernel": ("pad", 0, 0)}, ["got ('pad', 0, 0)"]),
        ({"kernel": ("cut", 0)}, ["axis 0 is to be cut to 4 tokens, and the table has 3", "possible is (3, 4)"]),
        ({"kernel": ("cut", 4), "new_sizes": (3, 1)}, ["axis 0 is to be cut to 3 tokens from token 4", "is (0, 0)"]),
        ({"kernel": "repeat", "new_sizes": (2, 4)}, ["axis 0 has 3 tokens, and 'repeat' only adds", "2 were asked"]),
        (
            {"kernel": {"y": ("pad", 0), "x": "linear"}, "axes": ("y", "x"), "new_sizes": (2, 4)},
            ["axis 'y' has 3 tokens, and 'pad' only adds", "('cut', 0)"],
        ),
    ],
)
def test_a_refusal_says_what_was_seen_and_the_cure(settings, says):
    given = {"old_sizes": (3, 4), "new_sizes": (4, 4), **settings}
    with pytest.raises(ValueError, match=r"ndpos\.resize") as refused:
        resize(torch.zeros(12, 2), given.pop("new_sizes"), **given)
    for part in says:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (("cut", 0.5), r"offsets of a cut are integers, got 0\.5"),
        (("pad", True), r"the value of a pad is a plain number, got True"),
        (("pad", torch.tensor(0.0)), r"the value of a pad is a plain number, got tensor\(0\.\)"),
    ],
)
def test_settings_of_another_type_are_refused(kernel, says):
    with pytest.raises(TypeError, match=rf"ndpos\.resize: {says}"):
        resize(torch.zeros(12, 2), (2, 4), old_sizes=(3, 4), kernel=kernel)
