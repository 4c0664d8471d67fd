"""One rotation, as fast as the machine allows. This room and ``encode/rotary.py`` know what a pairing is, no other."""

from ndpos.kernels.eager import PAIRINGS, Pairing, turn_pairs

__all__ = ["PAIRINGS", "Pairing", "turn_pairs"]
