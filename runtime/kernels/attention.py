"""Attention of a part of the queries: the part's place decides which keys or which heads it sees. Nothing is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.kernels.base import KernelInfo, kernel

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@kernel("causal_attention")
def causal_attention(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """Causal attention of the queries from ``start`` on: query i of the part sees keys 0 .. start + i; later keys are not touched."""
    given = dict(zip(_NAMES, args)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    start, length = info.start("l"), query.shape[-2]
    keys = min(key.shape[-2], start + length)
    at_query = torch.arange(start, start + length, device=query.device)
    seen = torch.arange(keys, device=query.device) <= at_query[:, None]
    rest = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
    return op(query, key[..., :keys, :], value[..., :keys, :], seen, 0.0, False, **rest)


@kernel("grouped_heads")
def grouped_heads(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """A part of the query heads with all key/value heads: query head i uses key/value head i // g."""
    given = dict(zip(_NAMES, args)) | kwargs
    query, key, value = given.pop("query"), given.pop("key"), given.pop("value")
    first, count, per_head = info.start("q"), query.shape[-3], info.sizes["g"]
    used = [(first + i) // per_head for i in range(count)]
    if used[0] == used[-1]:
        key, value = (x.narrow(-3, used[0], 1) for x in (key, value))
    else:
        index = torch.tensor(used, device=key.device)
        key, value = key.index_select(-3, index), value.index_select(-3, index)
        given.pop("enable_gqa")
    return op(query, key, value, **given)
