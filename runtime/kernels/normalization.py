"""Norms over dims that are split: sums over the axis give the statistics of the whole.

With N elements per statistic over all ranks, z = (x - mean) rstd and g the gradient of z:

    layer norm, batch norm    dx = rstd (g - sum(g) / N - z sum(g z) / N)
    RMS norm (mean = 0)       dx = rstd (g - z sum(g z) / N)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.collectives import Group
from runtime.kernels.base import KernelInfo, kernel
from runtime.kernels.exchange import as_op_would, groups_of, total, wide


class SplitNormalize(torch.autograd.Function):
    """z and the statistics (mean, biased variance) of ``x`` over ``dims`` of all ranks; ``count`` elements in each statistic."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: list[int], count: int, eps: float, centred: bool, groups: Sequence[Group]
    ) -> tuple[Tensor, Tensor, Tensor]:
        w = wide(x)
        shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
        mean = total(w.sum(dims, keepdim=True), groups) / count if centred else w.new_zeros(shape)
        var = total((w - mean).square().sum(dims, keepdim=True), groups) / count
        rstd = (var + eps).rsqrt()
        ctx.dims, ctx.count, ctx.groups, ctx.centred = dims, count, groups, centred
        ctx.save_for_backward(x, mean, rstd)
        ctx.mark_non_differentiable(mean, var)
        return ((w - mean) * rstd).to(x.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, mean, rstd = ctx.saved_tensors
        g, z = wide(grad), (wide(x) - mean) * rstd
        sums = [(g * z).sum(ctx.dims, keepdim=True)] + ([g.sum(ctx.dims, keepdim=True)] if ctx.centred else [])
        means = total(torch.stack(sums), ctx.groups) / ctx.count
        dx = rstd * (g - z * means[0] - (means[1] if ctx.centred else 0))
        return dx.to(x.dtype), None, None, None, None, None


@kernel("norm")
def norm(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """layer_norm and rms_norm, the normalised dims split; weight and bias are split along."""
    x = as_op_would(op, args[0], [1] * len(args[1]))
    normalized = list(range(x.dim() - len(args[1]), x.dim()))
    rest = dict(zip(("weight", "bias", "eps") if info.op == "aten.layer_norm.default" else ("weight", "eps"), args[2:])) | kwargs
    centred = info.op == "aten.layer_norm.default"
    eps = rest.get("eps")
    if eps is None:
        eps = 1e-5 if centred else torch.finfo(x.dtype).eps
    count = math.prod(size for factor, size in info.sizes.items() if factor.startswith("n"))
    z = SplitNormalize.apply(x, normalized, count, eps, centred, groups_of(info))[0]
    if rest.get("weight") is not None:
        z = z * rest["weight"]
    return (z + rest["bias"] if rest.get("bias") is not None else z).to(x.dtype)


@kernel("batch_norm")
def batch_norm(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Any:
    """Batch norm in training with the batch or the space split: statistics of the whole batch, exact for uneven parts."""
    names = ("x", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    given = dict(zip(names, args)) | kwargs
    if not given["training"]:
        return op(*args, **kwargs)
    x = given["x"]
    over = [d for d in range(x.dim()) if d != 1]
    count = math.prod(size for factor, size in info.sizes.items() if factor != "c")
    z, mean, var = SplitNormalize.apply(x, over, count, given["eps"], True, groups_of(info))
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    y = z if given["weight"] is None else z * given["weight"].view(shape)
    y = (y if given["bias"] is None else y + given["bias"].view(shape)).to(x.dtype)
    if info.op != "shard.batch_norm":
        return y
    mean, unbiased = mean.flatten(), var.flatten() * (count / max(1, count - 1))
    return y, _moved(given["running_mean"], mean, given["momentum"]), _moved(given["running_var"], unbiased, given["momentum"])


def _moved(running: Tensor | None, batch: Tensor, momentum: float) -> Tensor:
    return batch if running is None else torch.lerp(running, batch.to(running.dtype), momentum)
