"""The project's own ops, plain functions on tensors: what the captured graph needs and aten has not. ``OPS`` finds them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OPS: dict[str, Callable[..., Any]] = {}


def op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an op under the name that graph nodes carry, ``shard.<name>``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPS[name] = function
        return function

    return register


@op("shard.valid_count")
def valid_count(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """How many targets [N, *] count in a mean: those other than ``ignore_index``, or the sum of their class weights [C]. A scalar."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(dtype)
    return torch.where(valid, weight.detach()[target.masked_fill(~valid, 0)], 0).sum().to(dtype)


@op("shard.batch_norm")
def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Batch norm of x [N, C, *] without side effects: (output, new running mean, new running variance).

    Without running statistics the last two are those of the batch. Running variances are unbiased, as in ``torch.nn.BatchNorm2d``.
    """
    if not training and running_mean is not None and running_var is not None:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps), running_mean.clone(), running_var.clone()
    with torch.no_grad():
        over = [d for d in range(x.dim()) if d != 1]
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        mean, var = wide.mean(over), wide.var(over, unbiased=x.numel() > x.shape[1])
        new_mean = mean if running_mean is None else torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
        new_var = var if running_var is None else torch.lerp(running_var, var.to(running_var.dtype), momentum)
    return F.batch_norm(x, None, None, weight, bias, True, momentum, eps), new_mean, new_var


@op("shard.index")
def index(x: Tensor, indices: Sequence[Tensor | None], aligned: Sequence[tuple[int, int]]) -> Tensor:
    """``x[indices]`` where, besides the dims that tensors index, each dim ``d`` of ``aligned = ((d, position), ...)`` runs along dim
    ``position`` of the index space: ``x[arange(len(x)), ids]`` is ``index(x, (None, ids), ((0, 0),))``.
    """
    full: list[Tensor | None] = [*indices, *[None] * (x.dim() - len(indices))]
    used = [one for one in full if one is not None]
    rank = max([one.dim() for one in used] + [int(position) + 1 for _, position in aligned])
    for dim, position in aligned:
        shape = [1] * rank
        shape[int(position)] = x.shape[int(dim)]
        full[int(dim)] = torch.arange(x.shape[int(dim)], device=x.device).view(shape)
    return torch.ops.aten.index.Tensor(x, full)


@op("shard.expert_mm")
def expert_mm(rows: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """``rows [R, K]`` times the weight of each row's expert: ``weight [E, K, N]``, ``expert int[R]`` -> ``[R, N]``; zero for rows of
    experts outside 0 ... E - 1."""
    experts = weight.shape[0]
    foreign = (expert < 0) | (expert >= experts)
    key = expert.masked_fill(foreign, experts)
    order = key.argsort(stable=True)
    place, others = order.argsort(), foreign[order][:, None]
    ends = torch.searchsorted(key[order], torch.arange(experts, device=key.device, dtype=key.dtype), right=True).to(torch.int32)
    product = _grouped_product(rows[order].masked_fill(others, 0), weight, ends)
    return product.masked_fill(others, 0)[place]


GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT_BYTES = 16
"""Rows of the operands of ``grouped_mm`` start at multiples of this."""


def _grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows ``ends[e - 1] : ends[e]`` times the weight of expert e; what rows behind the last one give is not defined."""
    if rows.dtype not in GROUPED_DTYPES:
        starts = [0, *ends.tolist()]
        parts = [rows[a:b] @ w for a, b, w in zip(starts, starts[1:], weight)]
        return torch.cat([*parts, rows.new_zeros(rows.shape[0] - starts[-1], weight.shape[2])])
    width = weight.shape[2]
    return F.grouped_mm(aligned(rows, (1,)), aligned(weight, (1, 2)), offs=ends)[:, :width]


def aligned(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Zeros behind ``dims``, up to the alignment."""
    unit = ALIGNMENT_BYTES // x.element_size()
    missing = [-x.shape[d] % unit if d in dims else 0 for d in reversed(range(x.dim()))]
    return F.pad(x, [n for amount in missing for n in (0, amount)]) if any(missing) else x
