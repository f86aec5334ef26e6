"""Which part of a whole tensor a rank holds, whatever axes split it. Pure arithmetic, no process group.

    part = part_of((96, 32), (R, S(0, 3)), mesh, {"pipe": 0, "data": 1, "tensor": 1}, fsdp=True)
    local = part.take(whole)
    part.put(local, whole)          # whole[...] = local, in the same places

A part is a product of intervals: along every dim, the runs of indices that the rank holds, in the order it holds them. A plain split
is one run; a grouped split ``S(0:3)`` (query, key and value rows of a fused weight) is three.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.mesh import DATA, Mesh
from planner.sharding import Sharding, chunk_sizes, chunk_start

Run = tuple[int, int]
"""(first index, length) of consecutive indices."""
Box = tuple[Run, ...]
"""One run per dim: a block of a tensor."""


@dataclass(frozen=True)
class Part:
    """Per dim of the whole tensor, the runs held."""

    runs: tuple[tuple[Run, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(length for _, length in dim) for dim in self.runs)

    @property
    def is_empty(self) -> bool:
        return math.prod(self.shape) == 0

    def split(self, dim: int, ranks: int, rank: int, groups: int = 1) -> Part:
        """Rank's part of this part: the ``torch.chunk`` rule inside each of ``groups`` equal stretches of the dim."""
        size = self.shape[dim] // groups
        start, length = chunk_start(size, ranks, rank), chunk_sizes(size, ranks)[rank]
        wanted = [(group * size + start, length) for group in range(groups)]
        chosen = tuple(run for first, count in wanted for run in _inside(self.runs[dim], first, count))
        return Part((*self.runs[:dim], chosen, *self.runs[dim + 1 :]))

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """(where in the whole, where in the local tensor) of every block that the part consists of."""
        placed = []
        for dim in self.runs:
            at = itertools.accumulate((length for _, length in dim), initial=0)
            placed.append([(run, (start, run[1])) for run, start in zip(dim, at)])
        for choice in itertools.product(*placed):
            yield tuple(c[0] for c in choice), tuple(c[1] for c in choice)

    def take(self, whole: Tensor) -> Tensor:
        """The part of ``whole``, contiguous memory of its own."""
        local = torch.empty(self.shape, dtype=whole.dtype, device=whole.device)
        for there, here in self.boxes():
            block(local, here).copy_(block(whole, there))
        return local

    def put(self, local: Tensor, whole: Tensor) -> None:
        for there, here in self.boxes():
            block(whole, there).copy_(block(local.reshape(self.shape), here))


def _inside(runs: Sequence[Run], first: int, count: int) -> Iterator[Run]:
    """The runs that positions [first, first + count) of ``runs``, laid end to end, fall on."""
    at = 0
    for start, length in runs:
        low, high = max(first, at), min(first + count, at + length)
        if low < high:
            yield start + low - at, high - low
        at += length


def block(tensor: Tensor, box: Box) -> Tensor:
    """A view of the block."""
    for dim, (start, length) in enumerate(box):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def common(a: Box, b: Box) -> Box | None:
    """The block that two boxes share, None where they do not meet."""
    shared = []
    for (start, length), (other, count) in zip(a, b):
        low, high = max(start, other), min(start + length, other + count)
        if low >= high:
            return None
        shared.append((low, high - low))
    return tuple(shared)


def shifted(box: Box, origin: Box, to: Box) -> Box:
    """``box``, counted from where ``origin`` starts, placed where ``to`` starts."""
    return tuple((start - a + b, length) for (start, length), (a, _), (b, _) in zip(box, origin, to))


def whole_part(shape: Sequence[int]) -> Part:
    return Part(tuple(((0, size),) if size else () for size in shape))


def part_of(shape: Sequence[int], sharding: Sharding, mesh: Mesh, coordinates: Mapping[str, int], fsdp: bool = False) -> Part:
    """What the rank holds: axes split in the mesh's order, outermost first; fully_shard then splits dim 0 of that over ``data``."""
    part = whole_part(shape)
    for type_, axis in zip(sharding, mesh.axes):
        if type_.is_split:
            part = part.split(type_.dim, axis.size, coordinates[axis.name], type_.groups)
    return part.split(0, mesh.data, coordinates[DATA]) if fsdp else part


def splitting_axes(sharding: Sharding, mesh: Mesh, fsdp: bool = False) -> frozenset[str]:
    """The axes along which ranks hold different parts."""
    split = {axis.name for type_, axis in zip(sharding, mesh.axes) if type_.is_split}
    return frozenset(split | ({DATA} if fsdp else set()))
