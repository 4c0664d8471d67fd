"""One rotation, as fast as the machine allows: which channels make a pair, and how a pair is turned."""

import ndpos.kernels.operator  # noqa: F401  # registers ndpos::turn
from ndpos.kernels.choice import Backend, backends, check_backend
from ndpos.kernels.pairing import PAIRINGS, Pairing, Turning, check_blocks, pair_channels
from ndpos.kernels.turning import turn_all

__all__ = [
    "PAIRINGS",
    "Backend",
    "Pairing",
    "Turning",
    "backends",
    "check_backend",
    "check_blocks",
    "pair_channels",
    "turn_all",
]
