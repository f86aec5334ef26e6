"""Kernels of reductions and views that need no communication, only the global sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from runtime.kernels.base import KernelInfo, kernel


@kernel("scaled_sum")
def scaled_sum(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> torch.Tensor:
    """A part's share of a mean, ``sum(part) / global count``: the shares of all ranks add up to the mean.

    ``aten.mean.default(x)`` and ``aten.mean.dim(x, dim, keepdim)``. The reduced factors are called ``r<dim>``.
    """
    count = math.prod(size for factor, size in info.sizes.items() if factor.startswith("r"))
    x, dim, keepdim = [*args, None, False][:3] if len(args) < 2 else [*args, False][:3]
    dim = kwargs.get("dim", dim)
    if not dim and dim != 0:
        dim = tuple(range(x.dim()))
    return torch.sum(x, dim, kwargs.get("keepdim", keepdim), dtype=kwargs.get("dtype")) / count


@kernel("squeeze")
def squeeze(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> torch.Tensor:
    """Removes the dims that have no factor ``d<dim>``: those of global size 1, whatever the local sizes are."""
    x = args[0]
    return torch.squeeze(x, tuple(i for i in range(x.dim()) if f"d{i}" not in info.sizes))
