"""set_table puts any additive encoding in the place of a ViT's table; resize moves a live model, optimiser and all."""

import copy
import pickle

import pytest
import torch

import ndpos

pytest.importorskip("timm", reason="needs timm")
import timm
from timm.models.deit import VisionTransformerDistilled

import ndpos.timm
from tests.test_timm import assert_same, by_hand, images, vit

SPLIT = ndpos.split(32, 2)
EMBEDDINGS = {
    "sinusoidal": lambda: ndpos.SinusoidalEmbedding(SPLIT, base=100.0),
    "integer": lambda: ndpos.IntegerEmbedding(SPLIT),
    "binary": lambda: ndpos.BinaryEmbedding(SPLIT),
    "joint": lambda: ndpos.LearnedEmbedding((2, 3), 32),
    "axial": lambda: ndpos.LearnedEmbedding((2, 3), 32, kind="axial", num_prefix=1),
    "sum": lambda: ndpos.LearnedEmbedding((2, 3), 32, kind="sum"),
}
every_embedding = pytest.mark.parametrize("name", EMBEDDINGS)


def rows_of(embedding, sizes):
    if isinstance(embedding, ndpos.LearnedEmbedding):
        return embedding(sizes)
    return embedding(ndpos.grid(sizes).flatten(0, -2))


def with_rows(model, table):
    """The same model as timm has it, with `table` (prefix rows first) for its own table; sizes are the model's."""
    model = copy.deepcopy(model)
    spare = model.pos_embed.shape[1] - table.shape[0]
    ahead = torch.zeros(spare, table.shape[1])
    num_prefix = table.shape[0] - model.patch_embed.num_patches
    rows = torch.cat((table[:num_prefix], ahead, table[num_prefix:]))
    model.pos_embed = torch.nn.Parameter(rows[None].detach().clone())
    return model


def at(sizes):
    """The model of `vit()`, the same weights, built for another grid."""
    model = vit()
    model.set_input_size([16 * size for size in sizes])
    return model


# ---- set_table ----------------------------------------------------------------------------------------------------


@every_embedding
@pytest.mark.parametrize(
    "settings",
    [{}, {"reg_tokens": 3}, {"cls": VisionTransformerDistilled}, {"class_token": False, "global_pool": "avg"}],
    ids=["class", "registers", "distilled", "no prefix"],
)
@torch.no_grad()
def test_every_additive_encoding_is_added_where_the_table_was(name, settings):
    embedding = EMBEDDINGS[name]()
    plain, x = vit(**settings), images(2, 3)
    if getattr(embedding, "num_prefix", 0) > plain.num_prefix_tokens:
        pytest.skip("no token for the prefix row")
    expected = with_rows(plain, rows_of(embedding, (2, 3)))
    model = ndpos.timm.set_table(copy.deepcopy(plain), embedding)
    assert model.table is embedding
    assert_same(model(x), expected(x))
    assert (model(x) - plain(x)).abs().max() > 1e-3
    assert "pos_embed" not in model.state_dict()
    own = {f"table.{key}" for key in embedding.state_dict()}
    assert set(model.state_dict()) == (set(plain.state_dict()) - {"pos_embed"}) | own
    ndpos.timm.add_rope(model)
    assert_same(model.forward_features(x), by_hand(expected, x))


@every_embedding
@torch.no_grad()
def test_at_another_size_a_table_is_that_of_the_new_grid(name):
    embedding = EMBEDDINGS[name]()
    model = ndpos.timm.set_table(vit(dynamic_img_size=True), embedding)
    larger = with_rows(at((4, 5)), rows_of(embedding, (4, 5)))
    assert_same(model(images(4, 5)), larger(images(4, 5)))


@torch.no_grad()
def test_a_table_built_to_wrap_repeats_itself_on_larger_grids():
    embedding = ndpos.LearnedEmbedding((2, 3), 32, num_prefix=1, outside="wrap")
    torch.nn.init.normal_(embedding.tables[0])
    model = ndpos.timm.set_table(vit(dynamic_img_size=True), embedding)
    repeated = embedding.tables[0].repeat(2, 2, 1)[:3, :5].flatten(0, 1)
    expected = with_rows(at((3, 5)), torch.cat((embedding.prefix, repeated)))
    assert_same(model(images(3, 5)), expected(images(3, 5)))


@pytest.mark.parametrize("name", ["sinusoidal", "integer"])
@torch.no_grad()
def test_reference_sizes_lay_the_table_over_the_trained_grid(name):
    embedding = EMBEDDINGS[name]()
    model = ndpos.timm.set_table(vit(dynamic_img_size=True), embedding, reference_sizes=(2, 3))
    assert_same(model(images(2, 3)), ndpos.timm.set_table(vit(dynamic_img_size=True), embedding)(images(2, 3)))
    rows, columns = (torch.arange(4.0) + 0.5) * 2 / 4 - 0.5, (torch.arange(9.0) + 0.5) * 3 / 9 - 0.5
    coords = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)
    expected = with_rows(at((4, 9)), embedding(coords.flatten(0, 1)))
    assert_same(model(images(4, 9)), expected(images(4, 9)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@every_embedding
@torch.no_grad()
def test_a_table_follows_the_dtype_of_the_model_whichever_comes_first(name, dtype):
    x = images(2, 3).to(dtype)
    cast_last = ndpos.timm.set_table(vit(), EMBEDDINGS[name]()).to(dtype)
    assert cast_last(x).dtype == dtype
    assert ndpos.timm.set_table(vit().to(dtype), EMBEDDINGS[name]())(x).dtype == dtype


def test_under_autocast_tokens_and_tables_are_added_in_float32_as_timm_adds_them():
    seen = []
    for settings in ({}, {"class_token": False, "global_pool": "avg"}):
        for model in (vit(**settings), ndpos.timm.set_table(vit(**settings), EMBEDDINGS["sinusoidal"]())):
            handle = model.blocks[0].register_forward_pre_hook(lambda block, args: seen.append(args[0].dtype))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(images(2, 3))
            handle.remove()
    assert seen == [torch.float32] * 4


def test_learned_tables_train_copy_and_pickle():
    model = ndpos.timm.set_table(vit(), ndpos.LearnedEmbedding((2, 3), 32, num_prefix=1)).train()
    model(images(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(images(2, 3)), model(images(2, 3)))
        with torch.no_grad():
            again.table.tables[0].zero_()
        assert not torch.equal(again(images(2, 3)), model(images(2, 3)))


@pytest.mark.parametrize(
    ("embedding", "error", "says"),
    [
        (lambda: ndpos.RotaryEmbedding(SPLIT), TypeError, ["SinusoidalEmbedding", "got RotaryEmbedding"]),
        (lambda: torch.nn.Embedding(6, 32), TypeError, ["got Embedding"]),
        (lambda: ndpos.SinusoidalEmbedding(ndpos.split(64, 2)), ValueError, ["2 axes and 64 channels", "32 channels"]),
        (
            lambda: ndpos.SinusoidalEmbedding(ndpos.split(32, 3)),
            ValueError,
            ["3 axes and 32 channels", "2 axes (y, x)"],
        ),
        (lambda: ndpos.LearnedEmbedding((6,), 32), ValueError, ["1 axes", "2 axes (y, x)"]),
        (lambda: ndpos.LearnedEmbedding((2, 3), 32, num_prefix=2), ValueError, ["2 prefix rows", "1 prefix tokens"]),
    ],
)
def test_an_embedding_that_does_not_fit_is_refused(embedding, error, says):
    with pytest.raises(error) as refused:
        ndpos.timm.set_table(vit(), embedding())
    assert str(refused.value).startswith("ndpos.timm.set_table: ")
    for part in says:
        assert part in str(refused.value)


@pytest.mark.parametrize("name", ["binary", "joint"])
def test_reference_sizes_are_refused_where_coordinates_are_whole(name):
    with pytest.raises(ValueError, match="make coordinates fractional") as refused:
        ndpos.timm.set_table(vit(), EMBEDDINGS[name](), reference_sizes=(2, 3))
    assert ("resamples itself" in str(refused.value)) == (name == "joint")


# ---- resize -------------------------------------------------------------------------------------------------------


def stepped(model, make=torch.optim.AdamW, x=None):
    """An optimiser that has taken a step, and so keeps something about every parameter."""
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
    model(images(2, 3) if x is None else x).square().sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"reg_tokens": 2, "no_embed_class": True}, {"dynamic_img_size": True}], ids=str
)
def test_a_resized_model_answers_as_timm_after_set_input_size(wrapped, settings):
    plain = vit(**settings)
    model = copy.deepcopy(plain)
    model = ndpos.timm.add_rope(model, strength=0.0) if wrapped else model
    assert ndpos.timm.resize(model, (64, 32)) is model
    plain.set_input_size((64, 32))
    torch.testing.assert_close(model(images(4, 2)), plain(images(4, 2)), atol=1e-5, rtol=0)
    assert model.patch_embed.grid_size == plain.patch_embed.grid_size == (4, 2)
    assert model.patch_embed.num_patches == 8
    assert model.patch_embed.img_size == (64, 32)
    assert model._traits["img_size"] == plain._traits["img_size"]
    if wrapped:
        model.strength = 1.0
        assert_same(model.forward_features(images(4, 2)), by_hand(plain, images(4, 2)))


def test_a_table_moves_by_the_convention_that_its_weights_come_from():
    model = vit()
    optimizer = stepped(model, torch.optim.SGD)
    rows = model.pos_embed.detach().clone()
    ndpos.timm.resize(model, (48, 64), optimizer=optimizer, like="torchvision")
    assert torch.equal(model.pos_embed, ndpos.resize(rows, (3, 4), old_sizes=(2, 3), num_prefix=1, like="torchvision"))
    rows = model.pos_embed.detach().clone()
    with pytest.raises(ValueError, match="like is None or one of"):
        ndpos.timm.resize(model, (64, 64), like="dino")
    assert torch.equal(model.pos_embed, rows)
    assert model.patch_embed.grid_size == (3, 4)


def test_nothing_but_table_and_grid_is_touched_and_prefix_rows_come_back_bit_for_bit():
    model = ndpos.timm.add_rope(vit(reg_tokens=1), learnable=True)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    ndpos.timm.resize(model, (48, 64))
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        if name != "pos_embed":
            assert torch.equal(parameter, before[name][1])
    assert model.pos_embed.shape == (1, 2 + 12, 32)
    assert torch.equal(model.pos_embed[:, :2], before["pos_embed"][1][:, :2])
    expected = ndpos.resize(before["pos_embed"][1], (3, 4), old_sizes=(2, 3), num_prefix=2)
    assert torch.equal(model.pos_embed, expected)
    assert sum(name == "pos_embed" for name, _ in model.named_parameters()) == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_the_same_size_changes_nothing_and_a_frozen_table_stays_frozen(frozen):
    model = vit()
    model.pos_embed.requires_grad_(not frozen)
    table, rows = model.pos_embed, model.pos_embed.detach().clone()
    ndpos.timm.resize(model, (32, 48))
    assert model.pos_embed is table
    assert torch.equal(table, rows)
    ndpos.timm.resize(model, (48, 32))  # as many patches, another grid
    assert not torch.equal(table, rows)
    assert table.requires_grad != frozen


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.Adagrad,
        torch.optim.ASGD,
        lambda *a, **s: torch.optim.SGD(*a, momentum=0.9, **s),
        lambda *a, **s: torch.optim.RMSprop(*a, momentum=0.9, centered=True, **s),
    ],
    ids=["adamw", "nadam", "adagrad", "asgd", "sgd", "rmsprop"],
)
@pytest.mark.parametrize("learned", [False, True], ids=["pos_embed", "learned embedding"])
def test_what_an_optimiser_keeps_about_the_table_moves_with_it_and_goes_on_training(make, learned):
    model = vit()
    if learned:
        ndpos.timm.set_table(model, ndpos.LearnedEmbedding((2, 3), 32, kind="axial", num_prefix=1))
    optimizer = stepped(model, make)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = {id(parameter): copy.deepcopy(dict(optimizer.state[parameter])) for parameter in held}
    ndpos.timm.resize(model, (80, 64), optimizer=optimizer)
    tables = [model.table.tables[0], model.table.tables[1]] if learned else [model.pos_embed]
    for parameter in held:
        moved = any(parameter is table for table in tables)
        for name, value in optimizer.state[parameter].items():
            old = kept[id(parameter)][name]
            if isinstance(value, torch.Tensor) and value.ndim and moved:
                assert value.shape == parameter.shape != old.shape
                assert (value >= 0).all() or (old < 0).any()  # averages of squares stay positive
                if not learned:
                    kernel = "cubic" if name in ("exp_avg", "momentum_buffer", "ax") else "linear"
                    expected = ndpos.resize(old, (5, 4), old_sizes=(2, 3), num_prefix=1, kernel=kernel)
                    assert torch.equal(value, expected)
            else:
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(old))
    assert all(any(parameter is each for each in held) for parameter in model.parameters())  # none left untrained
    optimizer.zero_grad()
    before = [table.detach().clone() for table in tables]
    model(images(5, 4)).square().sum().backward()
    optimizer.step()
    for table, rows in zip(tables, before, strict=True):
        assert not torch.equal(table, rows)
        assert table.isfinite().all()


def test_a_learned_embedding_set_as_table_moves_to_the_new_grid():
    embedding = ndpos.LearnedEmbedding((2, 3), 32, num_prefix=1)
    expected = embedding((4, 2)).detach()
    model = ndpos.timm.resize(ndpos.timm.set_table(vit(), embedding), (64, 32))
    assert embedding.sizes == (4, 2)
    assert model.table.tables[0].shape == (4, 2, 32)
    torch.testing.assert_close(embedding().detach(), expected)
    fixed = ndpos.timm.resize(ndpos.timm.set_table(vit(), EMBEDDINGS["sinusoidal"]()), (64, 32))
    assert_same(fixed(images(4, 2)), with_rows(at((4, 2)), rows_of(EMBEDDINGS["sinusoidal"](), (4, 2)))(images(4, 2)))


@pytest.mark.parametrize("kind", ["joint", "axial", "sum"])
def test_a_learned_embedding_resizes_itself_in_place_to_what_it_would_have_answered(kind):
    embedding = ndpos.LearnedEmbedding((4, 3, 5), 12, kind=kind, num_prefix=2)
    embedding.tables[0].requires_grad_(False)
    parameters, expected = list(embedding.parameters()), embedding((4, 6, 2)).detach()
    assert embedding.resize_((4, 6, 2)) is embedding
    assert all(one is other for one, other in zip(embedding.parameters(), parameters, strict=True))
    assert embedding.sizes == (4, 6, 2)
    torch.testing.assert_close(embedding().detach(), expected)
    assert [table.requires_grad for table in embedding.tables] == [False] + [True] * (len(embedding.tables) - 1)
    assert embedding.lookup(torch.tensor([3, 5, 1])).shape == (12,)
    with pytest.raises(ValueError, match=r"2 axes .* 3 were expected"):
        embedding.resize_((4, 6))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ndpos.timm.resize(vit(), 64), TypeError, ["(height, width)", "got 64", "(64, 64)"]),
        (lambda: ndpos.timm.resize(vit(), (64, 40)), ValueError, ["16 x 16 do not divide", "64 x 40"]),
        (lambda: ndpos.timm.resize(vit(), (64.0, 48)), TypeError, ["image_size"]),
        (lambda: ndpos.timm.resize(vit(), (64, 48), optimizer="adam"), TypeError, ["torch.optim.Optimizer, got str"]),
        (lambda: ndpos.timm.resize(torch.nn.Linear(1, 1), (64, 48)), TypeError, ["got Linear"]),
        (
            lambda: ndpos.timm.resize(timm.create_model("vit_tiny_r_s16_p8_224", img_size=64, depth=1), (96, 96)),
            TypeError,
            ["HybridEmbed"],
        ),
    ],
)
def test_what_cannot_be_resized_is_refused_with_the_reason(call, error, says):
    with pytest.raises(error) as refused:
        call()
    assert str(refused.value).startswith("ndpos.timm.resize: ")
    for part in says:
        assert part in str(refused.value)


def test_an_optimiser_that_keeps_other_shapes_is_refused_before_anything_moves():
    model = vit()
    optimizer = stepped(model, lambda params, lr: torch.optim.Adafactor(params, lr=lr))
    rows = model.pos_embed.detach().clone()
    with pytest.raises(ValueError, match=r"keeps '\w+' \(1, 7, 1\) for a table \(1, 7, 32\)"):
        ndpos.timm.resize(model, (64, 48), optimizer=optimizer)
    assert torch.equal(model.pos_embed, rows)
    assert model.patch_embed.grid_size == (2, 3)
