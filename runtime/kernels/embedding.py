"""Looking up rows of a table that is split by rows: what a rank has, zero for the rest. A pending sum, nothing is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from runtime.kernels.base import KernelInfo, kernel


def own(index: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """(local index, 0 where another rank has it; where that is). ``start``, ``size``: the part of the indexed dim that this rank has."""
    local = index - start
    missing = (local < 0) | (local >= size)
    return local.masked_fill(missing, 0), missing


@kernel("vocab_embedding")
def vocab_embedding(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """``embedding(weight, indices, padding_idx, ...)`` with rows split: the padding row gets no gradient on the rank that has it."""
    weight, indices = args[0], args[1]
    rest = dict(zip(("padding_idx", "scale_grad_by_freq", "sparse"), args[2:])) | kwargs
    start, size = info.start("v"), weight.shape[0]
    local, missing = own(indices, start, size)
    padding = int(rest.get("padding_idx", -1)) - start
    padding = padding if 0 <= padding < size and int(rest.get("padding_idx", -1)) >= 0 else -1
    rows = op(weight, local, padding, False, bool(rest.get("sparse", False)))
    return rows.masked_fill(missing.unsqueeze(-1), 0)


@kernel("vocab_gather")
def vocab_gather(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """``gather(self, dim, index)`` with the indexed dim split."""
    x, dim, index = args[0], int(args[1]), args[2]
    local, missing = own(index, info.start("v"), x.shape[dim])
    return op(x, dim, local).masked_fill(missing, 0)


@kernel("vocab_index_select")
def vocab_index_select(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """``index_select(self, dim, index)`` with the indexed dim split."""
    x, dim, index = args[0], int(args[1]) % args[0].dim(), args[2]
    local, missing = own(index, info.start("v"), x.shape[dim])
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    return op(x, dim, local).masked_fill(missing.view(shape), 0)
