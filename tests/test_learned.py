"""LearnedEmbedding: a table that knows its own grid, whole, resampled, or looked up row by row."""

import copy
import math
import pickle

import pytest
import references
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import ndpos
from ndpos.encode.learned import LearnedEmbedding

KINDS = ("joint", "axial", "sum")
every_kind = pytest.mark.parametrize("kind", KINDS)
UNEVEN = ndpos.AxisSplit((2, 6), order=(1, 0), dim=10)


def learned(sizes=(3, 4), dim=10, *, seed=0, dtype=None, **settings):
    """An embedding whose rows are drawn from N(0, 1), so that tables that differ differ visibly."""
    emb = LearnedEmbedding(sizes, dim, dtype=dtype, **settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in emb.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return emb


def whole(emb):
    """Every row of the grid as plain numbers, by the definition of the kind; prefix rows left out."""
    rows = []
    for cell in references.cells(emb.sizes):
        if emb.kind == "joint":
            rows.append(emb.tables[0][tuple(cell)].tolist())
            continue
        parts = {axis: table[cell[axis]] for axis, table in zip(emb.table_axes, emb.tables, strict=True)}
        if emb.kind == "sum":
            rows.append(sum(parts[axis] for axis in range(len(cell))).tolist())
        else:
            row = [number for axis in emb.split.order if axis in parts for number in parts[axis].tolist()]
            rows.append(row + [0.0] * (emb.dim - len(row)))
    return rows


def as_image(table, sizes):
    return table.view(*sizes, -1).movedim(-1, 0)[None]


def interpolate(table, old, new, mode="bicubic", antialias=True, align_corners=False):
    moved = F.interpolate(as_image(table, old), size=new, mode=mode, antialias=antialias, align_corners=align_corners)
    return moved[0].movedim(0, -1).flatten(0, -2)


EMBEDDINGS = {
    "joint": {"kind": "joint"},
    "axial": {"kind": "axial"},
    "axial, x first, channels left over": {"kind": "axial", "split": UNEVEN},
    "axial, an axis without channels": {"kind": "axial", "split": ndpos.AxisSplit((0, 10))},
    "sum": {"kind": "sum"},
    "one axis": {"sizes": (12,)},
    "sum of one axis": {"sizes": (12,), "kind": "sum"},
    "three axes": {"sizes": (2, 3, 2), "kind": "axial"},
    "sum of three axes": {"sizes": (2, 3, 2), "kind": "sum"},
    "axes of one": {"sizes": (1, 12, 1), "kind": "sum"},
}
every_embedding = pytest.mark.parametrize("name", EMBEDDINGS)


@every_embedding
@pytest.mark.parametrize("num_prefix", [0, 2])
def test_at_its_own_sizes_an_embedding_is_its_rows_bit_for_bit(name, num_prefix):
    emb = learned(num_prefix=num_prefix, **EMBEDDINGS[name])
    expected = torch.tensor(whole(emb))
    for table in (emb(), emb(emb.sizes), emb(list(emb.sizes))):
        assert table.shape == (num_prefix + 12, 10)
        assert torch.equal(table[num_prefix:], expected)
        assert num_prefix == 0 or torch.equal(table[:2], emb.prefix)


@every_embedding
def test_a_table_handed_out_is_not_the_parameter(name):
    """Changed in place it would spoil the rows; under FSDP2, which frees parameters, it would be a view of nothing."""
    emb = learned(**EMBEDDINGS[name])
    with torch.no_grad():
        expected = emb().clone()
        emb().add_(100.0)
        emb.lookup(ndpos.grid(emb.sizes)).add_(100.0)
    assert torch.equal(emb(), expected)
    storages = {parameter.untyped_storage().data_ptr() for parameter in emb.parameters()}
    assert emb().untyped_storage().data_ptr() not in storages


@every_kind
def test_equal_counts_are_not_equal_grids(kind):
    emb = learned((2, 8), kind=kind, kernel="linear", antialias=False)
    moved = emb((4, 4))
    assert (moved - emb()).abs().max() > 0.1
    with torch.no_grad():  # every row of axis 0 holds its own row number
        for table in emb.tables:
            table.zero_()
        emb.tables[0][1] = 1.0
    channel = emb((4, 4)).view(4, 4, 10)[..., 0]
    assert channel.tolist() == [[each] * 4 for each in (0.0, 0.25, 0.75, 1.0)]


def test_a_rectangle_is_resampled_from_the_grid_it_was_built_for():
    emb = learned((4, 8), num_prefix=1)
    assert torch.equal(emb((4, 8))[1:], emb.tables[0].flatten(0, 1))
    for new in ((8, 8), (14, 14), (3, 17), (2, 16)):
        assert torch.equal(emb(new)[:1], emb.prefix)
        torch.testing.assert_close(emb(new)[1:], interpolate(emb.tables[0], (4, 8), new), atol=1e-5, rtol=1e-5)


def test_an_embedding_is_resampled_by_a_convention_or_a_policy():
    emb = learned((3, 4), like="torchvision")
    assert torch.equal(emb((5, 6)), ndpos.resize(emb(), (5, 6), old_sizes=(3, 4), like="torchvision"))
    assert "like='torchvision'" in repr(emb)
    assert "kernel" not in repr(emb)
    assert torch.equal(copy.deepcopy(emb).resize_((5, 6))(), emb((5, 6)))
    clip = LearnedEmbedding((2, 3), 4, kind="sum", kernel="repeat")
    assert torch.equal(clip((4, 3)), clip().repeat(2, 1))
    assert LearnedEmbedding((4, 6), 8, kind="axial", like="naflex-factorised")((2, 6)).shape == (12, 8)
    with pytest.raises(ValueError, match="is defined for axes"):
        LearnedEmbedding((3, 4), 4, kind="sum", like="timm")


@every_kind
def test_a_cut_that_starts_further_in_leaves_the_own_grid_as_it_is(kind):
    emb = learned((6, 6), 4, kind=kind, kernel=("cut", 2))
    own = emb((6, 6))
    assert torch.equal(emb(), own)
    assert torch.equal(emb((4, 3)).unflatten(0, (4, 3)), own.unflatten(0, (6, 6))[2:, 2:5])
    for refused in (emb, emb.resize_):  # an axis that stays, beside one that does not, is cut as it would be alone
        with pytest.raises(ValueError, match="cut to 6 tokens from token 2 on"):
            refused((4, 6))
    assert torch.equal(emb(), own)
    shorter = emb((4, 3))
    assert torch.equal(emb.resize_((4, 3))(), shorter)
    with pytest.raises(ValueError, match="The largest grid possible is"):
        emb((3, 3))


@pytest.mark.parametrize("kernel", ["linear", "cubic"])
@pytest.mark.parametrize("antialias", [False, True])
def test_the_kernel_is_a_setting_that_is_kept_and_shown(kernel, antialias):
    emb = learned((16, 16), 4, kernel=kernel, antialias=antialias)
    mode = {"linear": "bilinear", "cubic": "bicubic"}[kernel]
    expected = interpolate(emb.tables[0], (16, 16), (12, 20), mode, antialias)
    torch.testing.assert_close(emb((12, 20)), expected, atol=1e-5, rtol=1e-5)
    assert f"kernel={kernel!r}, antialias={antialias}, align='centre'" in repr(emb)
    for again in (copy.deepcopy(emb), pickle.loads(pickle.dumps(emb))):
        assert torch.equal(again((12, 20)), emb((12, 20)))
        assert repr(again) == repr(emb)


def test_corner_alignment_puts_rows_and_columns_where_they_belong():
    emb = LearnedEmbedding((4, 4), 2, kernel="linear", antialias=False, align="corner")
    with torch.no_grad():
        emb.tables[0].copy_(ndpos.grid((4, 4)))
    assert emb((2, 3)).mT.tolist() == [[0, 0, 0, 3, 3, 3], [0, 1.5, 3, 0, 1.5, 3]]


@every_kind
def test_half_precision_tables_are_resampled_in_full_precision(kind):
    emb = learned((14, 14), kind=kind, num_prefix=1)
    for dtype in (torch.bfloat16, torch.float16):
        half = copy.deepcopy(emb).to(dtype)
        full, coords = copy.deepcopy(half).float(), 13 * torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
        assert torch.equal(half((16, 16)), full((16, 16)).to(dtype))
        assert torch.equal(half(), full().to(dtype))
        assert torch.equal(half.lookup(coords, kernel="linear"), full.lookup(coords, kernel="linear").to(dtype))
        assert torch.equal(half((16, 16))[:1], half.prefix)
    double = learned((14, 14), kind="joint", dtype=torch.float64)
    expected = interpolate(double.tables[0], (14, 14), (16, 16))
    torch.testing.assert_close(double((16, 16)), expected, atol=1e-12, rtol=0)


@every_embedding
def test_an_exact_lookup_is_the_row_of_the_cell(name):
    emb = learned(num_prefix=1, **EMBEDDINGS[name])
    cells, rows = ndpos.grid(emb.sizes), torch.tensor(whole(emb))
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float64):
        assert torch.equal(emb.lookup(cells.to(dtype)).flatten(0, -2), rows)
        assert torch.equal(emb.lookup(cells.to(dtype), kernel="linear").flatten(0, -2), rows)
    assert torch.equal(emb.lookup(cells.flatten(0, -2)[5]), rows[5])
    assert emb.lookup(cells[:0]).shape == (0, *emb.sizes[1:], 10)


@pytest.mark.parametrize(("dtype", "last"), [(torch.uint8, 255), (torch.int8, 127), (torch.int16, 299)])
def test_narrow_integers_reach_as_far_as_they_can(dtype, last):
    emb = learned((300,), 2)
    assert torch.equal(emb.lookup(torch.arange(last + 1, dtype=dtype)[:, None]), emb.tables[0][: last + 1])


@every_embedding
@pytest.mark.parametrize("outside", ["raise", "wrap"])
@given(st.lists(st.integers(-40, 40), min_size=3, max_size=3), st.integers(0, 2**31))
def test_a_linear_lookup_is_the_slow_loop_over_corners(name, outside, numbers, seed):
    emb = learned(outside=outside, seed=seed, dtype=torch.float64, **EMBEDDINGS[name])
    coord = [number / 8 for number in numbers[: len(emb.sizes)]]
    if outside == "raise":
        coord = [abs(at) % max(size - 1, 0.125) for at, size in zip(coord, emb.sizes, strict=True)]
    expected = references.rows_between(whole(emb), emb.sizes, coord, wrap=outside == "wrap")
    found = emb.lookup(torch.tensor([coord], dtype=torch.float64), kernel="linear")
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


def test_wrapped_coordinates_are_taken_modulo_the_sizes():
    emb = learned(outside="wrap")
    coords = torch.tensor([[-1, -1], [3, 4], [7, -9], [0, 0]])
    assert torch.equal(emb.lookup(coords), emb.lookup(coords.remainder(torch.tensor([3, 4]))))
    assert torch.equal(
        emb.lookup(torch.tensor([[-1e-30, 3.5]], dtype=torch.float64), kernel="linear")[0],
        ((emb.tables[0][0, 3] + emb.tables[0][0, 0]) / 2),
    )  # a hair below 0 is row 0, not a row that does not exist


@every_kind
def test_gradients_reach_exactly_the_rows_looked_up(kind):
    emb = learned(kind=kind, num_prefix=1)
    emb.lookup(torch.tensor([[1, 2], [1, 0]])).sum().backward()
    reached = [table.grad.abs().sum(-1) != 0 for table in emb.tables]
    if kind == "joint":
        assert reached[0].nonzero().tolist() == [[1, 0], [1, 2]]
    else:
        assert [each.nonzero().flatten().tolist() for each in reached] == [[1], [0, 2]]
    assert emb.prefix.grad is None


@every_kind
@pytest.mark.parametrize("sizes", [None, (5, 4)])
def test_every_parameter_gets_a_gradient_from_a_whole_table(kind, sizes):
    emb = learned(kind=kind, num_prefix=2)
    emb(sizes).sum().backward()
    assert all((parameter.grad != 0).all() for parameter in emb.parameters())
    axial = learned(kind="axial", split=ndpos.AxisSplit((0, 10)))  # an axis without channels has no table
    axial(sizes).sum().backward()
    assert all(parameter.grad is not None for parameter in axial.parameters())


@every_embedding
@pytest.mark.parametrize("num_prefix", [0, 2])
def test_two_tables_added_to_the_same_tokens_accumulate_gradients_apart(name, num_prefix):
    """torch lets parameters keep views of one gradient, into which a second backward then adds for each of them."""
    both = [learned(num_prefix=num_prefix, **EMBEDDINGS[name]) for _ in range(2)]
    above = torch.randn(num_prefix + 12, 10, generator=torch.Generator().manual_seed(1))

    def gradients():
        ((both[0]() + both[1]()) * above).sum().backward()
        return [parameter.grad.clone() for emb in both for parameter in emb.parameters()]

    for once, twice in zip(gradients(), gradients(), strict=True):
        torch.testing.assert_close(twice, 2 * once)


def test_a_lookup_is_differentiable_in_fractional_coordinates():
    emb = learned(dtype=torch.float64)
    coords = torch.tensor([[0.25, 2.5], [1.75, 0.5]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda coords: emb.lookup(coords, kernel="linear"), (coords,))


def test_state_is_the_rows_alone_and_reset_draws_them_anew():
    emb = LearnedEmbedding((3, 4), 10, kind="axial", num_prefix=2)
    assert {name: tuple(value.shape) for name, value in emb.state_dict().items()} == {
        "prefix": (2, 10),
        "tables.0": (3, 4),
        "tables.1": (4, 6),
    }
    assert list(emb.buffers()) == []
    with torch.device("meta"):
        built = LearnedEmbedding((64, 64), 10, num_prefix=1)
    built.to_empty(device="cpu")
    for parameter in built.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    built.reset_parameters()
    assert 0.019 < built.tables[0].std() < 0.021
    assert built.prefix.abs().max() < 0.1


def test_settings_are_shown():
    assert repr(LearnedEmbedding((3, 4), 10, kind="axial", split=UNEVEN, num_prefix=2, outside="wrap")).startswith(
        "LearnedEmbedding(\n  (3, 4), 10, kind='axial', split=AxisSplit((2, 6), order=(1, 0), dim=10), num_prefix=2, "
        "outside='wrap', kernel='cubic', antialias=True, align='centre'"
    )


def lookup(coords, sizes=(50, 300), **settings):
    return lambda: LearnedEmbedding(sizes, 4).lookup(torch.tensor(coords), **settings)


def build(*args, **settings):
    return lambda: LearnedEmbedding(*args, **settings)


OUTSIDE = ["emb(sizes)", "outside='wrap'"]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lookup([[49, -1]]), ValueError, ["axis 1 has 300 rows, coordinates 0 to 299", "Seen: -1", *OUTSIDE]),
        (lookup([[50, 0]]), ValueError, ["axis 0 has 50 rows, coordinates 0 to 49", "Seen: 50", *OUTSIDE]),
        (lookup([[0, 300]]), ValueError, ["axis 1 has 300 rows", "Seen: 300"]),
        (lookup([[0.0, 299.5]], kernel="linear"), ValueError, ["axis 1 has 300 rows", "Seen: 299.5"]),
        (lookup([[-0.5, 0.0]], kernel="linear"), ValueError, ["axis 0 has 50 rows", "Seen: -0.5"]),
        (lookup([[0.0, math.nan]]), ValueError, ["axis 1 are whole numbers", "Seen: nan"]),
        (lookup([[math.inf, 0.0]], kernel="linear"), ValueError, ["axis 0 are finite", "Seen: inf"]),
        (lookup([[0.0, 1.5]]), ValueError, ["axis 1 are whole numbers", "Seen: 1.5", "kernel='linear' takes"]),
        (lookup([[0, 0, 0]]), ValueError, ["has 2 axes, the coordinates have 3", "(1, 3)"]),
        (lookup(0), ValueError, ["coordinates are (*batch, tokens, axes), got ()"]),
        (lookup([[True, False]]), TypeError, ["real numbers, got torch.bool"]),
        (lookup([[0, 0]], kernel="cubic"), ValueError, ["kernel is 'exact' or 'linear', got 'cubic'"]),
        (lambda: learned().lookup([[0, 0]]), TypeError, ["coordinates are a tensor", "list"]),
        (lambda: learned()((3, 4, 5)), ValueError, ["has 3 axes (3, 4, 5), 2 were expected"]),
        (lambda: learned()((3, 0)), ValueError, ["at least 1, got 0"]),
        (lambda: learned()(12), TypeError, ["one integer per axis, got 12", "(height, width)"]),
        (lambda: learned()((3, 4.0)), TypeError, ["integers, got 4.0"]),
        (build((3, 0), 8), ValueError, ["sizes", "at least 1, got 0"]),
        (build((), 8), ValueError, ["at least one axis"]),
        (build((3, 4), 0), ValueError, ["dim", "at least 1, got 0"]),
        (build((3, 4), 8, num_prefix=-1), ValueError, ["num_prefix", "at least 0, got -1"]),
        (build((3, 4), 8, kind="both"), ValueError, ["('joint', 'axial', 'sum')", "'both'"]),
        (build((3, 4), 8, outside="clamp"), ValueError, ["'raise' or 'wrap'", "'clamp'"]),
        (build((3, 4), 8, split=ndpos.split(8, 2)), ValueError, ["split belongs to kind='axial'", "'joint'"]),
        (build((3, 4), 8, kind="axial", split=ndpos.split(8, 1)), ValueError, ["1 axes and dim 8", "(3, 4), dim 8"]),
        (build((3, 4), 9, kind="axial"), ValueError, ["dim is even", "got dim 9 for 2 axes"]),
        (build((3, 4), 8, kernel="bicubic"), ValueError, ["kernel is one of", "'bicubic'"]),
        (build((3, 4), 8, align="edge"), ValueError, ["align is one of", "'edge'"]),
    ],
)
def test_a_refusal_names_the_rule_what_was_seen_and_a_cure(call, error, says):
    with pytest.raises(error) as refused:
        call()
    for part in says:
        assert part in str(refused.value)


@every_kind
def test_a_refusal_comes_before_the_gather(kind, witness):
    emb = learned(kind=kind)
    with witness, pytest.raises(ValueError, match="axis 1"):
        emb.lookup(torch.tensor([[2, -1]]))
    assert "embedding" not in {name for name, _ in witness.made}
    with witness:
        emb.lookup(torch.tensor([[2, 1]]))
    assert "embedding" in {name for name, _ in witness.made}
