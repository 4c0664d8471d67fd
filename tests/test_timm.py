"""A timm ViT wrapped by add_rope, against its own blocks walked by hand, queries and keys turned by ndpos.rotate."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import ndpos

pytest.importorskip("timm", reason="needs timm")
import timm
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer

import ndpos.timm
from tests.test_house import missing_sections

SPLIT = ndpos.split(16, 2)
MODELS = {
    "class token": {},
    "registers": {"reg_tokens": 3},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "registers without a row in the table": {"reg_tokens": 2, "no_embed_class": True},
    "no table": {"pos_embed": "none"},
    "normed queries": {"qk_norm": True, "init_values": 0.5},
    "normed scores": {"scale_attn_norm": True},
    "post-norm blocks": {"block_fn": ResPostBlock},
    "pre-norm": {"pre_norm": True, "qkv_bias": False},
}
every_model = pytest.mark.parametrize("name", MODELS)


def vit(*, cls=VisionTransformer, sizes=(2, 3), **settings):
    torch.manual_seed(0)
    image = [16 * size for size in sizes]
    model = cls(
        **{
            "img_size": image,
            "patch_size": 16,
            "embed_dim": 32,
            "depth": 2,
            "num_heads": 2,
            "num_classes": 5,
            **settings,
        }
    )
    for parameter in model.parameters():  # timm starts with small weights, under which attention hardly matters
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def images(*sizes, batch=2):
    return torch.randn(batch, 3, *[16 * size for size in sizes], generator=torch.Generator().manual_seed(0))


def by_hand(model, x, frequencies=None, *, coords=None, attn_mask=None, is_causal=False):
    """Features of a model that is not wrapped, its blocks walked one by one with queries and keys turned."""
    frequencies = ndpos.geometric(SPLIT, base=100.0) if frequencies is None else frequencies
    sizes = [side // 16 for side in x.shape[-2:]]
    coords = ndpos.grid(sizes) if coords is None else coords
    x = model.norm_pre(model._pos_embed(model.patch_embed(x)))
    for layer, block in enumerate(model.blocks):
        own = frequencies[layer] if frequencies.ndim == 4 else frequencies
        angles = ndpos.angles(coords.flatten(0, -2), own)
        angles = angles if angles.ndim == 2 else angles.unsqueeze(0)

        def turn(x, angles=angles):
            prefix, patches = x[:, :, : model.num_prefix_tokens], x[:, :, model.num_prefix_tokens :]
            return torch.cat((prefix, ndpos.rotate(patches, angles, pairing="half")), dim=2)

        def attend(x, attn=block.attn, turn=turn):
            q, k, v = attn.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            q, k = turn(attn.q_norm(q)), turn(attn.k_norm(k))
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal)
            return attn.proj(attn.norm(x.transpose(1, 2).flatten(2)))

        if isinstance(block, ResPostBlock):
            x = x + block.norm1(attend(x))
            x = x + block.norm2(block.mlp(x))
        else:
            x = x + block.ls1(attend(block.norm1(x)))
            x = x + block.ls2(block.mlp(block.norm2(x)))
    return model.norm(x)


def assert_same(one, two):
    torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def unfuse(model):
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


@every_model
def test_a_wrapped_model_turns_its_patches_and_nothing_else(name):
    plain, x = vit(**MODELS[name]), images(2, 3)
    model = ndpos.timm.add_rope(copy.deepcopy(plain))
    assert_same(model.forward_features(x), by_hand(plain, x))
    assert_same(model(x), plain.forward_head(by_hand(plain, x)))
    assert (model(x) - plain(x)).abs().max() > 1e-2
    assert_same(unfuse(model)(x), plain.forward_head(by_hand(plain, x)))


@pytest.mark.parametrize("table", ["learn", "none"])
def test_a_dynamic_model_takes_images_of_any_shape(table):
    plain = vit(dynamic_img_size=True, pos_embed=table)
    model = ndpos.timm.add_rope(copy.deepcopy(plain))
    for sizes in ((2, 3), (3, 2), (4, 4), (1, 5), (1, 1)):
        assert_same(model.forward_features(images(*sizes)), by_hand(plain, images(*sizes)))


def test_a_fixed_model_follows_when_its_input_size_is_set():
    plain = vit()
    model = ndpos.timm.add_rope(copy.deepcopy(plain))
    for each in (plain, model):
        each.set_input_size((64, 32))
    assert_same(model.forward_features(images(4, 2)), by_hand(plain, images(4, 2)))
    with pytest.raises(ValueError, match="takes images of 64 x 32 pixels, got 32 x 48"):
        model(images(2, 3))


@pytest.mark.parametrize("unfused", [False, True])
@pytest.mark.parametrize("mask", ["causal", "boolean", "added", "per sample and head"])
def test_masks_are_honoured(unfused, mask):
    plain, x, tokens = vit(), images(2, 3), 7
    allowed = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed |= torch.eye(tokens, dtype=torch.bool)
    settings = {
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": allowed},
        "added": {"attn_mask": torch.randn(tokens, tokens, generator=torch.Generator().manual_seed(0))},
        "per sample and head": {"attn_mask": allowed.expand(2, 2, tokens, tokens)},
    }[mask]
    model = ndpos.timm.add_rope(copy.deepcopy(plain))
    model = unfuse(model) if unfused else model
    assert_same(model.forward_features(x, **settings), by_hand(plain, x, **settings))
    assert (model.forward_features(x, **settings) - model.forward_features(x)).abs().max() > 1e-2


def test_layers_and_heads_may_turn_their_own_way_and_learn_it():
    frequencies = ndpos.mixed(2, 8, heads=2, layers=2, generator=torch.Generator().manual_seed(0))
    rope = ndpos.RotaryEmbedding(SPLIT, frequencies=frequencies, learnable=True)
    plain, x = vit(), images(2, 3)
    model = ndpos.timm.add_rope(copy.deepcopy(plain), rope=rope)
    assert_same(model.forward_features(x), by_hand(plain, x, frequencies.float()))
    model(x).sum().backward()
    assert (model.rope.frequencies.grad != 0).any((-2, -1)).all()  # of every layer and head
    assert sorted(set(model.state_dict()) - set(plain.state_dict())) == ["rope.frequencies"]


def test_without_a_table_features_follow_the_places_of_patches_only_when_wrapped():
    plain = vit(pos_embed="none")
    model = ndpos.timm.add_rope(copy.deepcopy(plain))
    x = images(2, 3)
    patches = x.unflatten(-1, (3, 16)).unflatten(-3, (2, 16)).movedim(-2, -3)  # (batch, 3, rows, columns, 16, 16)
    order = torch.tensor([4, 0, 5, 1, 3, 2])
    mixed_up = patches.flatten(2, 3)[:, :, order].unflatten(2, (2, 3)).movedim(-3, -2).flatten(-2).flatten(-3, -2)
    assert_same(plain.forward_features(mixed_up)[:, 1:], plain.forward_features(x)[:, 1:][:, order])
    assert (model.forward_features(mixed_up)[:, 1:] - model.forward_features(x)[:, 1:][:, order]).abs().max() > 1e-2


def test_features_see_displacement_alone_when_nothing_else_tells_the_place():
    class Elsewhere(ndpos.RotaryEmbedding):
        def on_grid(self, sizes, **settings):
            return super().on_grid(sizes, start=self.start, step=self.step, **settings)

    def features(start, step=1):
        rope = Elsewhere(SPLIT, base=100.0)
        rope.start, rope.step = start, step
        model = vit(pos_embed="none", class_token=False, global_pool="avg")
        return ndpos.timm.add_rope(model, rope=rope).forward_features(images(2, 3))

    assert_same(features((5, -3)), features(0))
    assert (features(0, (2, 1)) - features(0)).abs().max() > 1e-2
    assert (features(0, (1, 2)) - features(0)).abs().max() > 1e-2


def test_a_wrapped_model_loads_and_saves_the_weights_of_the_model_itself():
    plain = vit()
    model = ndpos.timm.add_rope(vit(reg_tokens=0))
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(model.state_dict(), strict=True)
    assert ndpos.timm.add_rope(plain) is plain
    assert isinstance(plain, VisionTransformer)


@pytest.mark.parametrize("learnable", [False, True])
def test_copies_and_pickles_turn_alike_and_own_what_they_learn(learnable):
    rope = ndpos.RotaryEmbedding(SPLIT, base=100.0, learnable=learnable)
    model, x = ndpos.timm.add_rope(vit(), rope=rope), images(2, 3)
    expected = model(x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), expected)
        with torch.no_grad():
            for parameter in again.rope.parameters():
                parameter.add_(1.0)
        assert torch.equal(again(x), expected) != learnable
        assert torch.equal(model(x), expected)


def gradients(model, x):
    model.train().zero_grad()
    model(x).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_checkpointed_blocks_have_the_same_gradients_in_another_thread_too():
    rope = ndpos.RotaryEmbedding(SPLIT, frequencies=ndpos.mixed(2, 8, heads=2, layers=2), learnable=True)
    model, x = ndpos.timm.add_rope(vit(), rope=rope), images(2, 3)
    expected = gradients(model, x)
    model.set_grad_checkpointing(True)
    seen = [gradients(model, x)]
    thread = threading.Thread(target=lambda: seen.append(gradients(model, x)))
    thread.start()
    thread.join()
    for each in seen:
        assert each.keys() == expected.keys()
        for name, gradient in each.items():
            torch.testing.assert_close(gradient, expected[name], msg=name)


def test_a_bfloat16_model_turns_by_float32_tables(monkeypatch):
    seen, turned = [], ndpos.Rotation.both
    monkeypatch.setattr(
        ndpos.Rotation,
        "both",
        lambda turn, q, k, **settings: seen.append((turn.cos, q)) or turned(turn, q, k, **settings),
    )
    model, x = ndpos.timm.add_rope(vit()), images(2, 3)
    assert copy.deepcopy(model).bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
    exact = ndpos.RotaryEmbedding(SPLIT, base=100.0).on_grid((2, 3)).cos
    assert [q.dtype for _, q in seen] == [torch.bfloat16] * 4
    assert all(torch.equal(cos, exact) for cos, _ in seen)  # float32, and the same bits


def graphs(model):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for sizes in ((2, 3), (4, 2), (3, 3)):
        assert_same(compiled(images(*sizes)), model(images(*sizes)))
    return counter.frame_count


def test_wrapping_adds_no_graph_to_those_that_timm_makes_itself():
    """timm's patch embedding makes a graph for every size; the rotation must not make one more."""
    plain = vit(dynamic_img_size=True, pos_embed="none", depth=1)
    assert graphs(ndpos.timm.add_rope(copy.deepcopy(plain))) <= graphs(plain)


def rope(axes=2, dim=16, **settings):
    return ndpos.RotaryEmbedding(ndpos.split(dim, axes), **settings)


class Subclass(VisionTransformer):
    pass


class OwnBlock(Block):
    pass


class OwnAttention(timm.layers.Attention):
    pass


def wrapped_block():
    model = ndpos.timm.add_rope(vit())
    return model.blocks[0](torch.zeros(1, 7, 32))


def uneven():
    model = vit()
    model.blocks[1].attn = timm.layers.Attention(32, num_heads=4)
    return model


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ndpos.timm.add_rope(ndpos.timm.add_rope(vit())), ValueError, ["wrapped already", "twice"]),
        (
            lambda: ndpos.timm.add_rope(torch.nn.Linear(1, 1)),
            TypeError,
            ["the exact class VisionTransformer, VisionTransformerDistilled", "got Linear: it has no attention"],
        ),
        (
            lambda: ndpos.timm.add_rope(Subclass(img_size=32, embed_dim=32, depth=1, num_heads=2)),
            TypeError,
            ["got Subclass: a subclass of VisionTransformer", "forward of its own"],
        ),
        (
            lambda: ndpos.timm.add_rope(vit(block_fn=OwnBlock)),
            TypeError,
            ["block 0 is OwnBlock with Attention", "out of reach"],
        ),
        (
            lambda: ndpos.timm.add_rope(vit(attn_layer=OwnAttention)),
            TypeError,
            ["timm's Attention", "block 0 is Block with OwnAttention", "out of reach"],
        ),
        (lambda: ndpos.timm.add_rope(uneven()), ValueError, ["the same heads", "[(2, 16), (4, 8)]"]),
        (
            lambda: ndpos.timm.add_rope(vit(), rope=rope(dim=8)),
            ValueError,
            ["head_dim 8", "16 channels", "split(16, 2)"],
        ),
        (lambda: ndpos.timm.add_rope(vit(), rope=rope(axes=3)), ValueError, ["3 axes", "2 axes (y, x)"]),
        (lambda: ndpos.timm.add_rope(vit(), rope=rope(heads=3)), ValueError, ["3 heads and None layers", "2 and 2"]),
        (
            lambda: ndpos.timm.add_rope(vit(), rope=rope(heads=2, layers=3)),
            ValueError,
            ["2 heads and 3 layers", "2 and 2"],
        ),
        (lambda: ndpos.timm.add_rope(vit(), rope="axial"), TypeError, ["ndpos.RotaryEmbedding, got str"]),
        (lambda: ndpos.timm.add_rope(vit(), rope=rope(), base=7.0), ValueError, ["own frequencies", "leave base=7.0"]),
        (wrapped_block, ValueError, ["without the model's forward", "model.forward_features(...)"]),
    ],
)
def test_a_refusal_names_the_rule_what_was_seen_and_a_cure(call, error, says):
    with pytest.raises(error) as refused:
        call()
    assert str(refused.value).startswith("ndpos.timm")
    for part in says:
        assert part in str(refused.value)


def test_a_refused_model_is_left_as_it_was():
    plain, x = vit(), images(2, 3)
    expected = plain(x)
    with pytest.raises(ValueError, match="head_dim 8"):
        ndpos.timm.add_rope(plain, rope=rope(dim=8))
    assert type(plain) is VisionTransformer
    assert torch.equal(plain(x), expected)


@pytest.mark.parametrize("name", ndpos.timm.__all__)
def test_every_public_call_says_what_it_takes_gives_and_refuses_and_where_it_is_from(name):
    assert not missing_sections(getattr(ndpos.timm, name))
