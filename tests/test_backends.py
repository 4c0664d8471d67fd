"""Every way to rotate gives the same numbers: values, gradients, places in memory; and which way is taken is said."""

import dataclasses
import pickle
import re
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ndpos
from ndpos.kernels import PAIRINGS, choice, compiled, eager
from ndpos.kernels.pairing import Turning
from ndpos.kernels.plain import turn_plain
from ndpos.kernels.turning import exact_tables, turn_all

every_pairing = pytest.mark.parametrize("pairing", PAIRINGS)
HALVES = (torch.float16, torch.bfloat16)
has_compiler = not choice.compiler_missing(torch.device("cpu"))
needs_compiler = pytest.mark.skipif(not has_compiler, reason="needs a C++ compiler")
READY = [
    "eager",
    pytest.param("compiled", marks=needs_compiler),
]


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tables(*shape, dtype=torch.float32, seed=5):
    angles = 9 * numbers(*shape, seed=seed)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turning(pairing, **settings):
    return Turning(pairing, (2, 0, 3) if pairing == "half_per_axis" else None, **settings)


def exactly(x, cos, sin, how):
    """The plain formula in float64: itself held to loops over plain numbers by test_kernels.py."""
    return turn_plain(x.double(), cos.double(), sin.double(), how)


def close(got, expected, dtype):
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=unit, atol=2 * unit)


@st.composite
def layouts(draw):
    """A tensor of five pairs and more, laid out in some way, and tables for it."""
    batch, heads, tokens = (draw(st.integers(0 if name == "tokens" else 1, 4)) for name in ("batch", "heads", "tokens"))
    prefix, suffix, rest = draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(0, 3))
    dtype = draw(st.sampled_from([*HALVES, torch.float32, torch.float64]))
    total, width, token_dim = prefix + tokens + suffix, 10 + rest, draw(st.sampled_from([-2, -3]))
    made = numbers(batch, total, 3, heads, width + 1, seed=draw(st.integers(0, 99)), dtype=dtype)
    layout = draw(st.sampled_from(["packed", "own", "channels", "expanded", "odd offset"]))
    x = made[:, :, 1, :, :width]
    if layout == "own":
        x = x.contiguous()
    elif layout == "channels":
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif layout == "expanded":
        x = x[:, :, :1].expand(batch, total, heads, width)
    elif layout == "odd offset":
        x = made[:, :, 1, :, 1:]
    x = x if token_dim == -3 else x.transpose(1, 2)
    shape = draw(st.sampled_from([(tokens,), (1, 1, tokens), (1, heads, tokens), (batch, 1, tokens)]))
    cos, sin = tables(*shape, 5)
    if token_dim == -3:
        cos, sin = (part.transpose(-2, -3) if part.ndim > 2 else part.unsqueeze(-2) for part in (cos, sin))
    return x, cos, sin, {"token_dim": token_dim, "num_prefix": prefix, "num_suffix": suffix}


@every_pairing
@settings(max_examples=150)
@given(layouts(), st.booleans())
def test_the_eager_way_is_the_formula_whatever_the_layout(pairing, layout, inverse):
    x, cos, sin, how = layout
    how = turning(pairing, inverse=inverse, **how)
    before = x.clone()
    (turned,) = turn_all((x,), cos, sin, how, "eager")
    assert turned.dtype == x.dtype
    assert turned.stride() == torch.empty_like(x).stride()
    close(turned, exactly(x, cos, sin, how), x.dtype)
    for kept, same in zip(how.parted(turned)[::2], how.parted(x)[::2], strict=True):
        assert torch.equal(kept, same)
    assert torch.equal(x, before)


@every_pairing
@settings(max_examples=60)
@given(layouts(), st.integers(1, 200))
def test_turning_block_by_block_changes_nothing(pairing, layout, block):
    x, cos, sin, how = layout
    how, (cos, sin) = turning(pairing, **how), exact_tables(x, cos, sin)
    whole = torch.empty_like(x)
    eager.turn_eager((x,), cos, sin, how, (whole,))
    limits = {"BLOCK": block, "LEAST": 64, "SHARE": 0}
    kept = {name: getattr(eager, name) for name in limits}
    try:
        for name, value in limits.items():
            setattr(eager, name, value)
        cut = torch.empty_like(x)
        eager.turn_eager((x,), cos, sin, how, (cut,))
    finally:
        for name, value in kept.items():
            setattr(eager, name, value)
    close(cut, whole.double(), x.dtype)


@every_pairing
@settings(max_examples=60)
@given(layouts(), layouts(), st.booleans(), st.sampled_from([64, eager.LEAST]))
def test_queries_and_keys_turned_together_are_each_turned_alone(pairing, layout, other, inverse, least):
    x, cos, sin, how = layout
    fits = other[0].shape[:1] == x.shape[:1] and other[3] == how and cos.ndim < 3
    fits = fits and other[0].shape[how["token_dim"]] == x.shape[how["token_dim"]]
    y = other[0].to(x.dtype) if fits else x.transpose(0, 1).flip(-1).contiguous().transpose(0, 1)
    how = turning(pairing, inverse=inverse, **how)
    kept = eager.LEAST, eager.SHARE
    try:
        eager.LEAST, eager.SHARE = least, 0
        together = turn_all((x, y), cos, sin, how, "eager")
    finally:
        eager.LEAST, eager.SHARE = kept
    for one, turned in zip((x, y), together, strict=True):
        assert turned.dtype == one.dtype
        close(turned, exactly(one, cos, sin, how), one.dtype)


@needs_compiler
@pytest.mark.parametrize(
    ("pairing", "dtype", "token_dim", "heads", "prefix"),
    [
        ("interleaved", torch.bfloat16, -3, 1, 1),
        ("half", torch.float32, -2, 1, 0),
        pytest.param("half", torch.bfloat16, -2, 1, 1, marks=pytest.mark.slow),
        pytest.param("interleaved", torch.float32, -2, 4, 0, marks=pytest.mark.slow),
        ("half_per_axis", torch.float32, -2, 4, 1),
        pytest.param("half_per_axis", torch.float16, -3, 1, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_compiled_way_is_the_formula_and_sizes_past_the_second_compile_nothing(
    pairing, dtype, token_dim, heads, prefix
):
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for samples, tokens in ((2, 6), (3, 9), (5, 7)):
            made = numbers(samples, tokens + prefix, 3, 4, 13, dtype=dtype)
            x = made[:, :, 1] if token_dim == -3 else made[:, :, 1].transpose(1, 2).contiguous()
            cos, sin = tables(heads, tokens, 5) if heads > 1 else tables(tokens, 5)
            beside = (cos.unsqueeze(-2), sin.unsqueeze(-2)) if token_dim == -3 else (cos, sin)
            how = turning(pairing, token_dim=token_dim, num_prefix=prefix)
            (turned,) = turn_all((x,), *beside, how, "compiled")
            close(turned, exactly(x, *beside, how), dtype)
            assert turned.stride() == torch.empty_like(x).stride()
            assert torch.equal(how.parted(turned)[0], how.parted(x)[0])


@needs_compiler
@pytest.mark.slow
def test_more_settings_than_pytorch_keeps_graphs_for_are_all_compiled():
    torch._dynamo.reset()
    compiled._fused.cache_clear()
    x = numbers(2, 3, 4, 8, dtype=torch.float32)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for prefix in range(3):
            for pairs in range(1, 5):
                how, (cos, sin) = Turning("half", num_prefix=prefix), tables(4 - prefix, pairs)
                (turned,) = turn_all((x,), cos, sin, how, "compiled")
                close(turned, exactly(x, cos, sin, how), x.dtype)


def ways(backend, pairing, shape):
    marks = [] if backend == "eager" else [needs_compiler]
    if backend == "compiled" and (pairing, shape) != ("half", (2, 3, 6)):
        marks.append(pytest.mark.slow)  # a compilation each
    return pytest.param(backend, pairing, shape, marks=marks)


@pytest.mark.parametrize(
    ("backend", "pairing", "shape"),
    [
        ways(backend, pairing, shape)
        for backend in ("eager", "compiled")
        for pairing in PAIRINGS
        for shape in ((6,), (2, 1, 6), (1, 3, 6), (2, 3, 6))
    ],
    ids=str,
)
def test_gradients_of_x_and_of_the_tables_are_those_of_the_formula(backend, pairing, shape):
    how = turning(pairing, num_prefix=1)
    leaves = [numbers(2, 3, 7, 12, dtype=torch.float32), *tables(*shape, 5)]
    above = numbers(2, 3, 7, 12, seed=3, dtype=torch.float32)
    for needing in ((True, False, False), (True, True, True), (False, True, True), (False, True, False)):
        ours = [leaf.clone().requires_grad_(needs) for leaf, needs in zip(leaves, needing, strict=True)]
        (turned,) = turn_all((ours[0],), *ours[1:], how, backend)
        turned.backward(above)
        exact = [leaf.double().requires_grad_(needs) for leaf, needs in zip(leaves, needing, strict=True)]
        turn_plain(*exact, how).backward(above.double())
        for got, expected in zip(ours, exact, strict=True):
            if expected.grad is None:
                assert got.grad is None
            else:
                torch.testing.assert_close(got.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", READY)
def test_the_backward_keeps_the_tables_and_nothing_of_the_size_of_x(backend):
    turn = ndpos.RotaryEmbedding(ndpos.split(16, 2), backend=backend).on_grid((8, 8))
    kept = []
    x = numbers(8, 4, 64, 16, dtype=torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        turned = turn(x)
    assert sum(tensor.numel() for tensor in kept) == turn.cos.numel() + turn.sin.numel()
    turned.sum().backward()
    assert torch.equal(x.grad, turn.inverse()(torch.ones_like(x)))


@every_pairing
def test_twice_backward_forward_mode_and_transforms_go_through(pairing):
    x, (cos, sin) = numbers(2, 3, 11), tables(3, 5, dtype=torch.float64)
    how = turning(pairing)

    def turned(x, cos, sin):
        return turn_all((x,), cos, sin, how)[0]

    leaves = [leaf.requires_grad_() for leaf in (x, cos, sin)]
    assert torch.autograd.gradcheck(turned, leaves, check_forward_ad=True, check_batched_grad=True)
    whole = numbers(2, 3, 10).requires_grad_()  # no channel is left over
    assert torch.autograd.gradcheck(turned, (whole, cos, sin), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(turned, leaves, check_fwd_over_rev=True)
    with torch.no_grad():
        x, cos, sin = (leaf.detach() for leaf in leaves)
        expected = turn_plain(x, cos, sin, how)
        _, along = torch.func.jvp(lambda x: turned(x, cos, sin), (x,), (x,))
        torch.testing.assert_close(along, expected)
        torch.testing.assert_close(torch.vmap(turned, (0, None, None))(x, cos, sin), expected)
    of_x = torch.func.grad(lambda x: turned(x, cos, sin).square().sum())(x)
    torch.testing.assert_close(of_x, 2 * x)


@pytest.mark.parametrize(
    ("pairing", "backend", "dtype"),
    [
        *((pairing, None, dtype) for pairing in PAIRINGS for dtype in (torch.float32, torch.bfloat16)),
        pytest.param("half", "compiled", torch.float32, marks=needs_compiler),
        pytest.param("interleaved", "compiled", torch.bfloat16, marks=[needs_compiler, pytest.mark.slow]),
    ],
    ids=str,
)
def test_in_place_and_into_a_tensor_are_what_is_returned(pairing, backend, dtype):
    rope = ndpos.RotaryEmbedding(ndpos.AxisSplit((4, 6), dim=13), pairing=pairing, backend=backend)
    turn = rope.on_grid((2, 3), num_prefix=1)
    fused = numbers(2, 7, 3, 4, 13, dtype=dtype)
    q, k, v = fused.unbind(2)
    expected = turn(q.clone(), token_dim=-3), turn.keys(k.clone(), token_dim=-3), v.clone()
    out = torch.empty(2, 7, 4, 13, dtype=dtype)
    assert turn(q, token_dim=-3, out=out) is out
    torch.testing.assert_close(out, expected[0])
    turned = turn.both(q, k, token_dim=-3, out=(q, k))
    assert turned[0].data_ptr() == q.data_ptr()
    for got, wanted in zip(fused.unbind(2), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    x, angles = numbers(6, 10, dtype=dtype), numbers(6, 5, dtype=torch.float32)
    blocks = (2, 3) if pairing == "half_per_axis" else None
    wanted = ndpos.rotate(x, angles, pairing=pairing, blocks=blocks)
    ndpos.rotate(x, angles, pairing=pairing, blocks=blocks, backend=backend, out=x)
    torch.testing.assert_close(x, wanted)


def test_an_out_that_would_lose_numbers_is_refused_before_anything_is_written():
    turn = ndpos.RotaryEmbedding(ndpos.split(8, 2)).on_grid((2, 3))
    x, fused = numbers(2, 4, 6, 8, dtype=torch.float32), numbers(2, 6, 3, 4, 8, dtype=torch.float32)
    before = fused.clone()
    wrong = {
        "shape, dtype and device": torch.empty(2, 4, 6, 9),
        r"shape, dtype and device of x.*torch.float64": torch.empty(2, 4, 6, 8, dtype=torch.float64),
        "expanded": torch.empty(1, 4, 6, 8).expand(2, 4, 6, 8),
    }
    for text, out in wrong.items():
        with pytest.raises(ValueError, match=text):
            turn(x, out=out)
    shifted = fused.flatten()[8 : 8 + x.numel()].view(x.shape)
    with pytest.raises(ValueError, match="overlaps another tensor"):
        turn(fused[:, :, 0].transpose(1, 2), out=shifted)
    with pytest.raises(ValueError, match="overlaps another tensor"):
        turn.both(x, x[:1].expand(2, 4, 6, 8), out=(x, torch.empty_like(x)))
    with pytest.raises(ValueError, match="overlaps another tensor"):
        turn.both(x, x.clone(), out=(x, x))
    with pytest.raises(ValueError, match="out= is for inference"):
        turn(x.clone().requires_grad_(), out=x)
    with pytest.raises(ValueError, match="out is a tensor for each of 2"):
        turn.both(x, x.clone(), out=(x,))
    assert torch.equal(fused, before)
    q, k, _ = fused.unbind(2)
    turn(q, token_dim=-3, out=k)  # slices of one pack do not overlap
    torch.testing.assert_close(k, turn(q, token_dim=-3))


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=[needs_compiler, pytest.mark.slow])])
def test_both_turns_queries_and_fewer_keys_and_autograd_follows_each(backend):
    for parts in ({}, {"key_phase": torch.tensor([0.5, 1.0, 2.0, 3.0])}, {"amplitude": torch.full((4,), 2.0)}):
        rope = ndpos.RotaryEmbedding(ndpos.split(8, 2), backend=backend)
        turn = dataclasses.replace(rope.on_grid((2, 3)), key_amplitude="reciprocal", **parts)
        q, k = (numbers(2, heads, 6, 8, dtype=torch.float32).requires_grad_() for heads in (4, 2))
        turned = turn.both(q, k)
        for got, expected in zip(turned, (turn(q), turn.keys(k)), strict=True):
            torch.testing.assert_close(got, expected)
        turned[1].sum().backward()  # of keys alone
        assert q.grad is None or not q.grad.any()
        expected = numbers(2, 2, 6, 8, dtype=torch.float32).requires_grad_()
        turn.keys(expected).sum().backward()
        torch.testing.assert_close(k.grad, expected.grad)


def test_tables_in_any_place_of_memory_turn_the_same_way():
    x, angles = numbers(2, 3, 5, 8, dtype=torch.float32), 9 * numbers(1, 5, 4, dtype=torch.float32)
    polar = torch.polar(torch.ones_like(angles), angles)
    odd_rows, odd_start = numbers(1, 5, 9, dtype=torch.float32), numbers(1, 5, 10, dtype=torch.float32)
    places = {
        "side by side": (polar.real, polar.imag),
        "of a conjugate": (polar.conj().real, polar.conj().imag),
        "an odd number apart": (odd_rows[..., :-1:2], odd_rows[..., 1::2]),
        "from an odd place on": (odd_start[..., 1:9:2], odd_start[..., 2:10:2]),
    }
    for name, (cos, sin) in places.items():
        for pairing in ("interleaved", "half"):
            turned = ndpos.Rotation(cos, sin, pairing)(x)
            expected = exactly(x, cos.clone(), sin.clone(), Turning(pairing))
            torch.testing.assert_close(turned.double(), expected, rtol=1e-5, atol=1e-5, msg=name)


def test_what_is_turned_by_tables_of_its_own_is_checked_before_anything_is_written():
    q, k = numbers(2, 3, 5, 8, dtype=torch.float32), numbers(2, 3, 5, 8, seed=1, dtype=torch.float32)
    turn = ndpos.Rotation(*tables(1, 5, 4), "half", key_phase=torch.tensor([0.5, 1.0, 2.0, 3.0]))
    same, before = torch.empty_like(q), k.clone()
    for out in ((k, q), (same, same), (k, same)):
        with pytest.raises(ValueError, match="overlaps another tensor"):
            turn.both(q, k, out=out)
    assert torch.equal(k, before)
    expected = turn(q.clone()), turn.keys(k.clone())
    for got, wanted in zip(turn.both(q, k, out=(q, k)), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    per_head = dataclasses.replace(turn, key_phase=numbers(4, 1, 4, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"batch and heads of the rotation are \(4,\), of x \(1,\)"):
        per_head.keys(k[:, :1])
    basis = torch.eye(8, requires_grad=True)
    with pytest.raises(ValueError, match="out= is for inference"):
        dataclasses.replace(turn, key_phase=None, basis=basis)(q, out=same)
    b = torch.zeros(64)
    x, crossing = b.as_strided((1, 2, 2, 2), (30, 7, 4, 1)), b.as_strided((1, 2, 2, 2), (30, 7, 4, 1), 2)
    with pytest.raises(ValueError, match="overlaps another tensor"):
        ndpos.Rotation(*tables(1, 2, 1), "half")(x, out=crossing)
    empty = torch.empty(2, 3, 5, 8)[:0]
    assert dataclasses.replace(turn, key_phase=None)(q[:0], out=empty) is empty


def test_an_out_in_a_compiled_function_is_written_and_returned():
    turn, q = ndpos.RotaryEmbedding(ndpos.split(8, 2)).on_grid((2, 3)), numbers(2, 3, 6, 8, dtype=torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def turned(q, out):
        return turn(q, out=out)

    out, expected = torch.empty_like(q), turn(q)
    torch.testing.assert_close(turned(q, out), expected)
    torch.testing.assert_close(out, expected)
    turned(q, q)
    torch.testing.assert_close(q, expected)


def test_a_pack_of_sequences_is_each_of_them_turned_alone():
    rope = ndpos.RotaryEmbedding(ndpos.split(8, 1))
    lengths = [3, 0, 5, 1]
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    q = numbers(9, 2, 8, dtype=torch.float32)  # (tokens, heads, head_dim)
    packed = rope.on_grid((5,)).packed(cu_seqlens, 9)
    alone = [rope.on_grid((n,))(part, token_dim=-3) for n, part in zip(lengths, q.split(lengths), strict=True) if n]
    torch.testing.assert_close(packed(q, token_dim=-3), torch.cat(alone))
    turn = rope.on_grid((5,))
    for wrong, text in {
        (0, 3, 2, 9): "never fall",
        (1, 3, 9): "start at 0",
        (0, 3, 8): "end at the 9 tokens",
        (0, 9): "below the 5 rotated tokens",
    }.items():
        with pytest.raises(ValueError, match=text):
            turn.packed(torch.tensor(wrong), 9)
    with pytest.raises(ValueError, match="int32 or int64"):
        turn.packed(torch.tensor([0.0, 9.0]), 9)
    with pytest.raises(ValueError, match="in the middle"):
        rope.on_grid((5,), num_prefix=1).packed(cu_seqlens, 9)


def test_backends_say_what_is_here_and_why_not_the_others(monkeypatch):
    seen = {state.name: state for state in ndpos.backends()}
    assert tuple(seen) == ("eager", "compiled", "triton")
    assert seen["eager"].ready
    assert seen["compiled"].ready == has_compiler
    if not torch.cuda.is_available() and not choice._interpreted():
        assert not seen["triton"].ready
        assert "CUDA" in seen["triton"].why or "not installed" in seen["triton"].why
        with pytest.raises(ValueError, match=r"backend 'triton' turns tensors of a GPU, and .*ndpos.backends\(\)"):
            ndpos.rotate(torch.ones(2, 4), torch.ones(2, 2), pairing="half", backend="triton")
    with pytest.raises(ValueError, match=r"backend is None or one of .*, got 'cuda'"):
        ndpos.rotate(torch.ones(2, 4), torch.ones(2, 2), pairing="half", backend="cuda")
    with pytest.raises(ValueError, match=r"backend is None or one of .*, got 'fast'"):
        ndpos.RotaryEmbedding(ndpos.split(8, 2), backend="fast")
    monkeypatch.setattr(choice, "compiler_missing", lambda device: "no compiler anywhere")
    assert not ndpos.backends()[1].ready
    assert ndpos.backends()[1].why == "no compiler anywhere"


def test_without_a_compiler_the_compiled_way_warns_once_and_turns_all_the_same(monkeypatch):
    from torch._inductor import cpp_builder

    def missing():
        raise torch._inductor.exc.InvalidCxxCompiler()

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    choice._falls_back.cache_clear()
    try:
        x, angles = numbers(3, 4, dtype=torch.float32), numbers(3, 2, dtype=torch.float32)
        expected = ndpos.rotate(x, angles, pairing="half")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(3):
                assert torch.equal(ndpos.rotate(x, angles, pairing="half", backend="compiled"), expected)
        (said,) = (str(each.message) for each in warned if each.category is RuntimeWarning)
        assert re.search(r"'compiled' falls back to 'eager'.*found no C\+\+ compiler", said)
    finally:
        choice._falls_back.cache_clear()


@every_pairing
def test_the_registered_operator_passes_pytorchs_own_checks(pairing):
    for shape, token_dim, table in (((2, 3, 7, 12), -2, (6, 5)), ((2, 7, 3, 12), -3, (6, 1, 5)), ((7, 12), -2, (6, 5))):
        x, (cos, sin) = numbers(*shape, dtype=torch.float32), tables(*table)
        how = turning(pairing, token_dim=token_dim, num_prefix=1)
        for learned in (False, True):
            inputs = [x.clone().requires_grad_(), *(part.clone().requires_grad_(learned) for part in (cos, sin))]
            torch.library.opcheck(torch.ops.ndpos.turn.default, (*inputs, *how, "eager"))
    mapped = torch.vmap(lambda x: torch.ops.ndpos.turn(x, cos, sin, *how, "eager"))(torch.stack((x, 2 * x)))
    torch.testing.assert_close(mapped[1], 2 * mapped[0])
    per_sample = torch.vmap(lambda x, cos: torch.ops.ndpos.turn(x, cos, sin, *how, "eager"), (None, 0))(
        x, torch.stack((cos, 2 * cos))
    )
    close(per_sample[1], exactly(x, 2 * cos, sin, how), x.dtype)


def test_a_named_backend_stands_in_a_graph_as_one_operator_and_the_others_as_plain_products():
    x, (cos, sin), how = numbers(2, 3, 6, 10, dtype=torch.float32), tables(6, 5), Turning("half")
    for backend, expected in ((None, 0), ("eager", 0), ("compiled", 0), ("triton", 1)):

        class Turned(torch.nn.Module):
            backend: str | None

            def forward(self, x):
                return turn_all((x,), cos, sin, how, self.backend)[0]

        module = Turned()
        module.backend = backend
        graph = torch.export.export(module, (x,)).graph
        assert sum(node.target == torch.ops.ndpos.turn.default for node in graph.nodes) == expected
        assert not any("complex" in str(node.target) for node in graph.nodes)


def test_modes_and_subclasses_see_the_plain_formula():
    x, (cos, sin), how = numbers(2, 6, 10, dtype=torch.float32), tables(6, 5), Turning("interleaved")

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen = (*self.seen, str(function))
            return function(*args, **(kwargs or {}))

    with Counted() as counted:
        turn_all((x,), cos, sin, how)
    assert any("mul" in name for name in counted.seen)
    assert not any("complex" in name for name in counted.seen)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = [mode.from_tensor(tensor) for tensor in (x, cos, sin)]
        assert turn_all((fake[0],), *fake[1:], how)[0].shape == x.shape
    meta = [tensor.to("meta") for tensor in (x, cos, sin)]
    assert turn_all((meta[0],), *meta[1:], how)[0].device.type == "meta"


@pytest.mark.parametrize("backend", READY)
def test_threads_and_pickles_change_nothing(backend):
    rope = pickle.loads(pickle.dumps(ndpos.RotaryEmbedding(ndpos.split(16, 2), backend=backend)))
    assert rope.backend == backend
    turn, x = rope.on_grid((4, 5)), numbers(2, 3, 20, 16, dtype=torch.float32)
    expected, got = turn(x), [None] * 8

    def turn_here(place):
        got[place] = turn(x)

    threads = [threading.Thread(target=turn_here, args=(place,)) for place in range(len(got))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each, expected) for each in got)
    assert torch.equal(pickle.loads(pickle.dumps(turn))(x), expected)
