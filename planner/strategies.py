"""The strategies of every op class on a mesh.

On the axis of micro-batches the strategy of each op is given (``planner.micro``). What is open over the data and the tensor axis:

* With one of them, every legal strategy; with both, ops follow the batch on the data axis and are open on the tensor axis.
* Only the data axis splits the batch: on the tensor axis that would be the plan of another mesh.
* Ranks are there to divide the work. The matmul-like ops that make up all but ``SPARED`` of the FLOPs are split over every axis that
  they can be split over; without this the fastest plan of a tiny model would be that every rank runs all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import planner.rules  # noqa: F401 - registers every rule
from planner.fold import BUFFER_SINK, LOSS, Fold, OpClass
from planner.graph import INPUT, Spec
from planner.grouping import groupings
from planner.mesh import DATA, MICRO, TENSOR, Axis, Mesh
from planner.rules.base import MeshStrategy, Rule, Strategy, one_axis, over_mesh, replicated, rule_of
from planner.sharding import I, P, R, S, Sharding, Type

MATMUL_LIKE = ("matmul", "attention", "conv")
SPARED = 0.1


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

    @functools.cached_property
    def heavy(self) -> frozenset[int]:
        """The op classes that must be split: matmul-like, without the smallest that together make up ``SPARED`` of the FLOPs."""
        alike: dict[tuple[object, ...], set[int]] = {}
        flops: dict[tuple[object, ...], float] = {}
        for op in self.fold.ops:
            rule = self.rules.get(op.index)
            if rule is not None and rule.kind in MATMUL_LIKE:
                key: tuple[object, ...] = (
                    op.node.op,
                    rule.sizes,
                    rule.inputs,
                )
                alike.setdefault(key, set()).add(op.index)
                flops[key] = flops.get(key, 0.0) + rule.flops * len(op.members)
        left, found = SPARED * sum(flops.values()), set().union(*alike.values())
        for key in sorted(flops, key=lambda k: (flops[k], min(alike[k]))):
            left -= flops[key]
            if left < 0:
                break
            found -= alike[key]
        return frozenset(found)

    @functools.cached_property
    def groupings(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        return groupings(self.fold.graph)

    def one_axis(self, op: OpClass, ranks: int) -> tuple[Strategy, ...]:
        """Every legal strategy over one ranked axis."""
        key = (op.index, ranks)
        if key not in self._one_axis:
            rule = self.rules[op.index]
            grad_in, grad_out = self.grad_in(op), self.grad_out(op)
            if rule is None:
                self._one_axis[key] = (replicated(len(grad_in), grad_in, grad_out),)
            else:
                self._one_axis[key] = one_axis(rule, grad_in, grad_out, ranks, self.groupings.get(op.node.name))
        return self._one_axis[key]

    def over(
        self, op: OpClass, mesh: Mesh, micro: Mapping[str, Strategy], data: Mapping[int, Strategy], batch: Mapping[int, str]
    ) -> list[MeshStrategy]:
        """Every strategy over the mesh. ``micro``: node -> its strategy over micro-batches; ``data``: op class -> the only strategy
        allowed on the data axis, where one is; ``batch``: op class -> the factor that is its batch, which only the data axis splits."""
        per_axis: list[tuple[Strategy, ...]] = []
        for axis in mesh.axes:
            if axis.name == MICRO:
                per_axis.append((micro[op.node.name],))
            elif axis.name == DATA and op.index in data:
                per_axis.append((data[op.index],))
            else:
                per_axis.append(self._open(op, axis, batch.get(op.index, "")))
        return over_mesh(self.rules[op.index], per_axis, mesh.sizes)

    def _open(self, op: OpClass, axis: Axis, batch: str) -> tuple[Strategy, ...]:
        """What is tried on one ranked axis; ``batch``: the factor that is the op's batch."""
        every = self.one_axis(op, axis.size)
        if axis.name == TENSOR and batch:
            every = tuple(s for s in every if s.factor != batch)
        if op.index in self.heavy:
            every = tuple(s for s in every if s.factor) or every
        return every


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
        else:
            made = micro.get(fold.ops[fold.class_of[value.node]].node.name)
            types.append(R if op.node.op == BUFFER_SINK or made is None else made.outputs[value.index])
    return tuple(types)
