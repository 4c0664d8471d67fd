"""timm's rotary conventions, each written as coordinates, a frequency matrix and a pairing.

Registered models are built without weights and cut to one layer: their rope carries the settings timm ships.
"""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import ndpos

timm = pytest.importorskip("timm", reason="parity with timm needs timm")
sincos = pytest.importorskip("timm.layers.pos_embed_sincos", reason="parity with timm needs timm's sin-cos room")
attention = pytest.importorskip("timm.layers.attention", reason="parity with timm needs timm's attention room")


def rope_of(name, sizes, *, patch=16):
    """The rope of a registered model cut to one layer of two heads of 64 channels, on a grid of `sizes` patches."""
    image = [patch * n for n in sizes]
    return timm.create_model(name, depth=1, embed_dim=128, num_heads=2, num_classes=0, img_size=image).rope


def turned_by(table, *, half):
    """timm's own application of one of its `[sin | cos]` tables."""
    return lambda q, k: tuple(sincos.apply_rot_embed_cat(x, table, half=half) for x in (q, k))


def test_eva02_scales_its_grid_to_the_training_grid_and_pairs_neighbours_y_before_x(sizes, agree):
    theirs = rope_of("eva02_tiny_patch14_224", sizes, patch=14)
    split = ndpos.split(64, 2)
    frequencies = ndpos.geometric(split, base=1e4)
    coords = ndpos.scaled_grid(sizes, reference_sizes=theirs.ref_feat_shape, align="index").flatten(0, -2)
    agree(
        split,
        frequencies,
        coords,
        pairing="interleaved",
        theirs=turned_by(theirs.get_embed(), half=False),
        ladder=theirs.bands.repeat(2),
    )


def test_perception_encoder_counts_from_one_before_it_scales_and_puts_x_first(sizes, agree):
    theirs = rope_of("vit_pe_core_tiny_patch16_384", sizes)
    split = ndpos.AxisSplit((32, 32), order=(1, 0))
    frequencies = ndpos.geometric(split, base=1e4)
    step = [reference / size for reference, size in zip(theirs.ref_feat_shape, sizes, strict=True)]
    coords = ndpos.grid(sizes, start=step, step=step).flatten(0, -2)  # (i + 1) * reference / size
    agree(
        split,
        frequencies,
        coords,
        pairing="interleaved",
        theirs=turned_by(theirs.get_embed(), half=False),
        ladder=theirs.bands.repeat(2),
    )


def test_rope_vit_axial_puts_x_first_with_base_100(sizes, agree):
    theirs = rope_of("vit_small_patch16_rope_224", sizes)
    split = ndpos.AxisSplit((32, 32), order=(1, 0))
    agree(
        split,
        ndpos.geometric(split, base=100.0),
        ndpos.grid(sizes).flatten(0, -2),
        pairing="interleaved",
        theirs=turned_by(theirs.get_embed(), half=False),
        ladder=theirs.bands.repeat(2),
    )


@pytest.mark.parametrize("spacing", ["linear", "log"])
def test_pixel_bands_turn_a_grid_that_ends_at_its_corners(sizes, spacing, agree):
    theirs = sincos.RotaryEmbeddingCat(64, in_pixels=True, max_res=224, linear_bands=spacing == "linear")
    split = ndpos.split(64, 2)
    agree(
        split,
        ndpos.pixel_bands(split, max_frequency=224.0, spacing=spacing),
        ndpos.normalised_grid(sizes, at="ends").flatten(0, -2),
        pairing="interleaved",
        theirs=turned_by(theirs.get_embed(sizes), half=False),
        ladder=theirs.bands.repeat(2),
    )


def test_dinov3_turns_cell_centres_normalised_per_axis_by_periods_of_base_100(sizes, agree):
    theirs = rope_of("vit_small_patch16_dinov3", sizes)
    split = ndpos.split(64, 2)
    agree(
        split,
        ndpos.periodic(split, base=100.0),
        ndpos.normalised_grid(sizes, by="axis", at="centre").flatten(0, -2),
        pairing="half",
        theirs=turned_by(theirs.get_embed(sizes), half=True),
        ladder=2 * math.pi / theirs.periods.double().repeat(2),
    )


@pytest.mark.parametrize(("by", "named_by_timm"), [("axis", "separate"), ("shortest", "min"), ("longest", "max")])
def test_dinov3_between_two_periods_under_each_normalisation(sizes, by, named_by_timm, agree):
    theirs = sincos.RotaryEmbeddingDinoV3(64, min_period=0.4, max_period=20.0, normalize_coords=named_by_timm)
    split = ndpos.split(64, 2)
    agree(
        split,
        ndpos.periodic(split, shortest=0.4, longest=20.0),
        ndpos.normalised_grid(sizes, by=by, at="centre").flatten(0, -2),
        pairing="half",
        theirs=turned_by(theirs.get_embed(sizes), half=True),
        ladder=2 * math.pi / theirs.periods.double().repeat(2),
    )


@pytest.mark.parametrize(("head_dim", "counts"), [(72, (12, 12, 12)), (64, (11, 11, 10))], ids=["tiles", "clamped"])
def test_mrope_takes_an_image_for_a_clip_of_one_frame_with_axes_in_turn(sizes, head_dim, counts, agree):
    nominal = (8, 12, 12)  # timm clamps these to the 32 pairs of 64 channels: 11, 11 and 10 are what it turns
    theirs = sincos.RotaryEmbeddingMRope(head_dim, mrope_section=nominal)
    assert tuple(theirs.axis.bincount().tolist()) == counts
    agree(
        ndpos.AxisSplit([2 * count for count in counts]),
        ndpos.sections(counts, base=1e4, layout="interleaved"),
        ndpos.grid((1, *sizes)).flatten(0, -2),
        pairing="half",
        theirs=turned_by(theirs.get_embed(sizes), half=True),
        ladder=theirs.inv_freq,
    )


def as_matrix(freqs):
    """timm's mixed weights `(x then y, layers, heads, pairs)` as `(layers, heads, axes, pairs)`, rows y then x."""
    return freqs.detach().flip(0).permute(1, 2, 0, 3)


def test_rope_mixed_is_one_dense_matrix_per_layer_and_head(sizes):
    torch.manual_seed(0)
    layers, heads, head_dim = 3, 2, 32
    theirs = sincos.RotaryEmbeddingMixed(dim=heads * head_dim, depth=layers, num_heads=heads)
    frequencies = as_matrix(theirs.freqs)
    coords = ndpos.grid(sizes).flatten(0, -2)
    angles = ndpos.angles(coords, frequencies)
    tolerance = 1e-6 * max(1.0, angles.abs().max().item())
    tables = theirs.get_embed(sizes).detach()
    q = 2 * torch.rand(1, heads, len(coords), head_dim, generator=torch.Generator().manual_seed(0)) - 1

    split = ndpos.split(head_dim, 2)
    rope = ndpos.RotaryEmbedding(split, pairing="interleaved", frequencies=frequencies, heads=heads, layers=layers)
    turn = rope(coords)
    for layer in range(layers):
        expected = sincos.apply_rot_embed_cat(q, tables[layer])
        torch.testing.assert_close(turn.layer(layer)(q), expected, rtol=0.0, atol=tolerance)
        by_hand = ndpos.rotate(q, angles[layer][None], pairing="interleaved")
        torch.testing.assert_close(by_hand, expected, rtol=0.0, atol=tolerance)
        assert (turn.layer((layer + 1) % layers)(q) - expected).abs().max() > 0.1  # the twin: another layer's matrix


def test_rope_mixed_starts_as_timm_starts_it_with_two_ladders_a_quarter_turn_apart():
    torch.manual_seed(0)
    layers, heads, pairs = 2, 256, 16
    theirs = as_matrix(sincos.RotaryEmbeddingMixed(dim=heads * 2 * pairs, depth=layers, num_heads=heads).freqs)
    ours = ndpos.mixed(2, pairs, heads=heads, layers=layers, base=10.0, generator=torch.Generator().manual_seed(0))
    assert ours.shape == theirs.shape

    lengths = theirs.double().norm(dim=-2)
    torch.testing.assert_close(ours.double().norm(dim=-2), lengths, rtol=1e-6, atol=0.0)
    for matrix in (ours.double(), theirs.double()):
        directions = torch.complex(matrix[..., 1, :], matrix[..., 0, :]) / lengths  # x + iy
        first, second = directions[..., : pairs // 2], directions[..., pairs // 2 :]
        torch.testing.assert_close(first, first[..., :1].expand_as(first), rtol=0.0, atol=1e-6)
        torch.testing.assert_close(second, 1j * first, rtol=0.0, atol=1e-6)
        quadrants = (first[..., 0].angle() / (math.pi / 2)).floor().unique()
        assert len(quadrants) == 4  # one direction per layer and head, drawn from the whole circle


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_timm_attention_answers_the_same_with_ndpos_turning_all_but_its_prefix_tokens(sizes, pairing):
    torch.manual_seed(0)
    half, prefix, heads = pairing == "half", 5, 2
    attend = attention.AttentionRope(64, num_heads=heads, num_prefix_tokens=prefix, rotate_half=half).eval()
    table = sincos.RotaryEmbeddingCat(32, in_pixels=False, rotate_half=half).get_embed(sizes)
    x = torch.randn(2, prefix + math.prod(sizes), 64, generator=torch.Generator().manual_seed(0))

    rope = ndpos.RotaryEmbedding(ndpos.split(32, 2), pairing=pairing, base=1e4)
    turn = rope(ndpos.grid(sizes).flatten(0, -2), num_prefix=prefix)
    q, k, v = attend.qkv(x).unflatten(-1, (3, heads, 32)).permute(2, 0, 3, 1, 4)
    mixed = scaled_dot_product_attention(turn(q), turn.keys(k), v)
    torch.testing.assert_close(attend.proj(mixed.transpose(1, 2).flatten(2)), attend(x, rope=table))

    assert torch.equal(turn(q)[..., :prefix, :], q[..., :prefix, :])
    assert torch.equal(turn.keys(k)[..., :prefix, :], k[..., :prefix, :])
