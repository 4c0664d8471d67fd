"""``python -m vision_demo``: train a small Vision Transformer with positions, compare encodings, or predict."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from vision_demo.problems import Problem, Stopped, say, stoppable

NEEDED = {  # module: its package
    "timm": "timm",
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "tqdm": "tqdm",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "safetensors": "safetensors",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show is written with escapes
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with stoppable():
            return carry_out(arguments)
    except Problem as problem:
        say(problem)
        return problem.status
    except Stopped as stopped:
        say(stopped)
        return stopped.status
    except BrokenPipeError:  # the reader of a pipe has gone, as head does; nobody is left to be told
        close_output()
        return 1
    except OSError as error:
        say(error)
        return 1


def close_output() -> None:
    """Let what is still to be written to stdout vanish, or Python would complain about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def carry_out(arguments: Sequence[str]) -> int:
    """Check the command line and the optional packages, then hand over to ``run`` of the room named by the command."""
    from vision_demo.cli import parse  # here and not above, so that Ctrl-C while torch is loaded ends in one line too

    if not any(argument in ("-h", "--help") for argument in arguments):
        missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
        if missing:
            raise Problem(f"{' and '.join(missing)} not installed: pip install 'ndpos[demo]'")
    options = parse(arguments)
    if find_spec(f"vision_demo.{options.command}") is None:
        raise Problem(f"this installation has no {options.command}", status=2)
    import torch

    torch.set_num_threads(options.threads)
    return import_module(f"vision_demo.{options.command}").run(options)


if __name__ == "__main__":
    sys.exit(main())
