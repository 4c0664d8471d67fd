"""timm models that rotate already: what ``fuse_rope`` changes of a whole model, and of the rotation alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ndpos.kernels import Backend
from tests.benchmarks.models import OVERHEAD, forward
from tests.benchmarks.paired import Task, in_turn
from tests.benchmarks.rows import Bound, Job, Row, Settings

# Models as published, a few blocks of them: the rotation's share of a block is that of the whole model.
MODELS = {
    "vit_base_patch16_rope_224": 224,
    "eva02_base_patch14_224": 224,
    "vit_base_patch16_dinov3": 256,
}
MODES = ("eager", "torch.compile")
NOT_SLOWER = Bound(1.0, judged="low")  # slower where the whole interval is above 1


def jobs(settings: Settings) -> Iterator[Job]:
    try:
        import timm  # noqa: F401  # only asked whether it is there
    except ImportError as error:
        settings.skip("fused", f"not installed ({error})")
        return
    names = list(MODELS)[:1] if settings.quick else list(MODELS)
    modes = MODES[:1] if settings.quick else MODES
    for name in names:
        for dtype in settings.dtypes:
            for mode in modes:
                case = f"{name}, {dtype}, {mode}"
                yield Job(f"{case}, rotation", lambda case=case: rotation(settings, *case.split(", ")))
                yield Job(case, lambda case=case: whole(settings, *case.split(", ")))
    for mode in modes:
        case = f"ViT-B/16 at 224, batch 4, {mode}"
        yield Job(case, lambda case=case, mode=mode: without_rope(settings, case, mode))


def made(name: str, settings: Settings, dtype: str, **given: Any) -> Any:
    import timm

    depth = {"depth": 1 if settings.quick else 4} | given
    model = timm.create_model(name, num_classes=0, **depth).eval()
    return model.to(settings.device, settings.dtype(dtype))


def picture(name: str, settings: Settings, dtype: str) -> Tensor:
    return torch.randn(4, 3, MODELS[name], MODELS[name], device=settings.device, dtype=settings.dtype(dtype))


def without_rope(settings: Settings, case: str, mode: str) -> Iterator[Row]:
    """A whole ViT-B, rotating by timm, fused, or wrapped by ``add_rope``, over the same without RoPE."""
    import timm

    import ndpos.timm

    torch.compiler.reset()
    name, depth = "vit_base_patch16_rope_224", {"depth": 1} if settings.quick else {"depth": 12}
    model = made(name, settings, "float32", **depth, init_values=None)
    plain = copy.deepcopy(model)
    plain.rope = None
    vit = timm.create_model("vit_base_patch16_224", num_classes=0, **depth).eval().to(settings.device)
    models = {
        "the same again": copy.deepcopy(plain),
        "timm": model,
        "fuse_rope": ndpos.timm.fuse_rope(copy.deepcopy(model)),
    }
    wrapped = {
        "the plain ViT again": copy.deepcopy(vit),
        "add_rope": ndpos.timm.add_rope(
            copy.deepcopy(vit), rope=ndpos.RotaryEmbedding(ndpos.split(64, 2), base=100.0, pairing="interleaved")
        ),
    }
    x = picture(name, settings, "float32")
    with torch.inference_mode():
        for reference, others in ((plain, models), (vit, wrapped)):
            tasks = {key: forward(run_as(each, mode), x) for key, each in others.items()}
            of_plain = forward(run_as(reference, mode), x)
            times = in_turn(tasks, of_plain, pairs=settings.pairs, clock=settings.clock, label=case)
            for key in tasks:
                bound = OVERHEAD if key in ("fuse_rope", "add_rope") and settings.device == "cpu" else None
                yield Row("fused", case, key, "without RoPE", times.over_reference(key), bound)


def whole(settings: Settings, name: str, dtype: str, mode: str) -> Iterator[Row]:
    """A few blocks of a model, fused over timm's own."""
    import ndpos.timm

    torch.compiler.reset()
    case, model, x = f"{name}, {dtype}, {mode}", made(name, settings, dtype), picture(name, settings, dtype)
    fused = ndpos.timm.fuse_rope(copy.deepcopy(model))
    with torch.inference_mode():
        tasks = {"fuse_rope": forward(run_as(fused, mode), x)}
        reference = forward(run_as(model, mode), x)
        times = in_turn(tasks, reference, pairs=settings.pairs, clock=settings.clock, label=case)
    yield Row("fused", case, "fuse_rope", "timm", times.over_reference("fuse_rope"), NOT_SLOWER)


def rotation(settings: Settings, name: str, dtype: str, mode: str) -> Iterator[Row]:
    """What stands between the projection and attention: timm's, and ndpos's from timm's own table."""
    from timm.layers import apply_rot_embed_cat

    from ndpos.timm.fused import from_timm

    torch.compiler.reset()
    case, model = f"{name}, {dtype}, {mode}", made(name, settings, dtype)
    attention, prefix = model.blocks[0].attn, model.num_prefix_tokens
    half = bool(getattr(attention, "rotate_half", False))
    rope = model.rope.get_embed(shape=model.patch_embed.grid_size)
    rope = rope[0] if rope.ndim == 4 else rope
    tokens = prefix + rope.shape[-2]
    qkv = torch.randn(4, tokens, 3, attention.num_heads, model.embed_dim // attention.num_heads, device=rope.device)
    qkv = qkv.to(settings.dtype(dtype))

    def timms(qkv: Tensor, rope: Tensor) -> list[Tensor]:
        both = qkv.permute(2, 0, 3, 1, 4)[:2]
        turned = (apply_rot_embed_cat(x[:, :, prefix:], rope, half=half) for x in both)
        return [torch.cat((x[:, :, :prefix], y), dim=2) for x, y in zip(both, turned, strict=True)]

    def ours(qkv: Tensor, rope: Tensor, backend: Backend | None = None) -> tuple[Tensor, ...]:
        q, k, _ = qkv.unbind(2)
        return from_timm(rope, half, prefix, backend).both(q, k, token_dim=-3)

    runs = {"timm": run_as(timms, mode), "ndpos": run_as(ours, mode)}
    if mode == "eager":
        runs["ndpos, compiled backend"] = partial(ours, backend="compiled")
    with torch.inference_mode():
        expected = timms(qkv, rope)
        for key, run in runs.items():
            if key == "timm":
                continue
            off = max(
                (one.float() - other.transpose(1, 2).float()).abs().max().item()
                for one, other in zip(expected, run(qkv, rope), strict=True)
            )
            if not off <= 16 * torch.finfo(qkv.dtype).eps:
                raise RuntimeError(f"{case}: {key} is not the same rotation, {off:.2g} off")
        tasks = {key: Task(lambda run=run: run(qkv, rope)) for key, run in runs.items()}
        copy_of_both = Task(lambda: [x.clone() for x in qkv.unbind(2)[:2]])
        times = in_turn(tasks, copy_of_both, pairs=settings.pairs, clock=settings.clock, label=case)
    over_copy = times.over_reference("timm")
    yield Row("fused", case, "timm's rotation", "copies of q and k", over_copy)
    own = list(runs)[1:]
    best = max(own, key=lambda key: times.over("timm", key).ratio)
    for key in own:
        yield Row("fused", case, key, "copies of q and k", times.over_reference(key))
        # A model that is not compiled has a rotation that is, where it asks for it: the bound is for the better one.
        bound = Bound(4.0, "at least") if mode == "eager" and key == best and over_copy.ratio >= 6.4 else None
        yield Row("fused", case, "timm's rotation", key, times.over("timm", key), bound)
    if mode != "eager":
        yield Row("fused", case, "ndpos's rotation", "timm's", times.over("ndpos", "timm"), NOT_SLOWER)


def run_as(run: Callable[..., Any], mode: str) -> Callable[..., Any]:
    return torch.compile(run) if mode == "torch.compile" else run
