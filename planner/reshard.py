"""Changing a tensor's sharding: the collectives that do it. Serves costing and lowering alike, so what is priced is what runs.

One step changes the type on one axis:

========== ================== ====================
step       forward            backward
========== ================== ====================
I -> R     nothing            all-reduce
P -> I     all-reduce         nothing
P -> R     all-reduce         all-reduce
S(d) -> R  all-gather         reduce-scatter
S(d) -> I  all-gather         own slice
P -> S(d)  reduce-scatter     all-gather
I -> S(d)  own slice          all-gather
R -> S(d)  own slice          zeros around it
S(d)->S(e) all-to-all         all-to-all
R -> I     nothing            own value or zero
R -> P     own value or zero  own value or zero
I -> P     own value or zero  nothing
========== ================== ====================

Axes that split the same dim are nested in the mesh's order, so an outer axis cannot change its split of a dim while an inner
one still splits it: ``steps`` then gathers the inner one first and splits it again at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import ReshardError
from planner.sharding import R, Sharding, Type, largest_shape

# (from kind, to kind) -> (forward collective, backward collective); "" is no communication
COLLECTIVES: dict[tuple[str, str], tuple[str, str]] = {
    ("I", "R"): ("", "all_reduce"),
    ("P", "I"): ("all_reduce", ""),
    ("P", "R"): ("all_reduce", "all_reduce"),
    ("S", "R"): ("all_gather", "reduce_scatter"),
    ("S", "I"): ("all_gather", ""),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("I", "S"): ("", "all_gather"),
    ("R", "S"): ("", ""),
    ("S", "S"): ("all_to_all", "all_to_all"),
    ("R", "I"): ("", ""),
    ("R", "P"): ("", ""),
    ("I", "P"): ("", ""),
}


@dataclass(frozen=True)
class Step:
    """Type change on one axis (position in the mesh's typed axes). ``shape``: local shape on rank 0 with this axis left whole."""

    axis: int
    source: Type
    target: Type
    shape: tuple[int, ...]

    @property
    def collectives(self) -> tuple[str, str]:
        return COLLECTIVES[self.source.kind, self.target.kind]

    def __str__(self) -> str:
        return f"[{self.axis}] {self.source}->{self.target}"


@functools.lru_cache(maxsize=200_000)
def steps(source: Sharding, target: Sharding, shape: tuple[int, ...], sizes: tuple[int, ...], grad: bool = True) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target``, in order. Without gradient, changes between I and R vanish.

    Raises ReshardError where a step does not exist (S -> P).
    """
    state, wanted = list(source), list(target)
    done: list[Step] = []

    def change(axis: int, to: Type) -> None:
        if state[axis] == to:
            return
        before = state[axis]
        if before.is_split and to.is_split and before.dim == to.dim:
            change(axis, R)
            before = R
        if (before.kind, to.kind) not in COLLECTIVES:
            raise ReshardError(f"no conversion from {before} to {to} (tensor of shape {shape})")
        state[axis] = R
        whole = largest_shape(shape, tuple(state), sizes)
        state[axis] = to
        if grad or {before.kind, to.kind} != {"I", "R"}:
            done.append(Step(axis, before, to, whole))

    def inner_splits(axis: int, dim: int) -> list[int]:
        return [i for i in range(axis + 1, len(state)) if state[i].is_split and state[i].dim == dim]

    def settled(axis: int, dim: int) -> bool:
        """True if no outer axis will still change its split of this dim."""
        return all(state[i] == wanted[i] or dim not in (state[i].dim, wanted[i].dim) for i in range(axis))

    def free(axis: int, to: Type) -> None:
        """Gather the inner axes that split a dim which this axis is about to change."""
        for type_ in (state[axis], to):
            if type_.is_split:
                for inner in reversed(inner_splits(axis, type_.dim)):
                    change(inner, R)

    order = range(len(state))
    # 1. what makes the tensor smaller comes first, as long as nothing inner stands in the way
    for axis in order:
        to = wanted[axis]
        if to.is_split and not state[axis].is_split and not inner_splits(axis, to.dim) and settled(axis, to.dim):
            change(axis, to)
    # 2. give up splits, innermost first
    for axis in reversed(order):
        if state[axis].is_split and state[axis] != wanted[axis]:
            to = wanted[axis]
            if to.is_split and not settled(axis, to.dim):
                to = R
            free(axis, to)
            change(axis, to)
    # 3. everything else, outermost first
    for axis in order:
        if state[axis] != wanted[axis]:
            free(axis, wanted[axis])
            change(axis, wanted[axis])
    # 4. inner splits that had to be opened for an outer one
    for axis in order:
        change(axis, wanted[axis])
    return tuple(done)


def chain(source: Sharding, target: Sharding, done: Sequence[Step]) -> Sharding:
    """Where a chain of steps leads: a check that tests and the lowering use."""
    state = list(source)
    for step in done:
        if state[step.axis] != step.source:
            raise ReshardError(f"step {step} does not start at {state[step.axis]}")
        state[step.axis] = step.target
    return tuple(state)
