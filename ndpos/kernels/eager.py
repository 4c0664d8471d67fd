"""The rotation for eager mode on the CPU: few passes over ``x``, in blocks that stay in the cache.

Written into a given tensor, so that nothing as large as ``x`` is made besides the result. Interleaved pairs are complex
numbers already and turn as one product; halves take a product and two products added in place. Neither is for tracing
or exporting, where :mod:`ndpos.kernels.plain` stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ndpos.kernels.pairing import Turning, as_it_lies, axis_blocks

__all__ = ["turn_eager"]

Tables = tuple[Tensor, ...]
Pair = tuple[Tensor, Tensor]  # of x and of the result
Part = tuple[Tensor, Tensor, Tables]  # of x, of the result, and what turns it

BLOCK = 2**18  # numbers that are passed over more than once before the next ones: caches hold them
FEW = 2**17  # numbers for which preparing blocks takes longer than it saves; copies of so many fit LEAST
SHARE = 1 / 8  # of the bytes of x: what copies of a block and tables made ready may take together,
LEAST = 5 * 2**18  # or so many bytes, an eighth of 10 MB: under that, more blocks would cost more than they save


def turn_eager(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, how: Turning, outs: Sequence[Tensor]) -> None:
    """Write each of ``xs`` turned into its ``out``, which is ``x`` itself or does not overlap it.

    ``cos`` and ``sin`` are in the dtype of the products, float32 or wider and not narrower than any ``x``.
    """
    lie = [as_it_lies(x, cos, sin, how) for x in xs]
    if len({(x.dtype, swapped is None) for x, swapped in zip(xs, lie, strict=True)}) > 1:
        for x, out in zip(xs, outs, strict=True):
            turn_eager((x,), cos, sin, how, (out,))
        return
    alone = [out is x for x, out in zip(xs, outs, strict=True)]
    if lie[0] is not None:  # so that blocks and their copies are contiguous
        xs, outs = [x.transpose(-2, -3) for x in xs], [out.transpose(-2, -3) for out in outs]
        cos, sin, how = lie[0]
    width = 2 * cos.shape[-1]
    pairs = [_turned_part(*pair, width, how) for pair in zip(xs, outs, alone, strict=True)]
    if not any(x.numel() for x, _ in pairs):
        return
    if how.pairing == "interleaved":
        _turn_interleaved(pairs, (cos, sin), how)
    else:
        for (x, out), in_place in zip(pairs, alone, strict=True):
            _turn_halves(x, out, (cos, sin), how, in_place)


def _turned_part(x: Tensor, out: Tensor, in_place: bool, width: int, how: Turning) -> Pair:
    """Tokens and channels that turn; the others are copied here."""
    if how.num_prefix or how.num_suffix:
        before, x, after = how.parted(x)
        out_before, out, out_after = how.parted(out)
        if not in_place and how.num_prefix:
            out_before.copy_(before)
        if not in_place and how.num_suffix:
            out_after.copy_(after)
    if width < x.shape[-1]:
        if not in_place:
            out[..., width:].copy_(x[..., width:])
        x, out = x[..., :width], out[..., :width]
    return x, out


def _budget(x: Tensor) -> int:
    return max(LEAST, int(SHARE * x.nbytes)) if x.is_cpu else x.nbytes * 16


def _turn_interleaved(pairs: Sequence[Pair], tables: Tables, how: Turning) -> None:
    """All of ``pairs`` by tables made ready once: as large as ``x`` where angles differ by head."""
    largest = max((x for x, _ in pairs), key=Tensor.numel)
    budget, direct = _budget(largest), largest.dtype == tables[0].dtype
    direct = direct and all(_complex_views(*pair) for pair in pairs)
    room = budget - min(2 * tables[0].nbytes, budget // 2)
    scratch = None if direct else _Scratch(largest, tables[0], room, 1)
    for parts, (c, s) in _by_tables(pairs, tables, budget // 2):
        turns = torch.complex(c, s)
        turns = turns.conj() if how.inverse else turns
        for part, into in parts:
            if scratch is None:
                torch.mul(_as_complex(part), turns, out=_as_complex(into))
                continue
            for block, block_into, (its,) in _cuts(part, into, (turns,), scratch.most):
                (exact,) = scratch.like(block)
                exact.copy_(block)
                _as_complex(exact).mul_(its)
                block_into.copy_(exact)


def _turn_halves(x: Tensor, out: Tensor, tables: Tables, how: Turning, in_place: bool) -> None:
    cos, sin = tables
    budget, (counts, halves) = _budget(x), _widths(how, cos.shape[-1])
    sign = -1 if how.inverse else 1
    copies = 2 if x.dtype != cos.dtype else 1 if in_place else 0
    if x.numel() <= FEW:
        source = x.to(cos.dtype, copy=True) if copies else x
        turned = torch.empty_like(source) if copies == 2 else out
        _turn_pieces(_pieces(source, halves), _pieces(turned, halves), cos, sin, counts, sign)
        if copies == 2:
            out.copy_(turned)
        return
    # Cos for both channels of a pair: one product over all channels takes half the time of two over short rows. Not
    # worth its making where it takes the room of blocks: angles that differ by head or sample, or very many tokens.
    doubles = 2 * cos.nbytes <= (budget // 3 if copies else budget)
    if doubles:
        budget -= 2 * cos.nbytes
        cos = torch.cat([piece for piece in _pieces(cos, counts) for _ in range(2)], dim=-1)
    scratch = _Scratch(x, cos, budget, copies, halves)
    for block, result, (its_cos, its_sin) in _cuts(x, out, (cos, sin), scratch.most):
        exact = scratch.like(block)
        source = exact[0].copy_(block) if copies else block
        turned = exact[1] if copies == 2 else result
        sources = scratch.pieces[0] if copies else _pieces(source, halves)
        results = scratch.pieces[1] if copies == 2 else _pieces(turned, halves)
        if doubles:
            torch.mul(source, its_cos, out=turned)
        _turn_pieces(sources, results, None if doubles else its_cos, its_sin, counts, sign)
        if turned is not result:
            result.copy_(turned)


def _turn_pieces(
    sources: Sequence[Tensor], results: Sequence[Tensor], cos: Tensor | None, sin: Tensor, counts: list[int], sign: int
) -> None:
    """First and second halves by turns, into ``results``; without ``cos`` these hold the products with it already."""
    if cos is not None:
        for place, its in enumerate(_pieces(cos, counts)):
            torch.mul(sources[2 * place], its, out=results[2 * place])
            torch.mul(sources[2 * place + 1], its, out=results[2 * place + 1])
    for place, its in enumerate(_pieces(sin, counts)):
        results[2 * place].addcmul_(sources[2 * place + 1], its, value=-sign)
        results[2 * place + 1].addcmul_(sources[2 * place], its, value=sign)


@lru_cache(maxsize=256)
def _widths(how: Turning, pairs: int) -> tuple[list[int], list[int]]:
    """Pairs of each block of halves, and the channels of every half."""
    counts = [count for _, count in axis_blocks(how.pairing, how.blocks, pairs)]
    return counts, [count for count in counts for _ in range(2)]


def _pieces(x: Tensor, widths: list[int]) -> Sequence[Tensor]:
    return (x,) if len(widths) == 1 else torch.split_with_sizes(x, widths, -1)


class _Scratch:
    """Room for blocks of ``x`` in the dtype of the tables, within ``budget`` bytes.

    Made once, since the system hands out new pages slowly; its views are made again for another shape only, since half
    a dozen of them take as long as a block.
    """

    def __init__(self, x: Tensor, cos: Tensor, budget: int, copies: int, widths: list[int] | None = None) -> None:
        size = min(x.numel(), BLOCK if x.is_cpu else x.numel(), budget // max(1, copies) // cos.itemsize)
        self.most = max(size, x.shape[-1]) if copies else BLOCK
        self.widths, self.shape = widths, torch.Size()
        self.buffers = [torch.empty(self.most, dtype=cos.dtype, device=x.device) for _ in range(copies)]
        self.views: list[Tensor] = []
        self.pieces: list[Sequence[Tensor]] = []

    def like(self, block: Tensor) -> list[Tensor]:
        """A tensor of the shape of ``block`` in each buffer; ``pieces`` has the halves of each."""
        if block.shape != self.shape or not self.views:
            self.shape = block.shape
            self.views = [buffer[: block.numel()].view(block.shape) for buffer in self.buffers]
            self.pieces = [] if self.widths is None else [_pieces(view, self.widths) for view in self.views]
        return self.views


def _by_tables(pairs: Sequence[Pair], tables: Tables, most_bytes: int) -> Iterator[tuple[Sequence[Pair], Tables]]:
    """All at once; cut where tables made ready would take more than ``most_bytes``, along what they lie furthest apart.

    Those of the part before are still held when the next are made, hence the half.
    """
    table, made_ready = tables[0], 2 * tables[0].nbytes
    dim = _furthest_apart(table) if made_ready > most_bytes else None
    if dim is None:
        yield pairs, tables
        return
    most_bytes //= 2
    count = max(1, table.shape[dim] * most_bytes // made_ready)
    cut = [zip(torch.split(x, count, dim), torch.split(out, count, dim), strict=True) for x, out in pairs]
    their = zip(*(torch.split(each, count, dim) for each in tables), strict=True)
    for part, its in zip(zip(*cut, strict=True), their, strict=True):
        yield from _by_tables(part, its, most_bytes)


def _cuts(x: Tensor, out: Tensor, tables: Tables, most: int) -> Iterator[Part]:
    """Parts of at most ``most`` numbers, cut where they lie furthest apart."""
    if x.numel() <= most:
        yield x, out, tables
        return
    dim = _furthest_apart(x)
    if dim is None:
        yield x, out, tables
        return
    for part, into, their in _cut(x, out, tables, dim, max(1, most * x.shape[dim] // x.numel())):
        yield from _cuts(part, into, their, most)


def _furthest_apart(x: Tensor) -> int | None:
    """The dimension to cut, counted from the end: the one with the largest stride, never the channels."""
    strides = [stride if size > 1 else -1 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    furthest = max(strides, default=-1)
    return None if furthest < 0 else strides.index(furthest) - x.ndim


def _cut(x: Tensor, out: Tensor, tables: Tables, dim: int, count: int) -> Iterator[Part]:
    xs, outs = (
        torch.split(x, count, dim),
        torch.split(out, count, dim),
    )  # all views at once: a third of the time of one by one
    if tables[0].ndim < -dim or tables[0].shape[dim] == 1:
        yield from ((part, into, tables) for part, into in zip(xs, outs, strict=True))
    else:
        yield from zip(xs, outs, zip(*(torch.split(table, count, dim) for table in tables), strict=True), strict=True)


def _complex_views(*tensors: Tensor) -> bool:
    """Whether neighbours in the last dimension can be read as complex numbers where they are."""
    return all(
        x.stride(-1) == 1 and not x.storage_offset() % 2 and not any(stride % 2 for stride in x.stride()[:-1])
        for x in tensors
    )


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
