"""Learned tables moved by other libraries' own functions, run live, and by the graph of a trained ViT."""

import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch

import ndpos

SIZES = [((16, 16), (9, 24)), ((14, 14), (24, 24)), ((24, 24), (14, 14)), ((37, 37), (16, 20))]
moves = pytest.mark.parametrize(("old", "new"), SIZES, ids=str)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def same(ours, theirs, atol=2e-5):
    """Equal to what float32 leaves open of a place near 37 (4e-6 of a row) between rows of a normal distribution."""
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs.to(ours.dtype).reshape(ours.shape), atol=atol, rtol=0)


def modeling(name):
    pytest.importorskip("transformers", reason="parity with transformers needs transformers")
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}", reason=f"this transformers has no {name}")


@moves
def test_timm(old, new):
    layers = pytest.importorskip("timm.layers", reason="parity with timm needs timm")
    table = drawn(1, 2 + math.prod(old), 8)
    theirs = layers.resample_abs_pos_embed(table, new_size=new, old_size=old, num_prefix_tokens=2)
    same(ndpos.resize(table, new, old_sizes=old, num_prefix=2, like="timm"), theirs)


@moves
@pytest.mark.parametrize("name", ["vit", "clip", "dinov2", "dinov2_with_registers"])
def test_transformers(name, old, new):
    room = modeling(name)
    theirs = {
        "vit": "ViTEmbeddings",
        "clip": "CLIPVisionEmbeddings",
        "dinov2": "Dinov2Embeddings",
        "dinov2_with_registers": "Dinov2WithRegistersEmbeddings",
    }[name]
    table = drawn(1, 1 + math.prod(old), 8)
    holder = SimpleNamespace(
        position_embeddings=table,
        position_embedding=torch.nn.Embedding.from_pretrained(table[0]),
        position_ids=torch.arange(table.shape[1])[None],
        patch_embeddings=SimpleNamespace(patch_size=(14, 14)),
        patch_size=14,
        config=SimpleNamespace(patch_size=14),
    )
    tokens = torch.zeros(1, 1 + math.prod(new), 8)
    moved = getattr(room, theirs).interpolate_pos_encoding(holder, tokens, *(14 * n for n in new))
    like = {"dinov2_with_registers": "transformers-dinov2-registers"}.get(name, f"transformers-{name}")
    same(ndpos.resize(table, new, old_sizes=old, num_prefix=1, like=like), moved)


@pytest.mark.parametrize(("old", "new"), [(14, 24), (24, 14), (7, 8)])
def test_torchvision(old, new):
    vision = pytest.importorskip("torchvision.models.vision_transformer", reason="parity with torchvision needs it")
    table = drawn(1, 1 + old * old, 8)
    state = {"encoder.pos_embedding": table}
    theirs = vision.interpolate_embeddings(new * 16, 16, dict(state))["encoder.pos_embedding"]
    same(ndpos.resize(table, (new, new), old_sizes=(old, old), num_prefix=1, like="torchvision"), theirs)


def torchtune_room():
    """The one file of torchtune that moves tables: the package itself imports much that is not needed."""
    found = importlib.util.find_spec("torchtune")
    if found is None:
        pytest.skip("parity with torchtune needs torchtune: pip install --no-deps torchtune")
    path = f"{found.submodule_search_locations[0]}/models/clip/_position_embeddings.py"
    spec = importlib.util.spec_from_file_location("torchtune_position_embeddings", path)
    room = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(room)
    return room.TiledTokenPositionalEmbedding


def test_torchtune():
    room = torchtune_room()
    table = drawn(1 + 10 * 10, 8)
    theirs = room._resize_local_position_embedding(table, 16)
    same(ndpos.resize(table, (16, 16), old_sizes=(10, 10), num_prefix=1, like="torchtune"), theirs)
    for tiles, new in ((3, 2), (2, 4), (1, 2)):
        table = drawn(tiles, tiles, 1 + 6 * 6, 8)
        theirs = room._resize_global_position_embedding(table, new, 5)
        like = {"old_sizes": (tiles, tiles, 6, 6), "num_prefix": 1, "like": "torchtune"}
        same(ndpos.resize(table, (new, new, 5, 5), **like), theirs)


@moves
def test_big_vision_classic_by_scipy(old, new):
    ndimage = pytest.importorskip("scipy.ndimage", reason="big_vision moves tables by scipy")
    table = drawn(math.prod(old), 8).double()
    zoom = (new[0] / old[0], new[1] / old[1], 1)
    theirs = torch.from_numpy(ndimage.zoom(table.reshape(*old, 8).numpy(), zoom, order=1))
    same(ndpos.resize(table, new, old_sizes=old, like="big_vision"), theirs, atol=1e-10)


@moves
def test_flexivit_by_jax(old, new):
    jax = pytest.importorskip("jax", reason="FlexiViT moves tables by jax")
    table = drawn(math.prod(old), 8)
    theirs = jax.image.resize(table.reshape(*old, 8).numpy(), (*new, 8), "linear")
    same(ndpos.resize(table, new, old_sizes=old, like="flexivit"), torch.tensor(theirs.tolist()))


@moves
def test_siglip2(old, new):
    room = modeling("siglip2").Siglip2VisionEmbeddings
    table = drawn(*old, 8)
    theirs = room.resize_positional_embeddings(table, torch.tensor([new]), max_length=math.prod(new))
    same(ndpos.resize(table.flatten(0, 1), new, old_sizes=old, like="siglip2"), theirs)


@moves
@pytest.mark.parametrize("like", ["qwen3-vl", "kimi-vl"])
def test_indices_and_weights_of_transformers(like, old, new):
    vision = pytest.importorskip("transformers.vision_utils", reason="this transformers builds positions elsewhere")
    how = {"mode": "bilinear", "align_corners": True} if like == "qwen3-vl" else {"mode": "bicubic"}
    indices, weights = vision.get_vision_interpolation_indices_and_weights(torch.tensor([[1, *new]]), old[0], **how)
    table = drawn(math.prod(old), 8)
    same(ndpos.resize(table, new, old_sizes=old, like=like), (table[indices] * weights[..., None]).sum(1))


def test_qwen3_vl_walks_merged_blocks_that_are_a_permutation_of_the_rows():
    vision = pytest.importorskip("transformers.vision_utils", reason="this transformers builds positions elsewhere")
    table, new = drawn(8 * 8, 4), (6, 4)
    indices, weights = vision.get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, *new]]), 8, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    ours = ndpos.resize(table, new, old_sizes=(8, 8), like="qwen3-vl").reshape(3, 2, 2, 2, 4).transpose(1, 2)
    same(ours.flatten(0, -2), (table[indices] * weights[..., None]).sum(1))


@moves
def test_glm_4v(old, new):
    room = modeling("glm4v")
    table, count = drawn(math.prod(old), 8), math.prod(new)
    config = SimpleNamespace(hidden_size=8, image_size=14 * old[0], patch_size=14)
    holder = room.Glm4vVisionEmbeddings(config)
    holder.position_embedding.weight.data = table
    y, x = ndpos.grid(new).flatten(0, 1).unbind(-1)
    with torch.no_grad():
        theirs = holder(torch.zeros(count, 8), torch.tensor([count]), torch.tensor([[1, *new]]), y, x)
    # Coordinates go through [-1, 1] in float32 and back: 1e-5 of a row is lost on the way.
    same(ndpos.resize(table, new, old_sizes=old, like="glm-4v"), theirs, atol=1e-4)


@pytest.mark.parametrize("old", [7, 16, 27, 70])
@pytest.mark.parametrize("new", [(5, 9), (32, 40), (70, 71)], ids=str)
def test_minicpm_v_takes_the_bucket_of_every_row_but_where_float32_misses_a_border(old, new):
    vision = pytest.importorskip("transformers.vision_utils", reason="this transformers builds positions elsewhere")
    theirs = vision.get_vision_nearest_position_ids(torch.tensor([new]), old)
    rows = torch.arange(old * old, dtype=torch.float64)[:, None]
    ours = ndpos.resize(rows, new, old_sizes=(old, old), like="minicpm-v")[:, 0].long()
    for found, given, place in ((ours // old, theirs // old, 0), (ours % old, theirs % old, 1)):
        number = ndpos.grid(new).flatten(0, 1)[:, place]
        on_border = number * old % new[place] == 0
        assert torch.equal(found[~on_border], given[~on_border])
        assert (found - given).abs().max() <= 1


@pytest.mark.parametrize("new", [(5, 9), (8, 8)], ids=str)
@torch.no_grad()
def test_timesformer_in_space_and_time(new):
    room = modeling("timesformer")
    transformers = pytest.importorskip("transformers")
    config = transformers.TimesformerConfig(image_size=56, patch_size=8, num_frames=3, hidden_size=8)
    embeddings = room.TimesformerEmbeddings(config).eval()
    for parameter in embeddings.parameters():
        torch.nn.init.normal_(parameter)
    frames = 8
    x = torch.zeros(1, frames, 3, *(8 * n for n in new))
    seen = embeddings(x)
    embeddings.patch_embeddings.projection.bias.zero_()
    bare = embeddings(x)
    space = ndpos.resize(embeddings.position_embeddings[0], new, old_sizes=(7, 7), num_prefix=1, like="timesformer")
    time = ndpos.resize(embeddings.time_embeddings[0], (frames,), old_sizes=(3,), like="timesformer")
    ours = (space[1:, None] + time).flatten(0, 1)
    assert seen.shape == bare.shape
    same(ours, bare[0, 1:])


@pytest.mark.parametrize("aspect", [False, True])
@pytest.mark.parametrize("new", [(5, 9), (9, 5), (20, 11), (7, 7)], ids=str)
@torch.no_grad()
def test_naflex(aspect, new):
    naflex = pytest.importorskip("timm.models.naflexvit", reason="parity with timm needs timm")
    settings = {"patch_size": 16, "embed_dim": 8, "pos_embed_ar_preserving": aspect, "pos_embed_grid_size": (7, 7)}
    for kind in ("learned", "factorized"):
        embeds = naflex.NaFlexEmbeds(pos_embed=kind, **settings)
        for parameter in embeds.parameters():
            torch.nn.init.normal_(parameter)
        x = torch.zeros(1, math.prod(new), 8)
        if kind == "learned":
            embeds._apply_learned_pos_embed(x, list(new))
            table = embeds.pos_embed.reshape(49, 8)
            ours = ndpos.resize(table, new, old_sizes=(7, 7), like="naflex-aspect" if aspect else "naflex")
        else:
            embeds._apply_factorized_pos_embed(x, list(new))
            sides = (max(new),) * 2 if aspect else new
            y, column = (
                ndpos.resize(each[0], (side,), old_sizes=(7,), like="naflex-factorised")[:size]
                for each, side, size in zip((embeds.pos_embed_y, embeds.pos_embed_x), sides, new, strict=True)
            )
            ours = (y[:, None] + column).flatten(0, 1)
        same(ours, x)
