"""The same answers on a CUDA device, without a copy of the tables being moved there by hand. Skips without one."""

import math
import subprocess
import sys

import pytest
import test_triton
import torch

import ndpos

pytestmark = pytest.mark.gpu
FAR = [65_536, 10**6, 2**24 + 1]
launches = test_triton.launches  # a fixture of the checks below


@pytest.fixture(scope="module")
def device():
    pytest.importorskip("triton", reason="needs triton")
    return "cuda"


# Every check of the kernel that runs under the interpreter elsewhere runs on the GPU here.
for name in [name for name in vars(test_triton) if name.startswith("check_")]:
    globals()[name.replace("check_", "test_the_kernel__", 1)] = vars(test_triton)[name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pairing", ["interleaved", "half", "half_per_axis"])
def test_a_rotation_on_the_gpu_equals_that_on_the_cpu(dtype, pairing, rng):
    rope = ndpos.RotaryEmbedding(ndpos.AxisSplit((12, 20), dim=40), pairing=pairing)
    x = torch.randn(2, 3, 1 + 35, 40, generator=rng).to(dtype)
    here, there = (rope.on_grid((5, 7), num_prefix=1, device=device) for device in ("cpu", "cuda"))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        turned = there(x.cuda())
    assert turned.dtype == dtype
    assert turned.device.type == "cuda"
    torch.testing.assert_close(turned.cpu(), here(x))


def test_angles_are_exact_far_out_on_the_gpu():
    turn = ndpos.RotaryEmbedding(ndpos.AxisSplit((2,)))(torch.tensor(FAR, device="cuda")[:, None])
    exact = torch.tensor([[math.cos(position)] for position in FAR], dtype=torch.float64)
    torch.testing.assert_close(turn.cos[0].cpu().double(), exact, rtol=0, atol=1e-6)


def test_tables_and_resampling_on_the_gpu_equal_those_on_the_cpu(rng):
    sinusoidal = ndpos.SinusoidalEmbedding(ndpos.split(48, 3))
    coords = ndpos.grid((3, 4, 5), start=2**20).flatten(0, -2)
    torch.testing.assert_close(sinusoidal(coords.cuda()).cpu(), sinusoidal(coords), rtol=0, atol=1e-6)
    learned = ndpos.LearnedEmbedding((6, 9), 16, num_prefix=2)
    expected, places = learned((11, 4)), torch.tensor([[0, 8], [5, 3]])
    rows = learned.lookup(places)
    learned.cuda()
    torch.testing.assert_close(learned((11, 4)).cpu(), expected)
    torch.testing.assert_close(learned.lookup(places.cuda()).cpu(), rows)


def test_a_compiled_rotation_on_the_gpu_serves_new_sizes_with_two_graphs(rng):
    rope = ndpos.RotaryEmbedding(ndpos.split(32, 2))
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def turned(x):
        return rope.on_grid(x.shape[2:4], device=x.device)(x.flatten(2, 3))

    for sizes in [(14, 14), (16, 12), (10, 20), (6, 8), (4, 4)]:
        x = torch.randn(2, 3, *sizes, 32, generator=rng)
        torch.testing.assert_close(turned(x.cuda()).cpu(), rope.on_grid(sizes)(x.flatten(2, 3)))
    assert counter.frame_count <= 2


def test_a_lookup_outside_the_table_is_stopped_on_the_gpu():
    # A failed assertion ends the CUDA context, so it happens in a process of its own.
    code = (
        "import torch, ndpos\n"
        "table = ndpos.LearnedEmbedding((4,), 8).cuda()\n"
        "table.lookup(torch.tensor([[4]], device='cuda')).sum().item()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode != 0
