"""Outputs beside the loss that mix the batch (a maximum over all rows, for a log): no micro-batch has what they need.

A forward delivers what they are made of, joined over micro-batches and whole on every axis; they are computed after the last micro-batch,
on every rank.

    stage ─delivered(graph, plan)─→ joined values ─compute(late_nodes(...))─→ the model's outputs
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from planner.assignment import Assignment
from planner.graph import Graph, Node, Value, values_of
from planner.mesh import MICRO
from planner.micro import free_in_time
from runtime.local_op import local_call, returns_sequence


def late_nodes(graph: Graph, plan: Assignment) -> tuple[Node, ...]:
    """Nodes that need values of all micro-batches at once, and what is made of them, in execution order. None of them is part of a
    step: a plan whose loss mixes micro-batches is not made."""
    late: dict[str, Node] = {}
    micro = plan.mesh.index(MICRO)
    for node in graph.nodes if micro is not None else ():
        if not node.is_source and (any(value.node in late for value in node.inputs) or _mixes(graph, plan, node, micro)):
            late[node.name] = node
    return tuple(late.values())


def _mixes(graph: Graph, plan: Assignment, node: Node, micro: int | None) -> bool:
    strategy = plan.strategies[node.name]
    assert micro is not None
    if strategy.per_axis[micro].comm:
        return True
    moves = ((plan.produced(graph, v.node, v.index)[micro], wanted[micro], v) for v, wanted in zip(node.inputs, strategy.inputs))
    return any(made != wanted and not free_in_time(made, wanted, v.node not in graph.parameter_dependent) for made, wanted, v in moves)


def delivered(graph: Graph, plan: Assignment) -> tuple[Value, ...]:
    """What the last stage of a forward delivers: the outputs, with what late ones are made of in their place."""
    late = late_nodes(graph, plan)
    names = {node.name for node in late}
    wanted = [*values_of(graph.outputs), *(value for node in late for value in node.inputs)]
    return tuple(dict.fromkeys(value for value in wanted if value.node not in names))


def compute(late: Sequence[Node], values: dict[Value, Tensor], training: bool) -> None:
    """Add the outputs of late nodes to ``values``, which holds whole tensors."""
    for node in late:
        op = local_call(node, None, None, (), (), training)
        result = op.run([values[value] for value in node.inputs])
        results = result if returns_sequence(node) else (result,)
        values.update({Value(node.name, i): item for i, item in enumerate(results)})
