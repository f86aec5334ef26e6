"""The natural strategy of every op along an axis that splits the batch, by one pass in execution order.

Two uses. Along ``micro``, the axis of time, this is the only strategy there is: micro-batches run one after another and nothing
communicates between them, so what an op does follows from its inputs. Along ``data`` it is plain data parallelism, a good first guess.

Conversions along ``micro``::

    R -> S(d)   the micro-batch's own slice
    R -> P      the value in the first micro-batch, zero in the others
    I -> R      nothing
    P -> R      only of what no parameter or buffer has touched (a count of valid labels): summed over all micro-batches up front, in
                one round: a total cannot depend on another total
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import planner.rules  # noqa: F401 - registers every rule
from planner.errors import BatchError
from planner.graph import INPUT, Graph, Node, Value
from planner.reshard import COLLECTIVES
from planner.rules.base import Strategy, one_axis, replicated, rule_of
from planner.rules.groups import groups_in
from planner.sharding import P, R, S, Type


@dataclass(frozen=True)
class Natural:
    """One axis: how every op runs, and with which type every source comes."""

    strategies: dict[str, Strategy]
    sources: dict[str, Type]
    late: set[str] = field(default_factory=set)
    """Along ``micro``: nodes that no parameter touches and that need a total over all micro-batches. Totals are summed in one round, so
    what is late is itself never totalled."""

    def produced(self, value: Value) -> Type:
        if value.node in self.sources:
            return self.sources[value.node]
        return self.strategies[value.node].outputs[value.index]


def propagate_micro(graph: Graph, microbatches: int) -> Natural:
    """Strategies along ``micro``.

    Raises BatchError where the batch does not divide by ``microbatches`` (naming both), or where an op mixes the batch (naming op, module
    and source line).
    """
    for name, dim in graph.batch_dims:
        size = next(node for node in graph.of(INPUT) if node.target == name).outputs[0].shape[dim]
        if size % microbatches:
            raise BatchError(f"the batch of {size} (input {name!r}, dim {dim}) does not divide into {microbatches} micro-batches")
    if microbatches > 1 and not graph.batch_dims:
        raise BatchError(f"no input has a batch dim to cut into {microbatches} micro-batches; name it: batch_dims={{'x': 0}}")
    natural = propagate(graph, microbatches, communicate=False)
    for name, value in graph.mutations:
        if natural.produced(value) != R:
            node = graph.by_name[value.node]
            raise BatchError(
                f"buffer {name!r} is updated from the whole batch ({node.op} in module {node.module!r}, {node.source}), "
                f"which {microbatches} micro-batches do not see; use microbatches=1"
            )
    return natural


def propagate(graph: Graph, ranks: int, communicate: bool = True) -> Natural:
    """Strategies along an axis of ``ranks`` that splits the batch. ``communicate``: collectives are possible (not along ``micro``).

    Ops that only outputs beside the loss need (a maximum over the batch, for a log) do not run in a step: they take what conversions
    they need, and the runtime computes them after the last micro-batch. Raises BatchError where no strategy of another op can take its
    inputs as they are.
    """
    dims = dict(graph.batch_dims)
    stepped = _needed_by_step(graph)
    found = Natural({}, {})
    for node in graph.nodes:
        if node.is_source:
            found.sources[node.name] = S(dims[node.target]) if node.op == INPUT and node.target in dims else R
        else:
            try:
                found.strategies[node.name] = _choose(graph, node, found, ranks, communicate)
            except BatchError:
                if node.name in stepped:
                    raise
                found.strategies[node.name] = _choose(graph, node, found, ranks, True)
    return found


def _needed_by_step(graph: Graph) -> set[str]:
    """Names of the nodes that the loss and the buffers need; of all nodes where there is no loss."""
    if graph.loss is None:
        return set(graph.by_name)
    needed = {graph.loss.node, *(value.node for _, value in graph.mutations)}
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed.update(value.node for value in node.inputs)
    return needed


def _choose(graph: Graph, node: Node, found: Natural, ranks: int, communicate: bool) -> Strategy:
    have = [found.produced(value) for value in node.inputs]
    late = any(value.node in found.late for value in node.inputs)
    pure = [value.node not in graph.parameter_dependent and value.node not in found.late for value in node.inputs]
    by_itself = not communicate and node.name not in graph.parameter_dependent
    prices = {}
    for strategy in _legal(graph, node, have, ranks):
        if strategy.comm and not communicate:
            continue
        price = _price(have, pure, strategy, communicate)
        if price is not None:
            # a late value that is pending could not be totalled: rather total its terms
            pending = by_itself and P in strategy.outputs and (late or _totals(have, strategy))
            prices[strategy] = (pending, *price)
    if not prices:
        raise _mixes(graph, node, have, ranks)
    chosen = min(prices, key=lambda s: prices[s])
    if by_itself and (late or _totals(have, chosen)):
        found.late.add(node.name)
    return chosen


def _totals(have: Sequence[Type], strategy: Strategy) -> bool:
    """True if an input that is pending is needed whole."""
    return any(before == P and after != P for before, after in zip(have, strategy.inputs))


def _legal(graph: Graph, node: Node, have: Sequence[Type], ranks: int) -> Sequence[Strategy]:
    rule = rule_of(node, [graph.spec(value) for value in node.inputs])
    grad_in = [graph.has_grad(value) for value in node.inputs]
    if rule is None:
        return (replicated(len(grad_in), grad_in, node.grad),)
    return one_axis(rule, grad_in, node.grad, ranks, groups_in(rule, have))


Price = tuple[int, ...]


def _price(have: Sequence[Type], pure: Sequence[bool], strategy: Strategy, communicate: bool) -> Price | None:
    """(splits given up, collectives, conversions, pending outputs, place of the split): less is better; None where a conversion does
    not exist."""
    given_up = collectives = conversions = 0
    for before, after, is_pure in zip(have, strategy.inputs, pure):
        if before == after:
            continue
        if not communicate and not free_in_time(before, after, is_pure):
            return None
        if (before.kind, after.kind) not in COLLECTIVES:
            return None
        collectives += sum(map(bool, COLLECTIVES[before.kind, after.kind]))
        conversions += 1
        given_up += before.is_split
    collectives += len(strategy.comm)
    split = [type_.dim for type_ in strategy.outputs if type_.is_split]
    return given_up, collectives, conversions, sum(type_ == P for type_ in strategy.outputs), min(split, default=-1)


def free_in_time(before: Type, after: Type, pure: bool) -> bool:
    """True if the conversion exists along the axis of time. ``pure``: no parameter or changing buffer has touched the value."""
    change = (before.kind, after.kind)
    return change in (("R", "S"), ("R", "P"), ("I", "R")) or (change in (("P", "R"), ("P", "I")) and pure)


def _mixes(graph: Graph, node: Node, have: Sequence[Type], ranks: int) -> BatchError:
    where = f"{node.op} in module {node.module or 'the model'!r} ({node.source or 'unknown line'})"
    if rule_of(node, [graph.spec(value) for value in node.inputs]) is None:
        return BatchError(
            f"{where} has no sharding rule and so needs the whole batch, of which a micro-batch is but one of {ranks} parts; "
            "use microbatches=1"
        )
    types = ", ".join(map(str, have))
    return BatchError(
        f"{where} mixes the batch: with its inputs split as "
        f"({types}) over {ranks} micro-batches it would need values of all of them at once; use microbatches=1"
    )
