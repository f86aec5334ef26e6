"""How a tensor lies over the axes of a mesh: one type per axis.

===== ============================================ =======================
type  value on the axis                            gradient on the axis
===== ============================================ =======================
I     same on every rank, same work on every rank  I
R     same on every rank, different work           P, a pending sum
S(d)  split along dim d, the ``torch.chunk`` rule  S(d)
P     a pending sum                                R
===== ============================================ =======================

``S(d:g)`` is a split along d inside each of g equal groups: a fused query-key-value dim of 3 x 64 over 4 ranks as ``S(d:3)`` gives
each rank 16 of the query, 16 of the key and 16 of the value rows. It needs a length that g x ranks divides.

Text form of a type: ``I``, ``R``, ``P``, ``S(0)``, ``S(0:3)``. Text form of a sharding: types joined by commas in the order of the mesh's
axes, ``S(0),R``; a mesh without axes has the sharding ``-``. Both forms parse back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.errors import ReshardError

__all__ = ["Type", "I", "R", "P", "S", "Sharding", "chunk_sizes", "chunk_start", "splits_evenly", "splits_whole"]


@dataclass(frozen=True, order=True)
class Type:
    """One axis' type. ``kind`` is one of "I", "R", "S", "P"; ``dim`` and ``groups`` are set for "S" only."""

    kind: str
    dim: int = -1
    groups: int = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.groups == 1 else f"S({self.dim}:{self.groups})"

    __repr__ = __str__

    @property
    def is_split(self) -> bool:
        return self.kind == "S"

    @staticmethod
    def parse(text: str) -> Type:
        if text in ("I", "R", "P"):
            return Type(text)
        match = re.fullmatch(r"S\((\d{1,2})(?::(\d{1,6}))?\)", text)
        if not match or match[2] in ("0", "1"):
            raise ReshardError(f"unknown sharding type {text!r}: expected I, R, P, S(dim) or S(dim:groups)")
        return Type("S", int(match[1]), int(match[2] or 1))


I = Type("I")
R = Type("R")
P = Type("P")


def S(dim: int, groups: int = 1) -> Type:
    return Type("S", dim, groups)


Sharding = tuple[Type, ...]
"""One type per typed axis of the mesh, in the mesh's order."""


def show(sharding: Sharding) -> str:
    return ",".join(map(str, sharding)) or "-"


def parse(text: str) -> Sharding:
    return () if text == "-" else tuple(Type.parse(part) for part in text.split(","))


def chunk_sizes(size: int, ranks: int) -> tuple[int, ...]:
    """Sizes of the parts that ``torch.chunk`` gives each rank (trailing ranks may get less, or nothing)."""
    step = -(-size // ranks) if size else 0
    return tuple(max(0, min(step, size - rank * step)) for rank in range(ranks))


def chunk_start(size: int, ranks: int, rank: int) -> int:
    """First index of ``rank``'s part."""
    step = -(-size // ranks) if size else 0
    return min(size, rank * step)


def splits_evenly(size: int, ranks: int) -> bool:
    return size % ranks == 0


def splits_whole(size: int, ranks: int) -> bool:
    """True if every rank gets at least one element: the condition for a dim to be split at all."""
    return size > 0 and chunk_sizes(size, ranks)[-1] > 0


def local_shape(shape: tuple[int, ...], sharding: Sharding, sizes: tuple[int, ...], coords: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the part that the rank at ``coords`` holds. Axes split in the mesh's order, outermost first."""
    local = list(shape)
    for type_, size, coord in zip(sharding, sizes, coords):
        if type_.is_split:
            local[type_.dim] = chunk_sizes(local[type_.dim], size)[coord]
    return tuple(local)


def largest_shape(shape: tuple[int, ...], sharding: Sharding, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the largest part, the one rank 0 holds: what time and memory are priced with."""
    return local_shape(shape, sharding, sizes, (0,) * len(sizes))
