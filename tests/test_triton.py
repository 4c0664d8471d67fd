"""The Triton kernel, under Triton's interpreter in a process of its own, and what is compiled of it without a GPU.

Checks are named ``check_`` here, since the interpreter is chosen before the kernel is imported: one test runs them all
in a second process. ``test_gpu.py`` runs the same ones on a GPU.
"""

import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import references
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import ndpos
from ndpos.kernels import PAIRINGS

every_pairing = pytest.mark.parametrize("pairing", PAIRINGS)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ODD = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e30, 1e-45])  # numbers that arithmetic would not leave alone
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
HEAD_DIMS = (2, 6, 10, 40, 72, 80, 88, 104, 128, 130, 192, 256)


@pytest.fixture(scope="module")
def device():
    pytest.importorskip("triton", reason="needs triton")
    assert INTERPRETED
    return "cpu"


def kernel():
    from ndpos.kernels import triton

    return triton


def turn(*args, **settings):
    return kernel().turn_triton(*args, **settings)


def numbers(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def tables(*shape, seed=1, dtype=torch.float32, device="cpu"):
    angles = 9 * numbers(*shape, seed=seed, dtype=torch.float64)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def blocks_of(pairing, blocks):
    return blocks if pairing == "half_per_axis" else None


def rounded(exact, dtype):
    """As the kernel rounds; Triton's interpreter cuts bfloat16 off instead."""
    if INTERPRETED and dtype == torch.bfloat16 and exact.dtype == torch.float32:
        return (exact.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
    return exact.to(dtype)


def expected(x, cos, sin, pairing, blocks=None, token_dim=-2, num_prefix=0, num_suffix=0, inverse=False):
    """Each product and sum rounded in float32 or wider, the result once: the same bits are asked of the kernel."""
    exact = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    places = references.pair_places(pairing, cos.shape[-1], blocks)
    out = x.clone()
    body = out.narrow(token_dim, num_prefix, x.shape[token_dim] - num_prefix - num_suffix)
    if not places:
        return out
    one, two = (list(channels) for channels in zip(*places, strict=True))
    a, b, cos, sin = body[..., one].to(exact), body[..., two].to(exact), cos.to(exact), sin.to(exact)
    sin = -sin if inverse else sin
    body[..., one], body[..., two] = rounded(a * cos - b * sin, x.dtype), rounded(a * sin + b * cos, x.dtype)
    return out


def assert_same(got, want, what=""):
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    bits = BITS[got.element_size()]
    assert torch.equal(got.contiguous().view(bits), want.contiguous().view(bits)), what


class Launches:
    def __init__(self, jitted):
        self.jitted, self.count = jitted, 0

    def __getitem__(self, launch_grid):
        self.count += 1
        return self.jitted[launch_grid]


@pytest.fixture
def launches(device, monkeypatch):
    counted = Launches(kernel()._turn_kernel)
    monkeypatch.setattr(kernel(), "_turn_kernel", counted)
    return counted


@st.composite
def turnings(draw):
    heads, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    blocks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(sum))
    return heads, tokens, tuple(blocks), draw(st.integers(0, 3)), draw(st.integers(0, 2**31))


@every_pairing
@settings(max_examples=6, phases=[Phase.generate])  # each run of the interpreter is too slow to shrink by
@given(turning=turnings())
def check_every_pair_turns_as_the_slow_loop_turns_it_and_back(device, pairing, turning):
    heads, tokens, blocks, rest, seed = turning
    x, above = (numbers(heads, tokens, 2 * sum(blocks) + rest, seed=seed + i, dtype=torch.float64) for i in (0, 1))
    angles = 9 * numbers(tokens, sum(blocks), seed=seed, dtype=torch.float64)
    cos, sin, by = angles.cos().to(device), angles.sin().to(device), blocks_of(pairing, blocks)
    [turned] = turn([x.to(device)], cos, sin, pairing, by)
    [in_x] = turn([above.to(device)], cos, sin, pairing, by, inverse=True)
    for head in range(heads):
        lists = x[head].tolist(), angles.tolist(), above[head].tolist()
        slow = torch.tensor(references.rotation(*lists[:2], pairing, blocks), dtype=torch.float64)
        slow_in_x = torch.tensor(references.rotation_gradients(*lists, pairing, blocks)[0], dtype=torch.float64)
        torch.testing.assert_close(turned[head].cpu(), slow, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(in_x[head].cpu(), slow_in_x, rtol=1e-13, atol=1e-13)


@every_pairing
def check_every_width_of_a_head_whole_and_in_part(device, pairing):
    for place, head_dim in enumerate(HEAD_DIMS):
        pairs = head_dim // 2 if place % 2 else math.ceil(head_dim / 5)
        blocks = blocks_of(pairing, (pairs // 3, 0, pairs - pairs // 3))
        x, (cos, sin) = numbers(1, 1, 5, head_dim, device=device), tables(5, pairs, device=device)
        assert_same(turn([x], cos, sin, pairing, blocks)[0], expected(x, cos, sin, pairing, blocks), head_dim)


@every_pairing
def check_every_dtype_is_rounded_once(device, pairing):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for precise in (torch.float32, torch.float64):
            if INTERPRETED and (dtype, precise) == (torch.bfloat16, torch.float64):
                continue  # the interpreter cannot round this
            x, (cos, sin) = numbers(2, 9, 12, dtype=dtype, device=device), tables(9, 5, dtype=precise, device=device)
            for inverse in (False, True):
                [turned] = turn([x], cos, sin, pairing, blocks_of(pairing, (1, 4)), inverse=inverse)
                want = expected(x, cos, sin, pairing, blocks_of(pairing, (1, 4)), inverse=inverse)
                assert_same(turned, want, (dtype, precise, inverse))


@every_pairing
def check_strides_change_no_bit(device, pairing):
    cos, sin = tables(6, 5, device=device)
    fused = numbers(2, 6, 3, 2, 12, device=device)  # (batch, tokens, qkv, heads, head_dim)
    views = {
        "contiguous": numbers(2, 2, 6, 12, device=device),
        "sliced from qkv": fused[:, :, 1].transpose(1, 2),
        "transposed channels": numbers(2, 2, 12, 6, device=device).mT,
        "expanded heads": numbers(2, 1, 6, 12, device=device).expand(2, 2, 6, 12),
        "expanded tokens": numbers(2, 2, 1, 12, device=device).expand(2, 2, 6, 12),
        "every second channel": numbers(2, 2, 6, 24, device=device)[..., ::2],
        "with an offset": numbers(2, 2, 7, 13, device=device)[:, :, 1:, 1:],
        "samples of rank 2": numbers(6, 12, device=device),
        "samples of rank 3": numbers(2, 6, 12, device=device),
    }
    for name, x in views.items():
        before, blocks = x.clone(), blocks_of(pairing, (2, 3))
        want = expected(x, cos, sin, pairing, blocks)
        assert_same(turn([x], cos, sin, pairing, blocks)[0], want, name)
        assert_same(x, before, name)
        apart = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], device=device)
        [out] = turn([x], cos, sin, pairing, blocks, outs=[apart[..., 1::2]])
        assert_same(out, want, name)
        assert out.data_ptr() == apart[..., 1:].data_ptr()
        assert not apart[..., ::2].any(), name  # nothing else is written
    mixed = turn([views["contiguous"], views["transposed channels"]], cos, sin, "half", None)
    for x, out in zip((views["contiguous"], views["transposed channels"]), mixed, strict=True):
        assert_same(out, expected(x, cos, sin, "half"))
    x = views["contiguous"]
    for odd_cos, odd_sin in ((cos.mT.contiguous().mT, sin), (cos, sin.mT.contiguous().mT), (cos[:1, :1], sin[:1, :1])):
        odd_cos, odd_sin = odd_cos.expand(6, 5), odd_sin.expand(6, 5)
        assert_same(turn([x], odd_cos, odd_sin, "half", None)[0], expected(x, odd_cos, odd_sin, "half"))


@every_pairing
def check_tokens_and_channels_that_do_not_turn_keep_every_bit(device, pairing):
    cos, sin = tables(4, 5, device=device)
    for dtype in (torch.bfloat16, torch.float32):
        x = numbers(2, 9, 10 + len(ODD), dtype=dtype, device=device)
        x[..., 10:] = ODD.to(device, dtype)
        x[:, (0, 1, 2, 7, 8), : len(ODD)] = ODD.to(device, dtype)
        around, blocks = {"num_prefix": 3, "num_suffix": 2}, blocks_of(pairing, (2, 3))
        [turned] = turn([x], cos, sin, pairing, blocks, **around)
        assert_same(turned, expected(x, cos, sin, pairing, blocks, **around), dtype)
        assert turned[:, 3:7, :10].isfinite().all()  # what is odd stays where it is
        [none] = turn([x], cos[:0], sin[:0], pairing, blocks, num_prefix=9)
        assert_same(none, x, dtype)
    x = numbers(2, 3, 4, device=device)
    assert_same(turn([x], *tables(3, 0, device=device), pairing, blocks_of(pairing, (0,)))[0], x)


@pytest.mark.parametrize("token_dim", [-2, -3])
def check_tables_per_sample_and_per_head(device, token_dim):
    x = numbers(2, 3, 5, 8, device=device)
    for shape in ((5, 4), (3, 5, 4), (1, 3, 5, 4), (2, 1, 5, 4), (2, 3, 5, 4), (1, 1, 1, 4)):
        cos, sin = tables(*shape, device=device)
        want = expected(x, cos, sin, "half")
        if token_dim == -3:
            cos, sin = (t.transpose(-2, -3) if t.ndim > 2 else t.unsqueeze(-2) for t in (cos, sin))
            [turned] = turn([x.transpose(1, 2)], cos, sin, "half", None, token_dim=-3)
            turned = turned.transpose(1, 2)
        else:
            [turned] = turn([x], cos, sin, "half", None)
        assert_same(turned, want, shape)


@every_pairing
@pytest.mark.parametrize("token_dim", [-2, -3])
def check_queries_and_keys_of_other_heads_and_strides_turn_in_one_launch(device, launches, pairing, token_dim):
    fused = numbers(2, 6, 8, 12, dtype=torch.float16, device=device)  # (batch, tokens, heads of q, k and v, head_dim)
    q, k = fused[:, :, :4], fused[:, :, 4:6]
    cos, sin = tables(2, 5, 1, 5, device=device)
    if token_dim == -2:
        q, k, cos, sin = (each.transpose(1, 2) for each in (q, k.clone(), cos, sin))
    around, blocks = {"token_dim": token_dim, "num_prefix": 1}, blocks_of(pairing, (2, 3))
    turned = turn([q, k], cos, sin, pairing, blocks, **around)
    assert launches.count == 1
    for x, out in zip((q, k), turned, strict=True):
        assert_same(out, expected(x, cos, sin, pairing, blocks, **around))
    per_head = tables(*(2, 4, 5, 5) if token_dim == -2 else (2, 5, 4, 5), seed=3, device=device)
    for x, out in zip((q, 2 * q), turn([q, 2 * q], *per_head, pairing, blocks, **around), strict=True):
        assert_same(out, expected(x, *per_head, pairing, blocks, **around))


@every_pairing
def check_heads_that_share_a_program_and_many_blocks_of_tokens(device, monkeypatch, pairing):
    monkeypatch.setattr(kernel(), "PROGRAMS", 4)
    pairs, blocks = 96, blocks_of(pairing, (64, 32))  # 8 tokens to a block
    q, k = numbers(1, 11, 19, 200, device=device), numbers(1, 3, 19, 200, seed=1, device=device)
    cos, sin = tables(18, pairs, device=device)
    for x, out in zip((q, k), turn([q, k], cos, sin, pairing, blocks, num_suffix=1), strict=True):
        assert_same(out, expected(x, cos, sin, pairing, blocks, num_suffix=1))
    per_head = tables(11, 19, pairs, device=device)
    assert_same(turn([q], *per_head, pairing, blocks)[0], expected(q, *per_head, pairing, blocks))


def check_samples_of_every_layout(device, launches):
    x = numbers(2, 3, 2, 5, 8, device=device)  # two dimensions of samples
    one, several = tables(5, 4, device=device), tables(2, 1, 1, 5, 4, device=device)
    strided = numbers(2, 4, 2, 5, 8, device=device)[:, :3]
    for x_view, table, count in (
        (x, one, 1),  # one step leads through both
        (x, several, 2),  # here the table has none
        (strided, one, 2),
        (x.transpose(0, 1), one, 3),
        (x[:1], one, 1),
        (x[:, :1], several, 1),
    ):
        launches.count = 0
        assert_same(turn([x_view], *table, "half", None)[0], expected(x_view, *table, "half"))
        assert launches.count == count


@every_pairing
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def check_rows_of_packed_sequences(device, pairing, dtype):
    starts, ends = [0, 3, 3, 8], [3, 3, 8, 10]  # cumulative lengths, one of them 0
    rows = torch.cat([torch.arange(end - start) for start, end in zip(starts, ends, strict=True)]).to(device, dtype)
    x, (cos, sin) = numbers(1, 2, 12, 12, device=device), tables(7, 5, device=device)
    around, blocks = {"num_prefix": 1, "num_suffix": 1}, blocks_of(pairing, (2, 3))
    want = expected(x, cos[rows.long()], sin[rows.long()], pairing, blocks, **around)
    assert_same(turn([x], cos, sin, pairing, blocks, rows=rows, **around)[0], want)
    every_second = rows.repeat_interleave(2)[::2]
    assert_same(turn([x], cos, sin, pairing, blocks, rows=every_second, **around)[0], want)
    cos, sin = (t[:, None] for t in (cos, sin))
    [other] = turn([x.transpose(1, 2)], cos, sin, pairing, blocks, rows=rows, token_dim=-3, **around)
    assert_same(other.transpose(1, 2), want)


def lattice_tables(sizes, axes, device):
    """Tables of the axes one after the other, and the table of their grid, cell by cell."""
    cos, sin = tables(sum(sizes), len(axes), seed=len(sizes), device=device)
    starts = [sum(sizes[:axis]) for axis in range(len(sizes))]
    index = [[starts[axis] + cell[axis] for axis in axes] for cell in references.cells(sizes)]
    index = torch.tensor(index, device=device)
    return (cos, sin), (cos.gather(0, index), sin.gather(0, index))


@every_pairing
@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ((7,), (0,) * 5),
        ((3, 4), (0, 0, 1, 1, 1)),
        ((2, 1, 5), (2, 0, 1, 2, 0)),
        ((2, 3, 1, 2), (0, 1, 2, 3, 1)),
        ((3, 2), (0, 1) * 35),
    ],
)
def check_a_lattice_equals_the_table_of_its_grid_bit_for_bit(device, pairing, sizes, axes):
    pairs = len(axes)
    short, whole = lattice_tables(sizes, axes, device)
    lattice, blocks = kernel().Lattice(sizes, axes), blocks_of(pairing, (2, pairs - 2))
    x = numbers(1, 2, math.prod(sizes) + 1, 2 * pairs + 1, device=device)
    want = expected(x, *whole, pairing, blocks, num_prefix=1)
    assert_same(turn([x], *short, pairing, blocks, num_prefix=1, lattice=lattice)[0], want)
    cells = torch.tensor([1, 0, math.prod(sizes) - 1, 1], device=device)
    kept = numbers(2, 4, 2 * pairs, device=device)
    want = expected(kept, *(table[cells] for table in whole), pairing, blocks)
    assert_same(turn([kept], *short, pairing, blocks, rows=cells, lattice=lattice)[0], want)


@every_pairing
@pytest.mark.parametrize("rest", [0, 3])
def check_in_place_equals_out_of_place(device, pairing, rest):
    cos, sin = tables(5, 5, device=device)
    fused = numbers(2, 7, 3, 2, 10 + rest, dtype=torch.bfloat16, device=device)
    around, blocks = {"token_dim": -3, "num_prefix": 1, "num_suffix": 1}, blocks_of(pairing, (2, 3))
    cos, sin = cos[:, None], sin[:, None]
    want = fused.clone()
    for part in (0, 1):
        want[:, :, part] = expected(fused[:, :, part], cos, sin, pairing, blocks, **around)
    q, k = fused[:, :, 0], fused[:, :, 1]
    got = turn([q, k], cos, sin, pairing, blocks, outs=[q, fused[:, :, 1]], **around)
    assert got[0] is q
    assert_same(fused, want)  # values stay as they are


def check_nothing_is_launched_for_nothing(device, launches):
    for shape in ((0, 2, 3, 8), (1, 0, 3, 8), (1, 2, 0, 8), (0, 8)):
        cos, sin = tables(shape[-2], 4, device=device)
        assert turn([torch.empty(shape, device=device)], cos, sin, "half", None)[0].shape == shape
    assert launches.count == 0
    x, (cos, sin) = numbers(2, 3, 8, device=device), tables(3, 4, device=device)
    turned, empty = turn([x, x[:0]], cos, sin, "half", None)
    assert_same(turned, expected(x, cos, sin, "half"))
    assert empty.shape == (0, 3, 8)


def check_offsets_past_31_bits(device, monkeypatch):
    """Memory that is not touched costs nothing on Linux, and less than the device has on a GPU."""
    if INTERPRETED:  # else the whole memory is copied onto itself
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *args: None)
    far, x = 2**30 + 8, numbers(3, 3, 3, 8, dtype=torch.float16, device=device)
    cos, sin = tables(3, 4, device=device)
    memory = torch.empty(2 * far + 4096, dtype=torch.float16, device=device)
    for dim, steps in enumerate(
        [(far, 192, 8, 1), (192, far, 8, 1), (192, 64, far, 1), (192, 64, 8, 2 * far // 7 + 1)]
    ):
        view = memory.as_strided((3, 3, 3, 8), steps)
        view.copy_(x)
        for pairing in ("interleaved", "half"):
            assert_same(turn([view], cos, sin, pairing, None)[0], expected(x, cos, sin, pairing), dim)
        turn([x], cos, sin, "half", None, outs=[view])
        assert_same(view, expected(x, cos, sin, "half"), dim)
    wide = torch.empty(2 * far + 4096, device=device)
    for sizes, steps in [((3, 4), (far, 1)), ((3, 1, 4), (far, 4, 1)), ((3, 1, 1, 4), (far, 4, 4, 1))]:
        table = wide.as_strided(sizes, steps)
        table.copy_(cos.reshape(sizes))
        got = turn([x], table, table, "half", None)[0]
        assert_same(got, expected(x, cos.reshape(sizes), cos.reshape(sizes), "half"), sizes)


def front_door(device, **parts):
    """The same rotation by the kernel and in eager mode, where the first one knows the rows of each axis."""
    rope = ndpos.RotaryEmbedding(ndpos.AxisSplit((4, 6), dim=12), backend="triton", **parts)
    turn = rope.on_grid((3, 4), device=device, num_prefix=1)
    return turn, dataclasses.replace(turn, backend="eager")


def check_a_rotation_reads_the_rows_of_its_axes_and_has_the_gradients_of_eager_mode(device):
    turn, eager = front_door(device, learnable=True)
    assert turn.source_cos.shape == (1, 3 + 4, 5)
    results = []
    for each in (turn, eager):
        q, k = (numbers(2, heads, 13, 12, device=device).requires_grad_() for heads in (4, 2))
        turned = each.both(q, k)
        above = [numbers(*one.shape, seed=7, device=device) for one in turned]
        frequencies = [one.grad_fn for one in (each.cos, each.sin)]
        assert all(frequencies)
        gradients = torch.autograd.grad(turned, (q, k, each.cos, each.sin), above, retain_graph=True)
        results.append((*turned, *gradients))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    wrong = dataclasses.replace(turn, source_cos=torch.zeros_like(turn.source_cos), source_sin=turn.source_sin * 0)
    with torch.no_grad():
        assert not wrong(numbers(2, 4, 13, 12, device=device))[:, :, 1:, :10].any()  # the rows are what is read


def check_what_changes_a_rotation_changes_what_the_kernel_reads(device):
    turn, _ = front_door(device)
    x = numbers(2, 4, 13, 12, device=device)
    index = torch.tensor([7, 0, 7, 11, 3], device=device)
    changed = {
        "inverse": turn.inverse(),
        "amplitude": dataclasses.replace(turn, amplitude=torch.full((5,), 2.0, device=device)),
        "taken": turn.take(index),
        "taken twice": turn.take(index).take(index[index < 5]),
        "sliced": turn[2:9],
        "batched": turn.take(torch.stack((index, index.flip(0)))),
        "keys": dataclasses.replace(turn, key_phase=torch.linspace(0, 1, 5, device=device)),
    }
    for name, each in changed.items():
        eager = dataclasses.replace(
            each, backend="eager", source_cos=None, source_sin=None, source_rows=None, lattice=None
        )
        part = x[:, :, : 1 + each.cos.shape[-2]]
        torch.testing.assert_close(each.keys(part), eager.keys(part), msg=name)
        torch.testing.assert_close(each(part), eager(part), msg=name)
    assert changed["taken"].source_rows is not None
    assert changed["amplitude"]._source(-2, 4) is not None  # kept, and not read where the tables are others


def check_a_pack_is_read_by_its_cumulative_lengths(device):
    rope = ndpos.RotaryEmbedding(ndpos.split(8, 1), backend="triton")
    turn = rope.on_grid((5,), device=device).packed(torch.tensor([0, 3, 3, 8, 9], device=device), 9)
    assert turn.source_cos.shape[-2] == 5
    assert turn.source_rows.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    q, k = numbers(9, 4, 8, device=device), numbers(9, 2, 8, device=device)
    eager = dataclasses.replace(turn, backend="eager")
    for got, expected in zip(turn.both(q, k, token_dim=-3), eager.both(q, k, token_dim=-3), strict=True):
        torch.testing.assert_close(got, expected)


def check_a_refusal_names_the_rule_what_was_seen_and_a_cure(device):
    x, (cos, sin) = torch.zeros(2, 3, 5, 8, device=device), tables(5, 4, device=device)
    lattice, flat = kernel().Lattice, torch.zeros(5, 1, device=device)
    short, per_head = tables(4, 4, device=device), tables(3, 5, 4, device=device)
    for xs, table, around, says in (
        ([], (cos, sin), {}, ["one or two", "got 0"]),
        ([x] * 3, (cos, sin), {}, ["one or two", "got 3", "one by one"]),
        ([x, x.half()], (cos, sin), {}, ["alike", "float32", "float16"]),
        ([x, x[:, :, :4]], (cos, sin), {}, ["alike", "(2, 3, 5, 8)", "(2, 3, 4, 8)"]),
        ([x, x[:1]], (cos, sin), {}, ["alike", "(1, 3, 5, 8)"]),
        ([x, x[:, :1]], per_head, {}, ["[3, 1] heads", "(3, 5, 4)", "one by one"]),
        (
            [x],
            (cos, sin),
            {"outs": [x[..., :1].expand_as(x)]},
            ["a place for every number", "(120, 40, 8, 0)", "Leave outs out"],
        ),
        ([x], (cos, sin), {"outs": [x.half()]}, ["dtype", "torch.float16"]),
        ([x], (cos, sin), {"rows": flat[:, 0]}, ["rows are integers (5,)", "torch.float32"]),
        ([x], (cos, sin), {"rows": flat[:4, 0].long()}, ["rows are integers (5,)", "(4,)", "Prefix"]),
        ([x], (cos, sin), {"rows": flat.long()}, ["rows are integers (5,)", "(5, 1)"]),
        ([x], (cos, sin), {"lattice": lattice((2, 2), (0, 0, 1, 1))}, ["(2, 2)", "(5, 4)", "5 tokens", "one after"]),
        ([x], short, {"lattice": lattice((2, 2), (0, 0, 1, 1))}, ["a lattice", "(4, 4)", "5 tokens"]),
        ([x], (cos, sin), {"lattice": lattice((5,), (0, 0, 0))}, ["an axis for each pair", "(0, 0, 0)"]),
        ([x], (cos, sin), {"lattice": lattice((5,), (0, 0, 0, 1))}, ["an axis for each pair", "(0, 0, 0, 1)"]),
    ):
        with pytest.raises(ValueError) as refused:
            turn(xs, *table, "half", None, **around)
        assert str(refused.value).startswith("ndpos.kernels.triton: ")
        for part in says:
            assert part in str(refused.value), (part, str(refused.value))


def test_all_checks_pass_under_the_interpreter():
    pytest.importorskip("triton", reason="needs triton")
    # What does not turn is turned all the same and then left out: infinity times 0 is no worry.
    settings = ["-p", "no:cacheprovider", "-o", "python_functions=check_*", "-W", "ignore:invalid value:RuntimeWarning"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *settings, __file__],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^\d+ passed in", run.stdout, re.MULTILINE), run.stdout  # none skipped, none deselected


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A GPU to compile for, where none is needed."""
    pytest.importorskip("triton", reason="needs triton")
    if INTERPRETED:
        pytest.skip("compiles, which the interpreter does not")
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Hopper:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(
        kernel()._turn_kernel,
        "device_caches",
        type(kernel()._turn_kernel.device_caches)(kernel()._turn_kernel.create_binder),
    )


def kernels_of(calls, monkeypatch):
    """The kernels that Triton compiles for some calls; none is launched."""
    jitted, made = kernel()._turn_kernel, []

    class Compiled:
        def __getitem__(self, launch_grid):
            return lambda *args, **named: made.append(jitted.run(*args, grid=launch_grid, warmup=True, **named))

    with monkeypatch.context() as patched:
        patched.setattr(kernel(), "_turn_kernel", Compiled())
        for args, named in calls:
            turn(*args, **named)
    assert len(made) == len(calls)
    return list({id(each): each for each in made}.values())


@every_pairing
def test_new_sizes_are_no_new_kernel(pairing, hopper, monkeypatch):
    def call(batch, heads, kv_heads, sizes, head_dim=72, **named):
        q, k = (numbers(batch, count, 2 + math.prod(sizes), head_dim).bfloat16() for count in (heads, kv_heads))
        short, _ = lattice_tables(sizes, (0, 1) * 18, "cpu")
        lattice = kernel().Lattice(sizes, (0, 1) * 18)
        blocks = blocks_of(pairing, (16, 20))
        return ([q, k], *short, pairing, blocks), {"num_prefix": 2, "lattice": lattice, **named}

    sizes = [(1, 4, 2, (14, 14)), (2, 4, 2, (1, 1)), (3, 1, 1, (16, 1)), (16, 32, 16, (3, 30)), (5, 7, 3, (9, 9))]
    assert len(kernels_of([call(*each) for each in sizes], monkeypatch)) == 1
    wider = [call(*sizes[0], head_dim=width) for width in (72, 80)]
    assert len(kernels_of(wider, monkeypatch)) == 2  # a new kernel is seen


@every_pairing
@pytest.mark.parametrize("runs", [False, True])
def test_compiled_kernels_move_16_bytes_at_a_time_and_round_every_product(pairing, runs, hopper, monkeypatch):
    (short, whole), lattice = lattice_tables((14, 14), (0,) * 16 + (1,) * 16, "cpu"), None
    if runs:
        lattice = kernel().Lattice((14, 14), (0,) * 16 + (1,) * 16)

    def compiled(width):
        q, k = numbers(2, 12, 196, width).bfloat16(), numbers(2, 3, 196, width).bfloat16()
        call = ([q, k], *(short if runs else whole), pairing, blocks_of(pairing, (16, 16))), {"lattice": lattice}
        return kernels_of([call], monkeypatch)[0].asm["ptx"]

    def words(ptx):
        return set(re.findall(r"(?:ld|st)\.global[^ ]*", ptx))

    ptx = compiled(64)
    assert words(ptx) == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert "mul.rn.f32" in ptx
    assert "fma." not in ptx
    assert any("v4" not in word for word in words(compiled(65)))  # where rows are not aligned, that is seen
