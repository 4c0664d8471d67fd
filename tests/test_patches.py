"""Patches of real inputs: as many as the patch embedding cuts, standing where it cuts them."""

import pytest
import references
import torch
from hypothesis import given
from hypothesis import strategies as st

import ndpos


@pytest.mark.parametrize("remainder", ["raise", "drop", "pad"])
@given(st.integers(0, 30), st.integers(1, 9), st.integers(1, 9), st.integers(0, 4))
def test_patches_are_counted_as_if_laid_down_one_by_one(remainder, size, patch, stride, padding):
    def count():
        return ndpos.patch_sizes((size,), patch=patch, stride=stride, padding=padding, remainder=remainder)

    counted = references.windows(size, patch, stride, padding, remainder)
    if counted is None:
        with pytest.raises(ValueError, match=r"^ndpos\.patch_sizes: axis 0 "):
            count()
    else:
        assert count() == (counted,)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_dropping_the_rest_is_what_a_convolution_does(axes):
    sizes, patch, stride, padding = (23, 17, 30)[:axes], (5, 4, 7)[:axes], (3, 4, 2)[:axes], (2, 0, 1)[:axes]
    convolution = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[axes - 1]
    cut = convolution(1, 1, patch, stride, padding, device="meta")(torch.empty(1, 1, *sizes, device="meta"))
    counted = ndpos.patch_sizes(sizes, patch=patch, stride=stride, padding=padding, remainder="drop")
    assert counted == cut.shape[2:]


def test_an_image_that_patches_do_not_divide_is_refused_dropped_or_padded_by_name():
    assert ndpos.patch_sizes((225, 230), patch=16, remainder="drop") == (14, 14)
    assert ndpos.patch_sizes((225, 230), patch=16, remainder="pad") == (15, 15)
    with pytest.raises(ValueError) as raised:
        ndpos.patch_sizes((224, 230), patch=16)
    assert str(raised.value) == (
        "ndpos.patch_sizes: axis 1 leaves 6 of 230 pixels over: size + 2*padding - patch is 214, stride is 16. "
        "Resize the image, or say what the patch embedding does: remainder='drop' or 'pad'."
    )


def test_a_table_for_another_number_of_patches_is_refused_with_both_numbers():
    emb = ndpos.SinusoidalEmbedding(ndpos.split(8, 2))
    table = emb.on_grid(ndpos.patch_sizes((225, 230), patch=16, remainder="drop"))
    tokens = torch.zeros(1, 15 * 15, 8)
    with pytest.raises(ValueError, match=r"(?s)x +\(1, 225, 8\).*table +\(196, 8\)"):
        ndpos.add(tokens, table)


def test_overlapping_patches_count_their_strides_on_every_axis():
    assert ndpos.patch_sizes((224, 224), patch=16, stride=8) == (27, 27)
    assert ndpos.patch_sizes((64, 251), patch=16, stride=10, remainder="drop") == (5, 24)
    assert len(ndpos.patch_grid((64, 251), patch=16, stride=10, remainder="drop").flatten(0, -2)) == 120
    assert ndpos.patch_sizes((64, 250), patch=(8, 16), stride=(8, 13)) == (8, 19)


@given(st.lists(st.integers(4, 16), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_a_patch_stands_in_the_middle_of_its_pixels(sizes, patch, stride, padding):
    cut = {"patch": patch, "stride": stride, "padding": padding, "remainder": "drop"}
    counts = ndpos.patch_sizes(sizes, **cut)
    middles = []
    for cell in references.cells(counts):
        pixels = [[index * stride + offset - padding for offset in range(patch)] for index in cell]
        middles.append([sum(each) / patch for each in pixels])
    coords = ndpos.patch_grid(sizes, unit="pixels", **cut)
    assert coords.dtype == torch.float64
    assert coords.shape == (*counts, len(sizes))
    torch.testing.assert_close(coords.flatten(0, -2), torch.tensor(middles, dtype=torch.float64), rtol=0, atol=1e-12)


def test_patches_are_counted_from_zero_unless_pixels_are_asked_for():
    assert torch.equal(ndpos.patch_grid((32, 48), patch=16), ndpos.grid((2, 3)))
    assert ndpos.patch_grid((32, 48), patch=16, device="meta").device.type == "meta"
    assert ndpos.patch_grid((32, 48), patch=16, unit="pixels", device="meta").device.type == "meta"


def test_one_patch_size_is_that_size_on_every_axis():
    for unit in ("patches", "pixels"):
        one = ndpos.patch_grid((32, 32), patch=8, stride=4, padding=2, unit=unit)
        assert torch.equal(one, ndpos.patch_grid((32, 32), patch=(8, 8), stride=(4, 4), padding=(2, 2), unit=unit))


def test_a_clip_stands_in_seconds_on_its_first_axis_and_in_steps_on_the_others():
    coords = ndpos.clip_grid((3, 2, 2), seconds_per_frame=0.04, start_seconds=10.0)
    assert coords.shape == (3, 2, 2, 3)
    assert coords[:, 1, 1].tolist() == [[10.0, 1, 1], [10.04, 1, 1], [10.08, 1, 1]]
    assert torch.equal(coords[1, ..., 1:].long(), ndpos.grid((2, 2)))
    assert ndpos.clip_grid((3,), seconds_per_frame=1).dtype == torch.float64


def test_frames_at_half_the_rate_stand_where_every_second_frame_stood():
    slow = ndpos.clip_grid((4, 2, 2), seconds_per_frame=0.5)
    assert torch.equal(ndpos.clip_grid((8, 2, 2), seconds_per_frame=0.25)[::2], slow)


def test_a_spectrogram_stands_in_bins_first_and_in_seconds_last():
    coords = ndpos.spectrogram_grid((2, 3), seconds_per_column=0.1, start_seconds=5)
    assert coords[1].tolist() == [[1.0, 5.0], [1.0, 5.1], [1.0, 5.2]]
    assert ndpos.spectrogram_grid((0, 4), seconds_per_column=0.1).shape == (0, 4, 2)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: ndpos.patch_sizes((8, 15), patch=16, stride=4, remainder="drop"),
            ValueError,
            "axis 0 has 8 pixels (+2*0), less than one patch of 16.",
        ),
        (
            lambda: ndpos.patch_sizes((32, 32), patch=(16,)),
            ValueError,
            "patch is one number or one per axis; got 1 for 2",
        ),
        (lambda: ndpos.patch_sizes((32,), patch=16, stride=0), ValueError, "stride are integers of at least 1, got 0."),
        (lambda: ndpos.patch_sizes((32,), patch=0), ValueError, "patch are integers of at least 1, got 0."),
        (
            lambda: ndpos.patch_sizes((32,), patch=8, padding=-1),
            ValueError,
            "padding are integers of at least 0, got -1.",
        ),
        (lambda: ndpos.patch_sizes((32,), patch=8.0), TypeError, "patch are integers, got 8.0."),
        (lambda: ndpos.patch_sizes(32, patch=8), TypeError, "image_sizes take one integer per axis, got 32."),
        (lambda: ndpos.patch_sizes((32.0,), patch=8), TypeError, "image_sizes are integers, got 32.0."),
        (
            lambda: ndpos.patch_sizes((32,), patch=8, remainder="crop"),
            ValueError,
            "remainder is 'raise', 'drop' or 'pad', got 'crop'.",
        ),
        (
            lambda: ndpos.patch_grid((32,), patch=8, unit="pixel"),
            ValueError,
            "ndpos.patch_grid: unit is 'patches' or 'pixels', got 'pixel'.",
        ),
        (
            lambda: ndpos.clip_grid(8, seconds_per_frame=1),
            TypeError,
            "ndpos.clip_grid: sizes take one integer per axis",
        ),
        (
            lambda: ndpos.spectrogram_grid((8,), seconds_per_column=1),
            ValueError,
            "ndpos.spectrogram_grid: sizes has 1 axes (8,), 2 were expected.",
        ),
    ],
)
def test_an_error_names_the_rule_and_what_was_seen(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)
