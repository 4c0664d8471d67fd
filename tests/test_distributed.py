"""Two processes that train together, DDP and FSDP2, on batches of different lengths; all over gloo, on the CPU."""

import copy
import importlib.util
import socket
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import ndpos

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SIZES = [(2, 3), (4, 2)]  # of rank 0 and of rank 1


class Attention(torch.nn.Module):
    """One attention with every encoding that has parameters and a fixed one."""

    def __init__(self):
        super().__init__()
        split, mixed = ndpos.split(8, 2), ndpos.mixed(2, 4, heads=2, generator=torch.Generator().manual_seed(0))
        sparse = ndpos.keep_highest(ndpos.geometric(split), 0.5)
        self.ropes = torch.nn.ModuleList(
            [
                ndpos.RotaryEmbedding(split),
                ndpos.RotaryEmbedding(split, learnable=True),
                ndpos.RotaryEmbedding(split, frequencies=sparse, learnable=True),
                ndpos.RotaryEmbedding(split, frequencies=mixed, learnable=True),
            ]
        )
        self.tables = torch.nn.ModuleList(
            [ndpos.LearnedEmbedding((3, 3), 16, kind=kind, num_prefix=1) for kind in ("joint", "axial", "sum")]
        )
        self.bare = ndpos.LearnedEmbedding((2, 3), 16)  # of rank 0's own sizes: resampled on rank 1 alone
        self.found = ndpos.LearnedEmbedding((5, 5), 16)
        self.qkv = torch.nn.Linear(16, 48)
        self.seen = set()

    def forward(self, x, sizes):
        coords = ndpos.grid(sizes).flatten(0, -2)
        x = ndpos.add(x, sum(table(sizes) for table in self.tables))
        x = torch.cat((x[:, :1], ndpos.add(x[:, 1:], self.bare(sizes) + self.found.lookup(coords))), dim=1)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        for rope in self.ropes:
            turn = rope.on_grid(sizes, num_prefix=1)
            self.seen.add(turn.cos.dtype)
            q, k = turn(q), turn.keys(k)
        return F.scaled_dot_product_attention(q, k, v)


def seeded_model():
    torch.manual_seed(0)
    return Attention()


def step(model, rank, dtype=torch.float32):
    """One backward on the data of ``rank``; the output."""
    x = torch.randn(2, 1 + SIZES[rank][0] * SIZES[rank][1], 16, generator=torch.Generator().manual_seed(rank))
    out = model(x.to(dtype), SIZES[rank])
    out.float().square().sum().backward()
    return out


def mean_gradients():
    """What training together must come to: gradients of both ranks' data, one process, averaged."""
    model = seeded_model()
    for rank in (0, 1):
        step(model, rank)
    return {name: parameter.grad / 2 for name, parameter in model.named_parameters()}


def train_with_ddp(rank):
    model = DistributedDataParallel(seeded_model())  # find_unused_parameters is off: a parameter unused is an error
    for _ in range(2):
        model.zero_grad()
        step(model, rank)
    for name, expected in mean_gradients().items():
        torch.testing.assert_close(model.module.get_parameter(name).grad, expected, msg=partial("{}: {}".format, name))


def train_with_fsdp(rank):
    mesh = init_device_mesh("cpu", (2,))
    for each in (False, True):  # the whole attention as one unit, or every encoding a unit of its own
        model = seeded_model()
        units = [*model.ropes, *model.tables, model.bare, model.found] if each else []
        for unit in units:
            fully_shard(unit, mesh=mesh)
        if each:
            register_fsdp_forward_method(model.found, "lookup")
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            model.zero_grad()
            out = step(model, rank)
        alone = seeded_model()
        torch.testing.assert_close(out, step(alone, rank))
        for name, expected in mean_gradients().items():
            torch.testing.assert_close(
                model.get_parameter(name).grad.full_tensor(), expected, msg=partial("{}: {}".format, name)
            )


def train_with_fsdp_in_bfloat16(rank):
    model = fully_shard(seeded_model(), mesh=init_device_mesh("cpu", (2,)), mp_policy=BFLOAT16)
    out = step(model, rank, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert model.seen == {torch.float32}
    for name, parameter in model.named_parameters():
        assert parameter.grad.full_tensor().isfinite().all(), name


def train_a_timm_model_in_bfloat16(rank):
    from timm.models.vision_transformer import VisionTransformer

    import ndpos.timm

    torch.manual_seed(0)
    vit = VisionTransformer(
        img_size=(32, 48), patch_size=16, embed_dim=32, depth=2, num_heads=2, num_classes=3, dynamic_img_size=True
    )
    rope = ndpos.RotaryEmbedding(ndpos.split(16, 2), base=100.0, heads=2, layers=2, learnable=True)
    model = ndpos.timm.add_rope(vit, rope=rope)
    full, seen = copy.deepcopy(model), []
    attend = type(model.blocks[0].attn).forward

    def watch(self, x, attn_mask=None, is_causal=False):
        seen.append((x.dtype, attn_mask.turn.cos.dtype))
        return attend(self, x, attn_mask, is_causal)

    type(model.blocks[0].attn).forward = watch
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=BFLOAT16)
    fully_shard(model, mesh=mesh, mp_policy=BFLOAT16)
    x = torch.randn(2, 3, 32, 48 + 16 * rank, generator=torch.Generator().manual_seed(rank))
    out = model(x)
    out.float().sum().backward()
    assert seen == [(torch.bfloat16, torch.float32)] * 2
    torch.testing.assert_close(out.float(), full(x), atol=0.05, rtol=0.05)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name


def train_families_of_timm(rank):
    """Learned frequencies in every way that a family hands the rotation to its blocks, DDP and FSDP2 alike."""
    import timm

    import ndpos.timm
    from tests.test_timm_families import images, small

    settings = {"img_size": (64, 96), "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 3}

    def fresh(name):
        if name == "fused":
            torch.manual_seed(0)
            return ndpos.timm.fuse_rope(timm.create_model("vit_small_patch16_rope_mixed_224", **settings))
        return ndpos.timm.add_rope(small(name), learnable=True)

    for name in ("vit_pwee_patch16_reg1_gap_256", "eva_giant_patch14_224", "beit_base_patch16_224", "fused"):
        alone, x = fresh(name), images(name, batch=4)
        alone(x).square().mean().backward()
        replicas, shards = DistributedDataParallel(fresh(name)), fresh(name)
        for block in shards.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(shards, mesh=init_device_mesh("cpu", (2,)))
        for model in (replicas, shards):
            model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        for key, expected in alone.named_parameters():
            if expected.grad is None:
                continue
            told = partial("{}, {}: {}".format, name, key)
            close = {"rtol": 1e-4, "atol": 1e-5 * max(1.0, expected.grad.abs().max().item()), "msg": told}
            torch.testing.assert_close(replicas.module.get_parameter(key).grad, expected.grad, **close)
            torch.testing.assert_close(shards.get_parameter(key).grad.full_tensor(), expected.grad, **close)


def work(rank, port, names):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    try:
        for name in names:
            globals()[name](rank)
    finally:
        dist.destroy_process_group()


def test_processes_with_different_lengths_train_as_one_and_keep_rotations_in_float32():
    """One pair of processes does it all, since starting them takes longer than the work."""
    names = ["train_with_ddp", "train_with_fsdp", "train_with_fsdp_in_bfloat16"]
    if importlib.util.find_spec("timm") is not None:
        names += ["train_a_timm_model_in_bfloat16", "train_families_of_timm"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = mp.spawn(work, args=(port, names), nprocs=2, join=False)
    end = time.monotonic() + 120
    try:
        while not running.join(timeout=1):
            assert time.monotonic() < end, "two processes did not come to an end in time"
    finally:
        for process in running.processes:
            process.kill()
