"""Segments: the graph cut into consecutive runs, one per block of the model, and the classes of equal ones.

A block is what sits under a number in the module path: ``transformer.h.3.attn.c_attn`` belongs to ``transformer.h.3``. A run under
a number that has no equal (the stages of a convolutional net) is cut again, one number deeper; what lies between blocks is cut where a
module with parameters begins. Every cut is a place where a pipeline stage may end.

Two segments are equal when their ops, arguments, shapes, wiring, contexts and grad flags are, and their names up to the index: then
one list of strategies serves both.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.graph import PARAMETER, Graph, Node, Value, map_values

Run = tuple[Node, ...]


@dataclass(frozen=True)
class Segment:
    """``nodes``: names, in execution order. ``name``: module path with ``*`` for the index of the block ("transformer.h.*")."""

    index: int
    name: str
    nodes: tuple[str, ...]
    class_id: int


def segments(graph: Graph) -> tuple[Segment, ...]:
    """All nodes but the sources, cut in consecutive segments. Class ids count from 0 in order of first appearance."""
    kept: dict[str, Any] = graph.__dict__  # beside the graph's cached properties: a graph does not change
    if "_segments" not in kept:
        kept["_segments"] = tuple(_Cutter(graph).segments())
    found: tuple[Segment, ...] = kept["_segments"]
    return found


def classes(parts: Sequence[Segment]) -> dict[int, list[Segment]]:
    """class id -> its segments, in execution order."""
    found: dict[int, list[Segment]] = {}
    for segment in parts:
        found.setdefault(segment.class_id, []).append(segment)
    return found


class _Cutter:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.body = tuple(node for node in graph.nodes if not node.is_source)
        self.first_user = {value: users[0][0].name for value, users in graph.users.items() if graph.by_name[value.node].is_source}
        self.readers = {value: len({user.name for user, _ in users}) for value, users in graph.users.items()}

    def segments(self) -> list[Segment]:
        pieces = self._merged([piece for run in self._numbered(self.body, 1) for piece in run])
        if len(pieces) == 1:
            pieces = self._by_parameter(self.body)
        ids: dict[Hashable, int] = {}
        found = []
        for index, (name, run) in enumerate(pieces):
            class_id = ids.setdefault((name, self.signature(run)), len(ids))
            found.append(Segment(index, name, tuple(node.name for node in run), class_id))
        return found

    def _numbered(self, nodes: Run, depth: int) -> list[list[tuple[str, Run]]]:
        """Runs of equal prefix up to the ``depth``-th number; those without an equal are cut deeper."""
        runs = _group(nodes, lambda node: prefix(node.module, depth))
        named = [(pattern(key) if key is not None else "", run, key) for key, run in runs]
        count = Counter((name, self.signature(run)) for name, run, key in named if key is not None)
        pieces: list[list[tuple[str, Run]]] = []
        for name, run, key in named:
            if key is None:
                pieces.append(self._between(run, 0))
            elif count[name, self.signature(run)] > 1:
                pieces.append([(name, run)])
            elif any(prefix(node.module, depth + 1) is not None for node in run):
                pieces.extend(self._numbered(run, depth + 1))
            else:
                pieces.append([(name, run)])
        return pieces

    def _between(self, run: Run, level: int) -> list[tuple[str, Run]]:
        """A run outside numbered blocks: cut where another child module that has parameters begins."""
        starts = [0]
        current = None
        for i, node in enumerate(run):
            child = ".".join(node.module.split(".")[: level + 1])
            if self._reads_parameters(node) and child != current:
                if current is not None or self._worth(run[:i]):
                    starts.append(i)
                current = child
        pieces = [run[a:b] for a, b in itertools.pairwise([*starts, len(run)]) if b > a]
        if len(pieces) == 1:
            deepest = max(node.module.count(".") for node in run)
            return self._between(run, level + 1) if level < deepest else [(self._name(run), run)]
        return [piece for part in pieces for piece in (self._between(part, level + 1) if len(part) > LONG else [(self._name(part), part)])]

    def _by_parameter(self, run: Run) -> list[tuple[str, Run]]:
        """A model that is one module: cut where another of its parameters is read."""
        starts, seen = [0], set[Value]()
        for i, node in enumerate(run):
            new = {value for value in node.inputs if self.graph.by_name[value.node].op == PARAMETER} - seen
            if new and seen and self._worth(run[starts[-1] : i]):
                starts.append(i)
            seen |= new
        pieces = [run[a:b] for a, b in itertools.pairwise([*starts, len(run)])]
        return [(self._name(piece), piece) for piece in pieces]

    def _worth(self, run: Run) -> bool:
        return any(self.graph.has_grad(Value(node.name, i)) for node in run for i in range(len(node.outputs)))

    def _merged(self, pieces: list[tuple[str, Run]]) -> list[tuple[str, Run]]:
        """A few ops without parameters (an activation, a sum) go to the small piece before them."""
        merged: list[tuple[str, Run]] = []
        for name, run in pieces:
            idle = len(run) <= FEW and not any(map(self._reads_parameters, run))
            if idle and merged and len(merged[-1][1]) <= SMALL:
                merged[-1] = (merged[-1][0], merged[-1][1] + run)
            else:
                merged.append((name, run))
        return merged

    def _name(self, run: Run) -> str:
        """The module whose parameters a run between blocks reads."""
        return _common([node for node in run if self._reads_parameters(node)] or run)

    def _reads_parameters(self, node: Node) -> bool:
        return any(self.graph.by_name[value.node].op == PARAMETER for value in node.inputs)

    def signature(self, run: Run) -> Hashable:
        """What makes two runs equal."""
        inside = {node.name: i for i, node in enumerate(run)}
        outside: dict[Value, int] = {}

        def place(value: Value) -> Hashable:
            if value.node in inside:
                return ("in", inside[value.node], value.index)
            if value in outside:
                return ("again", outside[value])
            outside[value] = len(outside)
            source = self.graph.by_name[value.node]
            kind: tuple[Hashable, ...] = ("value",)
            if source.is_source:
                kind = (source.op, self.first_user[value] in inside, self.readers[value] > sum(value in node.inputs for node in run))
            return ("out", outside[value], source.outputs[value.index], source.grad[value.index], *kind)

        return tuple(
            (node.op, map_values(node.args, place), map_values(node.kwargs, place), node.outputs, node.grad, node.context) for node in run
        )


LONG = 32
"""A run between blocks that is longer is cut one module deeper."""
FEW, SMALL = 4, 8
"""So many ops without parameters join a piece of at most so many."""


def prefix(module: str, depth: int) -> str | None:
    """``("a.0.b.1.c", 2)`` -> ``"a.0.b.1"``; None where the path has fewer numbers."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[depth - 1] + 1]) if len(numbers) >= depth else None


def pattern(path: str) -> str:
    """``"a.0.b.1"`` -> ``"a.0.b.*"``."""
    head, _, _ = path.rpartition(".")
    return f"{head}.*" if head else "*"


def _group(nodes: Run, key: Callable[[Node], str | None]) -> list[tuple[str | None, Run]]:
    return [(k, tuple(group)) for k, group in itertools.groupby(nodes, key)]


def _common(run: Sequence[Node]) -> str:
    """The longest module path that all nodes share."""
    paths = [node.module.split(".") for node in run]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths))
    return ".".join(parts[0] for parts in shared)
