"""``python -m ndpos``: what the library knows, from the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ndpos", description="Positional encodings for any number of axes.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    support = commands.add_parser(
        "timm-support",
        help="every model that timm registers: takes RoPE, rotates already, or why not",
        description="Go through timm's models on the meta device, without weights; all of them take some minutes.",
    )
    support.add_argument("pattern", nargs="?", default="", help="names to look at, as in vit_* (default: all)")
    form = support.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="a table of families instead of a line for each model")
    form.add_argument("--json", action="store_true", help="a list of objects: name, family, state, note")
    options = parser.parse_args(arguments)
    try:
        return timm_support(options)
    except (
        BrokenPipeError
    ):  # the reader of a pipe has gone, as head does; Python would complain about stdout at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def timm_support(options: argparse.Namespace) -> int:
    """Print the rows as they are found, and how many there are of each state on stderr."""
    try:
        from ndpos.timm import support
    except ImportError as error:
        print(f"python -m ndpos: {error}", file=sys.stderr)
        return 1
    rows = []
    for row in support.timm_support(options.pattern):
        rows.append(row)
        if not (options.markdown or options.json):
            print(f"{row.name:<56} {row.state:<16} {row.note}", flush=True)
    if not rows:
        print(f"python -m ndpos timm-support: timm registers no model like {options.pattern!r}", file=sys.stderr)
        return 1
    if options.markdown:
        print(support.summary(rows))
    elif options.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
    counts = Counter(row.state for row in rows)
    print(f"{len(rows)} models: " + ", ".join(f"{count} {state}" for state, count in counts.items()), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
