"""The strategies of every op class on a mesh.

On the axis of micro-batches the strategy of each op is given (``planner.micro``); over the data and the tensor axis every legal
product is open, or, in a ``narrow`` search, on the data axis only the one that follows the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import planner.rules  # noqa: F401 - registers every rule
from planner.fold import BUFFER_SINK, LOSS, Fold, OpClass
from planner.graph import INPUT, Spec
from planner.mesh import DATA, MICRO, Mesh
from planner.rules.base import MeshStrategy, Rule, Strategy, one_axis, over_mesh, replicated, rule_of
from planner.sharding import I, P, R, S, Sharding, Type


@dataclass
class Catalogue:
    """Rules and one-axis strategies of the op classes of a fold, worked out once for all meshes."""

    fold: Fold
    _one_axis: dict[tuple[int, int], tuple[Strategy, ...]] = field(default_factory=dict)

    @functools.cached_property
    def rules(self) -> Mapping[int, Rule | None]:
        """Op class -> its rule; None where there is none. Sources and sinks are absent."""
        return {op.index: rule_of(op.node, self.specs(op)) for op in self.fold.ops if not op.node.is_source and not op.is_sink}

    def specs(self, op: OpClass) -> tuple[Spec, ...]:
        return tuple(self.fold.graph.spec(value) for value in op.node.inputs)

    def grad_in(self, op: OpClass) -> tuple[bool, ...]:
        return tuple(self.fold.graph.has_grad(value) for value in op.node.inputs)

    def grad_out(self, op: OpClass) -> tuple[bool, ...]:
        return op.node.grad

    def without_rule(self) -> tuple[OpClass, ...]:
        return tuple(op for op in self.fold.ops if op.index in self.rules and self.rules[op.index] is None)

    def one_axis(self, op: OpClass, ranks: int) -> tuple[Strategy, ...]:
        """Every legal strategy over one ranked axis."""
        key = (op.index, ranks)
        if key not in self._one_axis:
            rule = self.rules[op.index]
            grad_in, grad_out = self.grad_in(op), self.grad_out(op)
            if rule is None:
                self._one_axis[key] = (replicated(len(grad_in), grad_in, grad_out),)
            else:
                self._one_axis[key] = one_axis(rule, grad_in, grad_out, ranks)
        return self._one_axis[key]

    def over(self, op: OpClass, mesh: Mesh, micro: Mapping[str, Strategy], data: Mapping[int, Strategy]) -> list[MeshStrategy]:
        """Every strategy over the mesh. ``micro``: node -> its strategy over micro-batches; ``data``: op class -> the only strategy
        allowed on the data axis, where one is."""
        per_axis: list[tuple[Strategy, ...]] = []
        for axis in mesh.axes:
            if axis.name == MICRO:
                per_axis.append((micro[op.node.name],))
            elif axis.name == DATA and op.index in data:
                per_axis.append((data[op.index],))
            else:
                per_axis.append(self.one_axis(op, axis.size))
        return over_mesh(self.rules[op.index], per_axis, mesh.sizes)


def source_sharding(fold: Fold, op: OpClass, mesh: Mesh) -> Sharding:
    """Inputs with a batch dim are split along it over micro-batches and data; everything else is there whole."""
    batch_dim = dict(fold.graph.batch_dims).get(op.node.target) if op.node.op == INPUT else None
    return tuple(S(batch_dim) if batch_dim is not None and axis.name in (MICRO, DATA) else R for axis in mesh.axes)


def sink_sharding(fold: Fold, op: OpClass, mesh: Mesh, micro: Mapping[str, Strategy]) -> Sharding:
    """What is delivered: the loss invariant, and a pending sum over micro-batches; outputs and buffers whole."""
    value = op.node.inputs[0]
    grad = fold.graph.has_grad(value)
    types: list[Type] = []
    for axis in mesh.axes:
        if not axis.is_time:
            types.append(I if op.node.op == LOSS and grad else R)
        elif op.node.op == LOSS:
            types.append(P)
        elif op.node.op == BUFFER_SINK or value.node not in micro:
            types.append(R)
        else:
            types.append(micro[value.node].outputs[value.index])
    return tuple(types)
