"""The vision rotaries of transformers, each written as coordinates, a frequency matrix and a pairing.

Positions come from transformers' own builders wherever it has one that stands alone.
"""

import math

import pytest
import torch

import ndpos

pytest.importorskip("transformers", reason="parity with transformers needs transformers")


def patch_positions(thw, *, merge, temporal=False):
    """transformers' own (t,) y, x of every patch of a clip, tokens of a merged block next to each other."""
    vision = pytest.importorskip("transformers.vision_utils", reason="this transformers builds positions elsewhere")
    return vision.get_vision_position_ids(torch.tensor([thw]), merge, include_temporal=temporal)


def tokens_first(apply, cos, sin):
    """A peer's apply function on `(tokens, heads, head_dim)`, asked with `(1, heads, tokens, head_dim)`."""
    return lambda q, k: tuple(x.transpose(0, 1)[None] for x in apply(*(x[0].transpose(0, 1) for x in (q, k)), cos, sin))


def test_dinov3_skips_as_many_leading_tokens_as_it_has_too_many(sizes, agree, model):
    configuration, modeling = model("dinov3_vit")
    config = configuration.DINOv3ViTConfig(hidden_size=128, num_attention_heads=2, patch_size=16)
    theirs = modeling.DINOv3ViTRopePositionEmbedding(config).eval()
    cos, sin = theirs(torch.zeros(1, 3, *(16 * n for n in sizes)))
    split = ndpos.split(64, 2)
    agree(
        split,
        ndpos.periodic(split, base=config.rope_theta),
        ndpos.normalised_grid(sizes, by="axis", at="centre").flatten(0, -2),
        pairing="half",
        theirs=lambda q, k: modeling.apply_rotary_pos_emb(q, k, cos, sin),
        ladder=2 * math.pi * theirs.inv_freq.double().repeat(2),
        num_prefix=5,
    )


def test_pixtral_deals_one_ladder_to_y_and_x_in_turn(sizes, agree, model):
    configuration, modeling = model("pixtral")
    config = configuration.PixtralVisionConfig(hidden_size=128, num_attention_heads=2)
    theirs = modeling.PixtralVisionRotaryEmbedding(config)
    coords = ndpos.grid(sizes).flatten(0, -2)
    cos, sin = theirs(torch.zeros(1), coords)
    split = ndpos.split(64, 2)
    agree(
        split,
        ndpos.alternating(split, base=config.rope_parameters["rope_theta"]),
        coords,
        pairing="half",
        theirs=lambda q, k: modeling.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=0),
        ladder=theirs.inv_freq,
    )


def test_qwen2_vl_vision_walks_the_grid_in_merged_blocks(sizes, agree, model):
    configuration, modeling = model("qwen2_vl")
    config = configuration.Qwen2VLVisionConfig(embed_dim=128, num_heads=2)
    theirs = modeling.Qwen2VLVisionRotaryEmbedding(config)
    merge = 1 if any(n % 2 for n in sizes) else config.spatial_merge_size
    cos, sin = theirs(torch.zeros(1), patch_positions([1, *sizes], merge=merge))
    rows, columns = (n // merge for n in sizes)
    blocks = ndpos.grid(sizes).reshape(rows, merge, columns, merge, 2).transpose(1, 2)
    split = ndpos.split(64, 2)
    agree(
        split,
        ndpos.geometric(split, base=config.rope_parameters["rope_theta"]),
        blocks.flatten(0, -2),
        pairing="half",
        theirs=tokens_first(modeling.apply_rotary_pos_emb_vision, cos, sin),
        ladder=theirs.inv_freq.repeat(2),
    )


def test_kimi_gives_every_frequency_to_x_then_to_y_before_the_next(sizes, agree, model):
    configuration, modeling = model("kimi_k25")
    config = configuration.Kimi_K25VisionConfig(hidden_size=128, num_attention_heads=2)
    theirs = modeling.Kimi_K25VisionRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), patch_positions([1, *sizes], merge=1))
    split = ndpos.AxisSplit((32, 32), order=(1, 0))
    agree(
        split,
        ndpos.interleave_axes(ndpos.geometric(split, base=config.rope_parameters["rope_theta"])),
        ndpos.grid(sizes).flatten(0, -2),
        pairing="half",
        theirs=tokens_first(modeling.apply_rotary_pos_emb_vision, cos, sin),
        ladder=theirs.inv_freq.repeat_interleave(2),
    )


def test_gemma4_vision_pairs_halves_within_the_block_of_each_axis_x_first(sizes, agree, model):
    configuration, modeling = model("gemma4")
    processing = pytest.importorskip(
        "transformers.models.gemma4.image_processing_gemma4",
        reason="Gemma-4's patch positions need its processor, which needs torchvision",
    )
    processor = processing.Gemma4ImageProcessor(do_resize=False, patch_size=16)
    image = torch.zeros(3, *(16 * n for n in sizes))
    positions = processor(image, return_tensors="pt")["image_position_ids"][:, : math.prod(sizes)]
    config = configuration.Gemma4VisionConfig(hidden_size=128, num_attention_heads=2, head_dim=64)
    theirs = modeling.Gemma4VisionRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), positions)

    def turned(x):
        return modeling.apply_multidimensional_rope(x.transpose(1, 2), cos, sin, positions).transpose(1, 2)

    split = ndpos.AxisSplit((32, 32), order=(1, 0))
    agree(
        split,
        ndpos.geometric(split, base=config.rope_parameters["rope_theta"]),
        ndpos.grid(sizes).flatten(0, -2),
        pairing="half_per_axis",
        theirs=lambda q, k: (turned(q), turned(k)),
        ladder=theirs.inv_freq.repeat(2),
    )


@pytest.mark.parametrize("side", [6, 7])
def test_llama4_vision_counts_from_one_x_first_and_leaves_its_last_token_alone(side, agree, model):
    configuration, modeling = model("llama4")  # its table is square by construction
    config = configuration.Llama4VisionConfig(
        hidden_size=128, num_attention_heads=2, patch_size=14, image_size=14 * side
    )
    theirs = modeling.Llama4VisionRotaryEmbedding(config)

    def turned(q, k):
        turned = modeling.vision_apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), theirs(q))
        return tuple(x.transpose(1, 2) for x in turned)

    split = ndpos.AxisSplit((32, 32), order=(1, 0))
    frequencies = ndpos.geometric(split, base=config.rope_parameters["rope_theta"])
    first_patch = theirs.freqs_ci[0, 0].angle()  # at (1, 1) every angle is its frequency
    agree(
        split,
        frequencies,
        ndpos.grid((side, side), start=1).flatten(0, -2),
        pairing="interleaved",
        theirs=turned,
        ladder=first_patch,
        num_suffix=1,
    )


def test_minimax_m3_vision_turns_three_axes_and_leaves_the_channels_left_over(sizes, agree, model):
    configuration, modeling = model("minimax_m3_vl")
    config = configuration.MiniMaxM3VLVisionConfig(hidden_size=160, num_attention_heads=2)
    theirs = modeling.MiniMaxM3VLVisionRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), patch_positions([3, *sizes], merge=1, temporal=True))
    split = ndpos.split(80, 3, remainder="tail")  # 26 channels each, two of 80 stay
    agree(
        split,
        ndpos.geometric(split, base=config.rope_parameters["rope_theta"]),
        ndpos.grid((3, *sizes)).flatten(0, -2),
        pairing="half",
        theirs=tokens_first(modeling.apply_rotary_pos_emb_vision, cos, sin),
        ladder=theirs.inv_freq.repeat(3),
    )


def test_sam2_memory_attention_puts_x_first_and_leaves_its_trailing_object_pointers(sizes, agree, model):
    configuration, modeling = model("sam2_video")
    config = configuration.Sam2VideoConfig(
        memory_attention_hidden_size=64,
        memory_attention_num_attention_heads=1,
        memory_attention_rope_feat_sizes=list(reversed(sizes)),
    )
    theirs = modeling.Sam2VideoVisionRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), modeling.Sam2VideoMemoryAttention.precompute_positions(config))
    pointers = 4

    def turned(q, k):  # pointers are keys only: queries are asked without them
        patches = q[..., :-pointers, :]
        patches, k = modeling.apply_rotary_pos_emb_2d(patches, k, cos, sin, num_k_exclude_rope=pointers)
        return torch.cat((patches, q[..., -pointers:, :]), dim=-2), k

    split = ndpos.AxisSplit((32, 32), order=(1, 0))
    agree(
        split,
        ndpos.geometric(split, base=config.rope_parameters["rope_theta"]),
        ndpos.grid(sizes).flatten(0, -2),
        pairing="interleaved",
        theirs=turned,
        ladder=theirs.inv_freq.repeat(2),
        num_suffix=pointers,
    )
