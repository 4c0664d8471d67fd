"""Which ways to rotate this machine has, and which one a tensor takes."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch

from ndpos.kernels.compiled import compiler_missing

__all__ = ["BACKENDS", "Backend", "BackendState", "backends", "check_backend", "choose", "reads_sources"]

Backend = Literal["eager", "compiled", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class BackendState(NamedTuple):
    """A backend, whether this machine can run it, and what it is or why it cannot."""

    name: Backend
    ready: bool
    why: str


def backends() -> tuple[BackendState, ...]:
    """The ways to rotate that this machine has, and why not the others.

    With ``backend=None`` a CUDA tensor takes ``"triton"`` where it is ready, every other one ``"eager"``. Inside
    ``torch.compile`` the rotation is part of the caller's graph, which the compiler fuses unless ``"triton"`` is named.
    There, on the CPU, interleaved pairs of many float32 or bfloat16 numbers are read as one number of twice the width
    each. A query or key that begins at an odd place of its storage cannot be read so, and PyTorch raises
    ("storage_offset() must be divisible by 2"); ``.clone()`` it first. Splits into heads never begin there.

    Args:
        None: what is asked is the machine.

    Returns:
        One entry per backend: ``name``, ``ready``, ``why``. ``"eager"`` is PyTorch's own operations, with few passes on
        the CPU; ``"compiled"`` the same fused by ``torch.compile``, which compiles at the first call and falls back to
        ``"eager"`` with one warning where it cannot; ``"triton"`` one hand-written kernel for CUDA tensors.

    Raises:
        Nothing: what is missing is in ``why``.

    Example:
        >>> import ndpos
        >>> [(backend.name, backend.ready) for backend in ndpos.backends()][0]
        ('eager', True)

    Source:
        This library; each is tested against the same float64 reference.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    no_compiler, no_triton = compiler_missing(device), _triton_missing()
    return (
        BackendState("eager", True, "PyTorch's own operations, on every device"),
        BackendState("compiled", not no_compiler, no_compiler or "fused by torch.compile at the first call"),
        BackendState("triton", not no_triton, no_triton or "one kernel for CUDA tensors, forward and backward"),
    )


def check_backend(caller: str, backend: str | None) -> None:
    """Raise unless ``backend`` is one, or None for the one that fits."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"{caller}: backend is None or one of {BACKENDS}, got {backend!r}; see ndpos.backends().")


def choose(caller: str, backend: str | None, device: torch.device) -> str:
    """The backend that turns tensors of ``device``, by name or by itself."""
    if backend is None:
        return "triton" if device.type == "cuda" and _triton_installed() else "eager"
    if backend == "triton":
        missing = _triton_missing() or ("" if device.type == "cuda" or _interpreted() else f"x is on {device}")
        if missing:
            raise ValueError(f"{caller}: backend 'triton' turns tensors of a GPU, and {missing}; see ndpos.backends().")
    if backend == "compiled" and _falls_back(device.type):
        return "eager"
    return backend


def reads_sources(backend: str | None, device: torch.device) -> bool:
    """Whether the kernel for ``device`` finds rows of a table by itself, so that it should be given where they are."""
    if torch.compiler.is_compiling() or backend not in (None, "triton"):
        return False
    return not _triton_missing() and (device.type == "cuda" or (backend == "triton" and _interpreted()))


@lru_cache(maxsize=8)
def _falls_back(device_type: str) -> bool:
    missing = compiler_missing(torch.device(device_type))
    if missing:
        warnings.warn(f"ndpos: backend 'compiled' falls back to 'eager': {missing}.", RuntimeWarning, stacklevel=2)
    return bool(missing)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=1)
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None  # searches the path: not for every tensor anew


def _triton_missing() -> str:
    """Why the Triton kernel cannot run; empty if it can."""
    if not _triton_installed():
        return "triton is not installed (it comes with torch for Linux)"
    if _interpreted() or torch.cuda.is_available():
        return ""
    return "torch sees no CUDA device"
