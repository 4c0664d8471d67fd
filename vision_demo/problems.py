"""What ends the program early: a mistake that is told in one line, and a signal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Problem(Exception):
    """Something that the user can mend: told in one line on stderr, never as a traceback.

    Args:
        text: What was seen, where, and the likely cure.
        status: The exit status; 2 for a wrong command line, as argparse has it.
    """

    def __init__(self, text: object, *, status: int = 1) -> None:
        super().__init__(one_line(text))
        self.status = status


class Stopped(BaseException):
    """Ctrl-C or SIGTERM. No ``Exception``, so that nothing which forgives a bad file swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.cure = ""  # how to go on, said by whoever knows

    @property
    def status(self) -> int:
        """128 + the signal, as shells have it: 130 after Ctrl-C."""
        return 128 + self.number

    def __str__(self) -> str:
        return f"stopped by {'Ctrl-C' if self.number == signal.SIGINT else 'SIGTERM'}{self.cure}"


def one_line(text: object) -> str:
    """``text`` with whatever would break the line written as its escape: file names may hold anything."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in str(text))


def first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun started: the one that writes."""
    return os.environ.get("RANK", "0") == "0"


def say(text: object) -> None:
    """One line on stderr; once, however many processes train together."""
    if first_process():
        print(f"vision_demo: {one_line(text)}", file=sys.stderr)


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM raise :class:`Stopped`, so that both end in the same orderly way.

    Whatever else breaks because of that is no news: a library that is half imported may answer with an error of its
    own.
    """
    seen: list[Stopped] = []

    def stop(number: int, frame: FrameType | None) -> None:
        seen.append(Stopped(number))
        raise seen[-1]

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Exception as error:
        if seen:
            raise seen[-1] from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
