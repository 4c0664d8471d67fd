"""The text rotaries of transformers: one ladder over all pairs, whose columns listen to time, height and width.

Text stands on the diagonal t = y = x, an image or clip spreads over it: always one coordinate triple per token.
"""

import pytest
import torch

import ndpos

pytest.importorskip("transformers", reason="parity with transformers needs transformers")


@pytest.fixture
def conversation(sizes):
    """(t, y, x) of five words, a clip of two frames, and three words after it."""
    before = ndpos.grid((5,)).expand(5, 3)
    clip = ndpos.grid((2, *sizes), start=5).flatten(0, -2)
    after = ndpos.grid((3,), start=5 + max(sizes)).expand(3, 3)
    return torch.cat((before, clip, after))


def rotary(modeling, theirs, coords):
    """The peer's own rotation of tokens at `coords`, for positions it wants as (axes, batch, tokens)."""
    cos, sin = theirs(torch.zeros(1), coords.T[:, None])
    return lambda q, k: modeling.apply_rotary_pos_emb(q, k, cos, sin)


def channel_order(theirs, *, pairing):
    """The peer's ladder in the order of its pairs, put there by the peer itself."""
    ladder = theirs.recomposition_frequencies(theirs.inv_freq.expand(3, 1, 1, -1).clone()).flatten()
    return ladder[::2] if pairing == "interleaved" else ladder[: len(ladder) // 2]


def test_qwen2_vl_text_cuts_one_ladder_into_a_chunk_for_each_axis(conversation, agree, model):
    configuration, modeling = model("qwen2_vl")
    config = configuration.Qwen2VLTextConfig(hidden_size=256, num_attention_heads=2)
    theirs = modeling.Qwen2VLRotaryEmbedding(config)
    agree(
        ndpos.AxisSplit([2 * count for count in theirs.mrope_section]),
        ndpos.sections(theirs.mrope_section, base=config.rope_parameters["rope_theta"], layout="chunked"),
        conversation,
        pairing="half",
        theirs=rotary(modeling, theirs, conversation),
        ladder=channel_order(theirs, pairing="half"),
    )


def test_qwen3_vl_text_gives_the_axes_turns_and_the_slow_end_to_time(conversation, agree, model):
    configuration, modeling = model("qwen3_vl")
    config = configuration.Qwen3VLTextConfig(hidden_size=256, num_attention_heads=2, head_dim=128)
    theirs = modeling.Qwen3VLTextRotaryEmbedding(config)
    agree(
        ndpos.AxisSplit([2 * count for count in theirs.mrope_section]),
        ndpos.sections(theirs.mrope_section, base=config.rope_parameters["rope_theta"], layout="interleaved"),
        conversation,
        pairing="half",
        theirs=rotary(modeling, theirs, conversation),
        ladder=channel_order(theirs, pairing="half"),
    )


def test_glm4v_text_turns_neighbouring_channels_of_the_first_half_of_each_head(conversation, agree, model):
    configuration, modeling = model("glm4v")
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    config = configuration.Glm4vTextConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rope)
    theirs = modeling.Glm4vTextRotaryEmbedding(config)
    agree(
        ndpos.AxisSplit((16, 24, 24), dim=128),
        ndpos.sections(theirs.mrope_section, base=1e4, layout="chunked"),
        conversation,
        pairing="interleaved",
        theirs=rotary(modeling, theirs, conversation),
        ladder=channel_order(theirs, pairing="interleaved"),
    )


def test_ernie_45_vl_is_a_pattern_of_its_own_and_still_one_matrix(conversation, agree, model):
    configuration, modeling = model("ernie4_5_vl_moe")
    config = configuration.Ernie4_5_VLMoeTextConfig(hidden_size=256, num_attention_heads=2)
    theirs = modeling.Ernie4_5_VLMoeTextRotaryEmbedding(config)
    height, width, time = theirs.mrope_section
    ladder = ndpos.geometric(ndpos.split(128, 1), base=config.rope_parameters["rope_theta"])[0]
    frequencies = torch.zeros(3, 64, dtype=torch.float64)
    frequencies[1, : 2 * height : 2] = ladder[: 2 * height : 2]  # height and width take turns at the fast end,
    frequencies[2, 1 : 2 * width : 2] = ladder[1 : 2 * width : 2]
    frequencies[0, -time:] = ladder[-time:]  # time has the slow end
    agree(
        ndpos.AxisSplit((2 * time, 2 * height, 2 * width)),
        frequencies,
        conversation,
        pairing="interleaved",
        theirs=rotary(modeling, theirs, conversation),
        ladder=channel_order(theirs, pairing="interleaved"),
    )


def test_llama_is_one_axis(agree, model):
    configuration, modeling = model("llama")
    config = configuration.LlamaConfig(hidden_size=128, num_attention_heads=2)
    theirs = modeling.LlamaRotaryEmbedding(config)
    coords = ndpos.grid((31,))
    split = ndpos.split(64, 1)
    agree(
        split,
        ndpos.geometric(split, base=config.rope_parameters["rope_theta"]),
        coords,
        pairing="half",
        theirs=lambda q, k: modeling.apply_rotary_pos_emb(q, k, *theirs(q, coords.T)),
        ladder=theirs.inv_freq,
    )


def test_gemma4_text_keeps_the_fast_quarter_of_one_ladder_and_stills_the_rest(agree, model):
    configuration, modeling = model("gemma4")
    config = configuration.Gemma4TextConfig(hidden_size=128, num_attention_heads=2, global_head_dim=64)
    theirs = modeling.Gemma4TextRotaryEmbedding(config)
    settings = config.rope_parameters["full_attention"]
    coords = ndpos.grid((31,))
    cos, sin = theirs(torch.zeros(1), coords.T, "full_attention")
    split = ndpos.split(cos.shape[-1], 1)
    ladder = ndpos.geometric(split, base=settings["rope_theta"])
    agree(
        split,
        ndpos.keep_highest(ladder, settings["partial_rotary_factor"]),
        coords,
        pairing="half",
        theirs=lambda q, k: tuple(modeling.apply_rotary_pos_emb(x, cos, sin) for x in (q, k)),
        ladder=theirs.full_attention_inv_freq,
    )
