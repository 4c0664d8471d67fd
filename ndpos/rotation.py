"""Cos and sin per token and pair, and what it takes to turn a query or a key by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ndpos.fitting import check_fit, check_outs
from ndpos.kernels import Backend, Lattice, Pairing, Source, Turning, check_backend, check_blocks, turn_all
from ndpos.picking import PARTS, Picked
from ndpos.positions import outside_autocast
from ndpos.sizes import refuse_tracing

__all__ = ["Rotation"]


@dataclass(frozen=True, eq=False, repr=False)
class Rotation(Picked):
    """A turn for every token, ready for queries and keys: ``q, k = turn(q), turn.keys(k)``.

    Made by :class:`ndpos.RotaryEmbedding`; a plain value that is passed down a call. A registered pytree: its tensors
    are leaves, so it moves, maps, vmaps, compiles and exports like a tuple of tensors.

    Args:
        cos, sin: ``(*batch, heads|1, tokens, pairs)`` float32 or float64, layers in front if ``num_layers`` is given.
        pairing: Which two channels make a pair: ``"interleaved"`` (2i, 2i + 1), ``"half"`` (i, i + pairs),
            ``"half_per_axis"`` (half inside each axis block).
        blocks: Pairs of each axis block in channel order, for ``"half_per_axis"``.
        head_dim: Channels that queries and keys must have; not checked if not given.
        num_prefix, num_suffix: Tokens before and after the turned ones that come back bit-identical.
        num_layers: Size of the leading layer dimension; ``layer(i)`` selects one.
        amplitude: Length factor per pair ``(pairs,)`` or per token and pair, absent by default. With it a rotation does
            **not** keep norms (YaRN, xPos).
        key_amplitude: Whether keys get the ``"same"`` factor or its ``"reciprocal"`` (xPos).
        key_phase: Radians added to the keys' angles, ``(pairs,)`` or ``(heads, 1, pairs)``, absent by default.
        basis: Orthogonal ``(head_dim, head_dim)`` or ``(heads, head_dim, head_dim)`` applied to the channels first
            (STRING, commuting ComRoPE), absent by default.
        basis_last: Set by :meth:`inverse`: the transposed basis is applied after the turn.
        backend: Which way it is computed, see :func:`ndpos.backends`; None picks the one that fits.
        source_cos, source_sin, source_rows, lattice: The fewer rows that cos and sin were spread from, set where a
            kernel reads them instead: those of each axis of a grid, or which row each token takes.

    Raises:
        ValueError: at the call, when tokens, heads, channels or the rank do not fit.

    Example:
        >>> import ndpos, torch
        >>> turn = ndpos.RotaryEmbedding(ndpos.split(8, 2)).on_grid((2, 3), num_prefix=1)
        >>> turn
        Rotation(tokens=6, pairs=4, heads=1, pairing='half', num_prefix=1)
        >>> q = torch.randn(2, 4, 7, 8)  # (batch, heads, prefix + tokens, head_dim)
        >>> torch.equal(turn(q)[:, :, 0], q[:, :, 0]), torch.allclose(turn.inverse()(turn(q)), q, atol=1e-6)
        (True, True)

    Source:
        Su et al. 2021, RoFormer, arXiv:2104.09864, eq. 34. Amplitude: Sun et al. 2022, xPos, arXiv:2212.10554, and
        Peng et al. 2023, YaRN, arXiv:2309.00071. Basis: Schenck et al. 2025, STRING, arXiv:2502.02562.
    """

    cos: Tensor
    sin: Tensor
    pairing: Pairing
    blocks: tuple[int, ...] | None = None
    head_dim: int | None = None
    num_prefix: int = 0
    num_suffix: int = 0
    num_layers: int | None = None
    amplitude: Tensor | None = None
    key_amplitude: Literal["same", "reciprocal"] = "same"
    key_phase: Tensor | None = None
    basis: Tensor | None = None
    basis_last: bool = False
    backend: Backend | None = None
    source_cos: Tensor | None = None
    source_sin: Tensor | None = None
    source_rows: Tensor | None = None
    lattice: Lattice | None = None

    def __call__(self, q: Tensor, *, token_dim: int = -2, out: Tensor | None = None) -> Tensor:
        """Queries turned: ``(..., heads, tokens, head_dim)``, heads and tokens swapped for ``token_dim=-3``.

        Written to ``out`` if given, which may be ``q`` itself: turned in place, for inference alone.
        """
        return self._turn("ndpos.Rotation", (q,), self._tables(), token_dim, None if out is None else (out,))[0]

    def keys(self, k: Tensor, *, token_dim: int = -2, out: Tensor | None = None) -> Tensor:
        """Keys turned: as queries, but for ``key_phase`` and ``key_amplitude``."""
        tables, outs = self._tables(of_keys=True), None if out is None else (out,)
        return self._turn("ndpos.Rotation.keys", (k,), tables, token_dim, outs)[0]

    def both(
        self, q: Tensor, k: Tensor, *, token_dim: int = -2, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``(turn(q), turn.keys(k))``, at once where a backend can; keys may have fewer heads (grouped queries)."""
        alike = q.dtype == k.dtype and q.device == k.device and q.ndim == k.ndim
        if self.key_phase is None and (self.amplitude is None or self.key_amplitude == "same") and alike:
            q, k = self._turn("ndpos.Rotation.both", (q, k), self._tables(), token_dim, out)
            return q, k
        of_q, of_k = (None, None) if out is None else out
        if out is not None:  # before the first is written: it may be where the second is read
            check_outs("ndpos.Rotation.both", (q, k), out, [part for _, part in self._parts()])
        return self(q, token_dim=token_dim, out=of_q), self.keys(k, token_dim=token_dim, out=of_k)

    def inverse(self) -> Rotation:
        """The rotation that undoes this one, for queries and for keys, amplitude and basis included."""
        return dataclasses.replace(
            self,
            sin=-self.sin,
            source_sin=None if self.source_sin is None else -self.source_sin,
            amplitude=None if self.amplitude is None else self.amplitude.reciprocal(),
            key_phase=None if self.key_phase is None else -self.key_phase,
            basis_last=not self.basis_last,
        )

    def __repr__(self) -> str:
        tokens, pairs = self.cos.shape[-2:]
        parts = [f"tokens={tokens}", f"pairs={pairs}", f"heads={self.cos.shape[-3]}"]
        batch = tuple(self.cos.shape[:-3])[self.num_layers is not None :]
        parts += [f"batch={batch}"] if batch else []
        parts.append(f"pairing={self.pairing!r}")
        for name in ("num_layers", "num_prefix", "num_suffix"):
            parts += [f"{name}={getattr(self, name)}"] if getattr(self, name) else []
        parts += ["key_phase"] if self.key_phase is not None else []
        parts += ["basis"] if self.basis is not None else []
        parts += ["amplitude: norms are not kept"] if self.amplitude is not None else []
        return f"Rotation({', '.join(parts)})"

    def _tables(self, of_keys: bool = False) -> tuple[Tensor, Tensor]:
        """Cos and sin as they are multiplied with queries, or with keys."""
        refuse_tracing("ndpos.Rotation")
        cos, sin, amplitude = self.cos, self.sin, self.amplitude
        if not (cos.dtype.is_floating_point and sin.dtype.is_floating_point):
            raise TypeError(f"ndpos.Rotation: cos and sin are floating tensors, got {cos.dtype} and {sin.dtype}.")
        if cos.ndim < 3 or cos.shape != sin.shape:
            raise ValueError(
                f"ndpos.Rotation: cos and sin are (*batch, heads|1, tokens, pairs), got {tuple(cos.shape)} and "
                f"{tuple(sin.shape)}."
            )
        if self.key_amplitude not in ("same", "reciprocal"):
            raise ValueError(f"ndpos.Rotation: key_amplitude is 'same' or 'reciprocal', got {self.key_amplitude!r}.")
        if of_keys and self.key_phase is not None:
            phase_cos, phase_sin = self.key_phase.cos(), self.key_phase.sin()
            cos, sin = cos * phase_cos - sin * phase_sin, sin * phase_cos + cos * phase_sin
        if amplitude is not None:
            amplitude = amplitude.reciprocal() if of_keys and self.key_amplitude == "reciprocal" else amplitude
            cos, sin = cos * amplitude, sin * amplitude
        return cos, sin

    def _turn(
        self,
        caller: str,
        xs: tuple[Tensor, ...],
        tables: tuple[Tensor, Tensor],
        token_dim: int,
        outs: tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor, ...]:
        refuse_tracing(caller)
        check_backend(caller, self.backend)
        for x in xs:
            from_end = check_fit(
                caller,
                x,
                token_dim,
                tables[0].shape,
                head_dim=self.head_dim,
                num_prefix=self.num_prefix,
                num_suffix=self.num_suffix,
                num_layers=self.num_layers,
                basis=None if self.basis is None else tuple(self.basis.shape),
            )
            if self.cos.device != x.device:
                raise ValueError(
                    f"{caller}: the rotation is on {self.cos.device}, x is on {x.device}. Make it there: "
                    f"rope(coords.to(x.device)), or on_grid(..., device=x.device)."
                )
        if outs is not None:
            outs = check_outs(caller, xs, outs, (*tables, *(part for _, part in self._parts())))
        blocks = check_blocks(caller, self.pairing, self.blocks, self.cos.shape[-1])
        how = Turning(self.pairing, blocks, from_end, self.num_prefix, self.num_suffix)
        rank = min(x.ndim for x in xs)
        cos, sin = _beside(tables[0], from_end, rank), _beside(tables[1], from_end, rank)
        source = self._source(from_end, rank) if self.source_cos is not None and tables[0] is self.cos else None
        with outside_autocast(xs[0].device):
            if self.basis is None:
                return turn_all(xs, cos, sin, how, self.backend, outs, source)
            turned = tuple(self._turn_in_basis(x, cos, sin, how) for x in xs)
        return turned if outs is None else tuple(out.copy_(one) for out, one in zip(outs, turned, strict=True))

    def _source(self, token_dim: int, rank: int) -> Source | None:
        if self.source_cos is None or self.source_sin is None:
            return None
        cos, sin = (_beside(part.detach(), token_dim, rank) for part in (self.source_cos, self.source_sin))
        return Source(cos, sin, self.source_rows, self.lattice)

    def _turn_in_basis(self, x: Tensor, cos: Tensor, sin: Tensor, how: Turning) -> Tensor:
        assert self.basis is not None
        before, body, after = how.parted(x)
        exact = body.to(torch.promote_types(body.dtype, torch.float32))
        based = exact if self.basis_last else _in_basis(exact, self.basis.mT, how.token_dim)
        turned = turn_all((based,), cos, sin, how._replace(num_prefix=0, num_suffix=0), self.backend)[0]
        turned = (_in_basis(turned, self.basis, how.token_dim) if self.basis_last else turned).to(x.dtype)
        parts = [*([before] if how.num_prefix else []), turned, *([after] if how.num_suffix else [])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=how.token_dim)


def _beside(part: Tensor, token_dim: int, rank: int) -> Tensor:
    """``(*batch, heads|1, tokens, pairs)`` in the order of the dimensions of an x of ``rank`` or more."""
    if rank == 2:  # neither batch nor heads: check_fit saw to it
        return part.squeeze(0)
    return part if token_dim == -2 else part.transpose(-2, -3)


def _in_basis(x: Tensor, basis: Tensor, token_dim: int) -> Tensor:
    """``x @ basis`` over the channels; the caller stands outside autocast."""
    if basis.ndim == 3 and token_dim == -3:
        return _in_basis(x.transpose(-2, -3), basis, -2).transpose(-2, -3)
    return x @ basis.to(x.dtype)


def _flatten(turn: Rotation) -> tuple[list[Tensor], Any]:
    parts = turn._parts()
    settings = {field.name: getattr(turn, field.name) for field in dataclasses.fields(turn) if field.name not in PARTS}
    return [part for _, part in parts], (tuple(name for name, _ in parts), tuple(settings.items()))


def _flatten_with_keys(turn: Rotation) -> tuple[list[tuple[Any, Tensor]], Any]:
    leaves, context = _flatten(turn)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves, strict=True)], context


def _unflatten(leaves: Iterable[Any], context: Any) -> Rotation:
    # No check here: transforms put placeholders, not tensors, where the leaves were.
    names, settings = context
    return Rotation(**dict(zip(names, leaves, strict=True)), **dict(settings))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


pytree.register_pytree_node(
    Rotation,
    _flatten,
    _unflatten,
    serialized_type_name="ndpos.Rotation",
    to_dumpable_context=lambda context: context,
    from_dumpable_context=_tuples,
    flatten_with_keys_fn=_flatten_with_keys,
)
# Tensors and plain settings: an exported program that takes a Rotation can be loaded from its file.
torch.serialization.add_safe_globals([Rotation])
