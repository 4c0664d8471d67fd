"""Whole numbers per axis: the one reading of ``sizes``, of any "one number, or one per axis", and of indices into them.

Sizes are integers given per axis, never a square root and never a scale factor, because a float that was meant
to be 16 floors to 15. Symbolic integers of ``torch.compile`` and ``torch.export`` pass through unread, so that a
new image size is not a new graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def whole(caller: str, name: str, value: Any, *, minimum: int = 0) -> int:
    """``value`` as an integer of at least ``minimum``; floats and booleans are refused, symbolic integers kept."""
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]  # reading it here would fix the size into the graph
    if isinstance(value, bool) or isinstance(value, float):
        raise TypeError(f"{caller}: {name} are integers, got {value!r}. Sizes are counted, not divided or rooted.")
    try:
        number = value if isinstance(value, int) else operator.index(value)
    except TypeError:
        raise TypeError(f"{caller}: {name} are integers, got {value!r} of type {type(value).__name__}.") from None
    if number < minimum:
        raise ValueError(f"{caller}: {name} are integers of at least {minimum}, got {number}.")
    return number


def sizes_per_axis(
    caller: str, sizes: Sequence[int], *, name: str = "sizes", minimum: int = 0, axes: int | None = None
) -> tuple[int, ...]:
    """One integer per axis as a tuple, slowest axis first.

    A lone integer is refused: ``16`` could mean one axis of 16 or a square, and the two differ in silence.
    """
    if not several(sizes):
        raise TypeError(
            f"{caller}: {name} take one integer per axis, got {sizes!r}. For one axis write ({sizes!r},), for two "
            f"(height, width)."
        )
    numbers = tuple(whole(caller, name, size, minimum=minimum) for size in sizes)
    if not numbers:
        raise ValueError(f"{caller}: {name} need at least one axis, got ().")
    if axes is not None and len(numbers) != axes:
        raise ValueError(f"{caller}: {name} has {len(numbers)} axes {numbers}, {axes} were expected.")
    return numbers


def numbers_per_axis(caller: str, name: str, value: Any, axes: int) -> tuple[Any, ...]:
    """A number repeated for every axis, or a sequence of exactly one number per axis."""
    if not several(value):
        return (value,) * axes
    numbers = tuple(value)
    if len(numbers) != axes:
        raise ValueError(f"{caller}: {name} is one number or one per axis; got {len(numbers)} for {axes} axes.")
    return numbers


def several(value: Any) -> bool:
    """Whether ``value`` is an ordered sequence: no text, no set; an array without dimensions is one number."""
    if isinstance(value, (int, float, str, bytes, torch.SymInt)):  # a symbolic number must not be asked for its type
        return False
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def finite(caller: str, name: str, value: Any) -> float:
    """``value`` as a finite float; text, booleans, tensors and infinities are refused."""
    if isinstance(value, (bool, str, bytes, Tensor)) or not hasattr(value, "__float__"):
        raise TypeError(f"{caller}: {name} is a plain number, got {value!r}. A tensor's is its .item().")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) < math.inf:  # not math.isfinite: a compiler cannot ask it of a symbolic number
        raise ValueError(f"{caller}: {name} is a finite number, got {value!r}.")
    return number


def product(sizes: Sequence[int]) -> int:
    """Number of cells of a grid. Not ``math.prod``: that one reads symbolic sizes in older releases of torch."""
    cells = 1
    for size in sizes:
        cells = cells * size
    return cells


def refuse_unless(fits: Tensor, values: Tensor, text: str) -> None:
    """Raise ``ValueError(text)`` with the first value that does not fit, before anything is gathered.

    Reading values on the CPU costs nothing that a gather would not; on an accelerator it would wait for the device,
    and under a compiler it would break the graph, so there an asynchronous assertion does the same.
    """
    refuse_tracing(text.split(":")[0])
    fits = torch.broadcast_to(fits, values.shape)
    while torch._C._functorch.is_batchedtensor(fits):  # vmap hides the values; the error is about all samples
        fits = torch._C._functorch.get_unwrapped(fits)
    if torch.compiler.is_compiling() or fits.device.type not in ("cpu", "meta") or type(fits) is not Tensor:
        torch._assert_async(fits.all(), text)
    elif fits.device.type == "cpu" and not bool(fits.all()):
        seen = "" if fits.shape != values.shape else f" Seen: {values[~fits].flatten()[0].item()}."
        raise ValueError(f"{text}{seen} Shape {tuple(values.shape)}.")


def refuse_outside(values: Tensor, size: int, text: str) -> None:
    """Raise unless ``0 <= values <= size - 1`` everywhere; NaN fits nowhere, and -1 is not the last row.

    ``{size}`` in the text stands for the size; a graph is told "number of", for a symbolic size that is written into
    a text is fixed by it: one graph per size.
    """
    text = text.replace("{size}", "number of" if torch.compiler.is_compiling() else str(size))
    refuse_unless((values >= 0) & (values <= size - 1), values, text)


def refuse_tracing(caller: str) -> None:
    """Raise under ``torch.jit.trace``, which would fix the sizes of its example into the graph without a word."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # as torch has it
        raise NotImplementedError(
            f"{caller}: torch.jit.trace is not supported: its graph is for the sizes of the example alone. Use "
            f"torch.export.export, or torch.onnx.export(..., dynamo=True); both keep sizes open."
        )
