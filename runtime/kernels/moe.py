"""Grouped products with the experts split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.kernels.base import KernelInfo, kernel
from runtime.ops import aligned


@kernel("grouped_mm")
def grouped_mm(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """``grouped_mm(input [T, K], weight [E local, K, N], offs [E])``: rows of the local experts, zero elsewhere. A pending sum.

    Rows before the first local expert are given to it as zeros, so that shapes do not depend on the data; rows after the last one belong
    to no group.
    """
    given = dict(zip(("input", "weight", "offs", "bias", "out_dtype"), args)) | kwargs
    rows, weight, offs = given["input"], given["weight"], given["offs"]
    rest = {"out_dtype": given["out_dtype"]} if given.get("out_dtype") is not None else {}
    width = weight.shape[2]
    if info.op == "aten._grouped_mm.default":
        rows, weight = aligned(rows, (1,)), aligned(weight, (1, 2))
    if weight.shape[0] == info.sizes["e"]:
        return op(rows, weight, offs, **rest)[:, :width]
    start, count = info.start("e"), weight.shape[0]
    ends = offs[start : start + count]
    begin = offs[start - 1] if start else torch.zeros_like(offs[0])
    place = torch.arange(rows.shape[0], device=rows.device)
    others = ((place < begin) | (place >= ends[-1]))[:, None]
    return op(rows.masked_fill(others, 0), weight, ends, **rest).masked_fill(others, 0)[:, :width]


@kernel("expert_mm")
def expert_mm(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """``shard.expert_mm(rows [R, K], weight [E local, K, N], expert [R])``: rows of the local experts, zero elsewhere. A pending sum."""
    rows, weight, expert = args
    return op(rows, weight, expert - info.start("e"))
