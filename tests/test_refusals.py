"""What gave a wrong answer or a raw error of torch, and is refused in words; and what works that used to be refused."""

from functools import partial

import pytest
import torch

import ndpos

SPLIT = ndpos.split(8, 2)
LADDER = ndpos.geometric(SPLIT)
TURN = ndpos.RotaryEmbedding(SPLIT).on_grid((2, 3))
TABLE = ndpos.LearnedEmbedding((3, 2), 8, outside="wrap")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ndpos.geometric(SPLIT, "12"), TypeError, "base is a plain number, got '12'"),
        (lambda: ndpos.geometric(SPLIT, {1e4: 1, 1e2: 2}), TypeError, "base is a plain number"),
        (lambda: ndpos.geometric(SPLIT, True), TypeError, "base is a plain number, got True"),
        (lambda: ndpos.periodic(SPLIT, base="100"), TypeError, "base is a plain number, got '100'"),
        (lambda: ndpos.grid({2, 3}), TypeError, "sizes take one integer per axis"),
        (lambda: ndpos.grid(2 for _ in range(2)), TypeError, "sizes take one integer per axis"),
        (lambda: ndpos.grid((2, 3), start=2**62, step=2**61), ValueError, r"coordinates stay below 2\*\*63"),
        (lambda: ndpos.grid((2, 3), start=2**53 + 1, step=0.5), ValueError, r"coordinates stay below 2\*\*53"),
        (lambda: ndpos.grid((2,), start=float("nan")), ValueError, "start and step is a finite number, got nan"),
        (lambda: ndpos.centred_grid((2,), step="12"), TypeError, "step is a plain number, got '12'"),
        (lambda: ndpos.clip_grid((2, 1, 1), seconds_per_frame="0.5"), TypeError, "seconds_per_frame is a plain number"),
        (
            lambda: ndpos.augment(torch.ones(2, 2), jitter=float("inf")),
            ValueError,
            "jitter is a finite number, got inf",
        ),
        (lambda: ndpos.augment([1.0], shift=1.0), TypeError, "a tensor of real numbers, got list"),
        (lambda: ndpos.SinusoidalEmbedding(SPLIT, frequencies=LADDER * torch.nan), ValueError, "NaN or infinity"),
        (lambda: ndpos.SinusoidalEmbedding(SPLIT, frequencies=LADDER[:, :0]), ValueError, "at least one axis and one"),
        (lambda: ndpos.RotaryEmbedding(SPLIT, frequencies=LADDER.to("meta")), ValueError, "are on the meta device"),
        (lambda: ndpos.RotaryEmbedding(SPLIT, learnable="no"), TypeError, "learnable is True or False, got 'no'"),
        (lambda: ndpos.BinaryEmbedding((4, 4)), TypeError, r"BinaryEmbedding: split is an AxisSplit, got \(4, 4\)"),
        (
            lambda: ndpos.resize(torch.ones(4, 2), (5,), old_sizes=(4,), antialias="no"),
            TypeError,
            "antialias is True or",
        ),
        (lambda: TURN.head(None), ValueError, "heads are a slice of 1 heads, got None"),
        (lambda: TURN.head(slice(5, 9)), ValueError, "heads are a slice of 1 heads"),
        (lambda: TURN.take(torch.zeros(1, dtype=torch.int64, device="meta")), ValueError, "indices are on meta, the"),
        (lambda: TURN(torch.ones(6, 8, device="meta")), ValueError, "the rotation is on cpu, x is on meta"),
        (
            lambda: ndpos.Rotation(TURN.cos.int(), TURN.sin, "half")(torch.ones(6, 8)),
            TypeError,
            "floating tensors, got",
        ),
        (
            lambda: TABLE.lookup(torch.zeros(1, 2, device="meta")),
            ValueError,
            "coordinates are on meta, the table is on",
        ),
        (
            lambda: TABLE.lookup(torch.full((1, 2), 1e300, dtype=torch.float64)),
            ValueError,
            "coordinates of axis 0 are whole numbers",
        ),
        (lambda: TABLE.lookup(torch.full((1, 2), -1e25), kernel="linear"), ValueError, "axis 0 are finite"),
    ],
)
def test_what_would_be_wrong_in_silence_is_refused_in_words(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_tensors_are_joined_under_autocast_as_without_it(dtype, rng):
    turn = ndpos.RotaryEmbedding(SPLIT).on_grid((2, 3), num_prefix=1)
    x = torch.randn(2, 4, 7, 8, generator=rng).to(dtype)
    table = torch.randn(7, 4, generator=rng).to(dtype)
    learned = ndpos.LearnedEmbedding((2, 3), 8, kind="axial", num_prefix=1, dtype=dtype)
    emb = ndpos.SinusoidalEmbedding(SPLIT, layout="sin_cos")

    def everything():
        yield turn(x)
        yield ndpos.resize(table, (3, 3), old_sizes=(2, 3), num_prefix=1)
        yield learned((4, 4))
        yield learned.lookup(torch.tensor([[1, 2]]))
        yield emb(ndpos.grid((5, 2)).flatten(0, -2), dtype=dtype)
        yield emb.on_grid((5, 2), dtype=dtype)

    without = list(everything())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = list(everything())
    assert all(torch.equal(one, other) for one, other in zip(within, without, strict=True))


def test_an_image_of_the_same_token_count_turned_on_its_side_is_rotated_by_its_own_grid(rng):
    pytest.importorskip("timm", reason="wraps timm models")
    from timm.layers import PatchEmbed
    from timm.models import VisionTransformer

    from ndpos.timm import add_rope

    settings = {"img_size": (32, 64), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "pos_embed": "none"}
    loose = add_rope(VisionTransformer(**settings, embed_layer=partial(PatchEmbed, strict_img_size=False))).eval()
    dynamic = add_rope(VisionTransformer(**settings, dynamic_img_size=True)).eval()
    dynamic.load_state_dict(loose.state_dict())
    for sizes in [(32, 64), (64, 32), (64, 64)]:
        image = torch.randn(1, 3, *sizes, generator=rng)
        torch.testing.assert_close(loose(image), dynamic(image))


def test_a_mask_is_not_dropped_beside_a_causal_one():
    timm = pytest.importorskip("timm", reason="wraps timm models")
    from ndpos.timm import add_rope

    vit = add_rope(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0))
    for block in vit.blocks:
        block.attn.fused_attn = False
    with pytest.raises(ValueError, match="attn_mask or is_causal, not both"):
        vit.forward_features(torch.ones(1, 3, 32, 32), attn_mask=torch.ones(5, 5), is_causal=True)
