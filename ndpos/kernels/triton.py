"""The rotation as one Triton kernel for CUDA: one launch reads queries and keys once and writes them once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndpos.kernels.pairing import Lattice, Pairing, axis_blocks

__all__ = ["turn_triton"]

# Triton compiles a kernel anew for an integer that is 1, divisible by 16, or past 32 bits, and integers in a tuple
# cannot be exempted. So they travel as odd numbers past 32 bits: new token counts, batches, strides and sizes of a
# lattice are never a new kernel. Price: a shift in the kernel, and alignment is stated by UNIT instead.
ODD = tl.constexpr(2**33 + 1)
TILE = 1024  # pairs of a tile: one vector of 16 bytes for each half and thread in 16 bits; more spends registers
WARPS = 4
PROGRAMS = 1024  # enough for every multiprocessor to hide its memory's latency; past that, heads share a program
RUNS = 8  # of pairs that listen to one axis: comparisons for more of them would outweigh what they save
SHARED_HEADS = 8  # heads that turn by one reading of the table, which then adds 1/8 to the traffic of 16-bit heads


# fmt: off
# Arguments of the kernels stand in groups.


@triton.jit
def _number(odd):
    return (odd - ODD) >> 1


@triton.jit
def _table(cos_ptr, sin_ptr, row, step, p, mask, lattice, LISTENERS: tl.constexpr, EXACT: tl.constexpr):
    """Cos and sin of each token and pair; of a lattice, from the row of the pair's axis at the token's cell."""
    if LISTENERS is None:
        entry = (row * step)[:, None] + p[None, :]
        cos, sin = tl.load(cos_ptr + entry, mask=mask, other=0.0), tl.load(sin_ptr + entry, mask=mask, other=0.0)
    else:
        cos = tl.zeros(mask.shape, cos_ptr.dtype.element_ty)
        sin = tl.zeros(mask.shape, sin_ptr.dtype.element_ty)
        for axis in tl.static_range(len(LISTENERS)):
            # One masked load per axis, so that neighbouring pairs are still read as vectors.
            start, inner = _number(lattice[3 * axis]), _number(lattice[3 * axis + 1])
            entry = ((start + (row // inner) % _number(lattice[3 * axis + 2])) * step)[:, None] + p[None, :]
            listens = p < 0
            for run in tl.static_range(len(LISTENERS[axis][0])):
                listens |= (p >= LISTENERS[axis][0][run][0]) & (p < LISTENERS[axis][0][run][1])
            for word in tl.static_range(len(LISTENERS[axis][1])):
                listens |= (p // 32 == word) & (((LISTENERS[axis][1][word] >> (p % 32).to(tl.int64)) & 1) == 1)
            here = mask & listens[None, :]
            cos = tl.where(here, tl.load(cos_ptr + entry, mask=here, other=0.0), cos)
            sin = tl.where(here, tl.load(sin_ptr + entry, mask=here, other=0.0), sin)
    return cos.to(EXACT), sin.to(EXACT)


@triton.jit
def _turned(a, b, cos, sin, turning, INVERSE: tl.constexpr):
    """Rounded once; tokens that do not turn keep every bit, which a product by 1 would not (infinity times 0)."""
    if INVERSE:
        sin = -sin
    one, two = a.to(cos.dtype), b.to(cos.dtype)
    first, second = (one * cos - two * sin).to(a.dtype), (two * cos + one * sin).to(a.dtype)
    return tl.where(turning, first, a), tl.where(turning, second, b)


@triton.jit
def _turn_block(
    x_ptr, out_ptr, x_head, out_head, x_step, out_step, cos_ptr, sin_ptr, table, lattice,
    batch, first_head, last_head, row, inside, turning,
    START: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,  # first pair, pairs, and width of the tile
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, LISTENERS: tl.constexpr, PER_HEAD: tl.constexpr,
    TABLE_UNIT: tl.constexpr, EXACT: tl.constexpr,
):
    """Neighbouring pairs of all heads. A tile is read whole before it is written: the result may be x itself."""
    table_start, table_head = batch * _number(table[0]) * TABLE_UNIT, _number(table[1]) * TABLE_UNIT
    table_row, i = _number(table[2]) * TABLE_UNIT, tl.arange(0, WIDTH)
    p, in_table = START + i, turning[:, None] & (i < COUNT)[None, :]
    cos_ptr += table_start
    sin_ptr += table_start
    if not PER_HEAD:
        cos, sin = _table(cos_ptr, sin_ptr, row, table_row, p, in_table, lattice, LISTENERS, EXACT)
    for head in range(first_head, last_head):
        if PER_HEAD:
            at = head * table_head
            cos, sin = _table(cos_ptr + at, sin_ptr + at, row, table_row, p, in_table, lattice, LISTENERS, EXACT)
        x_tile, out_tile = x_ptr + head * x_head, out_ptr + head * out_head
        if INTERLEAVED:  # read as it lies, since every second number alone would waste half of each sector
            c = tl.arange(0, 2 * WIDTH)
            mask = inside[:, None] & (c < 2 * COUNT)[None, :]
            both = tl.load(x_tile + (2 * START + c)[None, :] * x_step, mask=mask)
            a, b = tl.split(tl.reshape(both, [both.shape[0], WIDTH, 2]))
            a, b = _turned(a, b, cos, sin, turning[:, None], INVERSE)
            tl.store(out_tile + (2 * START + c)[None, :] * out_step, tl.interleave(a, b), mask=mask)
        else:
            one, two = (2 * START + i)[None, :], (2 * START + COUNT + i)[None, :]
            mask = inside[:, None] & (i < COUNT)[None, :]
            a, b = tl.load(x_tile + one * x_step, mask=mask), tl.load(x_tile + two * x_step, mask=mask)
            a, b = _turned(a, b, cos, sin, turning[:, None], INVERSE)
            tl.store(out_tile + one * out_step, a, mask=mask)
            tl.store(out_tile + two * out_step, b, mask=mask)


@triton.jit
def _turn_heads(
    x_ptr, out_ptr, steps, cos_ptr, sin_ptr, table, lattice,
    batch, first_head, last_head, token, row, inside, turning,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, BLOCKS: tl.constexpr, REST: tl.constexpr,
    LISTENERS: tl.constexpr, PER_HEAD: tl.constexpr, CONTIGUOUS: tl.constexpr, UNIT: tl.constexpr,
    TABLE_UNIT: tl.constexpr, EXACT: tl.constexpr,
):
    # Offsets are int64 from the first product on: a tensor may hold more than 2**31 numbers.
    x_ptr += (batch * _number(steps[0]) + token * _number(steps[2]))[:, None] * UNIT
    out_ptr += (batch * _number(steps[4]) + token * _number(steps[6]))[:, None] * UNIT
    x_head, out_head = _number(steps[1]) * UNIT, _number(steps[5]) * UNIT
    x_step = 1 if CONTIGUOUS else _number(steps[3])
    out_step = 1 if CONTIGUOUS else _number(steps[7])
    for block in tl.static_range(len(BLOCKS)):
        _turn_block(
            x_ptr, out_ptr, x_head, out_head, x_step, out_step, cos_ptr, sin_ptr, table, lattice,
            batch, first_head, last_head, row, inside, turning,
            BLOCKS[block][0], BLOCKS[block][1], BLOCKS[block][2],
            INTERLEAVED, INVERSE, LISTENERS, PER_HEAD, TABLE_UNIT, EXACT,
        )
    if REST is not None:
        c = tl.arange(0, REST[2])
        mask = inside[:, None] & (c < REST[1])[None, :]
        for head in range(first_head, last_head):
            x_tile, out_tile = x_ptr + head * x_head, out_ptr + head * out_head
            kept = tl.load(x_tile + (REST[0] + c)[None, :] * x_step, mask=mask)
            tl.store(out_tile + (REST[0] + c)[None, :] * out_step, kept, mask=mask)


@triton.jit
def _turn_kernel(
    q_ptr, q_out_ptr, k_ptr, k_out_ptr, cos_ptr, sin_ptr, rows_ptr,
    q_steps, k_steps,  # of x, then of the result: batch, head, token and channel; all but those of channels in UNITs
    table,  # steps of the table: batch, head and row, in TABLE_UNITs
    lattice,  # of each axis: first row, cells from one step to the next, size
    counts,  # tokens, prefix, turning tokens, heads of q, heads of k, heads of a program, blocks of tokens, row step
    BLOCK: tl.constexpr,  # tokens
    BLOCKS: tl.constexpr,  # (first pair, pairs, width of the tile) of each block of pairs
    REST: tl.constexpr,  # (first channel, channels, width of the tile) of those that are copied
    LISTENERS: tl.constexpr,  # (runs, bits) of the pairs of each axis
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, PER_HEAD: tl.constexpr, CONTIGUOUS: tl.constexpr,
    UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr, EXACT: tl.constexpr,
):
    """A block of tokens and some heads of q, or of k, of one sample; blocks of tokens are neighbours in the grid."""
    prefix, turn_count = _number(counts[1]), _number(counts[2])
    q_heads, k_heads = _number(counts[3]).to(tl.int32), _number(counts[4]).to(tl.int32)
    shared, token_blocks = _number(counts[5]).to(tl.int32), _number(counts[6]).to(tl.int32)
    q_groups, k_groups = tl.cdiv(q_heads, shared), tl.cdiv(k_heads, shared)
    program = tl.program_id(0)
    group = (program // token_blocks) % (q_groups + k_groups)
    batch = (program // token_blocks // (q_groups + k_groups)).to(tl.int64)
    token = (program % token_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, row = token < _number(counts[0]), token - prefix
    turning = (row >= 0) & (row < turn_count)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + row * _number(counts[7]), mask=turning, other=0).to(tl.int64)
    # Two calls, not one with chosen pointers: the compiler then knows each pointer's alignment.
    if group < q_groups:
        head = (group * shared).to(tl.int64)
        last = tl.minimum(head + shared, q_heads)
        _turn_heads(
            q_ptr, q_out_ptr, q_steps, cos_ptr, sin_ptr, table, lattice, batch, head, last, token, row, inside, turning,
            INTERLEAVED, INVERSE, BLOCKS, REST, LISTENERS, PER_HEAD, CONTIGUOUS, UNIT, TABLE_UNIT, EXACT,
        )
    elif k_ptr is not None:
        head = ((group - q_groups) * shared).to(tl.int64)
        last = tl.minimum(head + shared, k_heads)
        _turn_heads(
            k_ptr, k_out_ptr, k_steps, cos_ptr, sin_ptr, table, lattice, batch, head, last, token, row, inside, turning,
            INTERLEAVED, INVERSE, BLOCKS, REST, LISTENERS, PER_HEAD, CONTIGUOUS, UNIT, TABLE_UNIT, EXACT,
        )


# fmt: on
def turn_triton(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    pairing: Pairing,
    blocks: tuple[int, ...] | None,
    *,
    token_dim: int = -2,
    num_prefix: int = 0,
    num_suffix: int = 0,
    inverse: bool = False,
    outs: Sequence[Tensor] | None = None,
    rows: Tensor | None = None,
    lattice: Lattice | None = None,
) -> list[Tensor]:
    """Queries, or queries and keys, turned in one launch, on CUDA or under Triton's interpreter.

    Args:
        xs: One or two tensors ``(..., heads, tokens, head_dim)``, heads and tokens swapped for ``token_dim`` -3, alike
            but for heads and strides.
        cos, sin: Tables ``(..., pairs)`` that broadcast against the turning tokens of ``xs``; taken as checked.
        rows: Row of the table for each turning token, or with a ``lattice`` its cell. Never compared with the table,
            since that would wait for the device: out of range, whatever lies there is read.
        inverse: Turn by the negative angles, which takes gradients of results to those of ``xs``.
        outs: Written if given: each its x itself, or memory apart from all of ``xs``.

    Raises:
        ValueError: xs that differ in more than heads and strides, or outs, rows or a lattice that do not fit them.
    """
    made = [torch.empty_like(x) for x in xs] if outs is None else list(outs)
    _check_pair(xs, made, token_dim, cos)
    turning = xs[0].shape[token_dim] - num_prefix - num_suffix
    _check_places(cos, token_dim, turning, rows, lattice)
    views = [_heads_first(x, token_dim) for x in (*xs, *made)]
    rest = xs[0].shape[-1] - 2 * cos.shape[-1]
    if all(_same_memory(x, out) for x, out in zip(xs, made, strict=True)):
        views = [view.narrow(-2, num_prefix, turning) for view in views]  # what stays is not even read
        num_prefix = rest = 0
    if not any(view.numel() for view in views):
        return made
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()  # one copy of a table, for one set of strides in the kernel
    exact = torch.float64 in (xs[0].dtype, cos.dtype, sin.dtype)
    settings = {
        **_tiles(pairing, blocks, cos.shape[-1], rest, TILE // 2 if exact else TILE),
        "INTERLEAVED": pairing == "interleaved",
        "INVERSE": inverse,
        "LISTENERS": None if lattice is None else _listeners(lattice),
        "EXACT": tl.float64 if exact else tl.float32,
        "num_warps": WARPS,
        # Each product and sum is rounded, as PyTorch's are, so that kernels agree bit for bit; memory is what is slow.
        "enable_fp_fusion": False,
    }
    tables = []
    for table in (cos, sin):
        table = _heads_first(table[(None,) * max(0, 3 - table.ndim)], token_dim)
        count = turning if rows is None and lattice is None else table.shape[-2]
        tables.append(table.expand(*views[0].shape[:-3], table.shape[-3], count, table.shape[-1]))
    with torch.cuda.device_of(xs[0]):  # type: ignore[no-untyped-call]
        _launch(views, tables, (num_prefix, turning), rows, _odd(_spans(lattice)), settings)
    return made


def _tiles(
    pairing: Pairing, blocks: tuple[int, ...] | None, pairs: int, rest: int, tile: int
) -> dict[str, int | tuple[Any, ...] | None]:
    """Tokens of a program, blocks of pairs whose first channels stand before their second ones, and the rest."""
    runs, width = axis_blocks(pairing, blocks, pairs), triton.next_power_of_2
    widest = max([1, width(rest) // 2 if rest else 1, *(width(count) for _, count in runs)])
    return {
        "BLOCK": min(128, max(1, tile // widest)),
        "BLOCKS": tuple((start, count, width(count)) for start, count in runs),
        "REST": (2 * pairs, rest, width(rest)) if rest else None,
    }


def _launch(
    views: list[Tensor],  # xs, then outs: (*batch, heads, tokens, channels)
    tables: list[Tensor],
    places: tuple[int, int],
    rows: Tensor | None,
    lattice: tuple[int, ...],
    settings: dict[str, Any],
) -> None:
    batch = _one_batch([*views, tables[0]])
    if batch is None:
        # Price: a launch per sample of the first dimension, where strides or the table allow no single step.
        for sample in range(views[0].shape[0]):
            _launch([v[sample] for v in views], [t[sample] for t in tables], places, rows, lattice, settings)
        return
    samples, steps = batch
    table, several, pair = tables[0], tables[0].shape[-3] > 1, len(views) == 4
    unit = math.gcd(16 // views[0].element_size(), *(s for v in views for s in v.stride()[-3:-1]), *steps[:-1])
    table_unit = math.gcd(16 // table.element_size(), *table.stride()[-3:-1], steps[-1])
    x_steps = [
        [step // unit, view.stride(-3) // unit, view.stride(-2) // unit, view.stride(-1)]
        for view, step in zip(views, steps[:-1], strict=True)
    ]
    table_steps = [steps[-1], table.stride(-3) if several else 0, table.stride(-2)]
    q, k, q_out, k_out = views if pair else (views[0], None, views[1], None)
    tokens, q_heads, k_heads = q.shape[-2], q.shape[-3], 0 if k is None else k.shape[-3]
    token_blocks = triton.cdiv(tokens, settings["BLOCK"])
    shared = min(SHARED_HEADS, max(1, samples * token_blocks * (q_heads + k_heads) // PROGRAMS))
    groups = triton.cdiv(q_heads, shared) + triton.cdiv(k_heads, shared)
    row_step = 0 if rows is None else rows.stride(0)
    _turn_kernel[(token_blocks * groups * samples,)](
        *(q, q_out, k, k_out, *tables, rows),
        _odd(x_steps[0] + x_steps[len(views) // 2]),
        _odd(x_steps[1] + x_steps[3]) if pair else (),
        _odd([step // table_unit for step in table_steps]),
        lattice,
        _odd([tokens, *places, q_heads, k_heads, shared, token_blocks, row_step]),
        PER_HEAD=several,
        CONTIGUOUS=all(view.stride(-1) == 1 for view in views),
        UNIT=unit,
        TABLE_UNIT=table_unit,
        **settings,
    )


def _one_batch(views: list[Tensor]) -> tuple[int, list[int]] | None:
    """Samples of the leading dimensions and one step between them for each view; None where there is no such step."""
    samples, steps = 1, [0] * len(views)
    for dim in reversed(range(views[0].ndim - 3)):
        size = views[0].shape[dim]
        if size == 1:
            continue
        strides = [view.stride(dim) for view in views]
        if samples == 1:
            steps = strides
        elif strides != [step * samples for step in steps]:
            return None
        samples *= size
    return samples, steps


def _odd(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(2 * number + ODD.value for number in numbers)


def _heads_first(x: Tensor, token_dim: int) -> Tensor:
    x = x[None] if x.ndim == 2 else x
    return x.transpose(-2, -3) if token_dim == -3 else x


def _same_memory(x: Tensor, out: Tensor) -> bool:
    return out is x or (x.data_ptr() == out.data_ptr() and x.stride() == out.stride())


def _listeners(lattice: Lattice) -> tuple[tuple[tuple[tuple[int, int], ...], tuple[int, ...]], ...]:
    """Which pairs listen to each axis: runs of neighbours where these are few, else bits, 32 to a word.

    Runs keep loads vectors; bits cost as much for any pattern. Either way no table of the pattern is read.
    """
    axes = lattice.axes
    starts = [p for p, axis in enumerate(axes) if p == 0 or axes[p - 1] != axis]
    runs = list(zip(starts, [*starts[1:], len(axes)], strict=True))
    if len(runs) <= RUNS:
        return tuple((tuple(run for run in runs if axes[run[0]] == axis), ()) for axis in range(len(lattice.sizes)))
    words = [axes[word : word + 32] for word in range(0, len(axes), 32)]
    return tuple(
        ((), tuple(sum((heard == axis) << bit for bit, heard in enumerate(word)) for word in words))
        for axis in range(len(lattice.sizes))
    )


def _spans(lattice: Lattice | None) -> list[int]:
    """First row, cells from one step to the next, and size of every axis; the last two are divided by."""
    sizes = () if lattice is None else lattice.sizes
    spans = [(sum(sizes[:axis]), max(1, math.prod(sizes[axis + 1 :])), max(1, size)) for axis, size in enumerate(sizes)]
    return [number for span in spans for number in span]


def _check_pair(xs: Sequence[Tensor], outs: Sequence[Tensor], token_dim: int, cos: Tensor) -> None:
    seen = ", ".join(f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in xs)
    alike = {(x.dtype, x.device, x.ndim, x.shape[:-3], x.shape[token_dim], x.shape[-1]) for x in xs}
    if len(xs) not in (1, 2) or len(alike) != 1 or len(outs) != len(xs):
        raise ValueError(
            f"ndpos.kernels.triton: one or two tensors turn in one launch, alike but for heads and strides, with a "
            f"result each, got {len(xs)}: {seen}, and {len(outs)} results. Turn them one by one."
        )
    heads, table_heads = ([t.shape[-5 - token_dim] if t.ndim > 2 else 1 for t in each] for each in (xs, [cos]))
    if len(set(heads)) > 1 and table_heads != [1]:
        raise ValueError(
            f"ndpos.kernels.triton: queries and keys of {heads} heads share a table of 1 head, got {tuple(cos.shape)}. "
            f"Turn them one by one, each with its own heads of the table."
        )
    for x, out in zip(xs, outs, strict=True):
        overlaps = any(size > 1 and not step for size, step in zip(out.shape, out.stride(), strict=True))
        if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device) or overlaps:
            raise ValueError(
                f"ndpos.kernels.triton: a result has the shape, dtype and device of its x, {seen}, and a place for "
                f"every number; got {tuple(out.shape)} {out.dtype} on {out.device}, strides {out.stride()}. Leave outs "
                f"out."
            )


def _check_places(cos: Tensor, token_dim: int, turning: int, rows: Tensor | None, lattice: Lattice | None) -> None:
    integers = rows is None or not (rows.dtype.is_floating_point or rows.dtype.is_complex or rows.dtype == torch.bool)
    if rows is not None and (not integers or rows.shape != (turning,) or rows.device != cos.device):
        raise ValueError(
            f"ndpos.kernels.triton: rows are integers ({turning},), one for each turning token, beside the table on "
            f"{cos.device}, got {tuple(rows.shape)} {rows.dtype} on {rows.device}. Prefix and suffix tokens have none."
        )
    if lattice is None:
        return
    sizes, axes = lattice
    fits = rows is not None or math.prod(sizes) == turning
    known = len(axes) == cos.shape[-1] and all(0 <= axis < len(sizes) for axis in axes)
    if not (fits and known and cos.ndim >= -token_dim and sum(sizes) == cos.shape[token_dim]):
        raise ValueError(
            f"ndpos.kernels.triton: a lattice has a row for each step of each axis, an axis for each pair, and the "
            f"turning tokens as cells, got sizes {sizes} and axes {axes} for a table {tuple(cos.shape)} and {turning} "
            f"tokens. Lay the rows of the axes one after the other, slowest axis first."
        )
