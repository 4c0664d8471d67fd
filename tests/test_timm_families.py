"""Every kind of model that add_rope takes, against timm's own forward with the queries and keys of attention turned.

The turn of the reference stands in front of torch's attention function, so that it knows nothing of how a family makes
queries and keys.
"""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import ndpos

pytest.importorskip("timm", reason="needs timm")
import timm

import ndpos.timm
from ndpos.timm.support import signature_of

SMALL = {
    # One model for each signature that timm registers: class, blocks, attention, norms and biases.
    "vit_small_patch16_224": {},
    "vit_small_patch14_reg4_dinov2": {"patch_size": 16},
    "vit_xsmall_patch16_clip_224": {},
    "vit_small_patch16_36x1_224": {},
    "vit_relpos_small_patch16_224": {},
    "vit_srelpos_small_patch16_224": {},
    "vit_relpos_base_patch16_cls_224": {},
    "vit_relpos_base_patch16_clsgap_224": {},
    "vit_base_patch16_rpn_224": {},
    "vit_small_patch16_18x2_224": {},
    "vit_so150m_patch16_reg4_gap_256": {},
    "vit_large_patch16_siglip_256": {},
    "vit_base_resnet26d_224": {},
    "vitamin_small_224": {},
    "deit3_small_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "vit_dpwee_patch16_reg1_gap_256": {},
    "vit_dwee_patch16_reg1_gap_256": {},
    "vit_pwee_patch16_reg1_gap_256": {},
    "vit_wee_patch16_reg1_gap_256": {},
    "beit_base_patch16_224": {},
    "beitv2_base_patch16_224": {},
    "eva_giant_patch14_224": {"patch_size": 16},
    "eva02_enormous_patch14_clip_224": {"patch_size": 16},
    "naflexvit_base_patch16_gap": {},
    "naflexvit_base_patch16_par_gap": {},
    "naflexvit_base_patch16_parfac_gap": {},
    "naflexvit_base_patch16_map": {},
}


def small(name, **settings):
    """A registered model of depth 2 and narrow, its weights large enough that attention matters."""
    torch.manual_seed(0)
    narrow = {} if "vitamin" in name or "resnet" in name else {"embed_dim": 64, "num_heads": 2}
    size = {} if "naflex" in name else {"img_size": (64, 96)}
    size = {"img_size": (128, 192)} if "resnet" in name else size
    depth = {} if "vitamin" in name or "resnet" in name else {"depth": 2}
    given = {**SMALL[name], **size, **depth, **narrow, "num_classes": 3, **settings}
    if "36x1" in name or "18x2" in name:
        given["depth"] = 2
    model = timm.create_model(name, **given)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "gamma" in key or key.endswith("norm1.weight"):
            torch.nn.init.constant_(parameter, 0.5)
    return model.eval()


every = pytest.mark.parametrize("name", SMALL)
# One of each class, blocks and attention; the others differ in norms, tokens and tables.
KINDS = [
    "vit_base_patch16_rpn_224",
    "vit_small_patch16_18x2_224",
    "deit_tiny_distilled_patch16_224",
    "vit_dpwee_patch16_reg1_gap_256",
    "vit_dwee_patch16_reg1_gap_256",
    "vit_pwee_patch16_reg1_gap_256",
    "vit_relpos_base_patch16_cls_224",
    "vit_srelpos_small_patch16_224",
    "beit_base_patch16_224",
    "eva_giant_patch14_224",
    "eva02_enormous_patch14_clip_224",
    "naflexvit_base_patch16_par_gap",
]
each_kind = pytest.mark.parametrize("name", KINDS)


def images(name, batch=2):
    size = (128, 192) if "resnet" in name else (64, 96)
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def turned_attention(angles, num_prefix):
    """torch's attention with queries and keys turned behind the prefix; one query for all (pooling) is left alone.

    ``angles`` ``(tokens, pairs)``, or a list of them for one call after the other.
    """
    plain, calls = F.scaled_dot_product_attention, iter(angles) if isinstance(angles, list) else None

    def attend(q, k, v, **settings):
        if q.shape[-2] == k.shape[-2]:
            own = angles if calls is None else next(calls)
            q, k = (
                torch.cat((x[..., :num_prefix, :], ndpos.rotate(x[..., num_prefix:, :], own, pairing="half")), dim=-2)
                for x in (q, k)
            )
        return plain(q, k, v, **settings)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def head_dim(model):
    place = next(ndpos.timm.blocks.turning_places(model.blocks[0]))
    return ndpos.timm.blocks.heads_of(place)[1]


def plain_angles(model, sizes, strength=(1.0, 1.0)):
    coords = ndpos.grid(sizes).flatten(0, -2) * torch.tensor(strength, dtype=torch.float64)
    return ndpos.angles(coords, ndpos.geometric(ndpos.split(head_dim(model), 2), base=100.0))


def sizes_of(model, x):
    patches = model.embeds if hasattr(model, "embeds") else model.patch_embed
    return tuple(patches.dynamic_feat_size(tuple(x.shape[-2:])))


def same(got, expected, times=1):
    scale = expected.abs().max()
    assert scale > 1e-3
    assert (got - expected).abs().max() <= times * 2e-5 * scale


@every
@torch.no_grad()
def test_queries_and_keys_are_turned_and_nothing_else_is_changed(name):
    model, x = small(name), images(name)
    before, keys = model.forward_features(x), list(model.state_dict())
    with turned_attention(plain_angles(model, sizes_of(model, x)), model.num_prefix_tokens):
        expected = model.forward_features(x)
    with turned_attention(plain_angles(model, sizes_of(model, x), (0.25, 1.0)), model.num_prefix_tokens):
        weaker = model.forward_features(x)
    assert (expected - before).abs().max() > 1e-3 * before.abs().max()
    assert (expected - weaker).abs().max() > 1e-3 * before.abs().max()
    ndpos.timm.add_rope(model, strength=0.0)
    assert torch.equal(model.forward_features(x), before)
    assert list(model.state_dict()) == keys
    model.strength = 1.0
    same(model.forward_features(x), expected)
    model.strength = (0.25, 1.0)
    same(model.forward_features(x), weaker)


@every
@torch.no_grad()
def test_scores_depend_on_the_displacement_alone(name):
    """With tokens that are all alike, the score of two patches is a function of how far apart they stand."""
    model, x = ndpos.timm.add_rope(small(name)), images(name, batch=1)
    plain, seen = F.scaled_dot_product_attention, []

    def attend(q, k, v, **settings):
        if q.shape[-2] == k.shape[-2]:
            seen.append(q @ k.mT)
        return plain(q, k, v, **settings)

    block = model.blocks[0]
    alike = block.register_forward_pre_hook(lambda _, args: (args[0][:, -1:].expand_as(args[0]), *args[1:]))
    F.scaled_dot_product_attention = attend
    try:
        model.forward_features(x)
    finally:
        F.scaled_dot_product_attention = plain
        alike.remove()
    (height, width), prefix = sizes_of(model, x), model.num_prefix_tokens
    scores = seen[0][0, :, prefix:, prefix:].unflatten(-1, (height, width)).unflatten(-3, (height, width))
    same(scores[:, 1:, :, 1:, :], scores[:, :-1, :, :-1, :])
    same(scores[:, :, 1:, :, 1:], scores[:, :, :-1, :, :-1])
    assert (scores[:, 0, 0, 1, 0] - scores[:, 0, 0, 0, 1]).abs().max() > 1e-4 * scores.abs().max()


@each_kind
def test_gradients_are_those_of_the_turned_attention(name):
    model, x = small(name), images(name)
    with turned_attention(plain_angles(model, sizes_of(model, x)), model.num_prefix_tokens):
        model(x).square().sum().backward()
    expected = {key: value.grad for key, value in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    ndpos.timm.add_rope(model, learnable=True)
    model(x).square().sum().backward()
    found = dict(model.named_parameters())
    assert found.pop("rope.frequencies").grad.abs().max() > 0
    for key, value in found.items():
        assert (value.grad is None) == (expected[key] is None), key
        if value.grad is not None and expected[key].abs().max() > 1e-4:
            same(value.grad, expected[key], times=5)


@each_kind
def test_graphs_pickles_copies_and_checkpointing_give_the_same(name):
    model, x = ndpos.timm.add_rope(small(name), strength=(0.5, 1.0), learnable=True), images(name)
    with torch.no_grad():
        expected = model(x)
        torch._dynamo.reset()
        same(torch.compile(model, backend="aot_eager", fullgraph="naflex" not in name)(x), expected)
        same(pickle.loads(pickle.dumps(model))(x), expected)
        copied = copy.deepcopy(model)
        copied.strength = 0.0
        same(model(x), expected)
    grads = []
    for checkpointed in (False, True):
        model.set_grad_checkpointing(checkpointed)
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()
        grads.append(model.rope.frequencies.grad)
    same(*grads)


@each_kind
@torch.no_grad()
def test_intermediate_features_are_turned_too(name):
    model, x = ndpos.timm.add_rope(small(name)), images(name)
    last, features = model.forward_intermediates(x, indices=1, norm=True)
    same(last, model.forward_features(x))
    patches = last[:, model.num_prefix_tokens :].mT.unflatten(-1, sizes_of(model, x))
    same(features[0], patches)


@pytest.mark.parametrize("name", [each for each in KINDS if "naflex" not in each])
@torch.no_grad()
def test_every_layer_can_have_its_own_frequencies(name):
    model, x = small(name), images(name)
    heads = ndpos.timm.blocks.heads_of(next(ndpos.timm.blocks.turning_places(model.blocks[0])))[0]
    dim, depth = head_dim(model), len(model.blocks)
    ladders = [ndpos.geometric(ndpos.split(dim, 2), base=base) for base in (10.0, 1000.0)]
    frequencies = torch.stack([ladder.expand(heads, -1, -1) for ladder in ladders[:depth]])
    coords = ndpos.grid(sizes_of(model, x)).flatten(0, -2)
    calls = 2 if "18x2" in name or "vit_d" in name else 1  # attentions of a block
    angles = [ndpos.angles(coords, ladder) for ladder in ladders for _ in range(calls)]
    with turned_attention(angles, model.num_prefix_tokens):
        expected = model.forward_features(x)
    rope = ndpos.RotaryEmbedding(ndpos.split(dim, 2), frequencies=frequencies)
    same(ndpos.timm.add_rope(model, rope=rope).forward_features(x), expected)


@torch.no_grad()
def test_heads_of_a_differential_attention_are_its_halves_in_turn():
    """Query 2h and 2h + 1 are the two halves of head h; each can have its own frequencies."""
    name = "vit_dwee_patch16_reg1_gap_256"
    model, x = small(name), images(name)
    dim = head_dim(model)
    frequencies = ndpos.mixed(2, dim // 2, heads=4, generator=torch.Generator().manual_seed(0))
    coords = ndpos.grid(sizes_of(model, x)).flatten(0, -2)
    each = ndpos.angles(coords, frequencies).unsqueeze(0)
    with turned_attention([each[:, 0::2], each[:, 1::2]] * 2, model.num_prefix_tokens):
        expected = model.forward_features(x)
    rope = ndpos.RotaryEmbedding(ndpos.split(dim, 2), frequencies=frequencies)
    same(ndpos.timm.add_rope(model, rope=rope).forward_features(x), expected)
