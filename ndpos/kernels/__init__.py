"""One rotation, as fast as the machine allows: which channels make a pair, and how a pair is turned."""

import ndpos.kernels.operator  # noqa: F401  # registers ndpos::turn
from ndpos.kernels.choice import Backend, backends, check_backend, reads_sources
from ndpos.kernels.pairing import PAIRINGS, Lattice, Pairing, Source, Turning, check_blocks, pair_channels
from ndpos.kernels.turning import turn_all

__all__ = [
    "PAIRINGS",
    "Backend",
    "Lattice",
    "Pairing",
    "Source",
    "Turning",
    "backends",
    "check_backend",
    "check_blocks",
    "pair_channels",
    "reads_sources",
    "turn_all",
]
