"""The demo draws its images exactly, trains, tells its results, and refuses bad arguments in one line."""

import os
import re
import signal
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
@pytest.mark.parametrize(("size", "square"), [(32, 4), (48, 6), (64, 8)])
def test_every_source_pixel_is_drawn_as_one_square_of_its_own_brightness(digits, size, square):
    from vision_demo.data import render

    pixels = digits[0].first(20).pixels
    images = render(pixels, (size, size))
    assert images.shape == (20, 1, size, size)
    assert images.dtype == torch.float32
    expected = (pixels.double() / 8 - 1).unsqueeze(-1).expand(20, 8, 8, square * square)
    assert torch.equal(patches_of(images, square).double(), expected)


@needs_packages
def test_digits_are_drawn_higher_or_wider_without_turning(digits):
    from vision_demo.data import render

    pixels = digits[0].first(5).pixels
    expected = (pixels / 8 - 1).repeat_interleave(4, 1).repeat_interleave(6, 2).unsqueeze(1)
    assert torch.equal(render(pixels, (32, 48)), expected)


@needs_packages
def test_a_patch_of_the_model_is_one_source_pixel_at_the_trained_size(digits):
    from vision_demo.data import SOURCE_SIZE
    from vision_demo.model import PATCH_SIZE, TRAINED_SIZE, build_model

    assert (SOURCE_SIZE * PATCH_SIZE,) * 2 == TRAINED_SIZE
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

    images = render(digits[0].first(8).pixels, (32, 32))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    moved = render(digits[0].first(8).pixels.flatten(1)[:, order].unflatten(1, (8, 8)), (32, 32))
    bag, ordered = (build_model(encoding, seed=3).eval() for encoding in ("none", "rope-axial"))
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
    bag, ordered, other = (
        build_model(p, seed=s).state_dict() for p, s in (("none", 0), ("rope-axial", 0), ("rope-axial", 1))
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert bag.keys() == ordered.keys()
    assert all(torch.equal(bag[name], ordered[name]) for name in bag)
    assert not torch.equal(ordered["patch_embed.proj.weight"], other["patch_embed.proj.weight"])


def trained(digits, recipe):
    from vision_demo.data import render
    from vision_demo.model import build_model
    from vision_demo.train import train

    seen = digits[0].first(96)
    model = build_model("rope-axial", seed=recipe.seed)
    train(model, render(seen.pixels, (32, 32)), seen.labels, recipe, title="test")
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
    images, model = render(seen.pixels, (32, 32)), build_model("rope-axial", seed=0)

    def loss():
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(model.eval()(images), seen.labels).item()

    before = loss()
    records = train(model, images, seen.labels, Recipe(epochs=4), title="a small run")
    assert loss() < 0.96 * before  # answering nothing, ln 10, would be 0.972 of it
    assert [record["epoch"] for record in records] == [1, 2, 3, 4]
    assert records[3]["loss"] < records[0]["loss"]
    bar = capsys.readouterr().err
    assert "a small run" in bar
    assert "8/8" in bar  # 4 epochs of 2 steps
    with torch.no_grad():
        right = sum(
            model(image[None]).argmax().item() == label for image, label in zip(images, seen.labels, strict=True)
        )
    assert accuracy(model, images, seen.labels, batch_size=24) == right / 64


@needs_packages
def test_a_record_holds_the_mean_over_its_images_whatever_the_batches(digits):
    from vision_demo.data import render
    from vision_demo.model import build_model
    from vision_demo.train import Recipe, train

    seen = digits[0].first(50)
    images, model = render(seen.pixels, (32, 32)), build_model("none", seed=0)
    with torch.no_grad():
        logits = model(images)
    loss = torch.nn.functional.cross_entropy(logits, seen.labels).item()
    recipe = Recipe(epochs=1, batch_size=32, learning_rate=0.0)  # nothing is learned: every step sees the same model
    held_out = (images[:10], logits[:10].argmax(dim=-1))
    (record,) = train(model, images, seen.labels, recipe, title="still", held_out=held_out)
    assert record["loss"] == pytest.approx(loss, rel=1e-5)
    assert record["train_accuracy"] == pytest.approx((logits.argmax(dim=-1) == seen.labels).float().mean().item())
    assert record["held_out_accuracy"] == 1.0


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


@pytest.fixture
def few(digits, monkeypatch):
    """Fewer digits, for speed."""
    monkeypatch.setattr("vision_demo.data.load", lambda: (digits[0], digits[1].first(40)))


@needs_packages
def test_the_digits_are_told_apart_after_the_recipe_at_a_fraction_of_its_length(digits):
    from vision_demo.data import render
    from vision_demo.model import build_model
    from vision_demo.train import Recipe, accuracy, train

    (seen, held_out), model = digits, build_model("rope-axial", seed=0)
    train(model, render(seen.pixels, (32, 32)), seen.labels, Recipe(epochs=3), title="short")
    assert accuracy(model, render(held_out.pixels, (32, 32)), held_out.labels) > 0.5  # without positions 0.25 at most


@needs_packages
@pytest.mark.usefixtures("few")
def test_a_run_shows_its_pictures_and_its_accuracy_at_every_size_and_repeats_with_its_seed(tmp_path, capsys):
    from PIL import Image

    def table(name):
        assert main([*QUICK, "--seed", "4", "--run", str(tmp_path / name)]) == 0
        return capsys.readouterr().out

    out = table("first")
    pictures, _, results = out.partition("accuracy on held-out images")
    shares = dict(re.findall(r"(\d+ x \d+) +([\d.]+)%", results))
    assert list(shares) == ["32 x 32", "24 x 24", "48 x 48", "64 x 64", "32 x 48"]
    assert all(0 <= float(share) <= 100 for share in shares.values())
    assert all(pictures.count(size) >= 1 for size in shares)
    assert any(block in pictures for block in "▀▄█")
    assert pictures.index("more of them") < 21 * 80  # about 20 lines
    assert str(tmp_path / "first" / "pictures.png") in pictures
    with Image.open(tmp_path / "first" / "pictures.png") as sheet:
        assert sheet.height > 2 * (32 + 24 + 48 + 64 + 32)
    assert "96 images at 32 x 32" in out
    assert str(tmp_path / "first") in results
    again = table("again").partition("accuracy on held-out images")[2]
    assert dict(re.findall(r"(\d+ x \d+) +([\d.]+)%", again)) == shares


@needs_packages
def test_pictures_in_the_terminal_are_what_the_model_gets(capsys, monkeypatch):
    from vision_demo.pictures import show

    image = -torch.ones(1, 1, 32, 32)
    image[..., :4, :4], image[..., 8:16, 4:8], image[..., 28:, 28:] = 1.0, 1.0, 1.0
    monkeypatch.setattr("vision_demo.pictures.CELLS", 8)
    show({(32, 32): image})
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["32 x 32", "▀", " █", "", "       ▄"]
    monkeypatch.setattr("vision_demo.pictures.can_write", lambda text: False)  # a terminal that knows ASCII alone
    show({(32, 32): image})
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == ["32 x 32", "'", " :", "", "       ."]


@needs_packages
def test_pictures_are_coloured_where_the_terminal_has_colours(capsys, monkeypatch):
    from vision_demo.pictures import show

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    image = torch.tensor([-1.0, 0.2, 1.0]).reshape(1, 3, 1, 1).expand(1, 3, 32, 32)
    show({(32, 32): image})
    assert "38;2;0;153;255;48;2;0;153;255m▀" in capsys.readouterr().out


@needs_packages
def test_every_encoding_of_the_table_is_trained_by_its_name(digits, tmp_path, capsys, monkeypatch):
    from vision_demo.model import ENCODINGS

    monkeypatch.setattr("vision_demo.data.load", lambda: (digits[0], digits[1].first(10)))
    monkeypatch.setattr("vision_demo.runs.curves", lambda records, title: b"drawn")  # for speed
    for name, title in ENCODINGS.items():
        arguments = ["--encoding", name, "--epochs", "1", "--train-images", "8", "--device", "cpu"]
        assert main([*arguments, "--run", str(tmp_path / name)]) == 0
        out, err = capsys.readouterr()
        assert title in out
        assert title in err
        assert "Traceback" not in err


@needs_packages
@pytest.mark.usefixtures("few")
def test_a_reader_that_goes_away_ends_it_without_a_word(tmp_path, capsys, monkeypatch):
    def gone(*words):
        raise BrokenPipeError

    monkeypatch.setattr("vision_demo.single.draw_pictures", gone)
    monkeypatch.setattr("vision_demo.__main__.close_output", lambda: None)
    assert main([*QUICK, "--run", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == ""


@needs_packages
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
        (["--encoding", "cubic"], "--encoding: knows none, "),
        (["--image-size", "32"], "--image-size goes with --data"),
        (["--data", "x", "--image-size", "30"], "multiples of 4 (a patch) up to 512, got '30'"),
        (["--data", "x", "--image-size", "0x32"], "got '0x32'"),
        (["--data", "x", "--image-size", "32x32x32"], "got '32x32x32'"),
        (["--data", "x", "--image-size", "1024"], "got '1024'"),
        (["--run", "x", "--resume", "y"], "not allowed with argument --run"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["compare", "--epochs", "0"], "--epochs: must be a whole number"),
        (["predict"], "required: RUN, IMAGE"),
        (["predict", "run"], "required: IMAGE"),
        (["predict", "run", "image", "--ink", "blue"], "--ink"),
    ],
    ids=" ".join,
)
def test_bad_arguments_end_with_status_2_and_one_line(arguments, told, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert err.count("\n") == 1
    assert out == ""


@needs_packages
@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused_and_never_replaced(name, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert main(["--device", name]) == 2
    assert f"'{name}' is not available on this machine" in capsys.readouterr().err


@needs_packages
@pytest.mark.parametrize(
    ("there", "chosen"), [({"cuda", "mps"}, "cuda"), ({"mps"}, "mps"), (set(), "cpu")], ids=["cuda", "mps", "cpu"]
)
def test_the_device_chosen_by_itself_is_cuda_then_mps_then_cpu(there, chosen, monkeypatch):
    from vision_demo.cli import parse

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
    text = " ".join(text.split())
    for word in (
        "--epochs",
        "--batch-size",
        "--seed",
        "--device",
        "--threads",
        "--train-images",
        "--encoding",
        "--data",
        "aspect ratio not kept",
        "--image-size",
        "--run",
        "--resume",
        "--compile",
        "predict RUN IMAGE",
        "compare [options]",
        "torchrun",
        "examples:",
        "add_rope",
    ):
        assert word in text


@needs_packages
def test_the_demo_runs_as_a_module():
    command = [sys.executable, "-m", "vision_demo", "--epochs", "0"]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("vision_demo: argument --epochs: must be")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--epochs", "9" * 400], "--epochs: must be a whole number, at most 1000000"),
        (["--batch-size", str(2**63)], "--batch-size: must be a whole number, at most 1000000"),
        (["compare", "--epochs", "10000000"], "at most 1000000"),
        (["--run", ""], "is empty; name a folder"),
        (["--resume", ""], "is empty; name a folder"),
        (["--data", ""], "is empty; name a folder"),
    ],
    ids=["epochs", "batch", "compare", "run", "resume", "data"],
)
def test_numbers_beyond_any_machine_and_empty_paths_are_refused_before_anything_is_made(
    arguments, told, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert err.count("\n") == 1
    assert out == ""
    assert not list(tmp_path.iterdir())


def test_an_error_that_a_signal_causes_is_told_as_the_signal():
    from vision_demo.problems import Stopped, stoppable

    def half_imported():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except Stopped as stopped:
            raise RecursionError("a library half imported") from stopped

    with pytest.raises(Stopped, match="stopped by Ctrl-C") as ended, stoppable():
        half_imported()
    assert ended.value.status == 130
    with pytest.raises(RecursionError), stoppable():
        raise RecursionError("of its own")
