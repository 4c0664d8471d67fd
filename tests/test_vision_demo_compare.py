"""Every encoding is what it says, and a comparison is measured, told, drawn, interrupted and taken up again rightly."""

import importlib
import json
import os
import re
import signal
import sys
from importlib.util import find_spec

import pytest
import torch

from vision_demo.__main__ import NEEDED, main

ABSENT = [package for module, package in NEEDED.items() if find_spec(module) is None]
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"the demo's optional packages are absent: {ABSENT}")
if not ABSENT:
    import ndpos
    from vision_demo import chart, compare, comparison, jobs
    from vision_demo.comparison import Comparison, Plan
    from vision_demo.data import render
    from vision_demo.model import ENCODINGS, build_model, use_raw_coordinates
    from vision_demo.problems import Problem, Stopped
    from vision_demo.train import Recipe, accuracy, train

NAMES = [
    "none",
    "integer",
    "binary",
    "sinusoidal-added",
    "sinusoidal-concatenated",
    "learned-joint",
    "learned-axial",
    "learned-modulo",
    "rope-axial",
    "rope-mixed",
    "rope-and-learned",
]
WITH_COORDINATES = {name for name in NAMES if name.startswith(("integer", "sinusoidal", "rope"))}
SIZES = [(32, 32), (24, 24), (48, 48), (64, 64), (32, 48)]
QUICK = ["compare", "--epochs", "2", "--train-images", "24", "--seed", "3", "--seeds", "2", "--device", "cpu"]
TWO = [*QUICK, "--encodings", "none,rope-axial"]


# ---- the encodings ----------------------------------------------------------------------------------------------


def tokens(model, images):
    """What the first block gets: (batch, tokens, width)."""
    seen = []
    hook = model.blocks[0].register_forward_pre_hook(lambda block, given: seen.append(given[0]))
    with torch.no_grad():
        model.eval()(images)
    hook.remove()
    return seen[0]


def added(encoding, size):
    """What an encoding adds to the tokens at ``size``: (rows, columns, 64), apart from rounding."""
    images = torch.zeros(1, 1, *size)
    rows = tokens(build_model(encoding, seed=1), images) - tokens(build_model("none", seed=1), images)
    return rows.reshape(size[0] // 4, size[1] // 4, 64)


def test_the_encodings_are_these():
    assert list(ENCODINGS) == NAMES
    assert len(set(ENCODINGS.values())) == len(NAMES)
    with pytest.raises(ValueError, match="encoding is one of none, integer"):
        build_model("cubic", seed=0)


@pytest.mark.parametrize("encoding", NAMES)
def test_every_encoding_takes_every_size_and_learns_all_its_parameters(encoding):
    model = build_model(encoding, seed=0)
    assert all(model(torch.zeros(2, 1, *size)).shape == (2, 10) for size in SIZES)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # An image that is not the same everywhere: frequencies have a gradient only where turning makes a difference.
    images = torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.nn.functional.cross_entropy(model(images), torch.tensor([1, 2, 3, 4])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    optimizer.step()
    assert not any(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("encoding", NAMES)
def test_every_encoding_is_built_for_other_classes_channels_and_sizes(encoding):
    model = build_model(encoding, seed=0, classes=3, channels=3, image_size=(32, 48))
    assert model(torch.zeros(2, 3, 32, 48)).shape == (2, 3)
    assert model(torch.zeros(2, 3, 24, 24)).shape == (2, 3)


@pytest.mark.parametrize("encoding", NAMES)
def test_only_the_model_without_positions_is_blind_to_the_order_of_patches(encoding, digits):
    pixels = digits[0].first(6).pixels
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    moved = render(pixels.flatten(1)[:, order].unflatten(1, (8, 8)), (32, 32))
    model = build_model(encoding, seed=3).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight *= 5  # untrained attention is nearly flat: hardly anything depends on order
        moves = (model(moved) - model(render(pixels, (32, 32)))).abs().max()
    assert moves < 1e-5 if encoding == "none" else moves > 1e-4


@pytest.mark.parametrize("encoding", NAMES)
def test_weights_that_encodings_share_begin_alike_and_only_those(encoding):
    plain, model = (build_model(name, seed=5).state_dict() for name in ("none", encoding))
    for name, values in plain.items():
        same_shape = model[name][: len(values)] if name.startswith("patch_embed") else model[name]
        assert torch.equal(same_shape, values[: len(same_shape)]), name
    own = {
        "learned-joint": {"table.tables.0": (8, 8, 64)},
        "learned-axial": {"table.tables.0": (8, 32), "table.tables.1": (8, 32)},
        "rope-mixed": {"rope.frequencies": (3, 4, 2, 8)},
    }
    own["learned-modulo"] = own["rope-and-learned"] = own["learned-joint"]
    assert {name: tuple(model[name].shape) for name in model.keys() - plain.keys()} == own.get(encoding, {})
    other = build_model(encoding, seed=6).state_dict()
    assert not any(torch.equal(other[name], model[name]) for name in model.keys() - plain.keys())
    assert len(model["patch_embed.proj.bias"]) == (32 if encoding == "sinusoidal-concatenated" else 64)


@pytest.mark.parametrize("encoding", NAMES)
def test_raw_coordinates_agree_at_the_trained_size_and_differ_elsewhere_where_there_are_any(encoding):
    generator = torch.Generator().manual_seed(0)
    images = {size: torch.randn(2, 1, *size, generator=generator) for size in SIZES}
    model = build_model(encoding, seed=2).eval()
    with torch.no_grad():
        kept = {size: model(image) for size, image in images.items()}
        assert use_raw_coordinates(model) == (encoding in WITH_COORDINATES)
        raw = {size: model(image) for size, image in images.items()}
    assert torch.equal(raw[32, 32], kept[32, 32])
    for size in SIZES[1:]:
        assert torch.equal(raw[size], kept[size]) == (encoding not in WITH_COORDINATES), size
    assert not use_raw_coordinates(model)  # they are raw already


def test_kept_coordinates_lay_the_grid_over_the_trained_one_and_raw_ones_count_patches():
    y = (torch.arange(12) + 0.5) * 8 / 12 - 0.5  # cell borders coincide
    x = (torch.arange(16) + 0.5) * 8 / 16 - 0.5
    expected = torch.cat([y[:, None, None].expand(12, 16, 32), x[None, :, None].expand(12, 16, 32)], dim=-1)
    torch.testing.assert_close(added("integer", (48, 64)), expected, atol=1e-5, rtol=0)
    model = build_model("integer", seed=1)
    use_raw_coordinates(model)
    images = torch.zeros(1, 1, 48, 64)
    rows = (tokens(model, images) - tokens(build_model("none", seed=1), images)).reshape(12, 16, 64)
    torch.testing.assert_close(rows[:, 3, 0], torch.arange(12.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows[5, :, 63], torch.arange(16.0), atol=1e-5, rtol=0)


def test_binary_adds_the_bits_of_the_count_of_patches():
    bits = added("binary", (48, 64)).round().long()
    assert torch.equal((bits[:, 2, :32] << torch.arange(32)).sum(-1), torch.arange(12))
    assert torch.equal((bits[7, :, 32:] << torch.arange(32)).sum(-1), torch.arange(16))


def test_the_concatenated_table_is_on_channels_of_its_own():
    model, plain = (build_model(name, seed=0) for name in ("sinusoidal-concatenated", "none"))
    images = torch.randn(2, 1, 48, 32, generator=torch.Generator().manual_seed(0))
    rows = tokens(model, images).reshape(2, 12, 8, 64)
    patches = tokens(plain, images).reshape(2, 12, 8, 64)
    torch.testing.assert_close(rows[..., :32], patches[..., :32])  # what a patch shows, and nothing of where it is
    y, x = (torch.arange(12) + 0.5) * 8 / 12 - 0.5, torch.arange(8.0)
    for pair in range(8):
        speed = 1e4 ** (-pair / 8)
        for image in rows:
            torch.testing.assert_close(image[:, 3, 32 + 2 * pair], (y * speed).sin(), atol=1e-6, rtol=0)
            torch.testing.assert_close(image[5, :, 48 + 2 * pair + 1], (x * speed).cos(), atol=1e-6, rtol=0)
            assert torch.equal(image[:, 0, 32:48], image[:, 7, 32:48])  # y does not listen to x
            assert torch.equal(image[0, :, 48:], image[11, :, 48:])


def test_the_modulo_table_repeats_itself_and_the_joint_one_is_resampled():
    modulo, joint = added("learned-modulo", (64, 48)), added("learned-joint", (64, 48))
    own = build_model("learned-modulo", seed=1).state_dict()["table.tables.0"]
    torch.testing.assert_close(modulo, own.repeat(2, 2, 1)[:, :12], atol=1e-6, rtol=0)
    expected = ndpos.resize(own.flatten(0, 1), (16, 12), old_sizes=(8, 8)).reshape(16, 12, 64)
    torch.testing.assert_close(joint, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(added("learned-joint", (32, 32)), own, atol=1e-6, rtol=0)


def test_rope_is_the_published_one_with_base_100_and_mixed_directions_differ_by_head_and_layer():
    axial = build_model("rope-axial", seed=0).rope.frequency_matrix()
    ladder = 100.0 ** -(torch.arange(4, dtype=axial.dtype) / 4)
    zeros = torch.zeros_like(ladder)
    torch.testing.assert_close(axial, torch.stack((torch.cat((ladder, zeros)), torch.cat((zeros, ladder)))))
    mixed = build_model("rope-mixed", seed=0).rope.frequencies.detach()
    assert len({tuple(matrix.flatten().tolist()) for layer in mixed for matrix in layer}) == 12
    assert (mixed.abs() > 0).all()  # every pair listens to both axes


# ---- numbers ----------------------------------------------------------------------------------------------------


def plan(encodings=("none", "rope-axial"), seeds=(0, 1, 2), sizes=tuple(SIZES)):
    source = {"name": "scikit-learn's handwritten digits"}
    return Plan(encodings, seeds, {"epochs": 12, "batch_size": 32}, sizes, 10, 1347, 450, source)


def training(encoding, seed, shares, raw=None):
    by_size = {f"{h}x{w}": share for (h, w), share in zip(SIZES, shares, strict=True)}
    raw = None if raw is None else {**by_size, "48x48": raw}
    return {
        "encoding": encoding,
        "seed": seed,
        "accuracy": by_size,
        "accuracy_raw_steps": raw,
        "seconds": 2.0 + seed,
        "epochs": [],
    }


MACHINE = {"cpu": "abacus", "threads": 1, "jobs": 2, "device": "cpu", "versions": {"torch": "2.9"}}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A comparison with numbers made up, kept in an order that is not the planned one."""
    found = Comparison(tmp_path_factory.mktemp("kept"), plan())
    for seed, share in ((2, 0.3), (0, 0.2), (1, 0.25)):
        found.keep(training("none", seed, [share, 0.1, 0.1, 0.1, 0.1]), MACHINE)
    for seed, share, raw in ((0, 0.9, 0.5), (1, 0.8, 0.6), (2, 1.0, 0.1)):
        found.keep(training("rope-axial", seed, [0.95, 0.5, share, 0.7, 0.6], raw), MACHINE)
    return found


def cells_of(markdown):
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[0], {title: values for title, *values in cells[2:]}


def test_the_table_has_the_mean_and_the_sample_standard_deviation_over_seeds(kept):
    heading, rows = cells_of((kept.folder / "table.md").read_text())
    assert heading == ["encoding", "32 x 32, trained", "24 x 24", "48 x 48", "64 x 64", "32 x 48"]
    assert rows == {
        "no positions": ["25.0 ± 5.0", *["10.0 ± 0.0"] * 4],  # 20, 30, 25: squares 25 + 25 + 0, by 2, is 25
        "RoPE axial": ["95.0 ± 0.0", "50.0 ± 0.0", "90.0 ± 10.0", "70.0 ± 0.0", "60.0 ± 0.0"],
        "RoPE axial, raw steps": ["95.0 ± 0.0", "50.0 ± 0.0", "40.0 ± 26.5", "70.0 ± 0.0", "60.0 ± 0.0"],
    }  # 50, 60, 10: squares 100 + 400 + 900, by 2, is 700, whose root is 26.46


def test_the_terminal_and_the_json_file_have_the_numbers_of_the_markdown_table(kept):
    _, rows = cells_of(kept.markdown())
    lines = kept.table().splitlines()
    assert lines[0].split() == ["accuracy", "in", "%", "32x32", "24x24", "48x48", "64x64", "32x48"]
    assert all(len(line) == 80 for line in lines)
    for line, values in zip(lines[1:], rows.values(), strict=True):
        assert line[25:].split() == " ".join(values).replace("± ", "±").split()
    content = json.loads((kept.folder / "comparison.json").read_text())
    order = [(each["encoding"], each["seed"]) for each in content["trainings"]]
    assert order == kept.plan.pairs()  # whatever was finished first
    again = comparison.find(kept.folder)
    assert again.markdown() == kept.markdown()
    assert (again.plan, again.trainings, again.machines) == (kept.plan, kept.trainings, kept.machines)


def test_the_notes_say_how_and_where_the_numbers_were_made(kept):
    text = kept.markdown()
    for words in ("450 held-out", "seeds 0, 1, 2", "chance is 10", "1,347 images", "12 epochs", "batch 32"):
        assert words in text
    assert "6 trainings on cpu (abacus, threads: 1, trainings side by side: 2), 3 seconds each; torch 2.9." in text


def test_one_seed_has_no_spread_and_a_row_says_how_many_seeds_it_lacks(tmp_path):
    found = Comparison(tmp_path, plan(encodings=("none",)))
    found.keep(training("none", 1, [0.3, 0.1, 0.1, 0.1, 0.1]), MACHINE)
    assert "| no positions (1 of 3 seeds) | 30.0 | 10.0 |" in found.markdown()
    assert found.rows()[0].spread((32, 32)) is None
    assert "±" not in found.table()


# ---- the picture ------------------------------------------------------------------------------------------------


def all_rows(kept, seeds=3):
    """Rows of all encodings, each with shares of its own."""
    found = []
    for index, encoding in enumerate(NAMES):
        for raw in [False, True][: 1 + (encoding in WITH_COORDINATES)]:
            shares = {s: [0.3 + 0.05 * index - 0.1 * raw + 0.01 * seed for seed in range(seeds)] for s in SIZES}
            found.append(comparison.Row(encoding, raw, shares))
    return found


def test_the_picture_has_one_line_for_each_encoding_where_its_accuracy_is(kept):
    drawn = chart.figure(all_rows(kept), plan(encodings=tuple(NAMES)))
    left, right = drawn.axes
    assert [line.get_label() for line in left.containers] == list(ENCODINGS.values())
    assert len(right.containers) == len(WITH_COORDINATES)
    ticks = [tick.get_text() for tick in left.get_xticklabels()]
    assert ticks == ["24 x 24", "32 x 32\ntrained", "48 x 48", "64 x 64", "32 x 48"]
    places = list(left.get_xticks())
    styles = set()
    for index, container in enumerate(left.containers):
        line = container.lines[0]
        xs, ys = (torch.tensor([float(value) for value in values]).double() for values in line.get_data())
        there = ~ys.isnan()
        torch.testing.assert_close(ys[there], torch.full((5,), 0.31 + 0.05 * index).double(), atol=1e-6, rtol=0)
        assert list(there) == [True, True, True, True, False, True]  # what is not square is no point of the line
        assert all(abs(x - place) < 0.25 for x, place in zip(xs[there].tolist(), places, strict=True))
        styles.add((line.get_color(), line.get_linestyle(), line.get_marker()))
        bars = container.lines[2][0].get_segments()  # error bars, one standard deviation to either side
        assert bars[0][1][1] - bars[0][0][1] == pytest.approx(0.02)
    assert len(styles) == len(NAMES)
    assert all(container.lines[0].get_linestyle() == "--" for container in right.containers)
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == list(ENCODINGS.values())


def test_the_picture_of_one_seed_has_no_error_bars_and_without_raw_rows_one_panel(kept):
    rows = [row for row in all_rows(kept, seeds=1) if row.encoding in ("none", "binary")]
    drawn = chart.figure(rows, plan(encodings=("none", "binary"), seeds=(0,)))
    assert len(drawn.axes) == 1
    assert len(drawn.axes[0].containers) == 2
    assert not any(container.has_yerr for container in drawn.axes[0].containers)


def test_nothing_of_the_picture_is_cut_off_or_covered(kept):
    drawn = chart.figure(all_rows(kept), plan(encodings=tuple(NAMES)))
    drawn.canvas.draw()
    whole, legend = drawn.bbox, drawn.legends[0].get_window_extent()
    for axes in drawn.axes:
        box = axes.get_tightbbox()
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.y1 <= whole.y1
        assert box.x1 < legend.x0
    assert legend.x1 <= whole.x1


def test_the_picture_file_is_a_png_and_leaves_no_figure_open(kept):
    import matplotlib.pyplot
    from PIL import Image

    with Image.open(kept.folder / "accuracy.png") as image:
        assert image.format == "PNG"
        assert image.width > 800
    assert matplotlib.pyplot.get_fignums() == []


# ---- a comparison from beginning to end -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory, digits):
    """A comparison that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vision_demo.data.load", lambda: digits)
        assert main([*TWO, "--run", str(folder)]) == 0
    return folder


def numbers(folder):
    """What is in comparison.json, without what a clock or the number of jobs decides."""
    content = json.loads((folder / "comparison.json").read_text())
    for each in content["trainings"]:
        del each["seconds"], each["machine"]
        for record in each["epochs"]:
            del record["seconds"]
    del content["machines"]
    return content


def copied(folder, target, names):
    target.mkdir()
    for name in names:
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def told(capsys):
    """The only line on stderr, without the progress bar."""
    err = capsys.readouterr().err
    assert "Traceback" not in err
    lines = [line.rpartition("\r")[2].strip() for line in err.split("\n")]
    lines = [line for line in lines if line and "epoch/s" not in line and "s/epoch" not in line]
    assert len(lines) == 1, err
    assert lines[0].startswith("vision_demo: ")
    return lines[0]


def test_the_folder_holds_what_an_independent_training_gives(finished, digits):
    content = json.loads((finished / "comparison.json").read_text())
    assert sorted(path.name for path in finished.iterdir()) == ["accuracy.png", "comparison.json", "table.md"]
    assert [tuple(size) for size in content["sizes"]] == SIZES
    assert (content["seeds"], content["train_images"], content["held_out_images"]) == ([3, 4], 24, 12)
    assert content["recipe"]["epochs"] == 2
    assert content["machines"][0]["threads"] == 1
    assert content["machines"][0]["versions"].keys() == {"ndpos", "timm", "torch", "python"}
    assert all(each["seconds"] > 0 and each["machine"] == 0 for each in content["trainings"])
    seen, held_out = digits[0].first(24), digits[1]
    mine = content["trainings"][3]
    assert (mine["encoding"], mine["seed"]) == ("rope-axial", 4)
    model = build_model("rope-axial", seed=4)
    records = train(model, render(seen.pixels, (32, 32)), seen.labels, Recipe(epochs=2, seed=4), title=None)
    assert [record["loss"] for record in mine["epochs"]] == [record["loss"] for record in records]

    def shares():
        return {f"{h}x{w}": accuracy(model, render(held_out.pixels, (h, w)), held_out.labels) for h, w in SIZES}

    assert mine["accuracy"] == shares()
    use_raw_coordinates(model)
    assert mine["accuracy_raw_steps"] == shares()
    assert content["trainings"][0]["accuracy_raw_steps"] is None


@pytest.mark.usefixtures("few")
def test_two_jobs_give_the_numbers_of_one_and_one_bar(finished, tmp_path, capsys):
    assert main([*TWO, "--jobs", "2", "--run", str(tmp_path / "two")]) == 0
    out, err = capsys.readouterr()
    assert numbers(tmp_path / "two") == numbers(finished)
    assert json.loads((tmp_path / "two" / "comparison.json").read_text())["machines"][0]["jobs"] == 2
    assert len(re.findall(r"^(?:no positions|RoPE axial), seed [34] +\d+\.\d% +\d+ s$", out, re.M)) == 4
    assert "8/8" in err  # 4 trainings of 2 epochs
    assert set(re.findall(r"(\S+ \w+): +\d+%", err)) == {"4 trainings"}
    assert (tmp_path / "two" / "table.md").read_text().split("\n\n")[0] in (finished / "table.md").read_text()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_comparison_broken_off_loses_nothing_and_goes_on(number, finished, tmp_path, capsys, monkeypatch):
    folder, trained = tmp_path / "run", []

    def counted(pair, work, tick):
        trained.append(pair)
        if len(trained) == 3:
            os.kill(os.getpid(), number)
        return honest(pair, work, tick)

    honest = compare.train_pair
    monkeypatch.setattr(compare, "train_pair", counted)
    assert main([*TWO, "--run", str(folder)]) == 128 + number
    assert told(capsys).endswith(f"; go on with: python -m vision_demo compare --resume {folder}")
    partial = numbers(folder)
    assert partial["trainings"] == numbers(finished)["trainings"][:2]
    assert "(1 of 2 seeds)" in (folder / "table.md").read_text()
    assert main(["compare", "--resume", str(folder), "--device", "cpu"]) == 0
    assert trained[2] == trained[3]
    assert trained[3:] == [("none", 4), ("rope-axial", 4)]
    assert "2 of 4 trainings to do" in capsys.readouterr().out
    assert numbers(folder) == numbers(finished)


@pytest.mark.usefixtures("few")
def test_a_finished_comparison_trains_nothing_and_makes_its_files_again(finished, tmp_path, capsys, monkeypatch):
    folder = copied(finished, tmp_path / "run", ["comparison.json"])
    monkeypatch.setattr(compare, "train_pair", lambda *given: pytest.fail("all is trained"))
    assert main(["compare", "--resume", str(folder), "--device", "cpu", "--seeds", "2", "--jobs", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert comparison.find(finished).table() in out
    for path in finished.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_folder_is_named_after_the_time_and_never_written_over(finished, tmp_path, capsys, monkeypatch):
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    assert main([*TWO, "--run", str(finished)]) == 1
    assert f"never overwritten; go on with compare --resume {finished}" in told(capsys)
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before
    (tmp_path / "notes.txt").write_text("mine")
    assert main([*TWO, "--run", str(tmp_path)]) == 1
    assert "holds other files" in told(capsys)
    assert main([*TWO, "--run", str(tmp_path / "notes.txt")]) == 1
    assert "is a file" in told(capsys)
    monkeypatch.chdir(tmp_path)
    folders = {comparison.begin(None, plan()).folder for _ in range(3)}
    assert len(folders) == 3
    assert all(re.match(r"runs/compare-\d{4}-\d\d-\d\d-\d{6}", folder.as_posix()) for folder in folders)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--epochs", "12"], "--epochs 12 contradicts {}, which has 2"),
        (["--seed", "0"], "--seed 0 contradicts {}, which has 3"),
        (["--seeds", "3"], "--seeds 3 contradicts {}, which has 2"),
        (["--batch-size", "8"], "--batch-size 8 contradicts {}, which has 32"),
        (["--train-images", "25"], "--train-images 25 contradicts {}, which has 24"),
        (["--encodings", "none"], "--encodings none contradicts {}, which has none,rope-axial; leave --encodings out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_contradict_the_comparison_are_refused(options, text, finished, capsys):
    assert main(["compare", "--resume", str(finished), *options]) == 2
    assert text.format(finished) in told(capsys)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda content: b"", "damaged: JSONDecodeError"),
        (lambda content: content[:-20], "damaged"),
        (lambda content: content.replace(b'"format": 1', b'"format": 2'), "another format"),
        (lambda content: content.replace(b'"rope-axial"', b'"cubic"'), "encoding 'cubic' is unknown"),
        (lambda content: content.replace(b'"seed": 4', b'"seed": 5'), "never planned"),
        (lambda content: content.replace(b'"24x24"', b'"25x25"'), "damaged: KeyError: '24x24'"),
        (
            lambda content: content.replace(b'"held_out_images": 12', b'"held_out_images": 13'),
            "begun with other images",
        ),
        (lambda content: b"[]", "damaged"),
        (lambda content: b"\xff\xfe", "damaged"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(spoil, text, finished, tmp_path, capsys):
    folder = copied(finished, tmp_path / "run", ["comparison.json"])
    path = folder / "comparison.json"
    path.write_bytes(spoil(path.read_bytes()))
    assert main(["compare", "--resume", str(folder)]) == 1
    line = told(capsys)
    assert text in line
    assert str(folder) in line


def test_folders_without_a_comparison_are_told_in_one_line(tmp_path, capsys):
    for path, text in ((tmp_path / "none", "no such folder"), (tmp_path, "it has no comparison.json")):
        assert main(["compare", "--resume", str(path)]) == 1
        assert text in told(capsys)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--encodings", "none,cubic"], "--encodings: knows none, integer, "),
        (["--encodings", ""], "got ''"),
        (["--seeds", "0"], "--seeds: must be a whole number, at least 1"),
        (["--seeds", "two"], "got 'two'"),
        (["--seed", str(2**63 - 1)], "the last seed would be above"),
        (["--jobs", "0"], "--jobs: must be a whole number, at least 1"),
        (["--train-images", "1348"], "at most 1347, got '1348'"),
        (["--run", "a", "--resume", "b"], "not allowed with argument"),
        (["--data", "photos"], "unrecognized arguments: --data photos"),
        (["rope-axial"], "unrecognized arguments: rope-axial"),
    ],
    ids=" ".join,
)
def test_bad_arguments_end_with_status_2_and_one_line(arguments, text, capsys):
    assert main(["compare", *arguments]) == 2
    assert text in told(capsys)


def test_torchrun_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(TWO) == 2
    assert "say --jobs N, without torchrun" in told(capsys)


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compare", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in ("--encodings", "--seeds", "--jobs", "--run", "--resume", "raw steps", "table.md", "examples:"):
        assert word in text


@pytest.mark.usefixtures("few")
def test_too_little_memory_is_told_with_how_to_go_on(tmp_path, capsys, monkeypatch):
    def full(*given, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(compare, "train", full)
    assert main([*TWO, "--run", str(tmp_path / "run")]) == 1
    line = told(capsys)
    assert "too little memory: a smaller --batch-size or fewer --jobs" in line
    assert f"compare --resume {tmp_path / 'run'}" in line


# ---- processes --------------------------------------------------------------------------------------------------


TASKS = """
import os, signal
from vision_demo.problems import Problem

def square(task, shared, tick):
    tick()
    if task == "problem":
        raise Problem("seen by a process", status=2)
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return task * task + shared
"""


@pytest.fixture
def square(tmp_path, monkeypatch):
    """A task for processes, in a module that imports hardly anything: they start in a moment."""
    (tmp_path / "tasks_of_a_test.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("tasks_of_a_test").square
    del sys.modules["tasks_of_a_test"]


def test_tasks_side_by_side_are_all_done_and_problems_and_lost_processes_are_told(square):
    ticks = []
    found = jobs.all_done(square, [1, 2, 3, 4, 5], 100, 2, lambda: ticks.append(1))
    assert sorted(found) == [101, 104, 109, 116, 125]
    assert len(ticks) == 5
    with pytest.raises(Problem, match="seen by a process") as caught:
        list(jobs.all_done(square, [1, "problem", 2, 3], 0, 2, lambda: None))
    assert caught.value.status == 2
    with pytest.raises(Problem, match="one of the processes has ended with status -9"):
        list(jobs.all_done(square, [1, "killed"], 0, 2, lambda: None))


def test_processes_end_with_whoever_reads_their_results(square, monkeypatch):
    started, honest = [], jobs.start_deaf
    monkeypatch.setattr(jobs, "start_deaf", lambda process: (honest(process), started.append(process)))
    found = jobs.all_done(square, [1, 2, 3], 0, 2, lambda: None)
    next(found)
    found.close()
    assert len(started) == 2
    assert not any(process.is_alive() for process in started)
    with pytest.raises(Stopped):
        stopped(jobs.all_done(square, [1, 2, 3], 0, 2, lambda: None))
    assert len(started) == 4
    assert not any(process.is_alive() for process in started)


def stopped(results):
    """Ctrl-C in the midst of waiting."""
    try:
        next(results)
        results.throw(Stopped(signal.SIGINT))
    finally:
        results.close()
