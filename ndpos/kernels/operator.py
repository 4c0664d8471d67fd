"""The rotation as one registered operator, ``ndpos::turn``, for graphs in which a backend is named."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndpos.kernels.pairing import Turning
from ndpos.kernels.turning import exact_tables, table_gradients, turn_now

__all__: list[str] = []

NAME = "ndpos::turn"
LIBRARY = torch.library.Library("ndpos", "DEF")  # type: ignore[no-untyped-call]  # as torch has it
LIBRARY.define(  # type: ignore[no-untyped-call]
    "turn(Tensor x, Tensor cos, Tensor sin, str pairing, int[]? blocks, int token_dim, int num_prefix, int num_suffix, "
    "bool inverse, str? backend) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _how(settings: tuple[Any, ...]) -> Turning:
    pairing, blocks, *rest = settings
    return Turning(pairing, None if blocks is None else tuple(blocks), *rest)


@torch.library.impl(LIBRARY, "turn", "CompositeExplicitAutograd")
def _turn(x: Tensor, cos: Tensor, sin: Tensor, *settings: Any) -> Tensor:
    return turn_now((x,), *exact_tables(x, cos, sin), _how(settings[:-1]), settings[-1])[0]


@torch.library.register_fake(NAME, lib=LIBRARY)  # type: ignore[untyped-decorator]
def _shape(x: Tensor, cos: Tensor, sin: Tensor, *settings: Any) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, *ctx.settings = inputs
    ctx.save_for_backward(cos, sin, *((x,) if cos.requires_grad or sin.requires_grad else ()))


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    cos, sin, *x = ctx.saved_tensors
    *settings, inverse, backend = ctx.settings
    of_x = torch.ops.ndpos.turn(grad, cos, sin, *settings, not inverse, backend) if ctx.needs_input_grad[0] else None
    of_tables: tuple[Tensor | None, Tensor | None] = (None, None)
    if x:
        of_cos, of_sin = table_gradients(x[0], grad, cos, _how((*settings, inverse)))
        of_tables = (of_cos.to(cos.dtype), of_sin.to(sin.dtype))
    return (of_x, *of_tables, *(None,) * len(ctx.settings))


def _vmapped(info: Any, in_dims: tuple[Any, ...], x: Tensor, cos: Tensor, sin: Tensor, *settings: Any) -> Any:
    """The mapped dimension becomes one more batch dimension in front."""
    x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    tables = []
    for table, dim in zip((cos, sin), in_dims[1:3], strict=True):
        if dim is not None:
            table = table.movedim(dim, 0)
            table = table.reshape(info.batch_size, *(1,) * (x.ndim - table.ndim), *table.shape[1:])
        tables.append(table)
    return torch.ops.ndpos.turn(x, *tables, *settings), 0


torch.library.register_autograd(NAME, _backward, setup_context=_keep, lib=LIBRARY)
torch.library.register_vmap(NAME, _vmapped, lib=LIBRARY)
