"""What a sceptical user tried on the wrap: each of these was once wrong, and the right value stays here."""

import copy
import pickle

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ndpos

pytest.importorskip("timm", reason="needs timm")
import timm
import timm.optim
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block

import ndpos.timm
from tests.test_timm import SPLIT, assert_same, by_hand, images, vit

# ---- loading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_weights_from_before_the_wrap_give_initial_frequencies_even_to_a_model_without_memory(assign):
    plain = vit()
    expected = ndpos.timm.add_rope(copy.deepcopy(plain), learnable=True)
    model = ndpos.timm.add_rope(vit(), learnable=True).to("meta")
    model = model if assign else model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.load_state_dict(plain.state_dict(), strict=True, assign=assign)
    assert torch.equal(model.rope.frequencies, expected.rope.frequencies)
    assert torch.equal(model(images(2, 3)), expected(images(2, 3)))


def test_a_buffer_of_the_users_own_is_loaded_whatever_its_name():
    model = ndpos.timm.add_rope(vit())
    model.head.register_buffer("periods", torch.ones(3))
    given = {**model.state_dict(), "head.periods": torch.full((3,), 2.0)}
    model.load_state_dict(given, strict=True)
    assert torch.equal(model.head.periods, torch.full((3,), 2.0))


# ---- resizing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 3), (1, 1)], ids=["many patches", "one patch, whose shape broadcasts"])
@pytest.mark.parametrize("kind", ["pos_embed", "learned"])
def test_a_resized_table_trains_while_an_old_output_is_still_alive(sizes, kind):
    model = vit(sizes=sizes, class_token=False, global_pool="avg").train()
    if kind == "learned":
        ndpos.timm.set_table(model, ndpos.LearnedEmbedding(sizes, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(images(*sizes)).square().sum()  # in scope to the end, as in every training loop
    loss.backward()
    optimizer.step()
    ndpos.timm.resize(model, (48, 32), optimizer=optimizer)
    fresh = copy.deepcopy(model)
    for each in (model, fresh):
        each.zero_grad()
        each(images(3, 2)).square().sum().backward()
    for (name, one), (_, other) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert one.grad.shape == one.shape
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    assert loss.isfinite()


def test_hooks_on_a_table_outlive_its_move():
    model, seen = vit(), []
    model.pos_embed.register_hook(lambda gradient: seen.append(gradient.shape))
    ndpos.timm.resize(model, (48, 32))
    model(images(3, 2)).sum().backward()
    assert seen == [(1, 7, 32)]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda parameters: torch.optim.LBFGS(parameters), "LBFGS keeps what it knows in another place"),
        (lambda parameters: timm.optim.create_optimizer_v2(parameters, "lookahead_adamw"), "in another place"),
    ],
    ids=["lbfgs", "lookahead"],
)
def test_optimisers_that_keep_state_elsewhere_are_refused_before_anything_moves(make, says):
    model = vit()
    with pytest.raises(ValueError, match=says):
        ndpos.timm.resize(model, (48, 64), optimizer=make(model.parameters()))
    assert model.pos_embed.shape == (1, 7, 32)


def test_an_optimiser_that_keeps_lists_is_refused_before_anything_moves():
    model = vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.pos_embed] = {"factors": [torch.ones(7, 7)]}
    with pytest.raises(ValueError, match="keeps 'factors' as a list"):
        ndpos.timm.resize(model, (48, 64), optimizer=optimizer)
    assert model.pos_embed.shape == (1, 7, 32)


@pytest.mark.parametrize("table", [False, True])
def test_what_is_wrapped_or_resized_in_inference_mode_can_be_trained(table):
    model = vit()
    with torch.inference_mode():
        ndpos.timm.add_rope(model, learnable=True)
    if table:
        ndpos.timm.set_table(model, ndpos.LearnedEmbedding((2, 3), 32))
    optimizer = torch.optim.AdamW(model.train().parameters())
    model(images(2, 3)).sum().backward()
    optimizer.step()
    with torch.inference_mode():
        ndpos.timm.resize(model, (48, 64), optimizer=optimizer)
    optimizer.zero_grad()
    model(images(3, 4)).sum().backward()
    optimizer.step()


# ---- what timm calls is called or refused -------------------------------------------------------------------------


class Counting(torch.nn.Sequential):
    pass


class Dropping(torch.nn.Identity):
    pass


def with_container():
    model = vit()
    model.blocks = Counting(*model.blocks)
    return model


def with_hook():
    model = vit()
    model.blocks.register_forward_hook(lambda *arguments: None)
    return model


def with_drop():
    model = vit()
    model.patch_drop = Dropping()
    return model


@pytest.mark.parametrize(
    "wrap", [ndpos.timm.add_rope, lambda model: ndpos.timm.set_table(model, ndpos.IntegerEmbedding(ndpos.split(32, 2)))]
)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (with_container, "blocks is a Counting"),
        (with_hook, "hooks of its own"),
        (with_drop, "patch_drop is a Dropping"),
    ],
)
def test_modules_that_would_be_bypassed_are_refused(make, says, wrap):
    model = make()
    with pytest.raises(TypeError, match=says):
        wrap(model)
    assert type(model) is timm.models.VisionTransformer


def test_a_plain_block_put_in_afterwards_is_told_by_name():
    model = ndpos.timm.add_rope(vit())
    model.blocks[1] = Block(32, 2)
    with pytest.raises(ValueError, match="plain Attention stands in a model wrapped by add_rope"):
        model(images(2, 3))


@torch.no_grad()
def test_layers_in_the_place_of_qkv_are_called_and_a_model_of_them_wraps_whole():
    class Adapted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    plain = vit()
    model = copy.deepcopy(plain)
    for block in model.blocks:
        block.attn.qkv = Adapted(block.attn.qkv)
    assert_same(ndpos.timm.add_rope(model).forward_features(images(2, 3)), by_hand(plain, images(2, 3)))


@torch.no_grad()
def test_an_image_size_that_patches_do_not_divide_stays_as_timm_takes_it_where_it_was_built_so():
    plain = vit(sizes=(2, 3))
    plain = timm.models.VisionTransformer(img_size=(35, 50), patch_size=16, embed_dim=32, depth=1, num_heads=2).eval()
    x = torch.randn(1, 3, 35, 50)
    model = ndpos.timm.add_rope(copy.deepcopy(plain), strength=0.0)
    assert torch.equal(model(x), plain(x))
    assert ndpos.timm.resize(model, (35, 50)) is model


# ---- precision and settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"qk_norm": True}, {}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_learned_frequencies_at_strength_0_answer_bit_for_bit_too(settings, dtype, fused):
    plain = vit(**settings).to(dtype)
    model = ndpos.timm.add_rope(copy.deepcopy(plain), learnable=True, strength=0.0)
    for each in (plain, model):
        for block in each.blocks:
            block.attn.fused_attn = fused
    x = images(2, 3, batch=3).to(dtype)
    assert torch.equal(model(x), plain(x))


@torch.no_grad()
def test_a_float64_model_turns_in_float64():
    plain = vit().double()
    model = ndpos.timm.add_rope(copy.deepcopy(plain))
    expected = by_hand(plain, images(2, 3).double())
    torch.testing.assert_close(model.forward_features(images(2, 3).double()), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "strength", [True, numpy.bool_(True), numpy.array(0.5), torch.tensor(0.5), "1", None, 1j], ids=repr
)
def test_strength_is_a_plain_number(strength):
    with pytest.raises(TypeError, match="strength is a plain number"):
        ndpos.timm.add_rope(vit(), strength=strength)


def test_numpy_numbers_are_plain_numbers():
    assert ndpos.timm.add_rope(vit(), strength=numpy.float32(0.5)).strength == 0.5


def test_absurd_reference_sizes_are_refused_when_they_are_given():
    with pytest.raises(ValueError, match="reference_sizes are patches per axis"):
        ndpos.timm.add_rope(vit(), reference_sizes=(10**30, 4))


def test_a_faded_model_runs_on_fake_tensors():
    model = ndpos.timm.add_rope(vit(), absolute="fade", strength=0.5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.empty(2, 3, 32, 48)).shape == (2, 5)


def test_distillation_tokens_are_never_dropped_as_if_they_were_patches():
    model = ndpos.timm.add_rope(vit(cls=VisionTransformerDistilled, sizes=(3, 4), patch_drop_rate=0.9)).train()
    with torch.no_grad():
        model.dist_token.fill_(100.0)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda block, arguments: seen.append(arguments[0]))
    for seed in range(5):
        torch.manual_seed(seed)
        model(images(3, 4))
    assert all((x[:, 1] > 50).all() and x.shape[1] == 3 for x in seen)


def test_a_wrapped_model_is_pickled_whole_and_small():
    model = ndpos.timm.add_rope(vit(), rope=ndpos.RotaryEmbedding(SPLIT), strength=0.5)
    assert pickle.loads(pickle.dumps(model)).strength == 0.5
