"""Every way a timm ViT is used goes on working when it is wrapped: held against timm itself at strength 0, and against
blocks walked by hand (test_timm.py) at strength 1."""

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ndpos

pytest.importorskip("timm", reason="needs timm")
import timm
from timm.layers import set_reentrant_ckpt
from timm.models._features import FeatureGetterNet
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

import ndpos.timm
from tests.test_timm import SPLIT, assert_same, by_hand, images, vit

MODELS = {
    "class token": {},
    "registers": {"reg_tokens": 3},
    "registers without a row in the table": {"reg_tokens": 2, "no_embed_class": True},
    "no prefix": {"class_token": False, "global_pool": "avg"},
    "no table": {"pos_embed": "none"},
    "distilled": {"cls": VisionTransformerDistilled},
    "dynamic": {"dynamic_img_size": True, "reg_tokens": 1},
    "dynamic and distilled": {"cls": VisionTransformerDistilled, "dynamic_img_size": True},
}
every_model = pytest.mark.parametrize("name", MODELS)


def both(name="class token", *, strength=0.0, **settings):
    """A model as timm makes it, and the same one wrapped."""
    plain = vit(**{**MODELS[name], **settings})
    return plain, ndpos.timm.add_rope(copy.deepcopy(plain), strength=strength)


# ---- strength 0 is the model itself; every forward --------------------------------------------------------------


@every_model
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@torch.no_grad()
def test_at_strength_0_every_forward_answers_bit_for_bit_as_timm(name, fused):
    plain, model = both(name)
    x = images(3, 4) if plain.dynamic_img_size else images(2, 3)
    for each in (plain, model):
        for block in each.blocks:
            block.attn.fused_attn = fused
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model.forward_features(x), plain.forward_features(x))
    for settings in (
        {},
        {"indices": 1, "norm": True, "output_fmt": "NLC"},
        {"indices": [0], "stop_early": True, "intermediates_only": True},
        {"return_prefix_tokens": True, "intermediates_only": True},
        {"output_dict": True, "return_prefix_tokens": True},
    ):
        seen, expected = model.forward_intermediates(x, **settings), plain.forward_intermediates(x, **settings)
        assert torch.utils._pytree.tree_structure(seen) == torch.utils._pytree.tree_structure(expected)
        for one, other in zip(
            torch.utils._pytree.tree_leaves(seen), torch.utils._pytree.tree_leaves(expected), strict=True
        ):
            assert torch.equal(one, other)
    for settings in ({"n": 2, "reshape": True}, {"n": [0], "return_prefix_tokens": True, "norm": True}):
        seen, expected = model.get_intermediate_layers(x, **settings), plain.get_intermediate_layers(x, **settings)
        for one, other in zip(
            torch.utils._pytree.tree_leaves(seen), torch.utils._pytree.tree_leaves(expected), strict=True
        ):
            assert torch.equal(one, other)


@every_model
@torch.no_grad()
def test_intermediates_are_those_of_the_turned_blocks(name):
    _, model = both(name, strength=1.0)
    x = images(2, 3)
    features, seen = model.forward_intermediates(x, output_fmt="NLC", return_prefix_tokens=True)
    assert torch.equal(features, model.forward_features(x))
    last = torch.cat((seen[-1][1], seen[-1][0]), dim=1) if model.num_prefix_tokens else seen[-1]
    assert torch.equal(model.norm(last), features)
    assert (features - both(name)[0].forward_features(x)).abs().max() > 1e-2
    as_grid = model.forward_intermediates(x, intermediates_only=True)[-1]
    patches = last[:, model.num_prefix_tokens :]
    assert torch.equal(as_grid[1, :, 1, 2], patches[1, 5])  # row 1, column 2 of a 2 x 3 grid


@torch.no_grad()
def test_features_only_and_pruned_layers_go_on_with_frequencies_of_every_layer():
    frequencies = ndpos.mixed(2, 8, heads=2, layers=2, generator=torch.Generator().manual_seed(0))
    plain, x = vit(), images(2, 3)
    model = ndpos.timm.add_rope(copy.deepcopy(plain), rope=ndpos.RotaryEmbedding(SPLIT, frequencies=frequencies))
    features, _ = model.forward_intermediates(x)
    assert_same(features, by_hand(plain, x, frequencies.float()))
    expected = model.forward_intermediates(x, indices=[0], intermediates_only=True)
    net = FeatureGetterNet(copy.deepcopy(model), out_indices=[0])
    assert len(net.model.blocks) == 1
    assert torch.equal(net(x)[0], expected[0])
    made = timm.create_model("vit_tiny_patch16_224", img_size=32, features_only=True)
    wrapped = ndpos.timm.add_rope(made.model)
    assert wrapped is made.model
    assert [feature.shape for feature in made(torch.zeros(1, 3, 32, 32))] == [(1, 192, 2, 2)] * len(made.out_indices)


@torch.no_grad()
def test_a_classifier_can_be_reset_and_an_input_size_set_after_wrapping():
    plain, model = both()
    for each in (plain, model):
        torch.manual_seed(3)
        each.reset_classifier(3, "avg")
        each.set_input_size((48, 32))
    assert model(images(3, 2)).shape == (2, 3)
    assert torch.equal(model(images(3, 2)), plain(images(3, 2)))
    model.strength = 1.0
    assert_same(model.forward_features(images(3, 2)), by_hand(plain, images(3, 2)))


@torch.no_grad()
def test_images_that_patches_do_not_divide_are_padded_as_timm_pads_them():
    plain, model = both("dynamic", dynamic_img_pad=True)
    x = torch.randn(2, 3, 41, 50)
    assert torch.equal(model(x), plain(x))
    model.strength = 1.0
    padded = torch.nn.functional.pad(x, (0, 14, 0, 7))
    assert torch.equal(model(x), model(padded))
    assert model.forward_intermediates(x, intermediates_only=True)[0].shape[-2:] == (3, 4)


def test_hybrid_patch_embeddings_are_taken_with_the_grid_that_they_say():
    model = timm.create_model("vit_tiny_r_s16_p8_224", num_classes=3, img_size=64, depth=1).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        wrapped = ndpos.timm.add_rope(model, strength=0.0)
        assert torch.equal(wrapped(x), expected)
        wrapped.strength = 1.0
        assert (wrapped(x) - expected).abs().max() > 1e-5


# ---- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@torch.no_grad()
def test_models_of_every_dtype_stay_in_it_and_answer_alike(dtype):
    plain, model = both(strength=1.0)
    expected = (
        model(images(2, 3).double() if dtype == torch.float64 else images(2, 3)) if dtype != torch.float64 else None
    )
    cast = copy.deepcopy(model).to(dtype)
    seen = cast(images(2, 3).to(dtype))
    assert seen.dtype == dtype
    if expected is not None:
        torch.testing.assert_close(seen.float(), expected, atol=0.2, rtol=0.1)
    zero = copy.deepcopy(plain).to(dtype)
    cast.strength = 0.0
    assert torch.equal(cast(images(2, 3).to(dtype)), zero(images(2, 3).to(dtype)))


@every_model
@torch.no_grad()
def test_autocast_answers_as_timm_under_autocast_at_strength_0(name):
    plain, model = both(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(images(2, 3)), plain(images(2, 3)))


# ---- the learned table: kept, faded, dropped; strength ------------------------------------------------------------


@torch.no_grad()
def test_strength_turns_by_a_part_of_every_angle_and_fade_takes_as_much_from_the_table():
    plain, x = vit(reg_tokens=1), images(2, 3)
    frequencies = ndpos.geometric(SPLIT, base=100.0)
    kept = ndpos.timm.add_rope(copy.deepcopy(plain), strength=0.25)
    assert_same(kept.forward_features(x), by_hand(plain, x, 0.25 * frequencies))
    faded = ndpos.timm.add_rope(copy.deepcopy(plain), strength=0.25, absolute="fade")
    thinner = copy.deepcopy(plain)
    thinner.pos_embed.mul_(0.75)
    assert_same(faded.forward_features(x), by_hand(thinner, x, 0.25 * frequencies))
    faded.strength = 0.0
    assert torch.equal(faded(x), plain(x))
    faded.strength = 1.0
    dropped = ndpos.timm.add_rope(copy.deepcopy(plain), absolute="drop")
    assert torch.equal(faded(x), dropped(x))
    thinner.pos_embed.zero_()
    assert_same(dropped.forward_features(x), by_hand(thinner, x, frequencies))


@torch.no_grad()
def test_entries_are_dropped_from_a_model_whose_table_is_dropped_as_from_one_whose_table_is_faded_away():
    plain, x = vit(pos_drop_rate=0.5), images(2, 3)
    seen = []
    for absolute in ("fade", "drop"):
        torch.manual_seed(0)
        seen.append(ndpos.timm.add_rope(copy.deepcopy(plain), absolute=absolute).train()(x))
    assert torch.equal(*seen)
    assert not torch.equal(seen[0], ndpos.timm.add_rope(copy.deepcopy(plain), absolute="fade")(x))


def test_a_dropped_table_is_kept_frozen_and_trains_nothing_while_everything_else_trains():
    plain, x = vit(), images(2, 3)
    model = ndpos.timm.add_rope(copy.deepcopy(plain), absolute="drop", learnable=True).train()
    assert torch.equal(model.state_dict()["pos_embed"], plain.state_dict()["pos_embed"])
    model(x).sum().backward()
    idle = {name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None}
    assert idle == set()
    assert not model.pos_embed.requires_grad
    assert model.pos_embed.grad is None
    with torch.no_grad():
        before = model.eval()(x)
        model.pos_embed.fill_(7.0)
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("absolute", ["keep", "fade", "drop"])
def test_every_trained_parameter_gets_a_gradient_at_every_strength(strength, absolute):
    model = ndpos.timm.add_rope(vit(), absolute=absolute, strength=strength, learnable=True).train()
    model(images(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_strength_is_a_setting_that_copies_and_pickles_carry_and_state_dicts_do_not():
    model, x = ndpos.timm.add_rope(vit(), strength=0.25), images(2, 3)
    assert "strength" not in str(model.state_dict().keys())
    assert not list(model.buffers())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).half().float()):
        assert again.strength == 0.25
        again.strength = 0.75
        assert model.strength == 0.25
    moved = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    moved.load_state_dict(model.state_dict())
    assert torch.equal(moved(x), model(x))
    with torch.inference_mode():
        model.strength = 0.5
    model(x).sum().backward()


@torch.no_grad()
def test_a_pickle_does_not_grow_with_the_sizes_seen():
    model = ndpos.timm.add_rope(vit(dynamic_img_size=True))
    fresh = len(pickle.dumps(model))
    for sizes in ((2, 3), (9, 7), (12, 12)):
        model(images(*sizes))
    assert len(pickle.dumps(model)) == fresh


@pytest.fixture
def alone():
    """A process group of one, for DDP to find out what it does not get a gradient of."""
    if not dist.is_available():
        pytest.skip("torch is built without torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", [{"absolute": "drop"}, {"absolute": "fade", "learnable": True}], ids=str)
def test_ddp_trains_a_wrapped_model_whatever_becomes_of_its_table(settings, alone):
    model = DistributedDataParallel(ndpos.timm.add_rope(vit(), **settings).train())
    for _ in range(2):  # what got no gradient in the first step is told in the second
        model(images(2, 3)).sum().backward()
    module = ndpos.timm.add_rope(vit(), absolute="drop").train()
    module.pos_embed.requires_grad_(True)
    twin = DistributedDataParallel(module)
    twin(images(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="finished reduction"):
        twin(images(2, 3))


@torch.no_grad()
def test_reference_sizes_keep_the_trained_coordinates_when_the_image_grows():
    plain = vit(dynamic_img_size=True)
    model = ndpos.timm.add_rope(copy.deepcopy(plain), reference_sizes=(2, 3))
    assert_same(model.forward_features(images(2, 3)), by_hand(plain, images(2, 3)))
    rows, columns = (torch.arange(6) + 0.5) * 2 / 6 - 0.5, (torch.arange(4) + 0.5) * 3 / 4 - 0.5  # cell centres
    coords = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).double()
    assert_same(model.forward_features(images(6, 4)), by_hand(plain, images(6, 4), coords=coords))
    assert (model.forward_features(images(6, 4)) - by_hand(plain, images(6, 4))).abs().max() > 1e-2


# ---- patch drop, checkpointing, threads ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["class token", "registers", "no prefix", "distilled", "no table"])
@pytest.mark.parametrize("mixed", [False, True], ids=["axial", "mixed"])
def test_when_patches_are_dropped_the_rotation_follows_those_that_stay(name, mixed):
    """Dropping is the same as masking: kept tokens answer as in a full sequence whose dropped keys nobody sees."""
    frequencies = ndpos.mixed(2, 8, heads=2, layers=2, generator=torch.Generator().manual_seed(0))
    rope = ndpos.RotaryEmbedding(SPLIT, frequencies=frequencies) if mixed else None
    model = ndpos.timm.add_rope(vit(sizes=(3, 4), patch_drop_rate=0.5, **MODELS[name]), rope=rope)
    x, prefix = images(3, 4), model.num_prefix_tokens
    torch.manual_seed(5)
    seen = model.train().forward_features(x)
    assert seen.shape[1] == prefix + 6
    torch.manual_seed(5)
    kept = torch.argsort(torch.randn(2, 12), dim=-1)[:, :6]
    whole = torch.cat((torch.arange(prefix).expand(2, -1), prefix + kept), dim=1)
    allowed = torch.zeros(2, 1, 1, prefix + 12, dtype=torch.bool).index_fill(-1, torch.arange(prefix), True)
    allowed = allowed.scatter(-1, (prefix + kept)[:, None, None], True).expand(2, 1, prefix + 12, prefix + 12)
    full = model.eval().forward_features(x, attn_mask=allowed)
    assert_same(seen, full.gather(1, whole[:, :, None].expand(-1, -1, 32)))


def test_dropped_patches_are_no_grid():
    model = ndpos.timm.add_rope(vit(sizes=(3, 4), patch_drop_rate=0.5)).train()
    with pytest.raises(ValueError, match=r"patches were dropped, so features are no .* Take output_fmt='NLC'"):
        model.forward_intermediates(images(3, 4))
    _, seen = model.forward_intermediates(images(3, 4), output_fmt="NLC")
    assert seen[0].shape == (2, 6, 32)


def gradients(model, x, **settings):
    model.train().zero_grad()
    model.forward_features(x, **settings).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("strength", [0.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_checkpointed_blocks_have_the_same_gradients_whichever_way(reentrant, strength, masked):
    rope = ndpos.RotaryEmbedding(SPLIT, frequencies=ndpos.mixed(2, 8, heads=2, layers=2), learnable=True)
    model, x = ndpos.timm.add_rope(vit(), rope=rope, strength=strength), images(2, 3)
    settings = {"attn_mask": torch.ones(7, 7, dtype=torch.bool).tril()} if masked else {}
    expected = gradients(model, x, **settings)
    model.set_grad_checkpointing(True)
    set_reentrant_ckpt(reentrant)
    try:
        seen = gradients(model, x, **settings)
    finally:
        set_reentrant_ckpt(False)
    assert seen.keys() == expected.keys()
    for name, gradient in seen.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


@torch.no_grad()
def test_two_threads_run_two_image_sizes_through_one_model():
    model = ndpos.timm.add_rope(vit(dynamic_img_size=True), reference_sizes=(2, 3))
    inputs = [images(2, 3), images(5, 4)]
    expected = [model(x) for x in inputs]
    wrong = []

    def run(which):
        for _ in range(30):
            if not torch.equal(model(inputs[which]), expected[which]):
                wrong.append(which)

    threads = [threading.Thread(target=run, args=(which,)) for which in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---- weights: names, loading, decay -------------------------------------------------------------------------------


def test_a_learnable_wrap_adds_one_key_and_loads_weights_from_before_it():
    plain = vit()
    model = ndpos.timm.add_rope(vit(), learnable=True)
    assert set(model.state_dict()) - set(plain.state_dict()) == {"rope.frequencies"}
    assert set(plain.state_dict()) <= set(model.state_dict())
    initial = model.rope.frequencies.detach().clone()
    with torch.no_grad():
        model.rope.frequencies.mul_(1)
    given = plain.state_dict()
    assert model.load_state_dict(given, strict=True) == ([], [])
    assert "rope.frequencies" not in given  # the caller's dict is the caller's
    assert torch.equal(model.rope.frequencies, initial)
    inside = torch.nn.ModuleDict({"backbone": model})
    inside.load_state_dict({f"backbone.{key}": value for key, value in given.items()}, strict=True)
    other = {**given, "rope.frequencies": initial + 1}
    model.load_state_dict(other, strict=True)
    assert torch.equal(model.rope.frequencies, initial + 1)
    with pytest.raises(RuntimeError, match=r"size mismatch for rope\.frequencies"):
        model.load_state_dict({**given, "rope.frequencies": torch.ones(3)})


def test_checkpoints_that_carry_tables_of_angles_load_strictly_and_say_so_quietly(caplog):
    model, plain = ndpos.timm.add_rope(vit()), vit()
    derived = {
        "rope.inv_freq": torch.ones(4),
        "freqs_cos": torch.ones(6, 16),
        "blocks.0.attn.rope.freqs_sin": torch.ones(6, 16),
        "blocks.1.attn.freqs_t_x": torch.ones(6),
        "rope.periods": torch.ones(8),
    }
    with caplog.at_level("DEBUG", logger="ndpos.timm"):
        model.load_state_dict({**plain.state_dict(), **derived}, strict=True)
    assert len(caplog.records) == 1
    assert all(key in caplog.text for key in derived)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**plain.state_dict(), "rope.freqs": torch.ones(2, 2, 2, 8)}, strict=True)


def test_a_table_of_another_grid_is_refused_with_both_grids_and_the_call_that_moves_it():
    model = ndpos.timm.add_rope(vit(sizes=(2, 3)))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError) as refused:
        model.load_state_dict(vit(sizes=(4, 4)).state_dict())
    for part in ("pos_embed is (1, 17, 32)", "(1, 7, 32)", "(2, 3)", "16 rows is (4, 4) if it is square", "resize("):
        assert part in str(refused.value)
    assert torch.equal(model.pos_embed, before["pos_embed"])
    with pytest.raises(RuntimeError, match="grid of 15 rows is no square, so its grid must be known"):
        model.load_state_dict(vit(sizes=(3, 5)).state_dict())


def test_no_position_parameter_is_decayed_however_the_model_is_wrapped():
    model = ndpos.timm.add_rope(vit(reg_tokens=1), learnable=True)
    own = {"pos_embed", "cls_token", "reg_token", "rope.frequencies"}
    assert model.no_weight_decay() >= own
    assert ndpos.timm.no_weight_decay(model) == own
    tabled = ndpos.timm.set_table(vit(), ndpos.LearnedEmbedding((2, 3), 32, kind="axial", num_prefix=1))
    of_table = {"cls_token", "table.tables.0", "table.tables.1", "table.prefix"}
    assert ndpos.timm.no_weight_decay(tabled) == of_table
    assert tabled.no_weight_decay() >= of_table
    rope = ndpos.RotaryEmbedding(SPLIT, learnable=True)
    student = torch.nn.ModuleDict({"backbone": model, "table": ndpos.LearnedEmbedding((2, 2), 4), "rope": rope})
    names = {f"backbone.{name}" for name in own} | {"table.tables.0", "rope.frequencies"}
    assert ndpos.timm.no_weight_decay(student) == names
    decayed, spared = {}, {}
    named = {id(parameter): name for name, parameter in student.named_parameters()}
    for group in param_groups_weight_decay(student, 0.05, no_weight_decay_list=ndpos.timm.no_weight_decay(student)):
        (decayed if group["weight_decay"] else spared).update({named[id(each)]: 1 for each in group["params"]})
    assert names <= set(spared)
    assert "backbone.head.weight" in decayed
    compiled = torch.compile(model)
    assert ndpos.timm.no_weight_decay(compiled) == {f"_orig_mod.{name}" for name in own}
    fixed = ndpos.timm.set_table(vit(), ndpos.SinusoidalEmbedding(ndpos.split(32, 2)))
    assert ndpos.timm.no_weight_decay(fixed) == {"cls_token"}
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got dict"):
        ndpos.timm.no_weight_decay({})


def test_layer_wise_rates_take_tables_and_frequencies_for_the_stem():
    model = ndpos.timm.add_rope(vit(), learnable=True)
    ndpos.timm.set_table(model, ndpos.LearnedEmbedding((2, 3), 32))
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    scale = {id(each): group["lr_scale"] for group in groups for each in group["params"]}
    stem = scale[id(model.patch_embed.proj.weight)]
    assert stem < 1
    assert scale[id(model.rope.frequencies)] == stem
    assert scale[id(model.table.tables[0])] == stem


# ---- refusals -----------------------------------------------------------------------------------------------------


class Patched(VisionTransformer):
    pass


def replaced(name, on=lambda model: model):
    model = vit()
    setattr(on(model), name, lambda *args, **kwargs: None)
    return model


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ndpos.timm.add_rope(torch.nn.DataParallel(vit())), TypeError, ["DataParallel", "'module' is one"]),
        (lambda: ndpos.timm.add_rope(torch.compile(vit())), TypeError, ["'_orig_mod' is one: hand in that"]),
        (
            lambda: ndpos.timm.set_table(Patched(depth=1), ndpos.IntegerEmbedding(ndpos.split(768, 2))),
            TypeError,
            ["Patched"],
        ),
        (
            lambda: ndpos.timm.add_rope(replaced("forward_features")),
            TypeError,
            ["forward_features of the model", "Wrap"],
        ),
        (
            lambda: ndpos.timm.add_rope(replaced("forward", lambda model: model.blocks[1].attn)),
            TypeError,
            ["forward of block 1 has been replaced", "Wrap the model first"],
        ),
        (lambda: ndpos.timm.add_rope(vit(), absolute="hide"), ValueError, ["'keep', 'fade', 'drop'", "'hide'"]),
        (lambda: ndpos.timm.add_rope(vit(), strength=1.5), ValueError, ["from 0, none of it, to 1", "1.5"]),
        (lambda: ndpos.timm.add_rope(vit(), strength=float("nan")), ValueError, ["finite", "nan"]),
        (lambda: ndpos.timm.add_rope(vit(), strength=torch.tensor(0.5)), TypeError, ["plain number", "value.item()"]),
        (lambda: setattr(ndpos.timm.add_rope(vit()), "strength", "1"), TypeError, ["strength", "'1'"]),
        (lambda: ndpos.timm.add_rope(vit(), reference_sizes=14), TypeError, ["reference_sizes"]),
        (lambda: ndpos.timm.add_rope(vit(), reference_sizes=(14, 0)), ValueError, ["reference_sizes", "0"]),
        (lambda: ndpos.timm.add_rope(vit(), learnable=1), TypeError, ["learnable is True or False", "1"]),
        (
            lambda: ndpos.timm.add_rope(vit(), rope=ndpos.RotaryEmbedding(SPLIT), learnable=True),
            ValueError,
            ["own frequencies", "leave learnable=True out"],
        ),
        (lambda: ndpos.timm.add_rope(vit(pos_embed="none"), absolute="drop"), ValueError, ["no pos_embed to drop"]),
        (
            lambda: both(strength=1.0)[1](images(2, 2)),
            ValueError,
            ["32 x 48 pixels, got 32 x 32", "resize(model, (32, 32))"],
        ),
        (lambda: both("dynamic")[1](torch.zeros(1, 3, 33, 48)), ValueError, ["16 x 16 do not divide", "33 x 48"]),
        (
            lambda: both()[1](torch.zeros(1, 32, 48, 3)),
            ValueError,
            ["3 channels, got (1, 32, 48, 3)", "movedim(-1, 1)"],
        ),
        (
            lambda: both()[1].forward_features(images(2, 3), attn_mask=torch.ones(7, 7).bool(), is_causal=True),
            ValueError,
            ["attn_mask or is_causal, not both"],
        ),
        (lambda: both()[1].forward_intermediates(images(2, 3), output_fmt="NHWC"), ValueError, ["'NCHW' or 'NLC'"]),
    ],
)
def test_what_cannot_be_wrapped_or_fed_is_refused_with_the_reason(call, error, says):
    with pytest.raises(error) as refused:
        call()
    for part in says:
        assert part in str(refused.value)


def test_an_image_of_as_many_patches_in_another_grid_is_refused_not_given_a_transposed_table():
    model = vit()
    model.patch_embed.strict_img_size = False
    ndpos.timm.add_rope(model)
    with pytest.raises(ValueError, match="table is for 2 x 3 patches, the image has 3 x 2"):
        model(images(3, 2))


def test_a_refused_model_is_untouched_by_either_call():
    model = vit()
    before = (type(model), type(model.patch_embed), list(model.state_dict()), set(vars(model)))
    for refused in (
        lambda: ndpos.timm.add_rope(model, absolute="hide"),
        lambda: ndpos.timm.add_rope(model, strength=7),
        lambda: ndpos.timm.set_table(model, ndpos.LearnedEmbedding((2, 3), 33)),
    ):
        with pytest.raises(ValueError):
            refused()
        assert (type(model), type(model.patch_embed), list(model.state_dict()), set(vars(model))) == before
