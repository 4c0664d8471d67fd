"""The instrument of the benchmarks: intervals, memory, files and a whole small run. No time is judged here."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm", reason="the benchmarks need the demo's optional packages")
import ndpos
from tests.benchmarks import memory, report
from tests.benchmarks.__main__ import main, measure, parse
from tests.benchmarks.paired import Clock, Ratio, Task, in_turn, interval, ratio
from tests.benchmarks.rows import Bound, Job, Row, Settings

ROOT = Path(__file__).parent.parent


def drawn(true, seed, count=41):
    """Times of two functions, the first ``true`` times the second, each with its own noise, and a drift of both."""
    noise = random.Random(seed)
    speed = [1 + place / count for place in range(count)]
    a = [true * each * noise.lognormvariate(0, 0.1) for each in speed]
    return a, [each * noise.lognormvariate(0, 0.1) for each in speed]


def test_the_interval_covers_a_known_ratio_about_as_often_as_it_says():
    seen = [ratio(*drawn(1.5, seed)) for seed in range(100)]
    assert 88 <= sum(each.low <= 1.5 <= each.high for each in seen) <= 99
    assert all(each.low <= each.ratio <= each.high for each in seen)
    widths = sorted(each.high - each.low for each in seen)
    assert 0.05 < widths[50] < 0.3  # 2 x 1.96 x 1.25 x 1.5 x sqrt(2) x 0.1 / sqrt(41) = 0.16
    assert interval([2.0] * 5) == (2.0, 2.0)


class Recorder(Clock):
    """Writes down whose sample it is; each takes as long as there were samples before it."""

    def __init__(self):
        self.names = []

    def sample(self, task, calls):
        self.names.append(task.run())
        return float(len(self.names))


def test_every_task_stands_beside_the_reference_in_both_orders():
    clock = Recorder()
    tasks = {name: Task(lambda name=name: name) for name in "abc"}
    times = in_turn(tasks, Task(lambda: "-"), pairs=4, clock=clock)
    counted = clock.names[-4 * 2 * len(tasks) :]
    for place in range(0, len(counted), 12):  # a round, and the same backwards
        assert counted[place : place + 6] == counted[place : place + 12][:5:-1]
        assert set(counted[place : place + 6 : 2]) == set("abc")
        assert counted[place + 1 : place + 6 : 2] == ["-"] * 3
    for name in tasks:
        apart = [one - other for one, other in zip(times.own[name], times.reference[name], strict=True)]
        assert apart == [-1.0, 1.0, -1.0, 1.0]


def test_what_a_call_needs_is_made_before_every_call():
    made = []
    task = Task(made.remove, lambda: (made.append(len(made)) or made[-1],))
    Clock().sample(task, 3)
    assert made == []  # each was handed to one call


def test_a_bound_is_judged_by_the_number_it_names():
    seen = Ratio(1.0, 0.9, 1.2, 1.0, 1.0, 41)
    assert Bound(1.0).holds(seen)
    assert not Bound(1.1, judged="high").holds(seen)
    assert Bound(0.95, judged="low").holds(seen)
    assert not Bound(1.5, "at least").holds(seen)


X = torch.zeros(64, 1000)


def copied(extra):
    """A copy of X that first takes ``extra`` of X's bytes more, and gives them back."""
    spare = torch.ones(int(extra * X.numel()))
    return X + spare[0]


def test_memory_sees_a_planted_allocation_and_none_in_place():
    x = X.clone()
    assert memory.beyond(lambda: x.mul_(2), given=[x]) == 0
    out = torch.empty_like(x)
    assert memory.beyond(lambda: torch.mul(x, 2, out=out), given=[x, out]) == 0
    assert memory.beyond(lambda: x.mul_(torch.ones(x.numel() // 4)[0]), given=[x]) == x.nbytes // 4
    assert memory.beyond(lambda: x.clone()) == 0
    assert memory.beyond(lambda: copied(0.25)) == x.nbytes // 4
    assert memory.beyond(lambda: copied(0.25), tables=x.nbytes // 8) == x.nbytes // 8
    one_at_a_time = memory.beyond(lambda: (copied(0.25), copied(0.25)))
    assert one_at_a_time == x.nbytes // 4  # what is given back before is not counted twice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_an_eager_rotation_holds_an_eighth_of_x_at_most_beside_its_result(pairing, heads, dtype):
    rope = ndpos.RotaryEmbedding(ndpos.split(64, 1), pairing=pairing, backend="eager")
    x = torch.zeros(2, 8, 6000, 64, dtype=dtype)
    turn = rope.on_grid((6000,))
    per_head = [part.expand(1, heads, 6000, 32).contiguous() for part in (turn.cos, turn.sin)]
    turn = dataclasses.replace(turn, cos=per_head[0], sin=per_head[1])
    assert memory.beyond(lambda: turn(x)) <= x.nbytes / 8
    assert memory.beyond(lambda: turn(x, out=x), given=[x]) <= x.nbytes / 8


def test_memory_sees_a_planted_allocation_in_a_backward():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return copied(0.5) + grad.mul_(2)  # the copy, and half of it before

    class Plain(Doubled):
        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    assert memory.spent(Plain.apply, X, "backward", 0) == 0
    assert memory.spent(Doubled.apply, X, "backward", 0) == X.nbytes


def small_report():
    found = report.Report(
        {"cpu": "A CPU", "cores": 2, "threads": 1, "torch": "2", "batch": 1, "heap": "system"}, "2000"
    )
    seen = Ratio(1.25, 1.2, 1.31, 2.5, 2.0, 41)
    found.rows = [
        Row("rotation", "vit-s-224 float32 forward", "ndpos eager, half", "clone", seen, Bound(1.0, aim=0.5)),
        Row("rotation", "clip-8k float32 forward", "ndpos eager, half", "clone", seen, bandwidth=0.875),
        Row("models", "ViT-B/16", "timm", "plain", seen, Bound(1.3, judged="low")),
    ]
    found.skipped = {"liger": "not installed"}
    return found


def test_a_report_comes_back_from_its_file_and_makes_the_same_tables(tmp_path):
    found = small_report()
    found.save(tmp_path / "report.json")
    again = report.Report.load(tmp_path / "report.json")
    assert again == found
    assert [row.holds for row in again.rows] == [False, None, True]
    assert report.markdown(again) == report.markdown(found)
    lines = report.markdown(again).splitlines()
    assert "A CPU, 2 cores, 1 thread," in lines[0]
    assert "| ndpos eager, half | 1.25 (1.20 to 1.31) | 1.25 (1.20 to 1.31) |" in lines
    assert "| ViT-B/16 | timm | plain | 1.25 (1.20 to 1.31) | lower end at most 1.3 |" in lines
    assert "MISSED" in report.line(again.rows[0])
    assert "88% of the bandwidth" in report.line(again.rows[1])


def test_an_interrupted_run_keeps_what_it_measured(tmp_path):
    rows = small_report().rows

    def interrupted():
        yield rows[1]
        raise KeyboardInterrupt

    found, settings = small_report(), Settings()
    found.rows = []
    todo = [Job("first", lambda: rows[:1]), Job("second", interrupted), Job("third", lambda: rows[2:])]
    measure(found, todo, settings, tmp_path / "report.json", None)
    kept = report.Report.load(tmp_path / "report.json")
    assert kept.rows == rows[:2]
    assert list(kept.skipped) == ["second", "third"]


def test_a_quick_run_from_the_command_line_writes_its_files(tmp_path):
    written = {name: tmp_path / f"report.{name}" for name in ("json", "picture", "markdown")}
    files = [part for name, path in written.items() for part in (f"--{name}", str(path))]
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks",
        "rotation",
        "--quick",
        "--pairs",
        "2",
        "--threads",
        "1",
        *files,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    content = json.loads(written["json"].read_text())
    assert content["machine"]["threads"] == 1
    cases = {(row["case"], row["name"]) for row in content["rows"] if row["over"] == "clone"}
    for direction in ("forward", "backward"):
        for pairing in ("interleaved", "half"):
            assert (f"vit-s-224 float32 {direction}", f"ndpos eager, {pairing}") in cases
    assert all(row["seen"]["pairs"] == 2 for row in content["rows"])
    assert written["picture"].read_bytes().startswith(b"\x89PNG")
    assert "Time over `clone`, float32, backward" in written["markdown"].read_text()
    assert all(row["bound"] is None for row in content["rows"])  # two pairs of the smallest shape say nothing of bounds
    assert "bounds hold" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "nowhere.json"], "--from: there is no file nowhere.json"),
        (["--json", "nowhere/report.json"], "--json: there is no folder"),
        (["--pairs", "0"], "--pairs is at least 1, got 0"),
        (["speed"], "SECTION is one of"),
    ],
)
def test_what_cannot_be_read_or_written_is_said_before_anything_is_measured(capsys, arguments, said):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert said in capsys.readouterr().err


def test_no_picture_is_drawn_of_what_was_not_measured(capsys, tmp_path):
    found = small_report()
    found.rows = [row for row in found.rows if row.section != "rotation"]
    found.save(tmp_path / "report.json")
    main(["--from", str(tmp_path / "report.json"), "--picture", str(tmp_path / "report.png")])
    assert "no picture" in capsys.readouterr().out
    assert not (tmp_path / "report.png").exists()
