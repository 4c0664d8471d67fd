"""Two processes train what one process trains, speak with one voice, and end together."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from vision_demo.__main__ import NEEDED, main

ABSENT = [package for module, package in NEEDED.items() if find_spec(module) is None]
pytestmark = [
    pytest.mark.skipif(bool(ABSENT), reason=f"the demo's optional packages are absent: {ABSENT}"),
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
]

# 4 steps of 15 images, of which one process has 8 and the other 7, and a step with one image, so that one has none.
BATCHES = ["--epochs", "2", "--batch-size", "15", "--train-images", "61", "--device", "cpu"]
JOBS = ["trained", "interrupted", "resumed", "bad data of one", "bad argument", "one dies"]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def fewer_digits():
    from vision_demo import data

    seen, held_out = data.load()
    data.load = lambda: (seen, held_out.first(13))  # an odd number: the shares of the measurement differ


def at_step(number, what):
    """Do ``what`` before the optimizer's step of this number."""
    step, steps = torch.optim.AdamW.step, []

    def watched(self, *arguments):
        steps.append(None)
        if len(steps) == number:
            torch.optim.AdamW.step = step
            what()
        return step(self, *arguments)

    torch.optim.AdamW.step = watched


def arguments_of(job, rank, folder):
    """The command line of one job, after what leads up to it."""
    if job == "interrupted":
        at_step(8, lambda: signal.raise_signal(signal.SIGINT))
    if job == "one dies" and rank == 1:
        at_step(3, lambda: os._exit(9))
    if job == "bad data of one":
        os.chdir(folder / f"of rank {rank}")
    return {
        "trained": [*BATCHES, "--run", str(folder / "trained")],
        "interrupted": [*BATCHES, "--run", str(folder / "interrupted")],
        "resumed": ["--resume", str(folder / "interrupted"), "--device", "cpu"],
        "bad data of one": ["--data", "photos", "--device", "cpu", "--run", str(folder / "bad")],
        "bad argument": ["--epochs", "0"],
        "one dies": [*BATCHES, "--run", str(folder / "dead")],
    }[job]


def work(rank, ports, folder):
    """One process, with the environment that torchrun gives it; what it said goes into a file for each job."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1")
    fewer_digits()
    for job, port in zip(JOBS, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments_of(job, rank, folder))
        said = {"status": status, "out": out.getvalue(), "err": err.getvalue()}
        (folder / f"{job} {rank}.json").write_text(json.dumps(said))
        if dist.is_initialized():  # after a signal it ends as it is, but here the process lives on
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each of two processes said in each job; one pair does it all, since starting them takes longer."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("processes")
    for rank in (0, 1):
        for name in ("cat", "dog"):
            (folder / f"of rank {rank}" / "photos" / name).mkdir(parents=True)
            for image in range(2):
                Image.new("RGB", (8, 8)).save(folder / f"of rank {rank}" / "photos" / name / f"{image}.png")
    (folder / "of rank 1" / "photos" / "dog" / "1.png").write_bytes(b"hello")
    ports = [free_port() for _ in JOBS]
    processes = [mp.get_context("spawn").Process(target=work, args=(rank, ports, folder)) for rank in (0, 1)]
    try:
        for process in processes:
            process.start()
        end = time.monotonic() + 200
        for process in processes:
            process.join(end - time.monotonic())
            assert not process.is_alive(), "two processes did not come to an end in time"
    finally:
        for process in processes:
            process.kill()
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return folder, found


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def only_line(err):
    lines = [line.rpartition("\r")[2] for line in err.split("\n") if "step/s" not in line.rpartition("\r")[2]]
    lines = [line.strip() for line in lines if line.strip()]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


def test_two_processes_have_the_losses_of_one_though_shares_are_unequal_or_empty(said, tmp_path, monkeypatch):
    folder, _ = said
    from vision_demo import data

    seen, held_out = data.load()
    monkeypatch.setattr(data, "load", lambda: (seen, held_out.first(13)))
    assert main([*BATCHES, "--run", str(tmp_path / "one")]) == 0
    one, two = records(tmp_path / "one"), records(folder / "trained")
    assert len(one) == len(two) == 2
    for ours, theirs in zip(one, two, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5)


def test_only_the_first_process_speaks_and_shows_a_bar(said):
    _, found = said
    assert found["trained 0"]["status"] == found["trained 1"]["status"] == 0
    assert "61 images at 32 x 32, RoPE axial, 2 epochs, on cpu, 2 processes" in found["trained 0"]["out"]
    assert "10/10" in found["trained 0"]["err"]
    assert found["trained 1"]["out"] == found["trained 1"]["err"] == ""


def test_two_interrupted_processes_go_on_to_the_same_weights(said):
    folder, found = said
    assert found["interrupted 0"]["status"] == found["interrupted 1"]["status"] == 130
    assert "python -m vision_demo --resume" in only_line(found["interrupted 0"]["err"])
    assert found["interrupted 1"]["err"] == ""
    assert found["resumed 0"]["status"] == found["resumed 1"]["status"] == 0
    assert records(folder / "interrupted") == records(folder / "trained")
    resumed, trained = (
        torch.load(folder / name / "state.pt", weights_only=True)["model"] for name in ("interrupted", "trained")
    )
    assert all(torch.equal(resumed[name], trained[name]) for name in trained)


@pytest.mark.parametrize(
    ("job", "status", "text"),
    [("bad data of one", 1, "photos/dog/1.png: not an image"), ("bad argument", 2, "--epochs: must be")],
)
def test_a_problem_of_one_process_ends_both_with_one_line(job, status, text, said):
    folder, found = said
    assert found[f"{job} 0"]["status"] == found[f"{job} 1"]["status"] == status
    assert text in only_line(found[f"{job} 0"]["err"])
    assert found[f"{job} 1"]["err"] == ""
    assert not (folder / "bad").exists()


def test_a_process_that_loses_the_other_ends_with_one_line(said):
    _, found = said
    assert found["one dies 0"]["status"] == 1
    assert "another process has ended, so this one ends too" in only_line(found["one dies 0"]["err"])
    assert "one dies 1" not in found


@pytest.mark.slow
def test_torchrun_starts_them(said, tmp_path):
    folder, _ = said
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "vision_demo", *BATCHES, "--run-folder", str(tmp_path / "run")]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    found = [record["loss"] for record in records(tmp_path / "run")]
    assert found == [record["loss"] for record in records(folder / "trained")]
