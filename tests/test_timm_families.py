"""Every kind of model that add_rope takes, against timm's own forward with the queries and keys of attention turned.

The turn of the reference stands in front of torch's attention function, so that it knows nothing of how a family makes
queries and keys.
"""

import contextlib
import copy
import pickle
from pathlib import Path

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
    "vit_srelpos_medium_patch16_224": {},
    "vit_relpos_medium_patch16_rpn_224": {},
    "vit_base_patch16_xp_224": {},
    "vit_base_patch16_rpn_224": {},
    "vit_small_patch16_18x2_224": {},
    "vit_so150m_patch16_reg4_gap_256": {},
    "vit_large_patch16_siglip_256": {},
    "vit_tiny_r_s16_p8_224": {},
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
    narrow = {} if "vitamin" in name or "_r_s16" in name else {"embed_dim": 64, "num_heads": 2}
    size = {} if "naflex" in name else {"img_size": (64, 96)}
    size = {"img_size": (128, 192)} if "_r_s16" in name else size
    depth = {} if "vitamin" in name or "_r_s16" in name else {"depth": 2}
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
    "vit_small_patch16_224",
    "vit_base_patch16_xp_224",
    "vit_relpos_medium_patch16_rpn_224",
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
    size = (128, 192) if "_r_s16" in name else (64, 96)
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
    told = {key: grad for key, grad in expected.items() if grad is not None and grad.abs().max() > 1e-3}
    assert len(told) > len(expected) / 2
    for key, value in found.items():
        assert (value.grad is None) == (expected[key] is None), key
        if key in told:
            same(value.grad, told[key], times=5)


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


# ---- grids per image, dropped patches -------------------------------------------------------------------------------


def patchified(pictures, patch=16):
    """Pictures of several sizes as NaFlex has them: patches, coordinates (y, x) and validity, padded at the end."""
    rows, coords = [], []
    for picture in pictures:
        height, width = (side // patch for side in picture.shape[-2:])
        cut = picture.reshape(3, height, patch, width, patch).permute(1, 3, 2, 4, 0)
        rows.append(cut.reshape(height * width, -1))
        coords.append(ndpos.grid((height, width)).flatten(0, -2))
    longest = max(map(len, rows)) + 2
    valid = torch.stack([torch.arange(longest) < len(each) for each in rows])
    pad = torch.nn.functional.pad
    return {
        "patches": torch.stack([pad(each, (0, 0, 0, longest - len(each))) for each in rows]),
        "patch_coord": torch.stack([pad(each, (0, 0, 0, longest - len(each))) for each in coords]),
        "patch_valid": valid,
    }


@pytest.mark.parametrize("reference", [None, (5, 7)])
@torch.no_grad()
def test_pictures_of_several_grids_in_one_batch_are_each_turned_by_their_own(reference):
    generator = torch.Generator().manual_seed(0)
    pictures = [torch.randn(3, 16 * h, 16 * w, generator=generator) for h, w in ((2, 3), (4, 2), (3, 3))]
    model = small("naflexvit_base_patch16_gap")
    plain = model(patchified(pictures))
    ndpos.timm.add_rope(model, reference_sizes=reference)
    together = model(patchified(pictures))
    alone = torch.cat([model(picture.unsqueeze(0)) for picture in pictures])
    same(together, alone)
    assert (together - plain).abs().max() > 1e-3 * plain.abs().max()
    torch._dynamo.reset()
    same(torch.compile(model, backend="aot_eager")(patchified(pictures)), alone)


@pytest.mark.parametrize(
    "name", ["eva_giant_patch14_224", "naflexvit_base_patch16_gap", "vit_dwee_patch16_reg1_gap_256"]
)
@torch.no_grad()
def test_patches_that_are_left_keep_their_places(name, monkeypatch):
    kept = torch.tensor([[3, 0, 5, 7], [1, 2, 8, 4]])

    def drop(x, prob, num_prefix_tokens, ordered, training):
        left = x[:, num_prefix_tokens:].gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return torch.cat((x[:, :num_prefix_tokens], left), dim=1), kept

    for module in (timm.layers.patch_dropout, ndpos.timm.encoded):
        monkeypatch.setattr(module, "patch_dropout_forward", drop)
    model = small(name, patch_drop_rate=0.5).train()
    x = images(name)
    angles = plain_angles(model, sizes_of(model, x))[kept].unsqueeze(1)  # (batch, 1, tokens, pairs)
    with turned_attention(angles, model.num_prefix_tokens):
        expected = model.forward_features(x)
    same(ndpos.timm.add_rope(model).forward_features(x), expected)


@torch.no_grad()
def test_a_fading_table_follows_the_strength_or_its_own_schedule():
    for name in ("eva_giant_patch14_224", "vit_small_patch16_224"):
        model, x = small(name), images(name)
        without = copy.deepcopy(model)
        torch.nn.init.zeros_(without.pos_embed)
        halved = copy.deepcopy(model)
        halved.pos_embed.mul_(0.5)
        ndpos.timm.add_rope(model, strength=0.0, absolute="fade")
        ndpos.timm.add_rope(without, strength=(0.5, 1.0))
        ndpos.timm.add_rope(halved, strength=(0.5, 1.0))
        model.strength = (0.5, 1.0)
        same(model.forward_features(x), halved.forward_features(x))
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        same(compiled(x), halved(x))
        model.fade = 1.0
        same(model.forward_features(x), without.forward_features(x))
        same(compiled(x), without(x))
        model.fade = None
        same(compiled(x), halved(x))


# ---- what cannot be wrapped -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: timm.create_model("swin_tiny_patch4_window7_224"), TypeError, ["SwinTransformer", "within windows"]),
        (lambda: timm.create_model("levit_128s"), TypeError, ["keys of another width"]),
        (lambda: timm.create_model("resnet18"), TypeError, ["ResNet: it has no attention"]),
        (lambda: timm.create_model("xcit_nano_12_p16_224"), TypeError, ["over channels"]),
        (
            lambda: timm.create_model("vit_small_patch16_rope_224"),
            TypeError,
            ["Eva rotates already, by RotaryEmbeddingCat", "rope_of", "fuse_rope"],
        ),
    ],
)
def test_a_model_of_another_kind_is_refused_with_its_reason(call, error, says):
    with torch.device("meta"):
        model = call()
    before = type(model)
    with pytest.raises(error) as refused:
        ndpos.timm.add_rope(model)
    assert type(model) is before
    for part in says:
        assert part in str(refused.value)


def test_what_a_family_cannot_follow_is_refused():
    beit = ndpos.timm.add_rope(small("beit_base_patch16_224"))
    with pytest.raises(TypeError, match="takes no attention mask: its blocks add a bias"):
        beit.forward_features(images("beit"), attn_mask=torch.zeros(1, 1, 25, 25))
    naflex = small("naflexvit_base_patch16_gap")
    with pytest.raises(ValueError, match=r"no pos_embed to fade.*inside its patch embedding"):
        ndpos.timm.add_rope(naflex, absolute="fade")
    layered = ndpos.RotaryEmbedding(ndpos.split(32, 2), heads=2, layers=2)
    with pytest.raises(ValueError, match="hands all blocks the same rotation; rope has 2 layers"):
        ndpos.timm.add_rope(naflex, rope=layered)
    assert type(naflex).__name__ == "NaFlexVit"
    with pytest.raises(ValueError, match=r"one for each axis \(y, x\)"):
        ndpos.timm.add_rope(naflex, strength=(0.5, 0.5, 0.5))
    eva = ndpos.timm.add_rope(small("eva_giant_patch14_224"))
    with pytest.raises(ValueError, match="without the model's forward"):
        eva.blocks[0](torch.zeros(1, 25, 64))
    with pytest.raises(TypeError, match="Eva, Beit, VisionTransformerRelPos; got NaFlexVit"):
        ndpos.timm.resize(naflex, (64, 64))


# ---- the registry ---------------------------------------------------------------------------------------------------


def test_the_command_says_of_every_model_whether_it_is_supported(capsys):
    from ndpos.__main__ import main

    assert main(["timm-support", "beit_*"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 5
    assert all(" supported " in line for line in said.out.splitlines())
    assert said.err == "5 models: 5 supported\n"
    assert main(["timm-support", "vit_small_patch16_dinov3", "--markdown"]) == 0
    assert "| rotates already | periodic, half, y first, axis | 1 | eva |" in capsys.readouterr().out
    assert main(["timm-support", "no such model"]) == 1
    assert "registers no model like 'no such model'" in capsys.readouterr().err


def signatures():
    return {signature_of(small(name)) for name in KINDS}


@pytest.mark.slow
def test_every_registered_model_is_supported_by_a_signature_that_was_run_or_refused_with_a_reason():
    rows = list(ndpos.timm.support.timm_support())
    counts = {state: sum(row.state == state for row in rows) for state in ("supported", "rotates already")}
    assert counts["supported"] >= 230
    assert counts["rotates already"] >= 76
    assert {row.note for row in rows if row.state == "supported"} <= signatures()
    assert all(row.note for row in rows)
    assert ndpos.timm.support.summary(rows) in (Path(ndpos.__file__).parents[1] / "README.md").read_text()


def test_a_sample_of_the_registry_is_supported_by_signatures_that_were_run():
    names = ["vit_base_patch16_224", "vit_relpos_medium_patch16_224", "beit_base_patch16_384", "eva_giant_patch14_560"]
    names += ["vit_srelpos_medium_patch16_224", "naflexvit_base_patch16_siglip", "vit_pwee_patch16_reg1_gap_256"]
    rows = list(ndpos.timm.support.timm_support(names=names))
    assert {row.state for row in rows} == {"supported"}
    assert {row.note for row in rows} <= signatures()
