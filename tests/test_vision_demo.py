"""The demo trains, draws its images exactly, tells its results, and refuses bad arguments in one line."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from vision_demo.__main__ import NEEDED, main

ABSENT = [package for module, package in NEEDED.items() if find_spec(module) is None]
needs_packages = pytest.mark.skipif(bool(ABSENT), reason=f"the demo's optional packages are absent: {ABSENT}")
QUICK = ["--epochs", "1", "--train-images", "96", "--device", "cpu"]


@pytest.fixture(scope="module")
def digits():
    data = pytest.importorskip("vision_demo.data")
    return data.load()


def patches_of(images, patch):
    """(n, 1, h, w) -> (n, rows, columns, patch * patch), by slicing alone."""
    rows = images[:, 0].unfold(1, patch, patch).unfold(2, patch, patch)
    return rows.flatten(-2)


@needs_packages
@pytest.mark.parametrize(("size", "square"), [(32, 4), (48, 6)])
def test_every_source_pixel_is_drawn_as_one_square_of_its_own_brightness(digits, size, square):
    from vision_demo.data import render

    pixels = digits[0].first(20).pixels
    images = render(pixels, size)
    assert images.shape == (20, 1, size, size)
    assert images.dtype == torch.float32
    expected = (pixels.double() / 8 - 1).unsqueeze(-1).expand(20, 8, 8, square * square)
    assert torch.equal(patches_of(images, square).double(), expected)


@needs_packages
def test_a_patch_of_the_model_is_one_source_pixel_at_the_trained_size(digits):
    from vision_demo.data import SOURCE_SIZE
    from vision_demo.model import PATCH_SIZE, TRAINED_SIZE, build_model

    assert SOURCE_SIZE * PATCH_SIZE == TRAINED_SIZE
    patch_embed = build_model("none", seed=0).patch_embed
    assert patch_embed.patch_size == (PATCH_SIZE, PATCH_SIZE)
    assert patch_embed.grid_size == (SOURCE_SIZE, SOURCE_SIZE)


@needs_packages
def test_every_digit_is_either_trained_on_or_held_out(digits):
    from sklearn.datasets import load_digits

    seen, held_out = digits
    assert (len(seen.pixels), len(held_out.pixels)) == (1347, 450)
    both = torch.cat([seen.pixels, held_out.pixels]).flatten(1).tolist()
    assert sorted(both) == sorted(load_digits().data.astype(int).tolist())
    shares = [torch.bincount(part.labels, minlength=10) / len(part.labels) for part in digits]
    torch.testing.assert_close(*shares, atol=0.003, rtol=0)


@needs_packages
def test_only_the_model_with_rope_sees_where_patches_are(digits):
    from vision_demo.data import render
    from vision_demo.model import build_model

    images = render(digits[0].first(8).pixels, 32)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    moved = render(digits[0].first(8).pixels.flatten(1)[:, order].unflatten(1, (8, 8)), 32)
    bag, ordered = (build_model(positions, seed=3).eval() for positions in ("none", "rope"))
    with torch.no_grad():
        for block in (*bag.blocks, *ordered.blocks):
            block.attn.qkv.weight *= 5  # untrained attention is nearly flat: hardly anything depends on order
        torch.testing.assert_close(bag(moved), bag(images), atol=1e-5, rtol=0)
        assert (ordered(moved) - ordered(images)).abs().max() > 1e-3
        assert ordered(torch.zeros(2, 1, 48, 32)).shape == (2, 10)


@needs_packages
def test_both_models_start_from_the_weights_of_their_seed_and_leave_the_random_state_alone():
    from vision_demo.model import build_model

    before = torch.get_rng_state()
    bag, ordered, other = (build_model(p, seed=s).state_dict() for p, s in (("none", 0), ("rope", 0), ("rope", 1)))
    assert torch.equal(torch.get_rng_state(), before)
    assert bag.keys() == ordered.keys()
    assert all(torch.equal(bag[name], ordered[name]) for name in bag)
    assert not torch.equal(ordered["patch_embed.proj.weight"], other["patch_embed.proj.weight"])


def trained(digits, recipe, positions="rope"):
    from vision_demo.data import render
    from vision_demo.model import build_model
    from vision_demo.train import train

    seen = digits[0].first(96)
    model = build_model(positions, seed=recipe.seed)
    train(model, render(seen.pixels, 32), seen.labels, recipe, title="test")
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@needs_packages
def test_the_same_seed_trains_the_same_weights_and_another_seed_others(digits):
    from vision_demo.train import Recipe

    first, again, other = (trained(digits, Recipe(epochs=1, seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@needs_packages
def test_training_lowers_the_loss_and_shows_a_bar(digits, capsys):
    from vision_demo.data import render
    from vision_demo.model import build_model
    from vision_demo.train import Recipe, accuracy, train

    seen = digits[0].first(64)
    images, model = render(seen.pixels, 32), build_model("rope", seed=0)

    def loss():
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(model.eval()(images), seen.labels).item()

    before = loss()
    train(model, images, seen.labels, Recipe(epochs=4), title="a small run")
    assert loss() < 0.96 * before  # answering nothing, ln 10, would be 0.972 of it
    bar = capsys.readouterr().err
    assert "a small run" in bar
    assert "8/8" in bar  # 4 epochs of 2 steps
    with torch.no_grad():
        right = sum(
            model(image[None]).argmax().item() == label for image, label in zip(images, seen.labels, strict=True)
        )
    assert accuracy(model, images, seen.labels, batch_size=24) == right / 64


@needs_packages
@pytest.mark.parametrize("steps", [1, 2, 10, 630])
def test_the_learning_rate_rises_to_its_peak_then_falls(steps):
    from vision_demo.train import learning_rate_factor

    factors = [learning_rate_factor(step, steps, 0.1) for step in range(steps)]
    peak = factors.index(max(factors))
    assert factors[peak] == 1.0
    assert all(factor > 0 for factor in factors)
    assert factors == sorted(factors[: peak + 1]) + sorted(factors[peak + 1 :], reverse=True)
    assert steps < 10 or factors[-1] < 0.05


@needs_packages
def test_the_table_holds_both_models_at_both_sizes_and_repeats_with_its_seed(digits, capsys, monkeypatch):
    seen, held_out = digits
    monkeypatch.setattr("vision_demo.data.load", lambda: (seen, held_out.first(50)))  # for speed

    def table():
        assert main([*QUICK, "--seed", "4"]) == 0
        return capsys.readouterr().out.partition("accuracy on ")[2].splitlines()[:4]

    title, sizes, bag, ordered = first = table()
    assert title == "50 held-out digits"
    assert re.findall(r"\d+ x \d+", sizes) == ["32 x 32", "48 x 48"]
    assert bag.strip().startswith("no positions")
    assert ordered.strip().startswith("2-D RoPE")
    for row in (bag, ordered):
        shares = [float(share) for share in re.findall(r"([\d.]+)%", row)]
        assert len(shares) == 2
        assert all(0 <= share <= 100 for share in shares)
    assert table() == first


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--epochs", "0"], "--epochs: must be a whole number, at least 1, got '0'"),
        (["--epochs", "-3"], "--epochs: must be a whole number, at least 1, got '-3'"),
        (["--epochs", "many"], "got 'many'"),
        (["--batch-size", "0"], "--batch-size: must be a whole number, at least 1"),
        (["--batch-size", "1.5"], "got '1.5'"),
        (["--seed", "-1"], "--seed: must be a whole number, at least 0"),
        (["--seed", str(2**64)], "--seed"),
        (["--threads", "0"], "--threads"),
        (["--threads", "100000"], "--threads"),
        (["--train-images", "1348"], "at most 1347, got '1348'"),
        (["--device", "abacus"], "--device: knows auto, cuda, cuda:N, mps and cpu, got 'abacus'"),
        (["--device", "cpu:1"], "got 'cpu:1'"),
        (["--device", "cuda:"], "got 'cuda:'"),
        (["--device", "cuda:99"], "--device: 'cuda:99' is not available on this machine"),
        (["--depth", "3"], "--depth"),
    ],
    ids=" ".join,
)
def test_bad_arguments_end_with_status_2_and_one_line(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert told in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused_and_never_replaced(name, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["--device", name])
    assert ended.value.code == 2
    assert f"'{name}' is not available on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "chosen"), [({"cuda", "mps"}, "cuda"), ({"mps"}, "mps"), (set(), "cpu")], ids=["cuda", "mps", "cpu"]
)
def test_the_device_chosen_by_itself_is_cuda_then_mps_then_cpu(there, chosen, monkeypatch):
    from vision_demo.__main__ import parse

    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in there)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in there)
    assert parse([]).device == torch.device(chosen)


@pytest.mark.parametrize("gone", [["sklearn"], ["timm", "sklearn"]], ids=" ".join)
def test_missing_packages_are_told_in_one_line(gone, capsys, monkeypatch):
    for module in gone:
        monkeypatch.setitem(sys.modules, module, None)
    assert main(QUICK) == 1
    err = capsys.readouterr().err
    assert all(NEEDED[module] in err for module in gone)
    assert "pip install 'ndpos[demo]'" in err
    assert err.count("\n") == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for word in (
        "--epochs",
        "--batch-size",
        "--seed",
        "--device",
        "--threads",
        "--train-images",
        "examples:",
        "add_rope",
    ):
        assert word in text


def test_the_demo_runs_as_a_module():
    command = [sys.executable, "-m", "vision_demo", "--epochs", "0"]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("vision_demo: argument --epochs: must be")
