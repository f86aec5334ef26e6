"""Outputs of a forward: micro-batches joined, shared with every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from planner.assignment import assign
from planner.graph import Node, Value
from planner.mesh import DATA, MICRO, PIPE
from planner.micro import propagate
from planner.outputs import output_values
from planner.sharding import R, Type, chunk_sizes
from planner.torch_ops import dtype_of
from runtime.collectives import own_part, swap
from runtime.epilogue import compute, delivered, late_nodes
from runtime.setup import Prepared


@dataclass(frozen=True)
class OutputLayout:
    """What a forward delivers, what is made of it after the last micro-batch, and how each value lies."""

    values: tuple[Value, ...]
    late: tuple[Node, ...]
    wanted: frozenset[Value]
    types: Mapping[Value, tuple[Type, Type]]
    """Value -> its type on micro, as the plan produces it, and on data, where the batch runs through it whatever the plan chose."""

    @staticmethod
    def of(prepared: Prepared) -> OutputLayout:
        graph, plan = prepared.captured.graph, assign(prepared.plan, prepared.captured.graph)
        values, wanted = delivered(graph, plan), frozenset(output_values(graph.outputs))
        micro, ranks = plan.mesh.index(MICRO), plan.mesh.data
        natural = propagate(graph, ranks) if ranks > 1 else None

        def types(value: Value) -> tuple[Type, Type]:
            in_time = R if micro is None else plan.produced(graph, value.node, value.index)[micro]
            return in_time, R if natural is None else natural.produced(value)

        return OutputLayout(values, late_nodes(graph, plan), wanted, {value: types(value) for value in {*values, *wanted}})


def join(
    results: Sequence[tuple[Tensor, ...]], prepared: Prepared, layout: OutputLayout, outputs: str, training: bool
) -> dict[Value, Tensor]:
    """``results``: per micro-batch the last stage's results (nothing on other stages). Whole tensors, or with ``outputs`` "local" this
    rank's part along the batch. Collective over the stages."""
    values, late, wanted, types = layout.values, layout.late, layout.wanted, layout.types
    made_of = {value for node in late for value in node.inputs}
    found, whole = {}, {}
    for i, value in enumerate(values):
        parts = _parts(i, value, types[value][0], results, prepared)
        if value in made_of:
            whole[value] = _shared(_along_micro(parts, types[value][0]), prepared)
        if value in wanted:
            if outputs == "local":
                parts = [_own(part, types[value][1], prepared) for part in parts]
            found[value] = _shared(_along_micro(parts, types[value][0]), prepared)
    compute(late, whole, training)
    for value in wanted - found.keys():
        found[value] = whole[value]
        if outputs == "local" and types[value][1].is_split:
            # the rows of this rank, micro-batch after micro-batch, as in the outputs that need no other rows
            data, count = types[value][1], prepared.ranks.mesh.microbatches
            cut = [own_part(whole[value], data, count, m) for m in range(count)]
            found[value] = _along_micro([_own(part, data, prepared) for part in cut], data)
    return found


def _parts(i: int, value: Value, micro: Type, results: Sequence[tuple[Tensor, ...]], prepared: Prepared) -> list[Tensor]:
    """A delivered value by micro-batch; on stages before the last only its shapes, on the meta device."""
    spec, mesh = prepared.captured.graph.spec(value), prepared.ranks.mesh
    if prepared.ranks.coordinates[PIPE] == mesh.pipe - 1:
        return [result[i].to(dtype_of(spec.dtype)) for result in results]
    lengths = chunk_sizes(spec.shape[micro.dim], mesh.microbatches) if micro.is_split else ()
    shapes = [(*spec.shape[: micro.dim], n, *spec.shape[micro.dim + 1 :]) for n in lengths] or [spec.shape]
    return [torch.empty(shape, dtype=dtype_of(spec.dtype), device="meta") for shape in shapes]


def _own(part: Tensor, data: Type, prepared: Prepared) -> Tensor:
    ranks = prepared.ranks
    return own_part(part, data, ranks.mesh.data, ranks.coordinates[DATA]) if data.is_split else part


def _shared(tensor: Tensor, prepared: Prepared) -> Tensor:
    """From the last stage to all. Collective over the stages."""
    ranks = prepared.ranks
    if ranks.mesh.pipe > 1:
        last = ranks.coordinates[PIPE] == ranks.mesh.pipe - 1
        tensor = tensor.contiguous() if last else torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.device)
        _broadcast(tensor, ranks.groups[PIPE], ranks.mesh.pipe - 1)
    return tensor


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
