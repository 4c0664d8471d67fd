"""Live timm models moved to other grids with all that follows their grid: biases, patch kernels, rotations."""

import copy

import pytest
import torch

import ndpos

pytest.importorskip("timm", reason="needs timm")
import timm

import ndpos.timm

MODELS = {
    "beit_base_patch16_224": {},
    "beit_base_patch16_224 shared": {"use_shared_rel_pos_bias": True, "use_rel_pos_bias": False},
    "beit_base_patch16_224 table": {"use_abs_pos_emb": True},
    "vit_relpos_base_patch16_224": {},
    "vit_relpos_base_patch16_224 class": {"class_token": True, "rel_pos_type": "bias"},
    "vit_relpos_base_patch16_224 bias": {"rel_pos_type": "bias"},
    "vit_relpos_base_patch16_224 shared": {"rel_pos_type": "bias", "shared_rel_pos": True},
    "vit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "eva02_tiny_patch14_224": {"patch_size": 16},
    "vit_small_patch16_rope_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_small_patch16_dinov3": {},
}
every = pytest.mark.parametrize("name", MODELS)


def small(name, sizes=(3, 4), patch=16):
    torch.manual_seed(0)
    settings = {"embed_dim": 64, "num_heads": 2, "depth": 2, "num_classes": 3, **MODELS[name]}
    settings["patch_size"] = patch
    model = timm.create_model(name.split()[0], img_size=tuple(patch * n for n in sizes), **settings)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "bias_table" in key or "pos_embed" in key:
                parameter.normal_()
    return model.eval()


def picture(sizes, patch=16):
    return torch.randn(2, 3, *(patch * n for n in sizes), generator=torch.Generator().manual_seed(1))


@every
@pytest.mark.parametrize("new", [(5, 4), (2, 6), (4, 3), (1, 5)], ids=str)
@torch.no_grad()
def test_a_moved_model_is_one_built_for_the_new_grid_with_moved_tables(name, new):
    model = small(name)
    state = copy.deepcopy(model.state_dict())
    held = dict(model.named_parameters())
    assert ndpos.timm.resize(model, tuple(16 * n for n in new)) is model
    assert {key: id(value) for key, value in model.named_parameters()} == {key: id(held[key]) for key in held}
    prefix = 0 if getattr(model, "no_embed_class", False) else model.num_prefix_tokens
    for key, value in state.items():
        if key == "pos_embed":
            state[key] = ndpos.resize(value, new, old_sizes=(3, 4), num_prefix=prefix)
        elif key.endswith("relative_position_bias_table"):
            kind = "beit" if len(value) == 5 * 7 + 3 else "swin"
            state[key] = ndpos.resize_bias(value, new, old_sizes=(3, 4), kind=kind)
            assert len(state[key]) == (2 * new[0] - 1) * (2 * new[1] - 1) + 3 * (kind == "beit")
    built = small(name, new)
    built.load_state_dict(state, strict=True)
    x = picture(new)
    torch.testing.assert_close(model(x), built(x), rtol=0, atol=1e-6)
    assert model.patch_embed.grid_size == new
    again = copy.deepcopy(model.state_dict())
    ndpos.timm.resize(model, tuple(16 * n for n in new))
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", [key for key in MODELS if "beit" in key or "relpos" in key])
def test_a_wrapped_model_moves_its_bias_too_and_trains_on(name):
    model = ndpos.timm.add_rope(small(name), base=100.0).train()
    optimizer = torch.optim.AdamW(model.parameters())
    model(picture((3, 4))).square().sum().backward()
    optimizer.step()
    before = {key: value.detach().clone() for key, value in model.named_parameters() if "bias_table" in key}
    kept = {key: copy.deepcopy(optimizer.state[value]) for key, value in model.named_parameters() if key in before}
    ndpos.timm.resize(model, (80, 48), optimizer=optimizer)
    moved = {key: value for key, value in model.named_parameters() if key in before}
    for key, value in moved.items():
        how = {"old_sizes": (3, 4), "kind": "beit" if len(before[key]) == 5 * 7 + 3 else "swin"}
        assert torch.equal(value, ndpos.resize_bias(before[key], (5, 3), **how))
        state = optimizer.state[value]
        assert torch.equal(state["exp_avg"], ndpos.resize_bias(kept[key]["exp_avg"], (5, 3), **how))
        linear = ndpos.resize_bias(kept[key]["exp_avg_sq"], (5, 3), kernel="linear", **how)
        assert torch.equal(state["exp_avg_sq"], linear)
        assert (linear >= 0).all()
    optimizer.zero_grad()
    model(picture((5, 3))).square().sum().backward()
    optimizer.step()
    assert all(value.grad is not None and value.isfinite().all() for value in moved.values())
    model.eval()
    torch.testing.assert_close(copy.deepcopy(model)(picture((5, 3))), model(picture((5, 3))))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224"])
@pytest.mark.parametrize(("patch", "grid"), [((8, 8), (6, 8)), ((32, 16), (2, 3)), ((24, 24), (3, 4))], ids=str)
def test_another_patch_size_moves_the_kernel_of_the_patch_embedding(name, patch, grid):
    model = small(name).train()
    optimizer = torch.optim.AdamW(model.parameters())
    model(picture((3, 4))).square().sum().backward()
    optimizer.step()
    weight, kept = model.patch_embed.proj.weight, copy.deepcopy(optimizer.state[model.patch_embed.proj.weight])
    expected = ndpos.resize_patch_kernel(weight.detach(), patch)
    image = tuple(n * p for n, p in zip(grid, patch, strict=True))
    ndpos.timm.resize(model, image, patch_size=patch, optimizer=optimizer)
    assert model.patch_embed.proj.weight is weight
    assert torch.equal(weight, expected)
    assert model.patch_embed.grid_size == grid
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape
    assert (optimizer.state[weight]["exp_avg_sq"] >= 0).all()
    assert kept["exp_avg"].shape != weight.shape
    optimizer.zero_grad()
    out = model(torch.randn(2, 3, *image))
    out.square().sum().backward()
    optimizer.step()
    assert weight.isfinite().all()
    # timm's own way: a model of the same settings given the same size
    other = small(name)
    other.set_input_size(image, patch_size=patch)
    assert (other.patch_embed.grid_size, other.patch_embed.patch_size) == (grid, patch)
    assert other.patch_embed.proj.kernel_size == model.patch_embed.proj.kernel_size == patch
    assert other._model_args == model._model_args


@torch.no_grad()
def test_pictures_twice_as_large_with_patches_twice_as_large_give_nearly_the_same_features():
    model = small("vit_tiny_patch16_224")
    smooth = torch.nn.functional.interpolate(picture((3, 4), patch=2), scale_factor=8, mode="bicubic")
    before = model(smooth)
    larger = torch.nn.functional.interpolate(smooth, scale_factor=2, mode="bicubic", antialias=True)
    after = ndpos.timm.resize(model, (96, 128), patch_size=(32, 32))(larger)
    assert (after - before).abs().max() < 0.02 * before.abs().max()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ndpos.timm.resize(small("beit_base_patch16_224"), (50, 64)), ValueError, ["16 x 16 do not divide"]),
        (
            lambda: ndpos.timm.resize(small("vit_tiny_patch16_224"), (48, 64), patch_size=(10, 16)),
            ValueError,
            ["10 x 16 do not divide", "48 x 64"],
        ),
        (
            lambda: ndpos.timm.resize(small("vit_tiny_patch16_224"), (48, 64), patch_size=8),
            TypeError,
            ["patch_size take one integer per axis"],
        ),
        (
            lambda: ndpos.timm.resize(timm.create_model("swin_tiny_patch4_window7_224"), (256, 256)),
            TypeError,
            ["VisionTransformerRelPos", "SwinTransformer"],
        ),
    ],
)
def test_a_refusal_changes_nothing_and_says_what_was_seen(call, error, says):
    with pytest.raises(error) as refused:
        call()
    for part in says:
        assert part in str(refused.value)


def test_an_optimiser_that_cannot_follow_is_refused_before_anything_moves():
    model = small("beit_base_patch16_224")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    model(picture((3, 4))).square().sum().backward()
    optimizer.step()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="cannot be moved with"):
        ndpos.timm.resize(model, (80, 64), optimizer=optimizer)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.patch_embed.grid_size == (3, 4)
    assert model(picture((3, 4))).isfinite().all()
