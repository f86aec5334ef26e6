"""Grouped products with the experts split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.base import KernelInfo, kernel

ALIGNMENT_BYTES = 16
"""Rows of the operands of ``aten._grouped_mm`` start at multiples of this."""


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
        rows, weight = _padded(rows, (1,)), _padded(weight, (1, 2))
    if weight.shape[0] == info.sizes["e"]:
        return op(rows, weight, offs, **rest)[:, :width]
    start, count = info.start("e"), weight.shape[0]
    ends = offs[start : start + count]
    begin = offs[start - 1] if start else torch.zeros_like(offs[0])
    place = torch.arange(rows.shape[0], device=rows.device)
    others = ((place < begin) | (place >= ends[-1]))[:, None]
    return op(rows.masked_fill(others, 0), weight, ends, **rest).masked_fill(others, 0)[:, :width]


def _padded(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Zeros behind ``dims``, up to the alignment."""
    unit = ALIGNMENT_BYTES // x.element_size()
    missing = [-x.shape[d] % unit if d in dims else 0 for d in reversed(range(x.dim()))]
    return F.pad(x, [n for amount in missing for n in (0, amount)]) if any(missing) else x
