"""Cos and sin per token and pair, and what it takes to turn a query or a key by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ndpos.fitting import check_fit
from ndpos.kernels import Pairing, check_blocks, turn_pairs
from ndpos.positions import outside_autocast
from ndpos.sizes import refuse_outside, refuse_tracing

__all__ = ["Rotation"]

PARTS = ("cos", "sin", "amplitude", "key_phase", "basis")  # the tensors of a Rotation; all other fields are settings


@dataclass(frozen=True, eq=False, repr=False)
class Rotation:
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

    def __call__(self, q: Tensor, *, token_dim: int = -2) -> Tensor:
        """Queries turned: ``(..., heads, tokens, head_dim)``, heads and tokens swapped for ``token_dim=-3``."""
        return self._turn(q, token_dim, "ndpos.Rotation", self.cos, self.sin, self.amplitude)

    def keys(self, k: Tensor, *, token_dim: int = -2) -> Tensor:
        """Keys turned: as queries, but for ``key_phase`` and ``key_amplitude``."""
        cos, sin, amplitude = self.cos, self.sin, self.amplitude
        if self.key_amplitude not in ("same", "reciprocal"):
            raise ValueError(f"ndpos.Rotation: key_amplitude is 'same' or 'reciprocal', got {self.key_amplitude!r}.")
        if self.key_phase is not None:
            phase_cos, phase_sin = self.key_phase.cos(), self.key_phase.sin()
            cos, sin = cos * phase_cos - sin * phase_sin, sin * phase_cos + cos * phase_sin
        if amplitude is not None and self.key_amplitude == "reciprocal":
            amplitude = amplitude.reciprocal()
        return self._turn(k, token_dim, "ndpos.Rotation.keys", cos, sin, amplitude)

    def __getitem__(self, tokens: Any) -> Rotation:
        """The rotation of some tokens, for all samples alike: a slice, a mask ``(tokens,)`` or indices ``(kept,)``.

        Counts the rotated tokens only: prefix and suffix are kept. An integer keeps its dimension, as ``[i : i + 1]``.
        """
        count = self.cos.shape[-2]
        if isinstance(tokens, slice):
            return self._each_token(lambda part: part[..., tokens, :])
        if isinstance(tokens, int) and not isinstance(tokens, bool):
            if not -count <= tokens < count:
                raise IndexError(f"ndpos.Rotation: token {tokens} of {count}.")
            return self[slice(tokens % count, tokens % count + 1)]
        try:
            index = torch.as_tensor(tokens, device=self.cos.device)
            seen = f"{tuple(index.shape)} {index.dtype}"
        except (RuntimeError, TypeError, ValueError):
            index, seen = torch.empty(()), repr(tokens)
        if index.ndim != 1 or (index.dtype == torch.bool and index.shape[0] != count):
            raise ValueError(
                f"ndpos.Rotation[...]: a slice, a mask ({count},) or indices (kept,); got {seen}. Another subset per "
                f"sample: turn.take(indices), indices (batch, kept)."
            )
        return self.take(index.nonzero().flatten() if index.dtype == torch.bool else index)

    def take(self, indices: Tensor) -> Rotation:
        """The rotation of kept or re-ordered tokens.

        Args:
            indices: ``(kept,)`` for all samples or ``(batch, kept)``, integers in [0, tokens), prefix not counted.

        Returns:
            A Rotation of ``kept`` tokens, with a batch dimension if ``indices`` has one. ``turn.take(i)(x[i])`` equals
            ``turn(x)[i]``.

        Raises:
            ValueError: indices that are not integers, out of range, or of another rank or batch.
        """
        dtype = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise ValueError(f"ndpos.Rotation.take: indices are integers, got {dtype}. A mask goes in turn[mask].")
        batch = tuple(self.cos.shape[self.num_layers is not None : -3])
        per_sample = indices.ndim == 2 and len(batch) < 2 and all(size in (1, indices.shape[0]) for size in batch)
        if indices.ndim != 1 and not per_sample:
            raise ValueError(
                f"ndpos.Rotation.take: indices are (kept,) or (batch, kept), got {tuple(indices.shape)} for a rotation "
                f"of batch {batch}."
            )
        if indices.device != self.cos.device:
            raise ValueError(
                f"ndpos.Rotation.take: indices are on {indices.device}, the rotation is on {self.cos.device}."
            )
        indices = indices.to(torch.int64)  # narrower integers cannot hold the number of tokens they are compared with
        refuse_outside(
            indices,
            self.cos.shape[-2],
            "ndpos.Rotation.take: indices are at least 0 and below the {size} rotated tokens; they do not count the "
            "prefix, so subtract num_prefix from positions in the sequence.",
        )
        if indices.ndim == 1:
            return self._each_token(lambda part: part.index_select(-2, indices))
        unbatched = 3 + (self.num_layers is not None)

        def gather(part: Tensor) -> Tensor:
            while part.ndim < 3:
                part = part.unsqueeze(0)
            part = part.unsqueeze(-4) if part.ndim <= unbatched else part
            # Not take_along_dim: it fixes the number of tokens into a compiled graph.
            kept, shape = indices.shape[1], (*part.shape[:-4], indices.shape[0], part.shape[-3])
            index = indices[:, None, :, None].expand(*shape, kept, part.shape[-1])
            return part.expand(*shape, -1, -1).gather(-2, index)

        return self._each_token(gather)

    def layer(self, index: int) -> Rotation:
        """The rotation of one layer, for encodings with a frequency matrix per layer."""
        if self.num_layers is None or isinstance(index, bool) or not 0 <= index < self.num_layers:
            raise ValueError(
                f"ndpos.Rotation.layer: layer {index} of {self.num_layers or 'a rotation without layers'}."
            )
        rank = self.cos.ndim
        chosen: dict[str, Any] = {
            name: part.select(0, index) if part.ndim == rank else part
            for name, part in self._parts()
            if name != "basis"
        }
        return dataclasses.replace(self, num_layers=None, **chosen)

    def head(self, heads: slice) -> Rotation:
        """The rotation of some heads, for encodings with a frequency matrix per head (grouped keys, sharded heads)."""
        if not isinstance(heads, slice) or not len(range(self.cos.shape[-3])[heads]):
            raise ValueError(f"ndpos.Rotation.head: heads are a slice of {self.cos.shape[-3]} heads, got {heads!r}.")
        kept: dict[str, Any] = {
            name: part[..., heads, :, :] if part.ndim >= 3 and part.shape[-3] > 1 else part
            for name, part in self._parts()
        }
        return dataclasses.replace(self, **kept)

    def inverse(self) -> Rotation:
        """The rotation that undoes this one, for queries and for keys, amplitude and basis included."""
        return dataclasses.replace(
            self,
            sin=-self.sin,
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

    def _parts(self) -> list[tuple[str, Tensor]]:
        return [(name, getattr(self, name)) for name in PARTS if getattr(self, name) is not None]

    def _each_token(self, pick: Callable[[Tensor], Tensor]) -> Rotation:
        """``pick`` applied to every part that has a value per token."""
        count = self.cos.shape[-2]
        picked: dict[str, Any] = {"cos": pick(self.cos), "sin": pick(self.sin)}
        if self.amplitude is not None and self.amplitude.ndim >= 2 and self.amplitude.shape[-2] == count:
            picked["amplitude"] = pick(self.amplitude)
        return dataclasses.replace(self, **picked)

    def _turn(
        self, x: Tensor, token_dim: int, caller: str, cos: Tensor, sin: Tensor, amplitude: Tensor | None
    ) -> Tensor:
        refuse_tracing(caller)
        if not (self.cos.dtype.is_floating_point and self.sin.dtype.is_floating_point):
            raise TypeError(f"{caller}: cos and sin are floating tensors, got {self.cos.dtype} and {self.sin.dtype}.")
        if self.cos.ndim < 3 or self.cos.shape != self.sin.shape:
            raise ValueError(
                f"{caller}: cos and sin are (*batch, heads|1, tokens, pairs), got {tuple(self.cos.shape)} and "
                f"{tuple(self.sin.shape)}."
            )
        token_dim = check_fit(
            caller,
            x,
            token_dim,
            self.cos.shape,
            head_dim=self.head_dim,
            num_prefix=self.num_prefix,
            num_suffix=self.num_suffix,
            num_layers=self.num_layers,
            basis=None if self.basis is None else tuple(self.basis.shape),
        )
        check_blocks(caller, self.pairing, self.blocks, cos.shape[-1])
        if self.cos.device != x.device:
            raise ValueError(
                f"{caller}: the rotation is on {self.cos.device}, x is on {x.device}. Make it there: "
                f"rope(coords.to(x.device)), or on_grid(..., device=x.device)."
            )
        with outside_autocast(x.device):
            return self._turn_checked(x, token_dim, cos, sin, amplitude)

    def _turn_checked(self, x: Tensor, token_dim: int, cos: Tensor, sin: Tensor, amplitude: Tensor | None) -> Tensor:
        if amplitude is not None:
            cos, sin = cos * amplitude, sin * amplitude
        cos, sin = _beside(cos, token_dim), _beside(sin, token_dim)
        tokens = x.shape[token_dim]
        body = x.narrow(token_dim, self.num_prefix, tokens - self.num_prefix - self.num_suffix)
        if self.basis is None:
            turned = turn_pairs(body, cos, sin, self.pairing, self.blocks)
        else:
            exact = body.to(torch.promote_types(body.dtype, torch.float32))
            based = exact if self.basis_last else _in_basis(exact, self.basis.mT, token_dim)
            turned = turn_pairs(based, cos, sin, self.pairing, self.blocks)
            turned = (_in_basis(turned, self.basis, token_dim) if self.basis_last else turned).to(x.dtype)
        if not self.num_prefix and not self.num_suffix:
            return turned
        before = [x.narrow(token_dim, 0, self.num_prefix)] if self.num_prefix else []
        after = [x.narrow(token_dim, tokens - self.num_suffix, self.num_suffix)] if self.num_suffix else []
        return torch.cat([*before, turned, *after], dim=token_dim)


def _beside(part: Tensor, token_dim: int) -> Tensor:
    """``(*batch, heads|1, tokens, pairs)`` in the order of x's dimensions."""
    if part.ndim == 3 and part.shape[0] == 1:
        part = part.squeeze(0)  # (tokens, pairs) fits x of any rank
        return part if token_dim == -2 else part.unsqueeze(-2)
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
