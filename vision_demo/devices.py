"""Where the work is done: the device, its precision, and the processes that train together.

Processes are started by ``torchrun --nproc-per-node N -m vision_demo``; without it there is one. Every process holds
all images and draws the same order, takes its share of each batch, and gradients are summed, so that the losses are
those of one process with the same batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vision_demo.problems import Problem


@dataclass(frozen=True)
class Workers:
    """The processes that train together, seen from one of them."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """The part of ``batch`` (images, ...) of this process; empty if there are fewer images than processes."""
        return batch.tensor_split(self.count)[self.rank]

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose gradients are means over the processes; the model itself if there is one process."""
        return model if self.count == 1 else DistributedDataParallel(model)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """A problem of any process inside this block becomes the problem of all, so that none waits for it for ever.

        Nothing inside may wait for other processes.
        """
        if self.count == 1:
            yield
            return
        problem = None
        try:
            yield
        except (Problem, OSError) as seen:
            problem = seen if isinstance(seen, Problem) else Problem(seen)
        told: list[tuple[str, int] | None] = [None] * self.count
        dist.all_gather_object(told, None if problem is None else (str(problem), problem.status))
        for text in told:
            if text is not None:
                leave()
                raise Problem(text[0], status=text[1])


ALONE = Workers()


def start(device: torch.device) -> tuple[Workers, torch.device]:
    """Join the other processes that torchrun started, if any; -> (workers, the device of this process)."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return ALONE, device
    rank, local, beside = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if device.type == "mps" or (device.type == "cuda" and device.index is not None):
        raise Problem(f"{count} processes cannot share --device {device}; say cuda or cpu", status=2)
    if device.type == "cuda":
        if beside > torch.cuda.device_count():
            raise Problem(
                f"{beside} processes, but {torch.cuda.device_count()} GPU(s); start fewer or say --device cpu"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        raise Problem(f"the {count} processes did not find each other: {first_line(error)}") from error
    return Workers(rank, count), device


def leave() -> None:
    """Leave the other processes, now that all is done or all have the same problem."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def first_line(error: BaseException) -> str:
    """The first line of an error whose text goes on for pages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def compiler_problem(error: BaseException) -> Problem | None:
    """An error of torch.compile in one line with its cure; None for any other."""
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return Problem(f"--compile: {first_line(error)}; leave --compile out")
    return None


def precision(device: torch.device) -> torch.autocast:
    """bfloat16 for what bears it on a GPU; float32 elsewhere, where bfloat16 is mostly slower."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def fetch(values: Tensor, indices: Tensor, device: torch.device) -> Tensor:
    """``values[indices]`` on ``device``; from CPU to GPU through pinned memory, while the GPU works on."""
    chosen = values[indices.to(values.device)]
    if device.type == "cuda" and chosen.device.type == "cpu":
        chosen = chosen.pin_memory()
    return chosen.to(device, non_blocking=True)
