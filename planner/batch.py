"""Which dims are the batch: a factor that the rules pass through, found by union-find over the graph.

Every (value, dim) is an element. A rule joins the dims that share a factor, so the sets are the quantities of the model: the batch, the
sequence, each hidden size. A set that holds a dim of a parameter is a feature, never the batch. Of the others the batch is the one that the
fewest ops need whole: attention needs the sequence whole, nothing (or the loss alone) needs the batch whole. Sizes are never
compared to find it. A batch of one row is seen in the same way, and then there is nothing to cut.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import planner.rules  # noqa: F401 - registers every rule
from planner.errors import InputError
from planner.graph import INPUT, PARAMETER, Graph, Node, Value
from planner.rules.base import Dims, Rule, rule_of

Element = tuple[Value, int]


class UnionFind:
    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        root = item
        while (above := self._parent.get(root, root)) != root:
            root = above
        while item != root:
            self._parent[item], item = root, self._parent.get(item, item)
        return root

    def join(self, a: Hashable, b: Hashable) -> None:
        first, second = self.find(a), self.find(b)
        if first != second:
            self._parent[second] = first


@dataclass
class _Set:
    """One quantity of the model."""

    inputs: list[tuple[str, int]] = field(default_factory=list)
    size: int = 0
    whole: int = 0
    """How many ops that carry gradient need it whole, with no kernel of their own for a split one."""
    kernels: int = 0
    """How many need a kernel to split it."""
    torn: int = 0
    """How many flatten it behind another dim."""
    idle: int = 0
    """How many ops without gradient (the building of masks) need it whole."""
    carries: bool = False
    """True if values that carry gradient have it."""
    feature: bool = False


@dataclass
class _Dims:
    """Joins of all dims of a graph, and who needs what whole."""

    graph: Graph
    joined: UnionFind = field(default_factory=UnionFind)
    whole: list[tuple[Element, str]] = field(default_factory=list)
    """Elements that an op needs whole, and how it counts: as which field of ``_Set``."""
    onward: dict[Element, list[Element]] = field(default_factory=dict)
    """Input element of an op -> output elements of the same factor, for ops that carry no gradient."""
    stopped: set[Element] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            if not node.is_source:
                rule = rule_of(node, [self.graph.spec(value) for value in node.inputs])
                if rule is not None:
                    self._node(node, rule)

    def _node(self, node: Node, rule: Rule) -> None:
        outputs = [Value(node.name, i) for i in range(len(node.outputs))]
        for factor in rule.size:
            ins = list(_leading(node.inputs, rule.inputs, factor, rule.size, rule.ignored))
            outs = list(_leading(outputs, rule.outputs, factor, rule.size))
            found = ins + outs
            for other in found[1:]:
                self.joined.join(found[0], other)
            has_kernel = any(extra.factor == factor for extra in rule.extra)
            torn = any(_torn(dims, factor, rule.size) for dims in (*rule.inputs, *rule.outputs))
            if factor in rule.whole or torn or not (rule.sums or outs):
                counts = "kernels" if has_kernel else "torn" if torn else "whole"
                counts = counts if any(node.grad) else "idle"
                self.whole.extend((element, counts) for element in ins[:1])
                self.stopped.update(ins if not has_kernel else ())
            elif not any(node.grad):
                for element in ins:
                    self.onward.setdefault(element, []).extend(outs)

    def sets(self) -> dict[Hashable, _Set]:
        found: dict[Hashable, _Set] = {}
        for node in self.graph.nodes:
            if node.op in (INPUT, PARAMETER):
                for dim, size in enumerate(node.outputs[0].shape):
                    entry = found.setdefault(self.joined.find((Value(node.name), dim)), _Set())
                    entry.feature |= node.op == PARAMETER
                    if node.op == INPUT:
                        entry.inputs.append((node.target, dim))
                        entry.size = size
        for element, counts in self.whole:
            entry = found.get(self.joined.find(element), _Set())
            if counts == "whole" and self.graph.spec(element[0]).shape[element[1]] != entry.size:
                counts = "idle"  # a flattened dim (batch and sequence in one): it speaks as much about the other
            setattr(entry, counts, getattr(entry, counts) + 1)
        for node in self.graph.nodes:
            for i, spec in enumerate(node.outputs):
                if node.grad[i]:
                    for dim in range(len(spec.shape)):
                        found.get(self.joined.find((Value(node.name, i), dim)), _Set()).carries = True
        return found

    def blocked(self, start: Element) -> bool:
        """True if an op that carries no gradient (the building of a mask) needs this dim of an input whole: the input stays whole
        then, which costs nothing, and what is made of it is cut later."""
        seen, todo = {start}, [start]
        while todo:
            element = todo.pop()
            if element in self.stopped:
                return True
            new = [e for e in self.onward.get(element, ()) if e not in seen]
            seen.update(new)
            todo.extend(new)
        return False


def _leading(
    values: Sequence[Value], dims: tuple[Dims, ...], factor: str, sizes: Mapping[str, int], skip: frozenset[int] = frozenset()
) -> Iterator[Element]:
    for position, (value, own) in enumerate(zip(values, dims)):
        for place, dim in enumerate(own):
            real = [f for f in dim if sizes[f] > 1] or dim
            if position not in skip and real and real[0] == factor:
                yield value, place


def _torn(dims: Dims, factor: str, sizes: Mapping[str, int]) -> bool:
    """True if the factor sits inside a flattened dim, behind another."""
    return any(factor in [f for f in dim if sizes[f] > 1][1:] for dim in dims)


def infer_batch_dims(graph: Graph, given: Mapping[str, int | None] | None = None) -> Graph:
    """The graph with ``batch_dims`` set: input name -> its batch dim. ``given`` overrides, name -> dim or None.

    Raises InputError where ``given`` names an input or a dim that does not exist.
    """
    inputs = {node.target: node for node in graph.of(INPUT)}
    found = _found(graph)
    for name, dim in (given or {}).items():
        if name not in inputs:
            raise InputError(f"batch_dims names {name!r}; the inputs are {sorted(inputs)}")
        shape = inputs[name].outputs[0].shape
        if dim is not None and not -len(shape) <= dim < len(shape):
            raise InputError(f"batch_dims: {name}={dim}, but {name} has the shape {shape}")
        found.pop(name, None)
        if dim is not None:
            found[name] = dim % len(shape)
    return replace(graph, batch_dims=tuple((name, found[name]) for name in inputs if name in found))


def _is_single_row(entry: _Set, best: _Set) -> bool:
    """True if this set is a batch of size 1: all inputs that have ``best`` have it, and fewer ops need it whole."""
    covers = {name for name, _ in best.inputs} <= {name for name, _ in entry.inputs}
    free = (entry.whole, entry.torn, entry.kernels) < (best.whole, best.torn, best.kernels)
    return entry.size == 1 and entry.carries and covers and free


def _found(graph: Graph) -> dict[str, int]:
    dims = _Dims(graph)
    quantities = [entry for entry in dims.sets().values() if entry.inputs and not entry.feature]
    candidates = [entry for entry in quantities if entry.size > 1]
    if not candidates:
        return {}
    best = min(
        candidates, key=lambda s: (not s.carries, s.whole, s.torn, min(dim for _, dim in s.inputs), s.kernels + s.idle, -len(s.inputs))
    )
    if any(_is_single_row(entry, best) for entry in quantities):
        return {}
    # inputs that meet in the loss only (two towers) form sets of their own: as clean as the best, along the same dim, of the same size
    along = {dim for _, dim in best.inputs}
    batch = [best]
    for other in candidates:
        clean = other.whole <= best.whole and other.torn <= best.torn
        if other is not best and clean and other.size == best.size and all(dim in along for _, dim in other.inputs):
            batch.append(other)
    places = [place for entry in batch for place in entry.inputs]
    names = [name for name, _ in places]
    value_of = {node.target: Value(node.name) for node in graph.of(INPUT)}
    once = [(name, dim) for name, dim in places if names.count(name) == 1]
    free = [(name, dim) for name, dim in once if not dims.blocked((value_of[name], dim))]
    return dict(free or once)
