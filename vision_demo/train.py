"""The recipe, the training loop and the measurement; the same for every model.

AdamW, linear warm-up and cosine decay. No augmentation: random crops were tried and gave nothing dependable at 48
pixels for twice the epochs. The recipe was chosen on a fold of the training images, never on the held-out ones.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from vision_demo.devices import ALONE, Workers, fetch, precision

Record = dict[str, float]  # of one epoch: epoch, loss, train_accuracy, perhaps held_out_accuracy, seconds
State = dict[str, Any]  # everything that decides how training goes on


@dataclass(frozen=True)
class Recipe:
    """How every model is trained; ``seed`` is that of the order of the images."""

    epochs: int = 12
    batch_size: int = 32  # of all processes together
    seed: int = 0
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup: float = 0.1  # share of all steps
    gradient_norm: float = 1.0  # gradients are scaled down to this norm


def learning_rate_factor(step: int, steps: int, warmup: float) -> float:
    """What the learning rate is multiplied by at ``step`` of ``steps``: up in a line, then down along a half cosine."""
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


class Trainer:
    """What changes from step to step, and can be kept and taken up again: :meth:`state`, :meth:`restore`."""

    def __init__(self, model: nn.Module, recipe: Recipe, steps: int) -> None:
        self.model, self.recipe = model, recipe
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, steps, recipe.warmup)
        )
        self.shuffle = torch.Generator().manual_seed(recipe.seed)  # on the CPU: the same order on every device
        self.records: list[Record] = []

    def state(self) -> State:
        """A picture of this moment, between two epochs. Copied: the tensors of the optimizer change in place."""
        on_gpu = self.device.type == "cuda"
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "shuffle": self.shuffle.get_state(),
                "random": torch.get_rng_state(),  # nothing here draws from it yet; dropout would
                "random_gpu": torch.cuda.get_rng_state(self.device) if on_gpu else None,
                "records": self.records,
            }
        )

    def restore(self, state: State) -> None:
        """Go back to the moment of ``state``."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.shuffle.set_state(state["shuffle"])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and state["random_gpu"] is not None:
            torch.cuda.set_rng_state(state["random_gpu"], self.device)
        self.records = list(state["records"])

    def epoch(self, net: nn.Module, images: Tensor, labels: Tensor, workers: Workers, bar: tqdm) -> Tensor:
        """Every image once, in a new order; -> (2,), this process's sum of losses and how many were right."""
        self.model.train()
        sums = torch.zeros(2, device=self.device)  # read once an epoch: reading it at every step would wait for the GPU
        for batch in torch.randperm(len(images), generator=self.shuffle).split(self.recipe.batch_size):
            share = workers.share(batch)
            # A process without an image takes part with one that counts nothing: the others wait for its gradients.
            counts = float(len(share) > 0)
            share = share if len(share) else batch[:1]
            there = fetch(labels, share, self.device)
            with precision(self.device):
                logits = net(fetch(images, share, self.device))
            loss = counts * F.cross_entropy(logits.float(), there, reduction="sum")
            self.optimizer.zero_grad()
            # The wrapped model takes the mean over processes, and shares may be unequal: this is the mean over images.
            (loss * workers.count / len(batch)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.gradient_norm)
            self.optimizer.step()
            self.schedule.step()
            sums += torch.stack((loss.detach(), counts * (logits.argmax(dim=-1) == there).sum()))
            bar.update()
        return sums


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    recipe: Recipe,
    *,
    title: str | None,
    held_out: tuple[Tensor, Tensor] | None = None,
    workers: Workers = ALONE,
    state: State | None = None,
    after_epoch: Callable[[State], None] | None = None,
) -> list[Record]:
    """Train in place, on the device of the model, behind a progress bar called ``title``.

    Args:
        model: From images to logits (batch, classes).
        images: (images, channels, height, width), on the model's device or on the CPU.
        labels: (images,) int64.
        recipe: Epochs, batch size and the rest.
        title: Written before the bar; None for no bar.
        held_out: Images and labels to measure after every epoch.
        workers: The processes that train together.
        state: Of an earlier call, from ``after_epoch``: training goes on there, to the very same weights.
        after_epoch: Given the state after every epoch, in every process.

    Returns:
        One record an epoch: ``epoch`` from 1, ``loss`` and ``train_accuracy`` (means over the epoch, each image
        measured at its own step), ``held_out_accuracy`` if asked for, ``seconds``.
    """
    steps = math.ceil(len(images) / recipe.batch_size)  # an epoch
    trainer = Trainer(model, recipe, recipe.epochs * steps)
    if state is not None:
        trainer.restore(state)
    done = len(trainer.records)
    net = workers.wrap(model)
    with tqdm(
        total=recipe.epochs * steps,
        initial=done * steps,
        desc=title,
        unit="step",
        disable=title is None or not workers.first,
    ) as bar:
        for epoch in range(done, recipe.epochs):
            started = time.perf_counter()
            sums = workers.sum(trainer.epoch(net, images, labels, workers, bar)).tolist()
            loss, right = (total / len(images) for total in sums)
            record = {"epoch": epoch + 1, "loss": loss, "train_accuracy": right}
            if held_out is not None:
                record["held_out_accuracy"] = accuracy(model, *held_out, workers=workers)
            record["seconds"] = round(time.perf_counter() - started, 3)
            trainer.records.append(record)
            bar.set_postfix(epoch=epoch + 1, loss=f"{loss:.3f}")
            if after_epoch is not None:
                after_epoch(trainer.state())
    return trainer.records


@torch.no_grad()
def accuracy(
    model: nn.Module, images: Tensor, labels: Tensor, *, batch_size: int = 64, workers: Workers = ALONE
) -> float:
    """Share of images (images, channels, height, width) whose largest logit is at their label (images,)."""
    model.eval()
    device = next(model.parameters()).device
    right = torch.zeros((), dtype=torch.int64, device=device)
    for batch in workers.share(torch.arange(len(images))).split(batch_size):
        if len(batch):
            with precision(device):
                found = model(fetch(images, batch, device)).argmax(dim=-1)
            right += (found == fetch(labels, batch, device)).sum()
    return int(workers.sum(right)) / len(images)
