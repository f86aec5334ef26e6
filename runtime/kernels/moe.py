"""Grouped products with the experts split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.kernels.base import KernelInfo, kernel


@kernel("grouped_experts")
def grouped_experts(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """``grouped_mm(input [T, K], weight [E local, K, N], offs [E])``: rows of the local experts, zero elsewhere. A pending sum.

    Rows before the first local expert are given to it and then dropped, so that shapes do not depend on the data; rows after the last
    one belong to no group.
    """
    given = dict(zip(("input", "weight", "offs"), args)) | kwargs
    rows, weight, offs = given["input"], given["weight"], given["offs"]
    start, count = info.start("e"), weight.shape[0]
    ends = offs[start : start + count]
    begin = offs[start - 1] if start else torch.zeros_like(offs[0])
    place = torch.arange(rows.shape[0], device=rows.device)
    mine = ((place >= begin) & (place < ends[-1]))[:, None]
    out = op(rows.masked_fill(~mine, 0), weight, ends)
    return out.masked_fill(~mine, 0)
