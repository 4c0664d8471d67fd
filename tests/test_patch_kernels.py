"""Patch-embedding kernels moved to other patches: resized patches give the tokens that they gave before."""

import functools
import math

import numpy as np
import pytest
import references
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import ndpos
from ndpos.resample import patch_kernel_changes

closely = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-10)


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def resizing(old, new, kernel, antialias):
    """The matrix ``(prod(new), prod(old))`` that resizes a patch."""
    pairs = zip(old, new, strict=True)
    matrices = [references.resample_matrix(o, n, kernel, antialias, "centre") for o, n in pairs]
    return functools.reduce(torch.kron, [torch.tensor(each, dtype=torch.float64) for each in matrices])


sizes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(sizes, st.sampled_from(["linear", "cubic", "keys"]), st.booleans())
def test_any_axes_equal_the_pseudo_inverse_of_the_whole_matrix(pairs, kernel, antialias):
    old, new = zip(*pairs, strict=True)
    weight = drawn(2, 3, *old)
    matrix = resizing(old, new, kernel, antialias)
    # The cut-off of the peer's numpy is for the whole matrix; singular values this small would be a matter of taste.
    singular = torch.linalg.svdvals(matrix)
    if ((singular < 1e-6) & (singular > 1e-14)).any():
        return
    inverse = torch.from_numpy(np.linalg.pinv(matrix.T.numpy()))
    ours = ndpos.resize_patch_kernel(weight, new, kernel=kernel, antialias=antialias)
    torch.testing.assert_close(ours.reshape(6, -1), weight.reshape(6, -1) @ inverse.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("old", "new"), [((16,), (32,)), ((16, 16), (24, 20)), ((2, 8, 8), (4, 8, 12))])
def test_larger_patches_give_the_same_tokens(old, new):
    weight, patches = drawn(5, 3, *old), drawn(4, 3, *old, seed=1)
    resized = (patches.reshape(12, -1) @ resizing(old, new, "linear", False).T).reshape(4, 3, *new)
    moved = ndpos.resize_patch_kernel(weight, new, kernel="linear", antialias=False)
    before, after = (x.flatten(1) @ w.flatten(1).T for x, w in ((patches, weight), (resized, moved)))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)


def test_smaller_patches_give_the_nearest_tokens():
    """The kernel is the least squares solution over white patches: no other is nearer."""
    weight, matrix = drawn(1, 1, 8, 8), resizing((8, 8), (5, 5), "cubic", True)
    moved = ndpos.resize_patch_kernel(weight, (5, 5)).flatten()
    assert (matrix @ (matrix.T @ moved - weight.flatten())).abs().max() < 1e-10  # normal equations


@pytest.mark.parametrize("new", [(8, 8), (14, 14), (32, 32), (12, 20)], ids=str)
def test_timm(new):
    embed = pytest.importorskip("timm.layers.patch_embed", reason="parity with timm needs timm")
    weight = drawn(6, 3, 16, 16).float()
    theirs = embed.resample_patch_embed(weight, list(new))
    torch.testing.assert_close(ndpos.resize_patch_kernel(weight, new), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_kept_and_equal_sizes_change_nothing(dtype):
    weight = drawn(4, 3, 8, 8).to(dtype)
    ours = ndpos.resize_patch_kernel(weight, (12, 8))
    assert ours.dtype == dtype
    assert torch.equal(ours, ndpos.resize_patch_kernel(weight.double(), (12, 8)).to(dtype))
    assert torch.equal(ndpos.resize_patch_kernel(weight, (8, 8)), weight)


def test_gradients_move_as_patches_do_and_their_squares_stay_positive():
    """The gradient of a kernel is a sum of patches: of resized ones it is resized."""
    old, new = (4, 4), (6, 5)
    patches, above = drawn(7, 3, *old), drawn(7, 2, seed=1)
    matrix = resizing(old, new, "cubic", True)
    resized = (patches.reshape(21, -1) @ matrix.T).reshape(7, 3, *new)
    before, after = (torch.einsum("bo,bchw->ochw", above, x) for x in (patches, resized))
    move = patch_kernel_changes(new)
    closely(move.averages(before), after)
    spike = torch.zeros(1, 1, 8, 8)
    spike[0, 0, 3, 3] = 1.0
    assert patch_kernel_changes((11, 11)).squares(spike).min() >= 0
    assert patch_kernel_changes((11, 11)).averages(spike).min() < -0.01


@pytest.mark.parametrize("frames", [1, 2, 3, 16])
@pytest.mark.parametrize("how", ["mean", "centre"])
def test_a_still_clip_gives_the_tokens_of_its_picture(frames, how):
    weight, picture = drawn(5, 3, 4, 4), drawn(2, 3, 8, 8, seed=1)
    kernel = ndpos.inflate_patch_kernel(weight, frames, how=how)
    assert kernel.shape == (5, 3, frames, 4, 4)
    clip = picture[:, :, None].expand(-1, -1, frames, -1, -1)
    closely(F.conv3d(clip, kernel, stride=(frames, 4, 4))[:, :, 0], F.conv2d(picture, weight, stride=4))
    if how == "centre":
        assert torch.equal(kernel[:, :, frames // 2], weight)
        assert kernel.count_nonzero() == weight.numel()
    else:
        assert all(torch.equal(frame, kernel[:, :, 0]) for frame in kernel.unbind(2))


def test_pictures_become_clips_of_another_patch():
    weight = drawn(5, 3, 16, 16)
    kernel = ndpos.resize_patch_kernel(ndpos.inflate_patch_kernel(weight, 2), (2, 8, 8))
    closely(kernel[:, :, 0] * 2, ndpos.resize_patch_kernel(weight, (8, 8)))
    assert math.prod(kernel.shape[2:]) == 128


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda w: ndpos.resize_patch_kernel(w, (0, 4)), ValueError, ["at least 1"]),
        (lambda w: ndpos.resize_patch_kernel(w, 4), TypeError, ["one integer per axis"]),
        (lambda w: ndpos.resize_patch_kernel(w, (1,) * 5), ValueError, ["(..., *old_sizes)", "got (2, 3, 4, 4)"]),
        (lambda w: ndpos.resize_patch_kernel(w.long(), (2, 2)), ValueError, ["torch.int64 cannot be resampled"]),
        (lambda w: ndpos.resize_patch_kernel(w, (2, 2), kernel="nearest"), ValueError, ["'nearest'"]),
        (lambda w: ndpos.resize_patch_kernel(w, (2, 2), antialias=1), TypeError, ["antialias is True or False"]),
        (lambda w: ndpos.inflate_patch_kernel(w, 0), ValueError, ["frames", "at least 1"]),
        (lambda w: ndpos.inflate_patch_kernel(w, 2.0), TypeError, ["got 2.0"]),
        (lambda w: ndpos.inflate_patch_kernel(w, 2, how="repeat"), ValueError, ["how is 'mean' or 'centre'"]),
        (lambda w: ndpos.inflate_patch_kernel(w[0, 0], 2), ValueError, ["(out, in, *sizes)", "(4, 4)"]),
    ],
)
def test_a_refusal_says_what_was_seen(call, error, says):
    with pytest.raises(error) as refused:
        call(torch.zeros(2, 3, 4, 4))
    for part in says:
        assert part in str(refused.value)
