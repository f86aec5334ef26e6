"""The batch, cut: this rank's part of every micro-batch.

    axis     micro (outermost: a micro-batch is a contiguous stretch of the batch), then data
    "global" every rank is given the whole batch and takes its part
    "local"  every rank is given its own part, which is cut into micro-batches only

Inputs without a batch dim go whole to every micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from planner.mesh import Mesh
from planner.sharding import chunk_sizes, chunk_start

Batch = Literal["global", "local"]
Parts = list[dict[str, Tensor]]
"""Per micro-batch: input name -> local tensor."""


def part_sizes(size: int, mesh: Mesh, data: int) -> list[int]:
    """Lengths of this rank's part of each micro-batch, of a batch dim of ``size`` over all ranks."""
    return [chunk_sizes(n, mesh.data)[data] for n in chunk_sizes(size, mesh.microbatches)]


def part_starts(size: int, mesh: Mesh, data: int) -> list[int]:
    """Where these parts begin in the global batch."""
    whole = chunk_sizes(size, mesh.microbatches)
    return [chunk_start(size, mesh.microbatches, i) + chunk_start(n, mesh.data, data) for i, n in enumerate(whole)]


def expected_spec(in_spec: Any, batch_dims: Mapping[str, int], mesh: Mesh, data: int, batch: Batch) -> Any:
    """The in_spec that a call must fit: the plan's own, or with this rank's share of every batch dim."""
    if batch == "global":
        return in_spec
    if isinstance(in_spec, list):
        return [expected_spec(item, batch_dims, mesh, data, batch) for item in in_spec]
    if not isinstance(in_spec, Mapping):
        return in_spec
    if "tensor" not in in_spec:
        return {key: expected_spec(item, batch_dims, mesh, data, batch) for key, item in in_spec.items()}
    dim = batch_dims.get(in_spec["tensor"])
    if dim is None:
        return in_spec
    shape = list(in_spec["shape"])
    shape[dim] = sum(part_sizes(shape[dim], mesh, data))
    return {**in_spec, "shape": shape}


def cut(named: Mapping[str, Tensor], sizes: Mapping[str, int], batch_dims: Mapping[str, int], mesh: Mesh, data: int, batch: Batch) -> Parts:
    """``named``: input name -> what this rank was given; ``sizes``: input name -> length of its batch dim over all ranks."""
    parts: Parts = [{} for _ in range(mesh.microbatches)]
    for name, tensor in named.items():
        if (dim := batch_dims.get(name)) is None:
            for part in parts:
                part[name] = tensor
            continue
        lengths = part_sizes(sizes[name], mesh, data)
        starts = part_starts(sizes[name], mesh, data)
        if batch == "local":
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
        for part, start, length in zip(parts, starts, lengths):
            part[name] = tensor.narrow(dim, start, length).contiguous()
    return parts

