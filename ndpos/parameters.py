"""A parameter moved to another shape where it stands, with what an optimiser keeps about it.

The Parameter stays the same object: an optimiser, hooks and averages that hold it go on with the moved one. A new
Parameter in its place would be one that nobody trains, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ndpos.resample import Changes

__all__: list[str] = []

# What optimisers keep in the parameter's shape. All else may be an average of squares, or part of one, as RMSprop's
# grad_avg, whose square is taken from square_avg.
COPIES = ("ax", "z")  # of the parameter itself: ASGD, schedule-free
AVERAGES = ("exp_avg", "momentum_buffer")  # of gradients


def check_movable(caller: str, parameters: Iterable[nn.Parameter], optimizer: Any) -> None:
    """Raise unless parameters are whole tensors and the optimiser keeps nothing about them that cannot be moved."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{caller}: optimizer is a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "_base_optimizer"):
        raise ValueError(
            f"{caller}: {type(optimizer).__name__} keeps what it knows in another place than by parameter, where it "
            f"cannot be moved. Make a new one after resizing."
        )
    for parameter in parameters:
        if type(parameter.data) is not Tensor:
            raise ValueError(
                f"{caller}: the table is a {type(parameter.data).__name__}; a sharded table cannot be moved. Resize "
                f"the model first, shard it afterwards."
            )
        for name, value in _state(optimizer, parameter).items():
            if isinstance(value, (list, tuple, dict)):
                raise ValueError(
                    f"{caller}: the optimiser keeps {name!r} as a {type(value).__name__}, which cannot be moved with "
                    f"the table. Drop it first: optimizer.state.pop(parameter)."
                )
            if isinstance(value, Tensor) and value.shape != parameter.shape and value.numel() != 1:
                raise ValueError(
                    f"{caller}: the optimiser keeps {name!r} {tuple(value.shape)} for a table "
                    f"{tuple(parameter.shape)}, which cannot be moved with it. Drop it first: "
                    f"optimizer.state.pop(parameter)."
                )


def move(
    parameter: nn.Parameter,
    changes: Changes,
    optimizer: torch.optim.Optimizer | None,
) -> Callable[[], None]:
    """Everything computed that makes ``parameter`` hold its changed table; the call that is returned puts it in place.

    What the optimiser keeps in the parameter's shape moves along. The gradient, of the old shape, is dropped.
    """
    kept = _state(optimizer, parameter)
    with torch.no_grad(), torch.inference_mode(False):  # what is born in inference mode could not be trained
        table = changes.table(parameter.detach())
        moved = {
            name: _change(changes, name)(value).clone(memory_format=torch.contiguous_format)
            for name, value in kept.items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }

    def put() -> None:
        # While an old output is alive, autograd keeps the shape of its gradient for this parameter. Another dtype in
        # between makes it forget: without, the next backward fails, or sums the gradient where shapes broadcast.
        other = torch.float16 if parameter.dtype != torch.float16 else torch.float32
        parameter.data = table.new_empty(0, dtype=other)
        parameter.data = table
        parameter.grad = None
        kept.update(moved)

    return put


def _change(changes: Changes, name: str) -> Callable[[Tensor], Tensor]:
    if name in COPIES:
        return changes.table
    return changes.averages if name in AVERAGES else changes.squares


def _state(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> dict[str, Any]:
    found: dict[str, Any] = {} if optimizer is None or parameter not in optimizer.state else optimizer.state[parameter]
    return found
