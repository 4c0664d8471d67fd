"""What training scripts do with a wrapped model, in every family: parameter groups, averages, weights moved about."""

import copy

import pytest
import torch

import ndpos

pytest.importorskip("timm", reason="needs timm")
import timm
import timm.optim
import timm.utils
from timm.models import clean_state_dict, load_checkpoint

import ndpos.timm
from tests.test_timm_families import images, same, small

FAMILIES = [
    "vit_small_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "vit_pwee_patch16_reg1_gap_256",
    "eva_giant_patch14_224",
    "beit_base_patch16_224",
    "vit_relpos_base_patch16_cls_224",
    "naflexvit_base_patch16_gap",
]
every_family = pytest.mark.parametrize("name", FAMILIES)


def names_of(model):
    return {id(parameter): name for name, parameter in model.named_parameters()}


@every_family
def test_timms_factory_spares_frequencies_the_decay_and_gives_them_the_rate_of_the_stem(name):
    model = ndpos.timm.add_rope(small(name), learnable=True)
    names = names_of(model)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    decay = {names[id(each)]: group["weight_decay"] for group in optimizer.param_groups for each in group["params"]}
    assert decay.keys() == set(names.values())
    assert decay["rope.frequencies"] == 0
    assert decay["blocks.0.mlp.fc1.weight" if "pwee" not in name else "blocks.0.in_proj.weight"] == 0.05
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    found = [(names[id(each)], group["lr_scale"]) for group in optimizer.param_groups for each in group["params"]]
    assert sorted(key for key, _ in found) == sorted(names.values())
    scale = dict(found)
    stem = next(key for key in scale if key.endswith("proj.weight") and ("patch_embed" in key or "embeds" in key))
    assert scale["rope.frequencies"] == scale[stem] < scale["head.weight"]


@every_family
def test_a_running_average_keeps_its_own_frequencies_and_strength(name):
    model = ndpos.timm.add_rope(small(name), learnable=True, strength=0.5).train()
    average = timm.utils.ModelEmaV3(model, decay=0.75, use_warmup=False)
    first = model.rope.frequencies.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(images(name)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.rope.frequencies, first)
    average.update(model)
    expected = 0.75 * first + 0.25 * model.rope.frequencies.detach()
    torch.testing.assert_close(average.module.rope.frequencies.detach(), expected)
    model.strength = 1.0
    assert average.module.strength == 0.5
    with torch.no_grad():
        alone = copy.deepcopy(average.module)
        same(average.module.eval()(images(name)), alone.eval()(images(name)))


@every_family
@torch.no_grad()
def test_weights_go_from_plain_to_wrapped_and_back(name, tmp_path):
    plain, x = small(name), images(name)
    expected = plain(x)
    state = plain.state_dict()
    fixed = ndpos.timm.add_rope(copy.deepcopy(plain), strength=0.0)
    for parameter in fixed.parameters():
        parameter.zero_()
    fixed.load_state_dict(state, strict=True)
    assert torch.equal(fixed(x), expected)
    learnable = ndpos.timm.add_rope(copy.deepcopy(plain), learnable=True, strength=0.0)
    learnable.load_state_dict(state, strict=True)
    back = small(name)
    back.load_state_dict(fixed.state_dict(), strict=True)
    assert torch.equal(back(x), expected)
    # What learned frequencies add is one key: told by a strict load, left out by timm's non-strict one.
    wrapped = learnable.state_dict()
    assert wrapped.keys() - state.keys() == {"rope.frequencies"}
    assert back.load_state_dict(wrapped, strict=False).unexpected_keys == ["rope.frequencies"]
    wrapped["rope.frequencies"] = wrapped["rope.frequencies"] * 2
    for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
        held = {f"{prefix}{key}": value for key, value in wrapped.items()}
        again = ndpos.timm.add_rope(small(name), learnable=True)
        again.load_state_dict(held, strict=True)
        assert torch.equal(again.rope.frequencies, wrapped["rope.frequencies"])
        torch.save({"state_dict": held}, tmp_path / "file.pth")
        once = ndpos.timm.add_rope(small(name), learnable=True)
        load_checkpoint(once, str(tmp_path / "file.pth"), strict=True)
        assert torch.equal(once.rope.frequencies, wrapped["rope.frequencies"])


@torch.no_grad()
def test_a_prefix_of_some_keys_alone_is_no_wrapper():
    model = ndpos.timm.add_rope(small("vit_small_patch16_224"))
    state = dict(model.state_dict())
    state["module.pos_embed"] = state.pop("pos_embed")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*module\.pos_embed"):
        model.load_state_dict(state)
    assert clean_state_dict(state).keys() == model.state_dict().keys()


def test_frozen_and_compiled_models_train_alike():
    name = "vit_small_patch16_224"
    grads = []
    for compiled in (False, True):
        model = ndpos.timm.add_rope(small(name), learnable=True, strength=0.7)
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(images(name)).square().sum().backward()
        grads.append(model.rope.frequencies.grad)
    same(grads[1], grads[0])


def test_a_fused_model_is_trained_averaged_and_loaded_as_before():
    torch.manual_seed(0)
    settings = {"img_size": (64, 96), "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 3}
    model = ndpos.timm.fuse_rope(timm.create_model("vit_small_patch16_rope_mixed_224", **settings))
    names = names_of(model)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    decay = {names[id(each)]: group["weight_decay"] for group in optimizer.param_groups for each in group["params"]}
    assert decay.keys() == set(names.values())
    assert decay["rope.freqs"] == 0
    average = timm.utils.ModelEmaV3(model, decay=0.5, use_warmup=False)
    before = model.rope.freqs.detach().clone()
    for checkpointed in (False, True):
        model.set_grad_checkpointing(checkpointed)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 64, 96)).square().sum().backward()
        assert model.rope.freqs.grad.abs().max() > 0
    optimizer.step()
    average.update(model)
    torch.testing.assert_close(average.module.rope.freqs.detach(), (before + model.rope.freqs.detach()) / 2)
    plain = timm.create_model("vit_small_patch16_rope_mixed_224", **settings)
    plain.load_state_dict(model.state_dict(), strict=True)
