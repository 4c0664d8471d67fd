"""Several tasks side by side, each in a process of its own, seen from the process that started them.

Results come over pipes. A process that ends for whatever reason closes its pipe, and nobody waits for it for ever.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tqdm import tqdm

from vision_demo.problems import Problem

Tick = Callable[[], Any]  # called at every step of a task
Do = Callable[[Any, Any, Tick], Any]  # (task, shared, tick) -> result; a function of a module, which processes can find


def all_done(do: Do, tasks: Sequence[Any], shared: Any, jobs: int, tick: Tick) -> Iterator[Any]:
    """The results of ``do(task, shared, tick)`` as they are finished; in this process if there is one job.

    Close the iterator when it is not read to its end: that ends the processes.

    Raises:
        Problem: One of a task, or a process was killed.
    """
    if jobs == 1:
        for task in tasks:
            yield do(task, shared, tick)
        return
    context, waiting = multiprocessing.get_context("spawn"), list(tasks)  # a forked process cannot use a GPU
    processes: dict[Connection, Any] = {}
    try:
        for _ in range(min(jobs, len(tasks))):
            ours, theirs = context.Pipe()
            processes[ours] = context.Process(target=serve, args=(theirs, do, shared), daemon=True)
            start_deaf(processes[ours])
            theirs.close()  # the process alone holds it now: when it ends, our end says so
            send(ours, waiting.pop(0), processes[ours])
        busy = list(processes)
        while busy:
            for connection in wait(busy):
                result = receive(connection, processes[connection])
                if result is None:
                    tick()
                    continue
                if waiting:
                    send(connection, waiting.pop(0), processes[connection])
                else:
                    busy.remove(connection)
                yield result
    finally:
        for process in processes.values():
            if process.pid is not None:
                process.kill()
                process.join()


def start_deaf(process: Any) -> None:
    """Start a process that Ctrl-C does not reach: it would die with a traceback, and is ended from here anyway."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)


def send(connection: Connection, task: Any, process: Any) -> None:
    """Tell a process what to do next."""
    try:
        connection.send(task)
    except OSError as error:
        raise lost(process) from error


def receive(connection: Connection, process: Any) -> Any:
    """The next message of a process: None for a tick, else a result; a problem that it had is raised."""
    try:
        message = connection.recv()
    except (EOFError, OSError) as error:
        raise lost(process) from error
    if isinstance(message, Problem):
        raise message
    return message


def lost(process: Any) -> Problem:
    """What is told of a process that has gone."""
    process.join(10)
    return Problem(f"one of the processes has ended with status {process.exitcode}, perhaps for lack of memory")


def serve(connection: Connection, do: Do, shared: Any) -> None:
    """What such a process does: the tasks that it is sent, until it is ended."""
    # tqdm's own lock is for bars of several processes, which there are none of; killed with it, a process would leave a
    # warning about leaked semaphores behind.
    tqdm.set_lock(threading.RLock())
    try:
        while True:
            task = connection.recv()
            try:
                result = do(task, shared, lambda: connection.send(None))
            except Problem as problem:
                result = problem
            connection.send(result)
    except (EOFError, ConnectionError):
        pass  # whoever started it is gone
