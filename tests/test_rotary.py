"""RotaryEmbedding: settings that are never state, exact tables however they are asked for, and what is learned."""

from fractions import Fraction

import pytest
import references
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

import ndpos

SPLIT = ndpos.AxisSplit((4, 6))
SIZES = (3, 4)


def seeded(number=0):
    return torch.Generator().manual_seed(number)


MATRICES = {
    "a ladder": ndpos.geometric(SPLIT),
    "x first": ndpos.geometric(ndpos.AxisSplit((4, 6), order=(1, 0))),
    "axes in turns": ndpos.interleave_axes(ndpos.geometric(SPLIT)),
    "zero columns": ndpos.keep_highest(ndpos.geometric(SPLIT), 0.5),
    "an axis unheard": torch.cat((torch.zeros(1, 5, dtype=torch.float64), ndpos.geometric(ndpos.split(10, 1)))),
    "fewer pairs": ndpos.geometric(ndpos.AxisSplit((2, 4))),
    "a matrix per head": torch.stack([ndpos.geometric(SPLIT), ndpos.geometric(SPLIT, base=7.0)]),
    "heads that hear other axes": torch.stack([ndpos.geometric(SPLIT), ndpos.geometric(SPLIT).flip(0)]),
    "mixed": ndpos.mixed(2, 5, heads=3, generator=seeded()),
    "layers": ndpos.mixed(2, 5, heads=3, layers=2, generator=seeded()),
    "a ladder per layer": ndpos.geometric(SPLIT).expand(2, 3, 2, 5),
}
every_matrix = pytest.mark.parametrize("name", MATRICES)
learned_or_not = pytest.mark.parametrize("learnable", [False, True], ids=["fixed", "learnable"])


def rotary(name="a ladder", **settings):
    return ndpos.RotaryEmbedding(SPLIT, frequencies=MATRICES[name], **settings)


def same(one, two):
    return torch.equal(one.cos, two.cos) and torch.equal(one.sin, two.sin)


@every_matrix
@learned_or_not
@given(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.integers(-9, 9), st.sampled_from([1, 3, -0.5, (2, 0.1)]))
def test_a_grid_of_tables_is_bit_for_bit_the_table_of_its_cells(name, learnable, sizes, start, step):
    rope = rotary(name, learnable=learnable)
    coords = ndpos.grid(sizes, start=start, step=step).flatten(0, -2)
    for dtype in (torch.float32, torch.float64):
        tables = rope.on_grid(sizes, start=start, step=step, dtype=dtype, num_prefix=1, num_suffix=2)
        cells = rope(coords, dtype=dtype, num_prefix=1, num_suffix=2)
        assert same(tables, cells)
        assert tables.cos.dtype == tables.sin.dtype == dtype
        assert pytree.tree_flatten(tables)[1] == pytree.tree_flatten(cells)[1]  # pairing, prefixes and all


@every_matrix
def test_angles_are_coordinates_times_frequencies_for_every_head_and_layer(name):
    coords, matrix = torch.tensor([[1, 2], [-3, 40], [0, 0]]), MATRICES[name]
    turn = rotary(name)(coords, dtype=torch.float64)
    matrices = matrix.reshape(-1, *matrix.shape[-2:])
    tables = turn.cos.reshape(-1, 3, matrix.shape[-1]), turn.sin.reshape(-1, 3, matrix.shape[-1])
    for one, cos, sin in zip(matrices, *tables, strict=True):
        angles = torch.tensor(references.angles(coords.tolist(), one.tolist()), dtype=torch.float64)
        torch.testing.assert_close(cos, angles.cos())
        torch.testing.assert_close(sin, angles.sin())


def test_samples_may_stand_at_places_of_their_own():
    coords = torch.randn(2, 3, 5, 2, generator=seeded())
    for name in MATRICES:
        turn = rotary(name)(coords)
        for one in range(2):
            for two in range(3):
                alone = rotary(name)(coords[one, two])
                index = (slice(None), one, two) if turn.num_layers else (one, two)
                assert torch.equal(turn.cos[index], alone.cos), name


def test_tables_are_exact_where_float32_positions_are_not():
    rope = ndpos.RotaryEmbedding(ndpos.split(2, 1))
    assert rope(torch.tensor([[2**24 + 1]])).cos.item() == pytest.approx(0.99438396, abs=1e-7)
    rope = ndpos.RotaryEmbedding(ndpos.split(64, 1))
    for start in (65536, 2**24 + 1, 2**40 + 1):
        turn = rope.on_grid((512,), start=start)
        for token in (0, 1, 511):
            exact = [references.exact_turn(start + token, Fraction(pair, 32)) for pair in range(32)]
            cos, sin = torch.tensor(exact, dtype=torch.float64).unbind(-1)
            tolerance = 1e-6 if start < 2**40 else 1e-3  # a float64 frequency itself is exact to 16 digits
            assert (turn.cos[0, token] - cos).abs().max() < tolerance
            assert (turn.sin[0, token] - sin).abs().max() < tolerance


@every_matrix
def test_fixed_frequencies_are_no_state_at_all(name):
    rope = rotary(name)
    before = rope.on_grid(SIZES)
    assert [*rope.parameters(), *rope.buffers(), *rope.state_dict()] == []
    rope.requires_grad_(True).train().eval()
    rope.load_state_dict({}, strict=True)
    for cast in ("half", "bfloat16", "double", "float"):
        assert same(getattr(rope, cast)().on_grid(SIZES), before)
    rope.to("meta").to_empty(device="cpu").reset_parameters()
    assert same(rope.on_grid(SIZES), before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(rope.on_grid(SIZES), before)
        assert same(rope(ndpos.grid(SIZES).flatten(0, -2)), before)


@every_matrix
def test_built_on_meta_an_embedding_is_whole_after_to_empty(name):
    for learnable in (False, True):
        with torch.device("meta"):
            rope = rotary(name, learnable=learnable)
        rope.to_empty(device="cpu")
        for parameter in rope.parameters():
            torch.nn.init.constant_(parameter, 7.0)
        rope.reset_parameters()
        assert same(rope.on_grid(SIZES), rotary(name, learnable=learnable).on_grid(SIZES))


def test_tables_are_made_where_the_coordinates_are():
    rope = rotary()
    assert rope.on_grid(SIZES).cos.device.type == "cpu"
    assert rope(ndpos.grid(SIZES, device="meta").flatten(0, -2)).cos.is_meta
    assert rope.on_grid(SIZES, device="meta").cos.is_meta
    assert rope(ndpos.grid(SIZES).flatten(0, -2)).cos.device.type == "cpu"
    with torch.device("meta"):
        assert rope.on_grid(SIZES).cos.is_meta
    assert rotary(learnable=True).to("meta").on_grid(SIZES).cos.is_meta


@pytest.mark.parametrize("name", ["a ladder", "zero columns", "axes in turns", "an axis unheard", "a ladder per layer"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_learning_keeps_axes_disjoint(name, optimizer):
    rope, matrix = rotary(name, learnable=True), MATRICES[name]
    assert rope.frequencies.numel() == (matrix != 0).sum()
    optimizer = optimizer(rope.parameters(), lr=0.1, weight_decay=0.1)
    x = torch.randn(2, 3, 12, 10, generator=seeded())
    for _ in range(3):
        turn = rope.on_grid(SIZES)
        turn = turn.layer(1) if turn.num_layers else turn
        (turn(x) * torch.linspace(0, 1, 10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    learned = rope.frequency_matrix().detach()
    assert ((learned == 0) == (matrix == 0)).all()
    moved = (learned - matrix).abs() > 1e-4
    assert (moved[-1] if matrix.ndim == 4 else moved).equal((matrix != 0)[-1] if matrix.ndim == 4 else matrix != 0)


@pytest.mark.parametrize("name", ["mixed", "layers"])
def test_a_dense_matrix_is_learned_whole(name):
    rope = rotary(name, learnable=True)
    assert rope.frequencies.shape == MATRICES[name].shape
    turn = rope.on_grid(SIZES)
    (turn.cos * torch.randn(turn.cos.shape, generator=seeded())).sum().backward()
    assert (rope.frequencies.grad != 0).all()


def test_learned_frequencies_get_the_gradient_of_the_slow_loop():
    rope = rotary(learnable=True).double()
    x, above = torch.randn(2, 12, 10, generator=seeded(), dtype=torch.float64)
    coords = ndpos.grid(SIZES).flatten(0, -2)
    rope(coords, dtype=torch.float64)(x).backward(above)
    matrix = rope.frequency_matrix().detach()
    _, in_angles = references.rotation_gradients(
        x.tolist(), references.angles(coords.tolist(), matrix.tolist()), above.tolist(), "half"
    )
    expected = [
        sum(in_angles[token][pair] * coords[token, axis].item() for token in range(12))
        for axis in range(2)
        for pair in range(5)
        if matrix[axis, pair] != 0
    ]
    torch.testing.assert_close(rope.frequencies.grad, torch.tensor(expected, dtype=torch.float64))


def test_a_learned_embedding_is_one_parameter_that_loads_and_saves():
    rope, other = (
        rotary("heads that hear other axes", learnable=True),
        rotary("heads that hear other axes", learnable=True),
    )
    assert list(rope.state_dict()) == ["frequencies"]
    torch.nn.init.uniform_(rope.frequencies, generator=seeded())
    other.load_state_dict(rope.state_dict(), strict=True)
    assert same(other.on_grid(SIZES), rope.on_grid(SIZES))
    assert not rope.frequencies.is_complex()
    assert rope.bfloat16().on_grid(SIZES).cos.dtype == torch.float32  # the parameter is cast, the product is not
    assert rope.frequency_matrix().dtype == torch.float64


@learned_or_not
def test_rounds_of_training_leave_nothing_behind(learnable):
    rope = rotary(learnable=learnable)
    x = torch.randn(12, 10, generator=seeded(), requires_grad=True)
    with torch.no_grad():
        before = rope.on_grid(SIZES)
    with torch.inference_mode():
        assert same(rope.on_grid(SIZES), before)
    gradients = []
    for _ in range(2):
        turn = rope.on_grid(SIZES)
        assert same(turn, before)
        assert turn.cos.requires_grad == learnable
        assert not turn.cos.is_inference()
        gradients.append(torch.autograd.grad(turn(x).square().sum() + turn.keys(x).sum(), x)[0])
    assert torch.equal(*gradients)


def test_a_table_belongs_to_who_asked_for_it():
    rope = rotary()
    first = rope.on_grid(SIZES)
    kept = first.cos.clone()
    first.cos.add_(100.0)
    assert torch.equal(rope.on_grid(SIZES).cos, kept)
    assert not torch.equal(ndpos.RotaryEmbedding(SPLIT, base=7.0).on_grid(SIZES).cos, kept)  # no table by shape alone


def test_decoding_step_by_step_is_the_full_run_bit_for_bit_in_any_order():
    rope = ndpos.RotaryEmbedding(ndpos.split(12, 1))
    x = torch.randn(2, 3, 10, 12, generator=seeded())
    full = rope.on_grid((10,))(x)
    for step in [0, 7, 3, 3, 9, 1, 8, 2, 6, 5, 4, 0]:
        one = x[:, :, step : step + 1]
        for turn in (rope.on_grid((1,), start=step), rope(torch.tensor([[step]])), rope.on_grid((10,))[step]):
            assert torch.equal(turn(one), full[:, :, step : step + 1])
    assert torch.equal(rope.on_grid((7,), start=3)(x[:, :, 3:]), full[:, :, 3:])
    assert torch.equal(rope.on_grid((10,))(x), full)


def test_images_of_different_sizes_share_a_padded_batch():
    rope, x = rotary(), torch.randn(2, 3, 24, 10, generator=seeded())
    coords = torch.zeros(2, 24, 2, dtype=torch.int64)  # padding stands at the origin, where nothing turns
    coords[0], coords[1, :15] = ndpos.grid((4, 6)).flatten(0, -2), ndpos.grid((3, 5)).flatten(0, -2)
    turned = rope(coords)(x)
    assert torch.equal(turned[0], rope.on_grid((4, 6))(x[0]))
    assert torch.equal(turned[1, :, :15], rope.on_grid((3, 5))(x[1, :, :15]))
    assert torch.equal(turned[1, :, 15:], x[1, :, 15:])


def test_channels_that_hear_no_axis_come_back_bit_for_bit():
    x = torch.randn(12, 64, generator=seeded())
    x[:, 60:] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    turned = ndpos.RotaryEmbedding(ndpos.split(64, 3, remainder="tail")).on_grid((1, 3, 4))(x)
    assert torch.equal(turned[:, 60:].view(torch.int32), x[:, 60:].view(torch.int32))
    still = ndpos.RotaryEmbedding(ndpos.split(8, 1), frequencies=torch.tensor([[1.0, 0.0, 1.0, 0.0]])).on_grid((12,))
    assert (still(x[:, :8]) == x[:, :8]).all(0).tolist() == [False, True] * 4


def test_an_embedding_says_what_it_was_built_with():
    assert repr(rotary()) == "RotaryEmbedding(AxisSplit((4, 6)), pairing='half', frequencies=2x5, learnable=False)"
    assert repr(rotary("layers", learnable=True, pairing="interleaved")) == (
        "RotaryEmbedding(AxisSplit((4, 6)), pairing='interleaved', frequencies=2x3x2x5, learnable=True)"
    )


def test_heads_and_layers_begin_with_the_same_ladder_and_learn_their_own():
    rope = ndpos.RotaryEmbedding(SPLIT, base=(10.0, 20.0), heads=3, layers=2, learnable=True)
    turn = rope.on_grid(SIZES)
    assert turn.cos.shape == (2, 3, 12, 5)
    alone = ndpos.RotaryEmbedding(SPLIT, frequencies=ndpos.geometric(SPLIT, base=(10.0, 20.0)), learnable=True)
    assert torch.equal(turn.cos, alone.on_grid(SIZES).cos.expand(2, 3, 12, 5))
    (turn.layer(1).head(slice(2, 3)).cos).sum().backward()
    assert (rope.frequencies.grad.view(2, 3, 5) != 0).any(-1).tolist() == [[False] * 3, [False, False, True]]


def refuse(split=SPLIT, **settings):
    return lambda: ndpos.RotaryEmbedding(split, **settings)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (refuse(64), TypeError, ["split is an AxisSplit, got 64", "ndpos.split(head_dim, axes)"]),
        (refuse(base=7.0, frequencies=MATRICES["a ladder"]), ValueError, ["already say", "leave base=7.0 out"]),
        (refuse(base=(1.0, 2.0, 3.0)), ValueError, ["base is one number or one per axis", "3 for 2 axes"]),
        (refuse(base=0.0), ValueError, ["base is a positive finite number", "0.0"]),
        (refuse(pairing="neox"), ValueError, ["'interleaved', 'half', 'half_per_axis'", "'neox'"]),
        (
            refuse(pairing="half_per_axis", frequencies=MATRICES["fewer pairs"]),
            ValueError,
            ["3 in all", "(2, 3)", "split.blocks"],
        ),
        (refuse(frequencies=[[1.0]]), TypeError, ["floating tensor (..., axes, pairs)", "list"]),
        (refuse(frequencies=torch.ones(2, 5).long()), TypeError, ["floating tensor (..., axes, pairs)", "int64"]),
        (refuse(frequencies=torch.ones(3, 5)), ValueError, ["2 axes and at most 5 pairs", "(3, 5)"]),
        (refuse(frequencies=torch.ones(2, 6)), ValueError, ["2 axes and at most 5 pairs", "(2, 6)"]),
        (refuse(frequencies=torch.ones(5)), ValueError, ["(axes, pairs), (heads, axes, pairs)", "(5,)"]),
        (refuse(frequencies=torch.full((2, 5), float("nan"))), ValueError, ["finite", "(2, 5)"]),
        (refuse(layers=2), ValueError, ["layers=2 needs heads too"]),
        (refuse(heads=0), ValueError, ["heads are integers of at least 1, got 0"]),
        (refuse(heads=2.0), TypeError, ["heads are integers, got 2.0"]),
        (refuse(heads=2, frequencies=MATRICES["mixed"]), ValueError, ["heads=2, but frequencies have 3", "(3, 2, 5)"]),
        (refuse(layers=3, frequencies=MATRICES["layers"]), ValueError, ["layers=3, but frequencies have 2"]),
        (lambda: rotary()(torch.zeros(3, 3)), ValueError, ["has 2 axes, the coordinates have 3", "(3, 3)"]),
        (lambda: rotary()(torch.zeros(2)), ValueError, ["(*batch, tokens, axes), got (2,)"]),
        (lambda: rotary()([[0, 0]]), TypeError, ["coordinates are a tensor", "list"]),
        (lambda: rotary()(torch.zeros(3, 2, dtype=torch.bool)), TypeError, ["real numbers, got torch.bool"]),
        (lambda: rotary()(torch.zeros(3, 2), dtype=torch.bfloat16), ValueError, ["float32 or float64", "bfloat16"]),
        (lambda: rotary()(torch.zeros(3, 2), num_prefix=-1), ValueError, ["num_prefix", "at least 0, got -1"]),
        (lambda: rotary()(torch.zeros(3, 2), num_suffix=True), TypeError, ["num_suffix are integers, got True"]),
        (
            lambda: rotary().on_grid((3, 4))(torch.zeros(12, 30)),
            ValueError,
            ["expected head_dim 10, got 30", "unflatten"],
        ),
        (lambda: rotary().on_grid((3,)), ValueError, ["on_grid", "has 2 axes, sizes are (3,)"]),
        (lambda: rotary().on_grid(16), TypeError, ["on_grid", "one integer per axis, got 16", "(height, width)"]),
        (lambda: rotary().on_grid((3, 4.0)), TypeError, ["on_grid", "sizes are integers, got 4.0"]),
        (lambda: rotary().on_grid((3, -1)), ValueError, ["on_grid", "at least 0, got -1"]),
        (lambda: rotary().on_grid((3, 4), step=(1, 2, 3)), ValueError, ["step is one number or one per axis", "3"]),
        (lambda: rotary().on_grid((3, 4), start=torch.zeros(2)), TypeError, ["plain numbers", "Add tensors"]),
    ],
)
def test_a_refusal_names_the_rule_what_was_seen_and_a_cure(call, error, says):
    with pytest.raises(error) as refused:
        call()
    for part in says:
        assert part in str(refused.value)


def test_half_per_axis_refuses_columns_outside_the_blocks_of_their_axes():
    split = ndpos.split(8, 2)
    in_turns = ndpos.interleave_axes(ndpos.geometric(split))
    with pytest.raises(ValueError, match=r"axes \(0, 0, 1, 1\); got columns for \(0, 1, 0, 1\)"):
        ndpos.RotaryEmbedding(split, frequencies=in_turns, pairing="half_per_axis")
    ndpos.RotaryEmbedding(split, frequencies=in_turns, pairing="half")
    ndpos.RotaryEmbedding(split, frequencies=ndpos.keep_highest(ndpos.geometric(split), 0.5), pairing="half_per_axis")


@pytest.mark.parametrize(("pairing", "blocks"), [("half", (2, 2)), ("half_per_axis", (5, -1)), ("half_per_axis", None)])
def test_blocks_that_do_not_belong_are_refused(pairing, blocks):
    with pytest.raises(ValueError, match=r"blocks belong to|needs the pairs of each axis block, 4 in all"):
        ndpos.rotate(torch.zeros(3, 8), torch.zeros(3, 4), pairing=pairing, blocks=blocks)


@pytest.mark.parametrize("align", ["index", "centre", "corner"])
@pytest.mark.parametrize("mixed", [False, True], ids=["axial", "mixed"])
def test_a_grid_laid_over_a_reference_grid_turns_as_its_scaled_coordinates(align, mixed):
    frequencies = ndpos.mixed(2, 8, heads=3, generator=torch.Generator().manual_seed(0)) if mixed else None
    rope = ndpos.RotaryEmbedding(ndpos.split(16, 2), frequencies=frequencies)
    turn = rope.on_grid((4, 9), reference_sizes=(2, 3), align=align, num_prefix=1)
    coords = ndpos.scaled_grid((4, 9), reference_sizes=(2, 3), align=align).flatten(0, -2)
    expected = rope(coords, num_prefix=1)
    assert torch.equal(turn.cos, expected.cos)
    assert torch.equal(turn.sin, expected.sin)
    assert not torch.equal(turn.sin, rope.on_grid((4, 9)).sin)
    table = ndpos.SinusoidalEmbedding(ndpos.split(16, 2))
    assert torch.equal(table.on_grid((4, 9), reference_sizes=(2, 3), align=align), table(coords))


@pytest.mark.parametrize("strength", [0.0, 0.25, torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64)], ids=str)
def test_strength_multiplies_every_angle(strength):
    rope = ndpos.RotaryEmbedding(ndpos.split(16, 2))
    coords = ndpos.grid((3, 5)).flatten(0, -2)
    expected = ndpos.angles(coords, ndpos.geometric(ndpos.split(16, 2))) * float(strength)
    for turn in (rope(coords, strength=strength), rope.on_grid((3, 5), strength=strength)):
        torch.testing.assert_close(turn.cos[0], expected.cos().float(), atol=1e-6, rtol=0)
        torch.testing.assert_close(turn.sin[0], expected.sin().float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"reference_sizes": (2, 3), "start": 1}, ValueError, "leave start=1 and step=1 out"),
        ({"reference_sizes": (2, 3), "align": "middle"}, ValueError, "'index', 'centre' or 'corner', got 'middle'"),
        ({"reference_sizes": (2,)}, ValueError, "reference_sizes"),
        ({"strength": float("inf")}, ValueError, "strength is a finite number"),
        ({"strength": "1"}, TypeError, "strength is a plain number"),
        ({"strength": torch.ones(3)}, ValueError, r"floating tensor \(\) or \(2,\), got \(3,\)"),
        ({"strength": (1.0, 1.0, 1.0)}, ValueError, "strength is one number or one per axis; got 3 for 2 axes"),
        ({"strength": torch.tensor(1)}, ValueError, "floating tensor"),
    ],
    ids=str,
)
def test_reference_sizes_and_strengths_that_make_no_sense_are_refused(settings, error, says):
    with pytest.raises(error, match=says):
        ndpos.RotaryEmbedding(ndpos.split(16, 2)).on_grid((4, 9), **settings)
