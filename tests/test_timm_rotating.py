"""timm's models that rotate already: their conventions read, changed, and their rotation done by ndpos."""

import copy
import dataclasses
import pickle

import pytest
import torch

import ndpos

pytest.importorskip("timm", reason="needs timm")
import timm
from timm.layers.attention import AttentionRope
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed

import ndpos.timm
from ndpos.timm.fused import from_timm
from ndpos.timm.rotating import READERS, SET, _only_rope

SIZES = (4, 6)
SMALL = {
    "vit_small_patch16_rope_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_small_patch16_rope_mixed_ape_224": {},
    "vit_small_patch16_rope_ape_224": {},
    "eva02_tiny_patch14_224": {"patch_size": 16},
    "vit_pe_core_tiny_patch16_384": {},
    "vit_pe_spatial_tiny_patch16_512": {},
    "vit_small_patch16_dinov3": {},
    "vit_small_patch16_dinov3_qkvb": {},
    "vit_base_patch16_sapiens2": {"embed_dim": 128, "num_heads": 4, "num_kv_heads": (4, 2)},
    "vit_small_patch16_rope_224 mrope": {"rope_type": "mrope", "rope_grid_indexing": "ij"},
    "naflexvit_base_patch16_gap axial": {"rope_type": "axial"},
    "naflexvit_base_patch16_gap mixed": {"rope_type": "mixed"},
    "naflexvit_base_patch16_gap dinov3": {"rope_type": "dinov3"},
    "deepseek_vit_412m": {"patch_size": 16},
    "qwen3_vit_88m": {},
    "gemma4_vit_167m": {},
}
every = pytest.mark.parametrize("name", SMALL)


def small(name, **settings):
    """A registered model of depth 2 on a grid of 4 x 6 patches, its attention made to matter."""
    torch.manual_seed(0)
    registered, given = name.split()[0], {"depth": 2, "num_classes": 3, **SMALL[name], **settings}
    size = {} if "naflex" in name or "gemma" in name else {"img_size": tuple(16 * side for side in SIZES)}
    narrow = {"embed_dim": 64, "num_heads": 2} if "naflex" in name or "rope" in name else {}
    model = timm.create_model(registered, **{**size, **narrow, **given})
    for key, parameter in model.named_parameters():
        if "freqs" in key:
            continue
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.8 * parameter[0].numel() ** -0.5)
        elif "gamma" in key:
            torch.nn.init.constant_(parameter, 0.5)
    return model.eval()


def images(batch=2, dtype=torch.float32, sizes=SIZES):
    shape = (batch, 3, *(16 * side for side in sizes))
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def side(name):
    return (6, 6) if "gemma" in name else SIZES  # its pooling takes blocks of 3 x 3


def features(model, x):
    return model.forward_features(x)[0] if "Gemma" in type(model).__name__ else model.forward_features(x)


def off(got, expected):
    assert expected.abs().max() > 1e-2
    return ((got - expected).abs().max() / expected.abs().max()).item()


# ---- read -----------------------------------------------------------------------------------------------------------


def tables_of_timm(rope, sizes):
    """cos and sin ``(..., tokens, pairs)`` as timm's module makes them."""
    if type(rope).__name__ == "Gemma4RotaryEmbedding2D":
        coords = ndpos.grid(sizes).flatten(0, -2).flip(-1)  # it takes (x, y)
        cos, sin = (table[0] for table in rope(torch.zeros(1), coords[None]))
        count = rope.head_dim // 4
        return tuple(torch.cat((each[:, :count], each[:, 2 * count : 3 * count]), -1) for each in (cos, sin))
    rope = copy.deepcopy(rope)
    rope.feat_shape, rope._use_cached_embed = None, False
    sin, cos = rope.get_embed(sizes).chunk(2, dim=-1)
    half = getattr(rope, "rotate_half", not hasattr(rope, "freqs"))
    once = slice(cos.shape[-1] // 2) if half else slice(0, None, 2)
    return cos[..., once], sin[..., once]


@every
@pytest.mark.parametrize("sizes", [SIZES, (7, 7), (40, 23)])
@torch.no_grad()
def test_a_convention_gives_the_angles_of_timm(name, sizes):
    model = small(name)
    found, rope = ndpos.timm.rope_of(model), _only_rope("test", model)
    turn = found.rotation(sizes)
    largest = max(1.0, ndpos.angles(found.coords(sizes), found.frequencies).abs().max().item())
    for got, expected in zip((turn.cos, turn.sin), tables_of_timm(rope, sizes), strict=True):
        assert (got.squeeze(-3) if expected.ndim == 2 else got).shape == expected.shape
        assert (got.reshape(expected.shape) - expected).abs().max() <= 1e-6 * largest
    assert turn.num_prefix == getattr(model, "num_prefix_tokens", 0)


def cat(**settings):
    return RotaryEmbeddingCat(32, **{"in_pixels": False, **settings})


@pytest.mark.parametrize(
    "rope",
    [
        cat(temperature=50.0, grid_indexing="xy", grid_offset=1.0, ref_feat_shape=[3, 5]),
        cat(rotate_half=True, ref_feat_shape=[9, 2]),
        cat(in_pixels=True, max_res=64),
        cat(in_pixels=True, linear_bands=True, grid_indexing="xy"),
        cat(grid_type="centered", normalize_coords="max", grid_offset=0.25),
        cat(grid_type="centered", normalize_coords="min", grid_indexing="xy"),
        RotaryEmbeddingDinoV3(32, temperature=None, min_period=0.5, max_period=90.0, normalize_coords="min"),
        RotaryEmbeddingDinoV3(32, temperature=30.0, rotate_half=False, grid_indexing="xy", grid_offset=0.5),
        RotaryEmbeddingMixed(64, depth=2, num_heads=2, grid_indexing="ij"),
    ],
    ids=lambda rope: type(rope).__name__,
)
@torch.no_grad()
def test_every_setting_of_timms_embeddings_is_read(rope):
    rope.eval()
    for sizes in ((4, 6), (5, 2)):
        found = READERS[type(rope)](rope)
        largest = max(1.0, ndpos.angles(found.coords(sizes), found.frequencies).abs().max().item())
        for got, expected in zip(found.tables(sizes), tables_of_timm(rope, sizes), strict=True):
            assert (got - expected).abs().max() <= 1e-6 * largest


@pytest.mark.slow
def test_all_rotating_models_of_timm_are_read():
    """Their frequencies to 1e-6 relative, against the numbers in timm's own buffers."""
    found = 0
    for row in ndpos.timm.support.timm_support():
        if row.state != "rotates already":
            continue
        found += 1
        with torch.device("meta"):
            model = timm.create_model(row.name)
        rope = _only_rope("test", model).to_empty(device="cpu")
        rope.reset_parameters()
        if hasattr(rope, "freqs"):
            torch.nn.init.normal_(rope.freqs)
        read = READERS[type(rope)](rope).frequencies
        theirs = next(getattr(rope, name) for name in ("bands", "periods", "inv_freq", "freqs") if hasattr(rope, name))
        theirs = 2 * torch.pi / theirs if hasattr(rope, "periods") else theirs
        own = read.abs().amax(dim=-2) if theirs.ndim == 1 else read
        for value in own[own != 0].flatten()[:64]:
            assert ((theirs.double() - value).abs() / value.abs()).min() <= 1e-6
    assert found >= 76


# ---- fused ----------------------------------------------------------------------------------------------------------


@every
@torch.no_grad()
def test_a_fused_model_computes_the_same_and_is_undone_by_one_call(name):
    model, x = small(name), images(sizes=side(name))
    before, keys, kinds = features(model, x), list(model.state_dict()), [type(each) for each in model.modules()]
    # Two blocks of Gemma 4 as timm computes them are themselves 2e-6 from float64: then no nearer than that.
    bound = max(1e-6, off(before, features(copy.deepcopy(model).double(), x.double())))
    assert ndpos.timm.fuse_rope(model) is model
    assert [type(each) for each in model.modules()] != kinds
    assert off(features(model, x), before) <= bound
    assert list(model.state_dict()) == keys
    assert off(features(copy.deepcopy(model), x), before) <= bound
    assert off(features(pickle.loads(pickle.dumps(model)), x), before) <= bound
    ndpos.timm.fuse_rope(model)
    ndpos.timm.unfuse_rope(model)
    assert [type(each) for each in model.modules()] == kinds
    assert torch.equal(features(model, x), before)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_queries_are_rounded_once(half, dtype):
    """What goes into attention is the exact turn by timm's own tables, rounded to the dtype of the model."""
    torch.manual_seed(0)
    attention = AttentionRope(64, num_heads=2, num_prefix_tokens=2, rotate_half=half).to(dtype)
    rope = RotaryEmbeddingCat(32, in_pixels=False, feat_shape=SIZES, rotate_half=half).get_embed()
    x = torch.randn(2, 2 + 24, 64).to(dtype)
    q = attention.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)[0]
    turn = ndpos.timm.fused.from_timm(rope, half, 2)
    exact = q.double()
    sin, cos = rope.double().chunk(2, dim=-1)
    patches = exact[:, :, 2:]
    swapped = (
        torch.cat((-patches[..., 16:], patches[..., :16]), -1)
        if half
        else torch.stack((-patches[..., 1::2], patches[..., 0::2]), -1).flatten(-2)
    )
    exact = torch.cat((exact[:, :, :2], patches * cos + swapped * sin), dim=2)
    error = (turn(q).double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps * (0.5 * exact.abs() + 1e-6) + 1e-6 * (dtype == torch.float32)).all()


@pytest.mark.parametrize("name", ["vit_small_patch16_rope_mixed_224", "eva02_tiny_patch14_224", "gemma4_vit_167m"])
def test_gradients_and_graphs_of_a_fused_model_are_those_of_timm(name):
    model, x = small(name), images(sizes=side(name))
    model(x).square().sum().backward()
    expected = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    model.zero_grad(set_to_none=True)
    ndpos.timm.fuse_rope(model)
    model(x).square().sum().backward()
    for key, value in model.named_parameters():
        if key in expected and expected[key].abs().max() > 1e-2:
            assert off(value.grad, expected[key]) <= 2e-4, key
    with torch.no_grad():
        torch._dynamo.reset()
        assert off(torch.compile(model, backend="aot_eager")(x), model(x)) <= 1e-5


@pytest.mark.parametrize("name", ["vit_small_patch16_rope_mixed_224", "eva02_tiny_patch14_224", "gemma4_vit_167m"])
def test_the_backend_that_was_asked_for_turns(name, monkeypatch):
    if not {state.name: state.ready for state in ndpos.backends()}["compiled"]:
        pytest.skip("no compiler on this machine")
    model, x = small(name), images(sizes=side(name))
    expected = features(model, x)
    bound = max(1e-6, off(expected, features(copy.deepcopy(model).double(), x.double())))
    ndpos.timm.fuse_rope(model)
    used = []
    turn = ndpos.kernels.turning.turn_compiled
    monkeypatch.setattr(ndpos.kernels.turning, "turn_compiled", lambda *given: used.append(1) or turn(*given))
    features(model, x)
    assert not used
    ndpos.timm.fuse_rope(model, backend="compiled")
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        used.clear()
        assert off(features(each, x), expected) <= bound
        assert used
    model(x).square().sum().backward()
    torch._dynamo.reset()
    with torch.no_grad():
        assert off(torch.compile(model, backend="aot_eager")(x), model(x)) <= 1e-5
    used.clear()
    features(ndpos.timm.fuse_rope(model), x)
    assert not used
    ndpos.timm.unfuse_rope(ndpos.timm.fuse_rope(model, backend="compiled"))
    assert not any("rope_backend" in vars(module) for module in model.modules())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", [0, 1])
def test_a_graph_takes_the_same_bits_from_timms_table_wherever_it_begins(half, dtype, start, rng):
    torch._dynamo.reset()
    # No two columns alike, so that a wrong one is seen.
    rope = torch.randn(start + 12 * 64, generator=rng).to(dtype)[start:].view(12, 64)

    def tables(rope):
        turn = from_timm(rope, half, 1)
        return turn.cos * 1, turn.sin * 1

    expected = tables(rope)
    with torch.autocast("cpu"):
        seen = torch.compile(tables, backend="aot_eager", fullgraph=True)(rope)
    for one, other in zip(seen, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224"])
def test_dropped_patches_take_their_tables_along(name):
    model, x = small(name, patch_drop_rate=0.5).train(), images()
    torch.manual_seed(3)
    expected = model.forward_features(x)
    ndpos.timm.fuse_rope(model)
    torch.manual_seed(3)
    assert off(model.forward_features(x), expected) <= 1e-6


@torch.no_grad()
def test_grouped_queries_and_gates_are_fused_too():
    torch.manual_seed(0)
    settings = {"qkv_fused": False, "num_kv_heads": 2, "gated": True, "qk_norm": True, "norm_layer": torch.nn.LayerNorm}
    attention = AttentionRope(64, num_heads=4, num_prefix_tokens=1, **settings)
    rope = RotaryEmbeddingCat(16, in_pixels=False, feat_shape=SIZES).get_embed()
    x = torch.randn(2, 25, 64)
    expected = attention(x, rope=rope)
    assert off(ndpos.timm.fuse_rope(attention)(x, rope=rope), expected) <= 1e-6
    attention.fused_attn = False
    assert off(attention(x, rope=rope), expected) <= 1e-6


# ---- changed --------------------------------------------------------------------------------------------------------


@every
@torch.no_grad()
def test_setting_what_is_read_changes_nothing_and_the_state_dict_stays(name):
    model, x = small(name), images(sizes=side(name))
    before, state = features(model, x), {key: value.clone() for key, value in model.state_dict().items()}
    found = ndpos.timm.rope_of(model)
    ndpos.timm.set_rope(model, found)
    assert off(features(model, x), before) <= 2e-5
    assert ndpos.timm.rope_of(model) == found
    model.load_state_dict(state, strict=True)
    assert off(features(pickle.loads(pickle.dumps(model)), x), before) <= 2e-5
    assert off(features(ndpos.timm.fuse_rope(copy.deepcopy(model)), x), before) <= 2e-5


@torch.no_grad()
def test_what_is_changed_is_what_timm_would_compute_if_it_was_built_that_way():
    x = images()
    for name, change, built in (
        ("vit_small_patch16_rope_224", {"base": 33.0}, {"rope_temperature": 33.0}),
        ("eva02_tiny_patch14_224", {"reference_sizes": (3, 3)}, {"ref_feat_shape": (3, 3)}),
        ("vit_small_patch16_rope_224", {"start": 2.0}, {"rope_grid_offset": 2.0}),
        ("vit_small_patch16_dinov3", {"base": 20.0}, {"rope_temperature": 20.0}),
    ):
        model = small(name)
        before = model.forward_features(x)
        ndpos.timm.set_rope(model, dataclasses.replace(ndpos.timm.rope_of(model), **change))
        got = model.forward_features(x)
        assert off(got, small(name, **built).forward_features(x)) <= 2e-5
        if "start" not in change:
            assert off(got, before) > 1e-4


def test_augmentation_is_drawn_in_training_alone_and_learned_frequencies_go_on_learning():
    model, x = small("vit_small_patch16_rope_mixed_224"), images()
    found = ndpos.timm.rope_of(model)
    ndpos.timm.set_rope(model, dataclasses.replace(found, rescale=2.0, reference_sizes=(8, 12)))
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model.forward_features(x), model.forward_features(x))
    model(x).sum().backward()
    assert model.rope.freqs.grad.abs().max() > 0
    with torch.no_grad():
        model.rope.freqs.mul_(2)
    assert torch.equal(ndpos.timm.rope_of(model).learned, 2 * found.learned)


@torch.no_grad()
def test_a_set_model_follows_the_size_of_the_image():
    model = small("vit_small_patch16_rope_224", dynamic_img_size=True)
    found = dataclasses.replace(ndpos.timm.rope_of(model), base=40.0)
    ndpos.timm.set_rope(model, found)
    embed = model.rope.get_embed((3, 5))
    turn = found.rotation((3, 5))
    assert embed.shape == (15, 2 * 32)
    torch.testing.assert_close(embed[:, 32:].view(15, 16, 2)[..., 0], turn.cos[0])
    model.forward_features(images(sizes=(3, 5)))


# ---- refused --------------------------------------------------------------------------------------------------------


def replaced(name, **change):
    model = small(name)
    return lambda: ndpos.timm.set_rope(model, dataclasses.replace(ndpos.timm.rope_of(model), **change))


def own_forward():
    model = small("vit_small_patch16_rope_224")
    model.blocks[1].attn.forward = model.blocks[1].attn.forward
    return model


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: ndpos.timm.fuse_rope(torch.nn.Linear(1, 1)),
            TypeError,
            ["Linear holds no attention", "add_rope", "needs no fusing"],
        ),
        (lambda: ndpos.timm.fuse_rope(timm.create_model("vit_tiny_patch16_224")), TypeError, ["add_rope(model)"]),
        (lambda: ndpos.timm.fuse_rope("model"), TypeError, ["takes a torch.nn.Module, got str"]),
        (
            lambda: ndpos.timm.fuse_rope(torch.nn.Linear(1, 1), backend="cuda"),
            ValueError,
            ["backend is None or one of", "'cuda'"],
        ),
        (lambda: ndpos.timm.fuse_rope(own_forward()), TypeError, ["forward of blocks.1.attn", "Fuse first"]),
        (lambda: ndpos.timm.rope_of(torch.nn.Linear(1, 1)), ValueError, ["Linear has none", "add_rope"]),
        (
            lambda: ndpos.timm.rope_of(torch.nn.ModuleList([small("eva02_tiny_patch14_224") for _ in range(2)])),
            ValueError,
            ["has 2: 0.rope, 1.rope"],
        ),
        (replaced("vit_small_patch16_rope_224", pairing="half"), ValueError, ["pairing belong to the trained weights"]),
        (replaced("vit_small_patch16_rope_224", order=(0, 1)), ValueError, ["order belong"]),
        (replaced("vit_small_patch16_rope_mixed_224", base=10.0), ValueError, ["learned ladder is given by learned"]),
        (replaced("gemma4_vit_167m", start=1.0), ValueError, ["what can change is base alone"]),
        (replaced("vit_small_patch16_dinov3", reference_sizes=(4, 4)), ValueError, ["fractions of the picture"]),
        (replaced("vit_small_patch16_rope_224", base=-1.0), ValueError, ["base is a positive finite number, got -1.0"]),
        (replaced("vit_small_patch16_rope_224", jitter=0.5), ValueError, ["jitter is a factor of at least 1"]),
        (lambda: ndpos.timm.set_rope(small("eva02_tiny_patch14_224"), 100.0), TypeError, ["got float", "rope_of"]),
    ],
)
def test_a_refusal_says_what_was_seen_and_the_cure(call, error, says):
    with pytest.raises(error) as refused:
        call()
    for part in says:
        assert part in str(refused.value)


def test_every_class_that_set_rope_makes_is_named_after_timms():
    assert {plain.__name__ for plain in SET} == {made.__name__.removeprefix("Set") for made in SET.values()}
