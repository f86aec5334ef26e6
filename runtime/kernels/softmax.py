"""Softmax over a dim that is split: the maxima and the sums are those of all ranks. Gradients: y = softmax(x), s = sum(g) over the dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.collectives import Group
from runtime.kernels.base import KernelInfo, kernel
from runtime.kernels.exchange import as_op_would, groups_of, largest, total, wide


def _log_sum(x: Tensor, dim: int, groups: Sequence[Group]) -> Tensor:
    """log(sum(exp(x))) over a dim and all ranks; the dim stays with size 1."""
    top = largest(x.amax(dim, keepdim=True), groups)
    top = top.masked_fill(top.isinf(), 0)  # a row of -inf, or with inf
    return total((x - top).exp().sum(dim, keepdim=True), groups).log() + top


class SplitSoftmax(torch.autograd.Function):
    """``y = exp(x - log_sum)``, dx = y (g - sum(g y)); logarithmic: ``y = x - log_sum``, dx = g - exp(y) sum(g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype, groups: Sequence[Group], log: bool) -> Tensor:
        ctx.dim, ctx.groups, ctx.log, ctx.dtype = dim, groups, log, x.dtype
        x = wide(x.to(dtype))
        shifted = x - _log_sum(x, dim, groups)
        y = (shifted if log else shifted.exp()).to(dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        y, g = wide(y), wide(grad)
        if ctx.log:
            dx = g - y.exp() * total(g.sum(ctx.dim, keepdim=True), ctx.groups)
        else:
            dx = y * (g - total((g * y).sum(ctx.dim, keepdim=True), ctx.groups))
        return dx.to(ctx.dtype), None, None, None, None


@kernel("softmax")
def softmax(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    x, dim = args[0], int(args[1])
    last = args[2] if len(args) > 2 else kwargs.get("dtype")
    if info.op in ("aten._softmax.default", "aten._log_softmax.default"):
        last = torch.float32 if last else None
    x = as_op_would(op, x, *args[1:])
    return SplitSoftmax.apply(x, dim, last or x.dtype, groups_of(info), "log_softmax" in info.op)
