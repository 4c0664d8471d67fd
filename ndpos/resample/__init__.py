"""A table moved to another grid: one separable resampler for any number of axes.

Every axis has one small matrix ``(new, old)`` of weights, or a rule for which row comes from where, and axes are moved
one after the other, so that a clip needs no other code than a picture. Sizes are integers from end to end: no scale
factor decides a size or a place. Read in this order: ``weights`` of one axis, ``ways`` (a kernel or policy),
``conventions`` (those of others, by name), ``moving`` (of a whole table), ``tiles``, ``table`` (the front door).
"""

from ndpos.resample.conventions import Like
from ndpos.resample.table import Changes, changes, resize
from ndpos.resample.ways import Policy
from ndpos.resample.weights import Align, Kernel

__all__ = ["Align", "Changes", "Kernel", "Like", "Policy", "changes", "resize"]
