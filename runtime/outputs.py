"""Outputs of a forward: micro-batches joined, shared with every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from planner.assignment import assign
from planner.graph import Value
from planner.mesh import DATA, PIPE
from planner.outputs import output_values
from planner.sharding import R, Type, chunk_sizes
from planner.torch_ops import dtype_of
from runtime.collectives import own_part, swap
from runtime.setup import Prepared


def join(results: Sequence[tuple[Tensor, ...]], prepared: Prepared, outputs: str) -> dict[Value, Tensor]:
    """``results``: per micro-batch the last stage's results (nothing on other stages). Whole tensors, or with ``outputs`` "local" this
    rank's part along the batch. Collective over the stages."""
    graph, ranks, mesh = prepared.captured.graph, prepared.ranks, prepared.ranks.mesh
    values = list(dict.fromkeys(output_values(graph.outputs)))
    types = output_types(values, prepared)
    last = ranks.coordinates[PIPE] == mesh.pipe - 1
    found = {}
    for i, value in enumerate(values):
        micro, data = types[value]
        spec = graph.spec(value)
        if last:
            parts = [result[i].to(dtype_of(spec.dtype)) for result in results]
        else:
            lengths = chunk_sizes(spec.shape[micro.dim], mesh.microbatches) if micro.is_split else ()
            shapes = [(*spec.shape[: micro.dim], n, *spec.shape[micro.dim + 1 :]) for n in lengths] or [spec.shape]
            parts = [torch.empty(shape, dtype=dtype_of(spec.dtype), device="meta") for shape in shapes]
        if outputs == "local" and data.is_split:
            parts = [own_part(part, data, mesh.data, ranks.coordinates[DATA]) for part in parts]
        tensor = _along_micro(parts, micro)
        if mesh.pipe > 1:
            tensor = tensor.contiguous() if last else torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.device)
            _broadcast(tensor, ranks.groups[PIPE], mesh.pipe - 1)
        found[value] = tensor
    return found


def output_types(values: Sequence[Value], prepared: Prepared) -> Mapping[Value, tuple[Type, Type]]:
    """Value -> (type on micro, type on data) that the plan produces it with."""
    graph, mesh = prepared.captured.graph, prepared.ranks.mesh
    plan = assign(prepared.plan, graph)

    def on(value: Value, axis: str) -> Type:
        index = mesh.index(axis)
        return R if index is None else plan.produced(graph, value.node, value.index)[index]

    return {value: (on(value, "micro"), on(value, DATA)) for value in values}


def _along_micro(parts: Sequence[Tensor], type_: Type) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if type_.is_split:
        return swap(torch.cat(list(parts), type_.dim), type_.dim, len(parts), type_.groups)
    return torch.stack(list(parts)).sum(0) if type_.kind == "P" else parts[-1]


def _broadcast(tensor: Tensor, group: dist.ProcessGroup, source: int) -> None:
    """Booleans as bytes, complex numbers as pairs: what every transport carries."""
    carried = tensor.view(torch.uint8) if tensor.dtype == torch.bool else torch.view_as_real(tensor) if tensor.is_complex() else tensor
    dist.broadcast(carried, group=group, group_src=source)
