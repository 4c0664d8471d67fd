"""Angles spent turning queries and keys: scores then depend on where two tokens stand relative to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ndpos.fitting import check_floating
from ndpos.frequencies import geometric
from ndpos.kernels import Backend, Lattice, Pairing, check_backend, check_blocks, reads_sources
from ndpos.positions import Align, Numbers, exact_dtype, placed_coords
from ndpos.radians import PlainMatrix, check_coords, check_setting, turns, turns_in_rows, turns_on_grid
from ndpos.rotation import Rotation
from ndpos.sizes import finite, numbers_per_axis, refuse_tracing, several, whole
from ndpos.subspaces import AxisSplit

__all__ = ["RotaryEmbedding", "rotate"]


def rotate(
    x: Tensor,
    angles: Tensor,
    *,
    pairing: Pairing,
    token_dim: int = -2,
    blocks: Sequence[int] | None = None,
    backend: Backend | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Turn every channel pair of a query or key by the angle of its token.

    After turning both, ``q . k`` depends on where the two tokens stand *relative to each other*. Channels past the
    first ``2 * pairs`` are copied.

    Args:
        x: Queries or keys with heads split off, ``(..., tokens, head_dim)``, any floating dtype.
        angles: Radians from :func:`ndpos.angles`, float32 or wider: ``(tokens, pairs)``, or of as many dimensions as x,
            always as ``(..., heads|1, tokens, pairs)`` whatever ``token_dim``.
        pairing: Which two channels make pair ``i`` of ``n``. ``"half"``, (i, i + n): DINOv3, Qwen2-VL, Llama in
            transformers. ``"interleaved"``, (2i, 2i + 1): RoFormer, Meta's Llama, EVA-02. ``"half_per_axis"``, half
            inside each axis block: Gemma 4, CroCo. No default: the wrong one loads and runs, and is silently wrong.
        token_dim: -2, or -3 for ``(..., tokens, heads, head_dim)``.
        blocks: Pairs of each axis block, ``split.blocks``; needed by ``"half_per_axis"`` alone.
        backend: Which way it is computed, see :func:`ndpos.backends`; None picks the one that fits.
        out: Where the result is written, for inference alone; ``x`` itself turns it in place.

    Returns:
        A tensor like ``x``, its dtype kept. Computed in the dtype of ``angles``, rounded once.

    Raises:
        ValueError: more pairs than channels allow, other token, head or batch counts, another rank, unknown pairing,
            half-precision angles, missing ``blocks``.
        TypeError: ``x`` is no floating tensor.

    Example:
        A quarter turn moves the first channel of the pair into the second.

        >>> import math, torch, ndpos
        >>> x = torch.tensor([[1.0, 0.0]])              # (tokens=1, head_dim=2)
        >>> quarter = torch.tensor([[math.pi / 2]])     # (tokens=1, pairs=1)
        >>> ndpos.rotate(x, quarter, pairing="half").round().abs().tolist()
        [[0.0, 1.0]]

    Source:
        Su et al. 2021, RoFormer, arXiv:2104.09864, eq. 34. Axial use for images: Heo et al. 2024, arXiv:2403.13298.
    """
    caller = "ndpos.rotate"
    if not isinstance(angles, Tensor) or angles.dtype not in (torch.float32, torch.float64):
        seen = angles.dtype if isinstance(angles, Tensor) else type(angles).__name__
        raise ValueError(
            f"{caller}: angles are float32 or float64, got {seen}. Near 1000 a bfloat16 is 4 apart, a float16 0.5: "
            f"cast the result, never the angles."
        )
    check_floating(caller, x)
    if angles.ndim < 2 or (angles.ndim > 2 and angles.ndim != x.ndim):
        raise ValueError(
            f"{caller}: angles are (tokens, pairs), or have as many dimensions as x: (..., heads|1, tokens, pairs).\n"
            f"  x       {tuple(x.shape)}\n  angles  {tuple(angles.shape)}\n"
            f"  Angles per sample need a heads dimension: angles.unsqueeze(-3)."
        )
    if angles.ndim == 2:
        angles = angles.unsqueeze(0)
    blocks = check_blocks(caller, pairing, blocks, angles.shape[-1])
    turn = Rotation(angles.cos(), angles.sin(), pairing, blocks=blocks, backend=backend)
    return turn._turn(caller, (x,), (turn.cos, turn.sin), token_dim, None if out is None else (out,))[0]


class _Lattice(NamedTuple):
    """A grid that no cell has been made of yet; it goes through ``forward``, so that hooks (FSDP's) see the call."""

    sizes: Sequence[int]
    start: Numbers
    step: Numbers
    reference_sizes: Sequence[int] | None
    align: Align
    device: torch.device | str | None


class RotaryEmbedding(nn.Module):
    """Rotary position embedding over any number of axes: coordinates in, a :class:`ndpos.Rotation` out.

    Frequencies are settings, never state: ``state_dict()`` is empty, and no cast, move, meta device or checkpoint can
    touch them. A learnable embedding has one parameter, ``frequencies``.

    Args:
        split: Channels of one head per axis. For a partial rotation ``AxisSplit(channels, dim=head_dim)``.
        pairing: Which two channels make a pair: ``"half"``, ``"interleaved"`` or ``"half_per_axis"``; see
            :func:`ndpos.rotate`. The default is for new weights: trained weights need their own.
        base: The theta of the geometric ladder, for all axes or one per axis; refused beside ``frequencies``.
        frequencies: ``(axes, pairs)``, ``(heads, axes, pairs)`` or ``(layers, heads, axes, pairs)`` in radians per unit
            of coordinate, ``pairs`` at most ``split.dim // 2``. The split then supplies axes and head_dim alone:
            ``AxisSplit([2 * count for count in counts])`` for :func:`ndpos.sections`, whatever their layout.
        heads: Number of heads, for a matrix per head (the same ladder for each to begin with, or as given).
        layers: Number of layers, for a matrix per layer and head.
        learnable: Learn the non-zero frequencies, so that disjoint axes stay disjoint; a matrix without a zero is
            learned whole. The parameter has the matrix' shape, or one number per non-zero entry, row-major.
        backend: Which way its rotations are computed, see :func:`ndpos.backends`; None picks the one that fits.

    Raises:
        ValueError: settings that contradict each other, with what was seen.

    Example:
        >>> import ndpos, torch
        >>> rope = ndpos.RotaryEmbedding(ndpos.split(64, 2), base=100.0)
        >>> turn = rope.on_grid((14, 14), num_prefix=1)      # a class token stays as it is
        >>> q = k = torch.randn(2, 12, 1 + 14 * 14, 64)      # (batch, heads, tokens, head_dim)
        >>> q, k = turn(q), turn.keys(k)
        >>> rope(torch.tensor([[[0.5, 2.0], [-1.0, 7.25]]])) # any coordinates, one set per sample
        Rotation(tokens=2, pairs=32, heads=1, batch=(1,), pairing='half')

    Source:
        Su et al. 2021, RoFormer, arXiv:2104.09864; axial and mixed axes: Heo et al. 2024, arXiv:2403.13298.
    """

    def __init__(
        self,
        split: AxisSplit,
        *,
        pairing: Pairing = "half",
        base: float | Sequence[float] | None = None,
        frequencies: Tensor | None = None,
        heads: int | None = None,
        layers: int | None = None,
        learnable: bool = False,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        caller = "ndpos.RotaryEmbedding"
        if not isinstance(split, AxisSplit):
            raise TypeError(f"{caller}: split is an AxisSplit, got {split!r}. ndpos.split(head_dim, axes) makes one.")
        check_backend(caller, backend)
        if not isinstance(learnable, bool):
            raise TypeError(f"{caller}: learnable is True or False, got {learnable!r}.")
        if frequencies is not None and base is not None:
            raise ValueError(f"{caller}: frequencies already say how fast each pair turns; leave base={base!r} out.")
        if frequencies is None:
            frequencies = geometric(split, 1e4 if base is None else base)
        matrix = PlainMatrix.of(caller, _per_head(caller, frequencies, split, heads, layers))
        pairs = matrix.shape[-1]
        self.split, self.pairing, self.learnable, self.backend = split, pairing, learnable, backend
        self.blocks = check_blocks(caller, pairing, split.blocks if pairing == "half_per_axis" else None, pairs)
        if self.blocks is not None and not matrix.follows(split.pair_axes):
            raise ValueError(
                f"{caller}: 'half_per_axis' needs a column for each of the {split.pairs} pairs, in the "
                f"blocks of the split, axes {split.pair_axes}; got columns for {matrix.listens}."
            )
        self.heads = matrix.shape[-3] if len(matrix.shape) > 2 else None
        self.layers = matrix.shape[0] if len(matrix.shape) == 4 else None
        self.matrix = matrix
        self.learned = tuple(place for place, value in enumerate(matrix.values) if value != 0)
        if learnable:
            whole_matrix = len(self.learned) == len(matrix.values)
            self.frequencies = nn.Parameter(torch.empty(matrix.shape if whole_matrix else (len(self.learned),)))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Put learned frequencies back to their initial values, as after ``to_empty``; nothing to do for fixed ones."""
        if self.learnable:
            with torch.no_grad():
                self.frequencies.copy_(self.initial_frequencies())

    def initial_frequencies(self) -> Tensor:
        """What learned frequencies start from, in the shape of the parameter: float64, on the CPU."""
        values = [self.matrix.values[place] for place in self.learned]
        return torch.tensor(values, dtype=torch.float64, device="cpu").view(self.frequencies.shape)

    def frequency_matrix(self, device: torch.device | str | None = None) -> Tensor:
        """The frequencies in force as a matrix ``(..., axes, pairs)``, in the widest float of ``device``."""
        if not self.learnable:
            return self.matrix.tensor(device)
        learned = self.frequencies.to(exact_dtype(self.frequencies.device))
        if len(self.learned) == len(self.matrix.values):
            return learned.to(device) if device is not None else learned
        places = torch.tensor(self.learned, dtype=torch.int64, device=learned.device)
        zeros = learned.new_zeros(len(self.matrix.values))
        full = zeros.index_put((places,), learned).view(self.matrix.shape)
        return full.to(device) if device is not None else full

    def forward(
        self,
        coords: Tensor | _Lattice,
        *,
        num_prefix: int = 0,
        num_suffix: int = 0,
        strength: float | Sequence[float] | Tensor = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> Rotation:
        """The rotation of tokens at ``coords``.

        Args:
            coords: ``(tokens, axes)`` for all samples or ``(*batch, tokens, axes)``; integers stay exact. A grid is
                flattened by the caller: ``grid(...).flatten(0, -2)``.
            num_prefix, num_suffix: Tokens before and after these (class, register) that are not to be turned.
            strength: What angles are multiplied by, those of all axes or one number per axis; at 0 nothing is turned. A
                tensor, without dimensions or ``(axes,)``, can change from call to call of a compiled model without a
                new graph; a number is part of the graph.
            dtype: Of cos and sin: float32, or float64 on request, whatever the queries will be.

        Returns:
            A Rotation, cos and sin ``(*batch, heads|1, tokens, pairs)`` with layers in front if there are any.

        Raises:
            ValueError: coordinates with another number of axes, or a half-precision ``dtype``.
        """
        caller = "ndpos.RotaryEmbedding"
        refuse_tracing(caller)
        _check_strength(caller, strength, self.split.axes)
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{caller}: cos and sin are float32 or float64, got {dtype}. Queries keep their own dtype."
            )
        lattice: Lattice | None = None
        source: dict[str, Any] = {}
        if isinstance(coords, _Lattice):
            if self.learnable and coords.device is None:
                coords = coords._replace(device=self.frequencies.device)
            per_axis = placed_coords(*coords, caller=f"{caller}.on_grid")
            if len(per_axis) != self.split.axes:
                raise ValueError(
                    f"{caller}.on_grid: the encoding has {self.split.axes} axes, sizes are {tuple(coords.sizes)}."
                )
            matrix = self._matrix(per_axis[0].device, strength)
            listens = self.matrix.listens
            cos, sin = turns_on_grid(per_axis, matrix, listens, dtype)
            if None not in listens and reads_sources(self.backend, cos.device):
                lattice = Lattice(tuple(len(each) for each in per_axis), tuple(max(0, axis or 0) for axis in listens))
                rows = turns_in_rows(per_axis, matrix.detach(), listens, dtype)
                source = {"source_cos": rows[0], "source_sin": rows[1]}
        else:
            check_coords(caller, coords, self.split.axes)
            cos, sin = turns(coords, self._matrix(coords.device, strength), dtype)
        if self.heads is None:
            cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
            source = {name: rows.unsqueeze(-3) for name, rows in source.items()}
        return Rotation(
            cos,
            sin,
            self.pairing,
            blocks=self.blocks,
            head_dim=self.split.dim,
            num_prefix=whole(caller, "num_prefix", num_prefix),
            num_suffix=whole(caller, "num_suffix", num_suffix),
            num_layers=self.layers,
            backend=self.backend,
            lattice=lattice,
            **source,
        )

    def on_grid(
        self,
        sizes: Sequence[int],
        *,
        start: Numbers = 0,
        step: Numbers = 1,
        reference_sizes: Sequence[int] | None = None,
        align: Align = "centre",
        num_prefix: int = 0,
        num_suffix: int = 0,
        strength: float | Sequence[float] | Tensor = 1.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Rotation:
        """The rotation of a whole grid, cos and sin evaluated once per row of each axis.

        Bit-equal to ``rope(grid(sizes, start=start, step=step).flatten(0, -2))`` and much cheaper unless the grid is
        small: 144 rows in place of 65,536 cells for a 16 x 64 x 64 clip. Frequencies that mix axes are evaluated cell
        by cell.

        Args:
            sizes, start, step: As :func:`ndpos.grid`.
            reference_sizes, align: Coordinates of :func:`ndpos.scaled_grid` instead: the grid is laid over one of these
                sizes, so that no distance is longer than there. Distances are the same for ``"centre"`` and
                ``"index"``; tokens that are not turned stand at 0, and tell them apart.
            num_prefix, num_suffix, strength, dtype: As :meth:`forward`.
            device: Where the tables are made; that of learned frequencies, else torch's default device.

        Returns:
            A Rotation of ``prod(sizes)`` tokens in row-major order.
        """
        lattice = _Lattice(sizes, start, step, reference_sizes, align, device)
        rotation: Rotation = self(lattice, num_prefix=num_prefix, num_suffix=num_suffix, strength=strength, dtype=dtype)
        return rotation

    def _matrix(self, device: torch.device, strength: float | Sequence[float] | Tensor) -> Tensor:
        matrix = self.frequency_matrix(device)
        if isinstance(strength, Tensor):
            factors = strength.to(device=matrix.device, dtype=matrix.dtype)
            return matrix * (factors.unsqueeze(-1) if factors.ndim else factors)
        by: Any = strength
        if several(by):  # axis by axis, as numbers of a graph may be symbolic and make no tensor
            return torch.stack([axis * each for axis, each in zip(matrix.unbind(-2), by, strict=True)], dim=-2)
        scaled: Tensor = matrix if by == 1 else matrix * by
        return scaled

    def extra_repr(self) -> str:
        shape = "x".join(str(size) for size in self.matrix.shape)
        return f"{self.split!r}, pairing={self.pairing!r}, frequencies={shape}, learnable={self.learnable}"


def _check_strength(caller: str, strength: Any, axes: int) -> None:
    if not isinstance(strength, Tensor):
        if not torch.compiler.is_compiling():  # a symbolic number cannot be asked whether it is finite
            for by in numbers_per_axis(caller, "strength", strength, axes):
                finite(caller, "strength", by)
    elif tuple(strength.shape) not in ((), (axes,)) or not strength.dtype.is_floating_point:
        raise ValueError(
            f"{caller}: strength is a number, one number per axis, or a floating tensor () or ({axes},), got "
            f"{tuple(strength.shape)} {strength.dtype}."
        )


def _per_head(caller: str, frequencies: Tensor, split: AxisSplit, heads: int | None, layers: int | None) -> Tensor:
    """``frequencies`` checked against the split and given dimensions for the heads and layers asked for."""
    check_setting(caller, frequencies)
    shape = tuple(frequencies.shape)
    if not 2 <= len(shape) <= 4 or shape[-2] != split.axes or not 0 < 2 * shape[-1] <= split.dim:
        raise ValueError(
            f"{caller}: frequencies are (axes, pairs), (heads, axes, pairs) or (layers, heads, axes, pairs) with "
            f"{split.axes} axes and at most {split.dim // 2} pairs; got {shape}."
        )
    if layers is not None and heads is None and len(shape) < 3:
        raise ValueError(f"{caller}: layers={layers} needs heads too: frequencies become (layers, heads, axes, pairs).")
    wanted: list[tuple[Any, int]] = [(heads, 3), (layers, 4)]
    for count, rank in wanted:
        if count is None:
            continue
        count = whole(caller, "heads" if rank == 3 else "layers", count, minimum=1)
        if frequencies.ndim < rank:
            frequencies = frequencies.expand(count, *frequencies.shape)
        elif frequencies.shape[-rank] != count:
            raise ValueError(
                f"{caller}: {'heads' if rank == 3 else 'layers'}={count}, but frequencies have "
                f"{frequencies.shape[-rank]}: {shape}."
            )
    return frequencies
