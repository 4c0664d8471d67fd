"""A Rotation as a value: what it leaves alone, which tokens, heads and layers it picks, and its optional parts."""

import dataclasses
import math

import pytest
import references
import torch
import torch.utils._pytree as pytree

import ndpos
from ndpos.kernels import PAIRINGS
from ndpos.rotation import Rotation

every_pairing = pytest.mark.parametrize("pairing", PAIRINGS)
SPLIT = ndpos.AxisSplit((4, 6), dim=12)
SIZES, TOKENS = (3, 4), 12
ODD = [math.nan, math.inf, -math.inf, -0.0, 1e30, 1e-45]


def rotary(**settings):
    return ndpos.RotaryEmbedding(SPLIT, **settings)


def per_head(rng, layers=None):
    return rotary(frequencies=ndpos.mixed(2, 5, heads=3, layers=layers, generator=rng))


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def same_bits(one, two):
    return one.dtype == two.dtype and torch.equal(bits(one), bits(two))


def with_parts(turn, rng, **settings):
    """``turn`` with every optional part: amplitudes, a key phase and an orthogonal basis."""
    dtype = turn.cos.dtype
    basis = torch.linalg.qr(torch.randn(12, 12, generator=rng, dtype=torch.float64)).Q
    amplitude = 0.5 + torch.rand(turn.cos.shape[-2], 5, generator=rng, dtype=dtype)
    phase = torch.randn(5, generator=rng, dtype=dtype)
    return dataclasses.replace(turn, amplitude=amplitude, key_phase=phase, basis=basis, **settings)


@every_pairing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("num_prefix", "num_suffix"), [(1, 0), (0, 2), (5, 3)])
@pytest.mark.parametrize("token_dim", [-2, -3])
def test_prefix_and_suffix_tokens_come_back_bit_for_bit(pairing, dtype, num_prefix, num_suffix, token_dim, rng):
    rope = rotary(pairing=pairing)
    turn = rope.on_grid(SIZES, num_prefix=num_prefix, num_suffix=num_suffix)
    shape = (2, 3, num_prefix + TOKENS + num_suffix, 12)
    x = torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)
    body = slice(num_prefix, num_prefix + TOKENS)
    outside = [token for token in range(shape[2]) if not body.start <= token < body.stop]
    x[:, :, outside, :6] = torch.tensor(ODD).to(dtype)
    out = turn(x) if token_dim == -2 else turn(x.transpose(1, 2), token_dim=-3).transpose(1, 2)
    assert same_bits(out[:, :, outside], x[:, :, outside])
    assert same_bits(out[:, :, body], rope.on_grid(SIZES)(x[:, :, body]))
    assert (out[:, :, body] != x[:, :, body]).any()


def test_gradients_pass_prefix_tokens_untouched(rng):
    turn = rotary().on_grid(SIZES, num_prefix=2, num_suffix=1)
    x = torch.randn(15, 12, generator=rng, requires_grad=True)
    above = torch.randn(15, 12, generator=rng)
    turn(x).backward(above)
    assert torch.equal(x.grad[[0, 1, 14]], above[[0, 1, 14]])
    torch.testing.assert_close(x.grad[2:14], turn.inverse()(above)[2:14])


def picked(turn, rng):
    """Every way to pick tokens for all samples alike, with the tokens that it picks."""
    mask = torch.rand(TOKENS, generator=rng) < 0.5
    order = torch.randperm(TOKENS, generator=rng)
    return {
        "a slice": (turn[2:7], list(range(2, 7))),
        "a slice with a step": (turn[1::3], list(range(1, TOKENS, 3))),
        "a token": (turn[5], [5]),
        "the last token": (turn[-1], [TOKENS - 1]),
        "a mask": (turn[mask], mask.nonzero().flatten().tolist()),
        "a list": (turn[[3, 3, 0]], [3, 3, 0]),
        "another order": (turn[order], order.tolist()),
        "indices": (turn.take(order[:4]), order[:4].tolist()),
        "int32 indices": (turn.take(order[:4].int()), order[:4].tolist()),
        "no tokens": (turn[TOKENS:], []),
    }


@pytest.mark.parametrize("parts", ["plain", "per head", "all parts"])
def test_turning_kept_tokens_is_keeping_turned_tokens_bit_for_bit(parts, rng):
    rope = per_head(rng) if parts == "per head" else rotary()
    turn = rope.on_grid(SIZES)
    turn = with_parts(turn, rng) if parts == "all parts" else turn
    x = torch.randn(2, 3, TOKENS, 12, generator=rng)
    for name, (some, kept) in picked(turn, rng).items():
        assert torch.equal(some(x[:, :, kept]), turn(x)[:, :, kept]), name
        assert torch.equal(some.keys(x[:, :, kept]), turn.keys(x)[:, :, kept]), name


@pytest.mark.parametrize("parts", ["plain", "per head", "per sample", "layers", "all parts"])
def test_every_sample_may_keep_tokens_of_its_own(parts, rng):
    keep = torch.stack([torch.randperm(TOKENS, generator=rng)[:8] for _ in range(2)])  # unsorted
    rope = per_head(rng, layers=2 if parts == "layers" else None) if parts in ("per head", "layers") else rotary()
    coords = ndpos.grid(SIZES).flatten(0, -2)
    turn = rope(torch.stack([coords, coords + 5]) if parts == "per sample" else coords)
    turn = with_parts(turn, rng) if parts == "all parts" else turn
    x = torch.randn(2, 3, TOKENS, 12, generator=rng)
    some = turn.take(keep)
    assert some.cos.shape[-4:] == (2, 3 if parts in ("per head", "layers") else 1, 8, 5)
    if parts == "layers":
        turn, some = turn.layer(1), some.layer(1)
    for sample in range(2):
        assert torch.equal(some(x[:, :, :8])[sample], turn.take(keep[sample])(x[:, :, :8])[sample])
    index = keep[:, None, :, None]
    assert torch.equal(some(x.take_along_dim(index, 2)), turn(x).take_along_dim(index, 2))
    assert torch.equal(some.keys(x.take_along_dim(index, 2)), turn.keys(x).take_along_dim(index, 2))


def test_narrow_integers_are_indices_too():
    turn = rotary().on_grid((100, 3))
    assert torch.equal(turn.take(torch.tensor([200, 7], dtype=torch.uint8)).cos, turn[[200, 7]].cos)
    assert torch.equal(turn.take(torch.tensor([[99]], dtype=torch.int8)).cos[0], turn[99].cos)


def test_indices_count_the_turned_tokens_alone_and_prefixes_stay(rng):
    turn = rotary().on_grid(SIZES, num_prefix=2, num_suffix=1)
    some = turn.take(torch.tensor([[0, 11], [4, 4]]))
    assert (some.num_prefix, some.num_suffix, some.cos.shape) == (2, 1, (2, 1, 2, 5))
    x = torch.randn(2, 3, 5, 12, generator=rng)
    assert torch.equal(some(x)[:, :, [0, 1, 4]], x[:, :, [0, 1, 4]])
    assert torch.equal(some(x)[:, :, 2:4], rotary().on_grid(SIZES).take(torch.tensor([[0, 11], [4, 4]]))(x[:, :, 2:4]))


def test_queries_and_keys_may_differ_in_heads_and_length(rng):
    rope = per_head(rng)
    turn = rope.on_grid(SIZES)
    q, k = torch.randn(2, 3, TOKENS, 12, generator=rng), torch.randn(2, 1, TOKENS, 12, generator=rng)
    for head in range(3):
        alone = rotary(frequencies=torch.tensor(rope.matrix.values, dtype=torch.float64).view(3, 2, 5)[head])
        one = slice(head, head + 1)
        assert torch.equal(turn.head(one)(q[:, one]), alone.on_grid(SIZES)(q[:, one]))
        assert torch.equal(turn.head(one).keys(k), alone.on_grid(SIZES).keys(k))
        assert torch.equal(turn(q)[:, one], turn.head(one)(q[:, one]))
    shared = rotary().on_grid(SIZES)
    assert torch.equal(shared.keys(k), shared.keys(k.expand(2, 3, TOKENS, 12))[:, :1])  # the single head is turned too
    assert (shared.keys(k) != k).any()
    assert torch.equal(shared.head(slice(0, 2)).cos, shared.cos)
    assert torch.equal(shared[4:](q[:, :, 4:]), shared(q)[:, :, 4:])  # later queries against all keys


def test_a_layer_is_that_of_an_embedding_with_that_matrix_alone(rng):
    rope = per_head(rng, layers=2)
    turn, x = rope.on_grid(SIZES, num_prefix=1), torch.randn(2, 3, 1 + TOKENS, 12, generator=rng)
    matrices = torch.tensor(rope.matrix.values, dtype=torch.float64).view(2, 3, 2, 5)
    for layer, matrix in enumerate(matrices):
        alone = rotary(frequencies=matrix).on_grid(SIZES, num_prefix=1)
        assert turn.layer(layer).num_layers is None
        assert torch.equal(turn.layer(layer)(x), alone(x))
    assert not torch.equal(turn.layer(0)(x), turn.layer(1)(x))


@every_pairing
@pytest.mark.parametrize("key_amplitude", ["same", "reciprocal"])
def test_an_amplitude_scales_the_turned_pairs_and_for_keys_as_it_says(pairing, key_amplitude, rng):
    turn = rotary(pairing=pairing).on_grid(SIZES, dtype=torch.float64)
    amplitude = 0.5 + torch.rand(TOKENS, 5, generator=rng, dtype=torch.float64)
    scaled = dataclasses.replace(turn, amplitude=amplitude, key_amplitude=key_amplitude)
    x = torch.randn(TOKENS, 12, generator=rng, dtype=torch.float64)
    factor = torch.ones(TOKENS, 12, dtype=torch.float64)
    for pair, channels in enumerate(references.pair_places(pairing, 5, SPLIT.blocks)):
        factor[:, channels] = amplitude[:, pair, None]
    torch.testing.assert_close(scaled(x), turn(x) * factor)
    torch.testing.assert_close(scaled.keys(x), turn.keys(x) * (factor if key_amplitude == "same" else 1 / factor))
    assert "norms are not kept" in repr(scaled)


@every_pairing
def test_a_key_phase_is_added_to_the_angles_of_keys_alone(pairing, rng):
    turn = rotary(pairing=pairing).on_grid(SIZES, dtype=torch.float64)
    phase = torch.randn(5, generator=rng, dtype=torch.float64)
    x = torch.randn(TOKENS, 12, generator=rng, dtype=torch.float64)
    angles = ndpos.angles(ndpos.grid(SIZES).flatten(0, -2), ndpos.geometric(SPLIT))
    phased = dataclasses.replace(turn, key_phase=phase)
    expected = references.rotation(x.tolist(), (angles + phase).tolist(), pairing, SPLIT.blocks)
    torch.testing.assert_close(phased.keys(x), torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(phased(x), turn(x))
    per_head = dataclasses.replace(turn, key_phase=torch.stack([phase, 0 * phase])[:, None])
    heads = per_head.keys(x.expand(2, TOKENS, 12))
    torch.testing.assert_close(heads, torch.stack([phased.keys(x), turn.keys(x)]))


@pytest.mark.parametrize("heads", [None, 3])
def test_an_orthogonal_basis_comes_first_and_keeps_norms_and_the_relative_score(heads, rng):
    shape = (12, 12) if heads is None else (heads, 12, 12)
    basis = torch.linalg.qr(torch.randn(*shape, generator=rng, dtype=torch.float64)).Q
    q, k = torch.randn(2, 3, 1, 12, generator=rng, dtype=torch.float64)

    def turn_at(*at):
        return dataclasses.replace(rotary()(torch.tensor([at]), dtype=torch.float64), basis=basis)

    turned = turn_at(2.0, -3.0)(q)
    plain = rotary()(torch.tensor([[2.0, -3.0]]), dtype=torch.float64)
    for head in range(3):
        own = basis if heads is None else basis[head]
        rows = torch.tensor([[references.dot(row, q[head, 0].tolist()) for row in own.tolist()]], dtype=torch.float64)
        torch.testing.assert_close(turned[head], plain(rows))
    torch.testing.assert_close(turn_at(2.0, -3.0)(q.transpose(0, 1), token_dim=-3).transpose(0, 1), turned)
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))

    def score(at_q, at_k):
        return (turn_at(*at_q)(q) * turn_at(*at_k).keys(k)).sum((-2, -1))

    torch.testing.assert_close(score((5.0, 2.5), (1.0, 1.0)), score((9.0, -0.5), (5.0, -2.0)))
    assert (score((5.0, 2.5), (1.0, 1.0)) - score((6.0, 2.5), (1.0, 1.0))).abs().min() > 1e-3
    assert (score((5.0, 2.5), (1.0, 1.0)) - score((5.0, 3.5), (1.0, 1.0))).abs().min() > 1e-3


def test_a_basis_is_exact_in_half_precision_and_under_autocast(rng):
    turn = with_parts(rotary().on_grid(SIZES), rng)
    x = torch.randn(TOKENS, 12, generator=rng)
    exact = turn(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(turn(x), exact)
    assert torch.equal(turn(x.bfloat16()), turn(x.bfloat16().float()).bfloat16())


@every_pairing
@pytest.mark.parametrize("key_amplitude", ["same", "reciprocal"])
@pytest.mark.parametrize("token_dim", [-2, -3])
def test_the_inverse_undoes_queries_and_keys_with_every_part(pairing, key_amplitude, token_dim, rng):
    turn = rotary(pairing=pairing).on_grid(SIZES, num_prefix=1, dtype=torch.float64)
    turn = with_parts(turn, rng, key_amplitude=key_amplitude)
    x = torch.randn(2, 1 + TOKENS, 1 + TOKENS, 12, generator=rng, dtype=torch.float64)
    back = turn.inverse()
    for there, again in ((turn, back), (turn.keys, back.keys), (back, turn), (back.keys, turn.keys)):
        torch.testing.assert_close(again(there(x, token_dim=token_dim), token_dim=token_dim), x)
    assert back.inverse().basis_last is False


def test_a_rotation_is_a_pytree_whose_leaves_are_its_tensors(rng):
    turn = with_parts(rotary(pairing="half_per_axis").on_grid(SIZES, num_prefix=1, num_suffix=2), rng)
    leaves, spec = pytree.tree_flatten(turn)
    parts = (turn.cos, turn.sin, turn.amplitude, turn.key_phase, turn.basis)
    assert all(leaf is part for leaf, part in zip(leaves, parts, strict=True))
    again = pytree.tree_unflatten(leaves, spec)
    for field in dataclasses.fields(Rotation):
        assert getattr(again, field.name) is getattr(turn, field.name), field.name
    assert pytree.tree_flatten(again)[1] == spec != pytree.tree_flatten(turn.inverse())[1]
    assert [str(path[0]) for path, _ in pytree.tree_leaves_with_path(rotary().on_grid(SIZES))] == [".cos", ".sin"]
    doubled = pytree.tree_map(torch.Tensor.double, turn)
    assert {leaf.dtype for leaf in pytree.tree_leaves(doubled)} == {torch.float64}
    assert doubled.num_prefix == 1
    assert pytree.tree_map(lambda leaf: leaf.to("meta"), turn)(torch.empty(15, 12, device="meta")).is_meta
    serialised = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert serialised == spec


def test_a_rotation_cannot_be_changed_and_says_what_it_is(rng):
    turn = rotary().on_grid(SIZES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        turn.num_prefix = 1
    assert repr(turn) == "Rotation(tokens=12, pairs=5, heads=1, pairing='half')"
    full = with_parts(per_head(rng, layers=2)(torch.zeros(4, 7, 2), num_prefix=1, num_suffix=2), rng)
    assert repr(full) == (
        "Rotation(tokens=7, pairs=5, heads=3, batch=(4,), pairing='half', num_layers=2, num_prefix=1, num_suffix=2, "
        "key_phase, basis, amplitude: norms are not kept)"
    )


def turn_of(*, tokens=2, pairs=2, heads=(1,), pairing="half", **settings):
    table = torch.zeros(*heads, tokens, pairs)
    return Rotation(table, table, pairing, **settings)


def x(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: turn_of(num_prefix=1, num_suffix=3)(x(5, 4)), ValueError, ["1 + 2 + 3", "x has 5", "num_prefix"]),
        (lambda: turn_of()(x(2, 3, 5, 4)), ValueError, ["0 + 2 + 0", "x has 5", "(2, 3, 5, 4)", "token_dim=-3"]),
        (lambda: turn_of(head_dim=4)(x(2, 12)), ValueError, ["expected head_dim 4, got 12", "unflatten", "AxisSplit"]),
        (lambda: turn_of(pairs=3)(x(2, 4)), ValueError, ["3 pairs need 6 channels, x has 4", "Fewer pairs"]),
        (lambda: turn_of(heads=(3, 1), num_layers=3)(x(2, 4)), ValueError, ["holds 3 layers", "turn.layer(i)"]),
        (lambda: turn_of(heads=(3,))(x(2, 4)), ValueError, ["needs 3 dimensions", "got 2", "heads dimension"]),
        (lambda: turn_of(heads=(2, 1))(x(2, 2, 4)), ValueError, ["needs 4 dimensions", "got 3", "no batch"]),
        (lambda: turn_of(heads=(3,))(x(2, 1, 2, 4)), ValueError, ["(3,), of x (1,)", "turn.head(slice(...))"]),
        (lambda: turn_of(heads=(2, 1))(x(3, 1, 2, 4)), ValueError, ["(2, 1), of x (3, 1)", "without a batch"]),
        (lambda: turn_of(heads=(3,)).keys(x(4, 2, 4)), ValueError, ["(3,), of x (4,)", "ndpos.Rotation.keys"]),
        (lambda: turn_of(basis=x(2, 2))(x(2, 4)), ValueError, ["basis is (head_dim, head_dim)", "(2, 2)", "each head"]),
        (lambda: turn_of(basis=x(3, 4, 4))(x(2, 2, 4)), ValueError, ["(heads, head_dim, head_dim), got (3, 4, 4)"]),
        (lambda: turn_of()(x(2, 4), token_dim=1), ValueError, ["token_dim is -2 or -3", "token_dim 1"]),
        (lambda: turn_of(heads=())(x(2, 4)), ValueError, ["(*batch, heads|1, tokens, pairs)", "got (2, 2)"]),
        (lambda: Rotation(x(1, 2, 2), x(1, 3, 2), "half")(x(2, 4)), ValueError, ["(1, 2, 2) and (1, 3, 2)"]),
        (lambda: turn_of(pairing="neox")(x(2, 4)), ValueError, ["'interleaved', 'half'", "'neox'"]),
        (lambda: turn_of(pairing="half_per_axis")(x(2, 4)), ValueError, ["2 in all", "None", "split.blocks"]),
        (lambda: turn_of()(x(2, 4, dtype=torch.int32)), TypeError, ["float16, bfloat16", "torch.int32"]),
        (lambda: turn_of()([0.0]), TypeError, ["float16, bfloat16", "list"]),
        (lambda: turn_of()[2], IndexError, ["token 2 of 2"]),
        (lambda: turn_of()[-3], IndexError, ["token -3 of 2"]),
        (lambda: turn_of()[torch.ones(3, dtype=torch.bool)], ValueError, ["mask (2,)", "(3,) torch.bool", "turn.take"]),
        (lambda: turn_of()[torch.ones(1, 2).long()], ValueError, ["indices (kept,)", "(1, 2)", "turn.take(indices)"]),
        (lambda: turn_of()[:, 0], ValueError, ["indices (kept,)", "slice(None, None, None), 0", "turn.take(indices)"]),
        (lambda: turn_of().take(torch.tensor([0, -1])), ValueError, ["at least 0", "Seen: -1", "subtract num_prefix"]),
        (lambda: turn_of().take(torch.tensor([[2]])), ValueError, ["below the 2", "Seen: 2", "subtract num_prefix"]),
        (lambda: turn_of()[[0, -1]], ValueError, ["at least 0", "Seen: -1"]),
        (lambda: turn_of().take(torch.tensor([0.0])), ValueError, ["integers, got torch.float32", "turn[mask]"]),
        (lambda: turn_of().take(torch.tensor([True])), ValueError, ["integers, got torch.bool", "turn[mask]"]),
        (lambda: turn_of().take([0]), ValueError, ["integers, got list"]),
        (lambda: turn_of().take(torch.tensor(0)), ValueError, ["(kept,) or (batch, kept)", "got ()"]),
        (lambda: turn_of(heads=(3, 1)).take(x(2, 1).long()), ValueError, ["got (2, 1)", "batch (3,)"]),
        (lambda: turn_of(heads=(3, 2, 1)).take(x(2, 1).long()), ValueError, ["got (2, 1)", "batch (3, 2)"]),
        (lambda: turn_of().layer(0), ValueError, ["layer 0", "without layers"]),
        (lambda: turn_of(heads=(3, 1), num_layers=3).layer(3), ValueError, ["layer 3 of 3"]),
        (lambda: turn_of(heads=(3, 1), num_layers=3).layer(-1), ValueError, ["layer -1 of 3"]),
    ],
)
def test_a_refusal_names_the_rule_what_was_seen_and_a_cure(call, error, says):
    with pytest.raises(error) as refused:
        call()
    assert str(refused.value).startswith("ndpos.Rotation")
    for part in says:
        assert part in str(refused.value)
