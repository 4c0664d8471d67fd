"""Added sinusoids of the peers: the same coordinates and frequencies as a rotation, spent as sines and cosines."""

import pytest
import torch

import ndpos


def same_table(coords, theirs, **convention):
    """Assert that ndpos' table at `coords` is the peer's, to 1e-6 of the largest angle: the fastest pair turns by 1."""
    tolerance = 1e-6 * max(1.0, float(coords.abs().max()))
    ours = ndpos.SinusoidalEmbedding(**convention)(coords)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=tolerance)

    # The twin: with the axes in another order, or with channels laid out otherwise, it is another table.
    layouts = {"interleaved", "sin_cos", "axis_sin_cos"} - {convention["layout"]}
    if convention["split"].axes == 1:
        layouts -= {"sin_cos", "axis_sin_cos"}
    else:
        swapped = ndpos.SinusoidalEmbedding(**convention)(coords.flip(-1))
        assert (swapped - theirs).abs().max() > 0.1
    for layout in layouts:
        other = ndpos.SinusoidalEmbedding(**{**convention, "layout": layout})(coords)
        assert (other - theirs).abs().max() > 0.1


def test_whisper_reaches_its_base_and_puts_all_sines_before_all_cosines():
    whisper = pytest.importorskip(
        "transformers.models.whisper.modeling_whisper", reason="Whisper's table needs transformers"
    )
    same_table(
        ndpos.grid((300,)),
        whisper.sinusoids(300, 64, max_timescale=10000),
        split=ndpos.split(64, 1),
        base=1e4,
        endpoint="closed",
        layout="sin_cos",
    )


def test_distilbert_interleaves_sine_and_cosine_as_vaswani_does():
    distilbert = pytest.importorskip(
        "transformers.models.distilbert.modeling_distilbert", reason="DistilBERT's table needs transformers"
    )
    theirs = torch.empty(128, 48)
    distilbert.create_sinusoidal_embeddings(128, 48, theirs)
    same_table(ndpos.grid((128,)), theirs, split=ndpos.split(48, 1), base=1e4, endpoint="open", layout="interleaved")


@pytest.fixture
def mae():
    return pytest.importorskip(
        "transformers.models.vit_mae.modeling_vit_mae", reason="MAE's table needs transformers with ViTMAE"
    )


@pytest.mark.parametrize("side", [6, 7])
def test_mae_puts_sines_and_cosines_of_x_before_those_of_y(side, mae):
    config = mae.ViTMAEConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        patch_size=16,
        image_size=16 * side,
    )
    embeddings = mae.ViTMAEEmbeddings(config)  # its table is square by construction
    embeddings.initialize_weights()
    assert not embeddings.position_embeddings[0, 0].any()  # the class token's row: no position
    split = ndpos.AxisSplit((32, 32), order=(1, 0))
    coords = ndpos.grid((side, side)).flatten(0, -2)
    same_table(coords, embeddings.position_embeddings[0, 1:].detach(), split=split, base=1e4, layout="axis_sin_cos")


def test_mae_on_any_grid_before_it_swaps_its_halves(sizes, mae):
    theirs = mae.build_2d_sinusoidal_position_embedding(*sizes, embed_dim=64)
    same_table(ndpos.grid(sizes).flatten(0, -2), theirs, split=ndpos.split(64, 2), base=1e4, layout="axis_sin_cos")


@pytest.mark.parametrize(("blocks", "layout"), [(False, "sin_cos"), (True, "axis_sin_cos")])
def test_timm_stacks_sines_then_cosines_or_one_axis_after_the_other(sizes, blocks, layout):
    sincos = pytest.importorskip("timm.layers.pos_embed_sincos", reason="timm's table needs timm")
    theirs = sincos.build_sincos2d_pos_embed(list(sizes), dim=64, temperature=1e3, interleave_sin_cos=blocks)
    split = ndpos.split(64, 2)
    bands = sincos.freq_bands(16, temperature=1e3, step=1).double().repeat(2)
    torch.testing.assert_close(ndpos.geometric(split, base=1e3).sum(0), bands, rtol=1e-6, atol=0.0)
    same_table(ndpos.grid(sizes).flatten(0, -2), theirs, split=split, base=1e3, layout=layout)
