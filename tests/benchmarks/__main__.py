"""``python -m tests.benchmarks``: what ndpos costs, as ratios of neighbours in one run (tests/benchmarks/paired.py)."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from tests.benchmarks import fused, memory, models, report, rotation, tables
from tests.benchmarks.paired import keep_heap
from tests.benchmarks.report import Report
from tests.benchmarks.rows import Job, Settings

SECTIONS = {
    "memory": [memory.jobs],
    "tables": [tables.jobs],
    "models": [models.jobs],
    "fused": [fused.jobs],
    "rotation": [rotation.jobs, rotation.both_jobs, rotation.heads_jobs],
}
DTYPES = ("float32", "bfloat16", "float16")
ON_CUDA = {
    "dtypes": ("bfloat16", "float32"),
    "shapes": ("clip-32k", "clip-8k", "vit-b-224"),
    "minutes": 9.0,
    "batch": 8,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        epilog="Exits with 0 whether or not the bounds hold: they are for reading.",
    )
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"{', '.join(SECTIONS)} or all (default: all): what a call takes beside its result, building tables and "
        "grids, a ViT-B end to end, timm's rotating models fused, and the rotation over clone and over the peers",
    )
    parser.add_argument("--pairs", type=int, help="paired runs of each ratio (default: 41; quick: 5)")
    parser.add_argument(
        "--threads", type=int, default=2, help="CPU threads, whatever OMP_NUM_THREADS says (default: %(default)s)"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: all; CUDA: bfloat16 float32")
    parser.add_argument("--shapes", nargs="+", choices=list(rotation.SHAPES), help="default: all; CUDA: three of them")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, help="times the batch of every shape (default: 1; CUDA: 8)")
    parser.add_argument(
        "--heap",
        choices=("system", "kept"),
        default="system",
        help="kept: memory stays with the process, so that no page faults are timed (tests/benchmarks/paired.py)",
    )
    parser.add_argument("--minutes", type=float, help="begin no case after so many minutes (default: no end; CUDA: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what was measured, written after each case")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a PNG: time over clone against shape")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="tables for a README")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing: show a JSON file")
    parser.add_argument(
        "--quick", action="store_true", help="the smallest shape and models, nothing compiled, and held to no bound"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.sections) - {*SECTIONS, "all"}
    if unknown:
        parser.error(f"SECTION is one of {', '.join(SECTIONS)} or all, got {', '.join(sorted(unknown))}")
    if options.source is not None and not options.source.is_file():
        parser.error(f"--from: there is no file {options.source}")
    for name in ("json", "picture", "markdown"):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"--{name}: there is no folder {path.absolute().parent}")
    for name in ("pairs", "threads", "batch"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} is at least 1, got {getattr(options, name)}")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    """What was asked for, and the defaults of the device and of a quick run."""
    chosen = ON_CUDA if options.device == "cuda" else {}
    dtypes = options.dtypes or (("float32",) if options.quick else chosen.get("dtypes", DTYPES))
    shapes = options.shapes or (("vit-s-224",) if options.quick else chosen.get("shapes", ()))
    options.minutes = options.minutes or chosen.get("minutes")
    pairs = options.pairs or (5 if options.quick else 41)
    batch = options.batch or chosen.get("batch", 1)
    return Settings(pairs, options.device, tuple(dtypes), tuple(shapes), batch, options.quick)


def jobs(sections: list[str], settings: Settings) -> Iterator[Job]:
    for name, makers in SECTIONS.items():
        if not sections or name in sections or "all" in sections:
            for make in makers:
                yield from make(settings)


def measure(found: Report, todo: list[Job], settings: Settings, path: Path | None, minutes: float | None) -> None:
    """Every job in turn, the report saved after each; an interruption ends the measuring and keeps what there is."""
    found.skipped = settings.skipped
    started = time.monotonic()
    bar = tqdm(todo, unit="case", disable=None)
    done = 0
    try:
        for job in bar:
            if minutes is not None and time.monotonic() - started > 60 * minutes:
                break
            bar.set_postfix_str(job.title)
            for row in job.measure():
                row = dataclasses.replace(row, bound=None) if settings.quick else row
                found.rows.append(row)
                tqdm.write(report.line(row))
            done += 1
            if path is not None:
                found.save(path)
    except KeyboardInterrupt:
        print("\ninterrupted: what was measured is kept", file=sys.stderr)
    finally:
        bar.close()
        for job in todo[done:]:
            settings.skip(job.title, "the run ended before it")
        if path is not None:
            found.save(path)


def run(options: argparse.Namespace) -> Report:
    if options.source is not None:
        return Report.load(options.source)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("python -m tests.benchmarks: there is no CUDA device here")
    torch.set_num_threads(options.threads)
    settings = settings_of(options)
    if options.heap == "kept":
        keep_heap()
    found = report.new(options.device, threads=options.threads, batch=settings.batch, heap=options.heap)
    print(report.describe(found))
    measure(found, list(jobs(options.sections, settings)), settings, options.json, options.minutes)
    return found


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    found = run(options)
    report.show(found)
    if options.markdown is not None:
        options.markdown.write_text(report.markdown(found))
    elif options.source is not None:
        print(report.markdown(found))
    if options.picture is not None:
        from tests.benchmarks import picture

        if any(row.section == "rotation" for row in found.rows):
            options.picture.write_bytes(picture.png(picture.figure(found.rows)))
        else:
            print(f"no picture: it shows the rotation, which was not measured; {options.picture} is as it was")


if __name__ == "__main__":
    main()
