"""A run folder holds all that a model needs, survives any interruption, and goes on to the very same weights."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from vision_demo.__main__ import NEEDED, main

ABSENT = [package for module, package in NEEDED.items() if find_spec(module) is None]
pytestmark = [
    pytest.mark.skipif(bool(ABSENT), reason=f"the demo's optional packages are absent: {ABSENT}"),
    pytest.mark.usefixtures("few"),
]
if not ABSENT:
    from PIL import Image
    from safetensors.torch import load_file, save_file

    from vision_demo import data, runs, train

QUICK = ["--epochs", "3", "--train-images", "70", "--seed", "7", "--device", "cpu"]  # 3 steps an epoch, the last small
FILES = [
    "config.json",
    "curves.png",
    "metrics.jsonl",
    "pictures.png",
    "results.json",
    "state.pt",
    "weights.safetensors",
]


@pytest.fixture(scope="module")
def states():
    """The states that the run of :func:`finished` saved after each epoch."""
    return []


@pytest.fixture(scope="module")
def finished(tmp_path_factory, digits, states):
    """A run that nothing has interrupted."""
    folder, save = tmp_path_factory.mktemp("runs") / "finished", runs.Run.save

    def watched(run, state):
        states.append(state)
        save(run, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vision_demo.data.load", lambda: digits)
        patch.setattr(runs.Run, "save", watched)
        assert main([*QUICK, "--run", str(folder)]) == 0
    return folder


def weights(folder):
    return load_file(folder / "weights.safetensors")


def metrics(folder):
    """The records without what a clock decides."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def assert_same_run(folder, other):
    assert metrics(folder) == metrics(other)
    found, expected = weights(folder), weights(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (folder / "results.json").read_text() == (other / "results.json").read_text()
    state, expected = (torch.load(run / "state.pt", weights_only=True) for run in (folder, other))
    assert torch.equal(state["shuffle"], expected["shuffle"])
    assert state["schedule"] == expected["schedule"]


def copied(folder, target):
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def told(capsys):
    """The only line on stderr, without the progress bar."""
    err = capsys.readouterr().err
    assert "Traceback" not in err
    lines = [line.rpartition("\r")[2] for line in err.split("\n") if "step/s" not in line.rpartition("\r")[2]]
    lines = [line for line in lines if line]
    assert len(lines) == 1, err
    assert lines[0].startswith("vision_demo: ")
    return lines[0]


def test_a_run_folder_holds_all_that_rebuilds_its_model(finished, digits):
    assert sorted(path.name for path in finished.iterdir()) == FILES
    config = json.loads((finished / "config.json").read_text())
    assert config["encoding"] == "rope-axial"
    assert config["classes"] == list("0123456789")
    assert (config["channels"], config["image_size"], config["train_images"], config["seed"]) == (1, [32, 32], 70, 7)
    assert config["recipe"]["epochs"] == 3
    assert config["recipe"]["seed"] == 7
    assert config["versions"]["torch"] == str(torch.__version__)
    assert [record["epoch"] for record in metrics(finished)] == [1, 2, 3]
    assert metrics(finished)[0].keys() == {"epoch", "loss", "train_accuracy", "held_out_accuracy"}
    results = json.loads((finished / "results.json").read_text())
    assert list(results) == ["32x32", "24x24", "48x48", "64x64", "32x48"]
    model = runs.find(finished).model()
    drawn = data.render(digits[1].pixels, (24, 24))
    assert train.accuracy(model, drawn, digits[1].labels) == results["24x24"]
    for name in ("curves.png", "pictures.png"):
        with Image.open(finished / name) as image:
            image.load()


def test_a_plain_call_trains_the_same_weights_as_a_run(finished, digits):
    from vision_demo.model import build_model

    seen, model = digits[0].first(70), build_model("rope-axial", seed=7)
    recipe = train.Recipe(epochs=3, seed=7)
    records = train.train(model, data.render(seen.pixels, (32, 32)), seen.labels, recipe, title="plain")
    assert all(torch.equal(value, weights(finished)[name]) for name, value in model.state_dict().items())
    assert [record["loss"] for record in records] == [record["loss"] for record in metrics(finished)]


@pytest.mark.parametrize(
    ("step", "number", "status"),
    [(1, signal.SIGINT, 130), (5, signal.SIGINT, 130), (5, signal.SIGTERM, 143), (9, signal.SIGINT, 130)],
)
def test_a_run_interrupted_at_any_step_goes_on_to_the_same_weights(
    step, number, status, finished, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("vision_demo.runs.curves", lambda records, title: b"drawn")  # for speed
    folder, forward, steps = tmp_path / "a run", torch.optim.AdamW.step, []

    def interrupted(self, *arguments):
        steps.append(None)
        if len(steps) == step:
            signal.raise_signal(number)
        return forward(self, *arguments)

    handler = signal.getsignal(signal.SIGINT)  # a job in the background is started with SIGINT ignored
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        assert main([*QUICK, "--run", str(folder)]) == status
    line = told(capsys)
    assert line.startswith(f"vision_demo: stopped by {'Ctrl-C' if status == 130 else 'SIGTERM'}; go on with: ")
    assert line.endswith(f" --resume '{folder}'")
    assert len(metrics(folder) if (folder / "metrics.jsonl").exists() else []) == (step - 1) // 3
    torch.manual_seed(123)  # whatever else has happened to the random state in between
    assert main(["--resume", str(folder), "--device", "cpu"]) == 0
    assert_same_run(folder, finished)
    assert signal.getsignal(signal.SIGINT) is handler


class Killed(BaseException):
    """As if the process were gone: nothing of the demo may catch it."""


def kill_at(moment, patch):
    """Kill it in one moment of those in which files are written: half written, whole, and under its own name."""
    replace, fsync, passed = os.replace, os.fsync, []

    def pass_by():
        passed.append(None)
        return len(passed) == moment

    def cut(number):
        if pass_by():
            os.ftruncate(number, os.fstat(number).st_size // 2)
            raise Killed
        fsync(number)

    def rename(partial, path):
        if pass_by():
            raise Killed
        replace(partial, path)
        if pass_by():
            raise Killed

    patch.setattr(os, "fsync", cut)
    patch.setattr(os, "replace", rename)


@pytest.mark.parametrize("moment", range(1, 13))
def test_a_run_killed_at_any_moment_of_a_save_loses_nothing_and_goes_on(
    moment, finished, states, tmp_path, monkeypatch
):
    monkeypatch.setattr("vision_demo.runs.curves", lambda records, title: b"drawn")  # for speed
    folder = copied(finished, tmp_path / "run")
    (folder / "results.json").unlink()
    run = runs.find(folder)
    run.save(states[1])
    with monkeypatch.context() as patch:
        kill_at(moment, patch)
        with pytest.raises(Killed):
            run.save(states[2])
    assert len(run.state()["records"]) == (2 if moment < 3 else 3)
    assert len(metrics(folder)) == (2 if moment < 6 else 3)  # never half a line
    assert run.model() is not None
    assert main(["--resume", str(folder), "--device", "cpu"]) == 0
    assert_same_run(folder, finished)


def test_a_save_has_no_other_moments(finished, states, tmp_path, monkeypatch):
    folder = copied(finished, tmp_path / "run")
    with monkeypatch.context() as patch:
        kill_at(13, patch)
        runs.find(folder).save(states[2])


def test_a_run_killed_before_its_first_epoch_ended_begins_again(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".state.pt.partial").write_bytes(b"half")
    (folder / "config.json").write_bytes((finished / "config.json").read_bytes())
    assert main(["predict", str(folder), "image.png"]) == 1
    assert "no epoch has ended yet" in told(capsys)
    assert main(["--resume", str(folder), "--device", "cpu"]) == 0
    assert_same_run(folder, finished)


def test_a_process_that_is_really_killed_leaves_a_run_that_goes_on(finished, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "vision_demo", *QUICK, "--run", str(folder)]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        end = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        process.kill()
        process.stderr.close()
        process.wait()
    assert main(["--resume", str(folder), "--device", "cpu"]) == 0
    assert metrics(folder) == [
        {**ours, "held_out_accuracy": record["held_out_accuracy"]}
        for ours, record in zip(metrics(finished), metrics(folder), strict=True)
    ]  # the process measured on more digits
    assert all(torch.equal(value, weights(finished)[name]) for name, value in weights(folder).items())


def test_a_finished_run_says_so_and_tells_its_results_again(finished, tmp_path, capsys, monkeypatch):
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    monkeypatch.setattr("vision_demo.data.load", lambda: pytest.fail("the images are not needed"))
    assert main(["--resume", str(finished), "--device", "cpu", "--seed", "7", "--epochs", "3"]) == 0
    out, err = capsys.readouterr()
    assert "finished already, after 3 epochs" in out
    for size, share in json.loads((finished / "results.json").read_text()).items():
        assert f"{size.replace('x', ' x ')} {share:8.1%}" in out
    assert err == ""
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--epochs", "12"], "--epochs 12 contradicts {}, which has 3; leave --epochs out"),  # though it is the default
        (["--seed", "8"], "--seed 8 contradicts {}, which has 7"),
        (["--batch-size", "16"], "--batch-size 16 contradicts {}, which has 32"),
        (["--encoding", "none"], "--encoding none contradicts {}, which has rope-axial"),
        (["--train-images", "71"], "--train-images 71 contradicts {}, which has 70"),
        (["--image-size", "64x32"], "--image-size 64x32 contradicts {}, which has 32x32"),
        (["--data", "/photos"], "--data /photos contradicts {}, which has the digits"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_contradict_the_run_are_refused(options, text, finished, capsys):
    assert main(["--resume", str(finished), *options]) == 2
    assert text.format(finished) in told(capsys)


def test_a_run_is_never_overwritten(finished, tmp_path, capsys):
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    assert main([*QUICK, "--run", str(finished)]) == 1
    assert f"never overwritten; go on with --resume {finished}" in told(capsys)
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before
    (tmp_path / "notes.txt").write_text("mine")
    assert main([*QUICK, "--run", str(tmp_path)]) == 1
    assert "holds other files" in told(capsys)
    assert main([*QUICK, "--run", str(tmp_path / "notes.txt")]) == 1
    assert "is a file" in told(capsys)
    assert main([*QUICK, "--run", str(tmp_path / "notes.txt" / "run")]) == 1
    assert "notes.txt" in told(capsys)


def test_runs_without_a_name_are_named_by_time_encoding_and_seed(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = runs.find(finished).config
    folders = {runs.begin(None, config).folder for _ in range(3)}
    assert len(folders) == 3
    for folder in folders:
        assert folder.parent == Path("runs")
        assert time.strftime("%Y-%m-%d-") in folder.name
        assert "-rope-axial-seed7" in folder.name


def spoiled(name, content):
    def spoil(folder):
        path = folder / name
        if content is None:
            path.unlink()
        elif callable(content):
            path.write_bytes(content(path.read_bytes()))
        else:
            path.write_bytes(content)

    return spoil


def flipped(content):
    """One bit is wrong, in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def changed(old, new):
    return lambda content: content.replace(old, new)


DAMAGE = {
    "config.json is gone": spoiled("config.json", None),
    "config.json is empty": spoiled("config.json", b""),
    "config.json is a list": spoiled("config.json", b"[]"),
    "config.json is no text": spoiled("config.json", b"\xff\xfe"),
    "config.json lacks a field": spoiled("config.json", changed(b'"encoding"', b'"coding"')),
    "config.json is of another format": spoiled("config.json", changed(b'"format": 1', b'"format": 99')),
    "config.json names an encoding that is unknown": spoiled("config.json", changed(b"rope-axial", b"rope-cubic")),
    "config.json has a size that is none": spoiled("config.json", changed(b"    32,", b"    -4,")),
    "config.json has a size that is no multiple of a patch": spoiled("config.json", changed(b"    32,", b"    33,")),
    "config.json has no classes": spoiled(
        "config.json", lambda content: re.sub(rb'"classes": [^]]*', b'"classes": [', content)
    ),
    "config.json has epochs that are none": spoiled("config.json", changed(b'"epochs": 3', b'"epochs": "3"')),
    "config.json has a recipe that is none": spoiled("config.json", changed(b"0.003", b"null")),
    "state.pt is gone": spoiled("state.pt", None),
    "state.pt is empty": spoiled("state.pt", b""),
    "state.pt is cut": spoiled("state.pt", lambda content: content[: len(content) // 2]),
    "state.pt has a wrong bit": spoiled("state.pt", flipped),
    "state.pt is something else": spoiled("state.pt", b"hello"),
    "state.pt is of another run": spoiled("config.json", changed(b'"seed": 7', b'"seed": 8')),
    "weights.safetensors is gone": spoiled("weights.safetensors", None),
    "weights.safetensors is cut": spoiled("weights.safetensors", lambda content: content[:-9]),
    "weights.safetensors has a wrong bit": spoiled("weights.safetensors", flipped),
    "weights.safetensors is something else": spoiled("weights.safetensors", b"hello"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_run_is_told_in_one_line_by_whatever_needs_it(kind, finished, tmp_path, capsys):
    folder = copied(finished, tmp_path / "run")
    DAMAGE[kind](folder)
    resumed = ["--resume", str(folder)]
    predicted = ["predict", str(folder), str(folder / "pictures.png"), "--device", "cpu"]
    for arguments, needed in ((resumed, ("config", "state")), (predicted, ("config", "weights"))):
        status = main(arguments)
        if kind.startswith(needed) and not (kind == "state.pt is of another run" and arguments is predicted):
            line = told(capsys)
            assert status == 1
            assert str(folder) in line
        else:
            assert status == 0
            assert capsys.readouterr().err == ""


def test_what_is_no_run_folder_is_told_in_one_line(tmp_path, capsys):
    for command in (["--resume"], ["predict"]):
        image = ["image.png"] if command == ["predict"] else []
        assert main([*command, str(tmp_path / "gone"), *image]) == 1
        assert "gone: no such run folder" in told(capsys)
        assert main([*command, str(tmp_path), *image]) == 1
        assert "not a run folder, it has no config.json" in told(capsys)
        assert main([*command, __file__, *image]) == 1
        assert "not a run folder" in told(capsys)


def test_weights_of_another_model_are_refused(finished, tmp_path, capsys):
    folder = copied(finished, tmp_path / "run")
    other = {"head.weight": torch.zeros(2, 2)}
    save_file(other, folder / "weights.safetensors", {"sha256": runs.digest(other)})
    assert main(["predict", str(folder), "image.png"]) == 1
    assert "do not belong together" in told(capsys)


def test_a_full_disk_ends_in_one_line_and_keeps_what_was_saved(finished, states, tmp_path, capsys, monkeypatch):
    folder = copied(finished, tmp_path / "run")
    runs.find(folder).save(states[0])
    (folder / "results.json").unlink()

    sync, written = os.fsync, []

    def full(number):
        written.append(number)
        if len(written) > 4:  # pictures, metrics, weights and curves are repaired first; then an epoch is to be saved
            raise OSError(28, "No space left on device")
        sync(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(["--resume", str(folder), "--device", "cpu"]) == 1
    assert re.search("No space left on device; go on with: .* --resume", told(capsys))
    assert main(["--resume", str(folder), "--device", "cpu"]) == 0
    assert_same_run(folder, finished)


def test_images_that_have_changed_since_are_refused(tmp_path, capsys):
    for name, colour in (("cat", "red"), ("dog", "blue")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for image in range(3):
            Image.new("RGB", (8, 8), colour).save(tmp_path / "photos" / name / f"{image}.png")
    run = ["--data", str(tmp_path / "photos"), "--image-size", "8", "--epochs", "1", "--run", str(tmp_path / "run")]
    assert main([*run, "--device", "cpu"]) == 0
    (tmp_path / "run" / "results.json").unlink()
    assert main(["--resume", str(tmp_path / "run"), "--data", str(tmp_path / "photos"), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("finished already") == 1
    (tmp_path / "run" / "results.json").unlink()
    (tmp_path / "photos" / "dog" / "new.png").write_bytes((tmp_path / "photos" / "dog" / "0.png").read_bytes())
    capsys.readouterr()
    assert main(["--resume", str(tmp_path / "run"), "--device", "cpu"]) == 1
    assert "not the images that" in told(capsys)
    assert main(["predict", str(tmp_path / "run"), "image.png", "--ink", "dark"]) == 2
    assert "--ink is for models of the digits" in told(capsys)


def predicted(finished, paths, capsys, *options):
    status = main(["predict", str(finished), *map(str, paths), *options, "--device", "cpu"])
    out, err = capsys.readouterr()
    return status, [line.split("\t") for line in out.splitlines()], err


def test_predictions_are_those_of_the_model_on_the_digits_as_they_were_drawn(finished, digits, tmp_path, capsys):
    drawn = data.render(digits[1].pixels, (32, 32))
    with torch.no_grad():
        expected = runs.find(finished).model()(drawn).softmax(dim=-1).max(dim=-1)
    paths = []
    for number, image in enumerate(drawn):
        paths.append(tmp_path / f"{number}.png")
        grey = ((image[0] + 1) * 32767.5).round().to(torch.int32).numpy().astype("uint16")
        Image.fromarray(grey).resize((64, 64), Image.Resampling.NEAREST).save(paths[-1])  # shrunk again exactly
    status, lines, err = predicted(finished, paths, capsys)
    assert (status, err) == (0, "")
    assert [line[0] for line in lines] == [str(path) for path in paths]
    assert [int(line[1]) for line in lines] == expected.indices.tolist()
    torch.testing.assert_close(torch.tensor([float(line[2]) for line in lines]), expected.values, atol=2e-4, rtol=0)


def test_dark_ink_is_inverted_on_request_and_colours_turn_grey(finished, digits, tmp_path, capsys):
    image = data.render(digits[1].pixels[:1], (32, 32))[0, 0]
    grey = ((image + 1) * 127.5).round().to(torch.uint8)
    Image.fromarray(grey.numpy()).save(tmp_path / "bright.png")
    Image.fromarray((255 - grey).numpy()).convert("RGB").save(tmp_path / "dark.jpg", quality=100, subsampling=0)
    _, (bright,), _ = predicted(finished, [tmp_path / "bright.png"], capsys)
    _, (dark,), _ = predicted(finished, [tmp_path / "dark.jpg"], capsys, "--ink", "dark")
    _, (wrong,), _ = predicted(finished, [tmp_path / "dark.jpg"], capsys)
    assert dark[1] == bright[1]
    assert float(dark[2]) == pytest.approx(float(bright[2]), abs=0.003)
    assert abs(float(wrong[2]) - float(bright[2])) > 0.003 or wrong[1] != bright[1]


def test_a_bad_image_is_told_in_one_line_and_the_others_are_still_predicted(finished, tmp_path, capsys):
    Image.new("RGBA", (50, 20), "red").save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"hello")
    paths = [tmp_path / name for name in ("gone.png", "good.png", "bad.png", "good.png")]
    status, lines, err = predicted(finished, paths, capsys)
    assert status == 1
    assert [line[0] for line in lines] == [str(tmp_path / "good.png")] * 2
    assert err.splitlines() == [
        f"vision_demo: {tmp_path / 'gone.png'}: no such file",
        f"vision_demo: {tmp_path / 'bad.png'}: not an image that Pillow can read",
    ]


@pytest.mark.gpu
def test_on_a_gpu_a_run_trains_in_bfloat16_and_is_resumed_and_predicts(finished, tmp_path, capsys, monkeypatch):
    seen = []
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(
        torch.nn.Linear,
        "forward",
        lambda self, x: (out := forward(self, x), seen.append((out.device.type, out.dtype)))[0],
    )
    arguments = [word if word != "cpu" else "cuda" for word in QUICK]
    assert main([*arguments, "--run", str(tmp_path / "run")]) == 0
    assert set(seen) == {("cuda", torch.bfloat16)}
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(finished), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.05)
    (tmp_path / "run" / "results.json").unlink()
    assert main(["--resume", str(tmp_path / "run"), "--device", "cuda"]) == 0
    status = main(["predict", str(tmp_path / "run"), str(finished / "curves.png"), "--device", "cuda"])
    assert status == 0
    assert "curves.png" in capsys.readouterr().out


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_losses(finished, tmp_path):
    assert main([*QUICK, "--compile", "--run", str(tmp_path / "run")]) == 0
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(finished), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    assert weights(tmp_path / "run").keys() == weights(finished).keys()
