"""A table moved to another grid: one separable resampler for any number of axes.

Every axis has one small matrix ``(new, old)`` of weights, or a rule for which row comes from where, and axes are moved
one after the other, so that a clip needs no other code than a picture. Sizes are integers from end to end: no scale
factor decides a size or a place. Read in this order: ``weights`` of one axis, ``ways`` (a kernel or policy),
``conventions`` (those of others, by name), ``moving`` (of a whole table), ``tiles``, ``table`` (the front door); then
what else moves with a grid: ``biases`` and ``patch_kernels``.
"""

from ndpos.resample.biases import bias_changes, resize_bias
from ndpos.resample.conventions import Like
from ndpos.resample.patch_kernels import inflate_patch_kernel, patch_kernel_changes, resize_patch_kernel
from ndpos.resample.table import Changes, changes, resize
from ndpos.resample.ways import Policy, changes_nothing
from ndpos.resample.weights import Align, Kernel

__all__ = [
    "Align",
    "Changes",
    "Kernel",
    "Like",
    "Policy",
    "bias_changes",
    "changes",
    "changes_nothing",
    "inflate_patch_kernel",
    "patch_kernel_changes",
    "resize",
    "resize_bias",
    "resize_patch_kernel",
]
