"""What kernels share: plain all-reduces over the axes that split the op, outside autograd, and the dtypes of statistics and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.collectives import Group, group_of
from runtime.kernels.base import KernelInfo


def groups_of(info: KernelInfo) -> tuple[Group, ...]:
    """The groups of the axes whose strategy names the kernel."""
    return tuple(group_of(axis) for axis, _ in info.axes)


def total(x: Tensor, groups: Sequence[Group]) -> Tensor:
    """Sum over the groups, one after another."""
    for group in groups:
        x = group.all_reduce(x.contiguous())
    return x


def largest(x: Tensor, groups: Sequence[Group]) -> Tensor:
    for group in groups:
        x = group.all_reduce(x.contiguous(), "max")
    return x


def wide(x: Tensor) -> Tensor:
    """Statistics of half precision are summed in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def as_op_would(op: Callable[..., Any], x: Tensor, *rest: Any) -> Tensor:
    """``x`` in the dtype that the op's result has: its own, unless autocast is on, which the op is asked about on a single element.

    ``rest``: the op's arguments after a tensor of one element with as many dims as ``x``.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return x
    with torch.no_grad():
        return x.to(op(x.new_zeros((1,) * x.dim()), *rest).dtype)
