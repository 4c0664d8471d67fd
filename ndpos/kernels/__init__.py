"""One rotation, as fast as the machine allows: which channels make a pair, and how a pair is turned."""

from ndpos.kernels.eager import turn_pairs
from ndpos.kernels.pairing import PAIRINGS, Pairing, check_blocks, pair_channels

__all__ = ["PAIRINGS", "Pairing", "check_blocks", "pair_channels", "turn_pairs"]
