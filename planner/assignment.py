"""A plan laid over a graph: which strategy every node runs with, how every source is stored, which stage holds what."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import planner.rules  # noqa: F401 - registers every rule
from planner.blocks import Segment, segments
from planner.errors import PlanError
from planner.graph import INPUT, PARAMETER, Graph, Node
from planner.grouping import groupings
from planner.mesh import DATA, MICRO, Mesh
from planner.oplines import OpLine
from planner.plan import ParameterPlan, Plan, SegmentPlan
from planner.rules.base import MeshStrategy, Rule, Strategy, one_axis, replicated, rule_of
from planner.rules.groups import groups_in
from planner.sharding import R, S, Sharding, Type, parse


@dataclass(frozen=True)
class Assignment:
    """Everything that lowering and evaluation ask of a plan, by node name."""

    mesh: Mesh
    segments: tuple[Segment, ...]
    stage_of_segment: tuple[int, ...]
    recompute: tuple[str, ...]
    """Per segment: "none", "selective" or "full"."""
    rules: Mapping[str, Rule | None]
    strategies: Mapping[str, MeshStrategy]
    sources: Mapping[str, Sharding]
    fsdp: frozenset[str]
    """Parameter nodes that fully_shard splits over the data axis."""

    def produced(self, graph: Graph, name: str, index: int) -> Sharding:
        """Sharding that a value is produced with."""
        if name in self.sources:
            return self.sources[name]
        strategy = self.strategies[name]
        return strategy.outputs[index] if strategy.per_axis else ()


def axis_strategies(graph: Graph, node: Node, rule: Rule | None, ranks: int, types: Sequence[Type] = ()) -> tuple[Strategy, ...]:
    """All strategies of a node over one axis of ``ranks``, with splits inside such groups as ``types`` (of inputs, then outputs) have."""
    grad_in = [graph.has_grad(v) for v in node.inputs]
    if rule is None:
        return (replicated(len(grad_in), grad_in, node.grad),)
    groups = groups_in(rule, types) if types else groupings(graph).get(node.name)
    return one_axis(rule, grad_in, node.grad, ranks, groups)


def assign(plan: Plan, graph: Graph) -> Assignment:
    """Lay ``plan`` over ``graph``; in a plan for inference nothing carries a gradient.

    Raises PlanError where they do not belong together, naming both sides.
    """
    if plan.optimizer == "none":
        graph = graph.without_gradients()
    mesh = plan.mesh.mesh()
    parts = segments(graph)
    by_segment: dict[int, SegmentPlan] = {i: part for part in plan.segments for i in part.segments}
    if sorted(by_segment) != list(range(len(parts))):
        raise PlanError(f"the plan speaks of {len(by_segment)} segments, the model has {len(parts)}: make a new plan for this model")
    rules: dict[str, Rule | None] = {}
    strategies: dict[str, MeshStrategy] = {}
    for segment in parts:
        lines = by_segment[segment.index].ops
        if len(lines) != len(segment.nodes):
            raise PlanError(f"segment {segment.name}: the plan has {len(lines)} ops, the model {len(segment.nodes)}")
        for name, text in zip(segment.nodes, lines):
            node = graph.by_name[name]
            rules[name] = rule_of(node, [graph.spec(v) for v in node.inputs])
            strategies[name] = _strategy(graph, node, rules[name], OpLine.parse(text), mesh)
    stage_of = [-1] * len(parts)
    for number, stage in enumerate(plan.stages):
        stage_of[stage.first : stage.last] = [number] * (stage.last - stage.first)
    table = {p.name: p for p in plan.parameters}
    sources = {n.name: _source(graph, n, table, mesh) for n in graph.nodes if n.is_source}
    fsdp = frozenset(n.name for n in graph.of(PARAMETER) if parameter_plan(n.target, table).fsdp)
    recompute = tuple(by_segment[i].recompute for i in range(len(parts)))
    return Assignment(mesh, parts, tuple(stage_of), recompute, rules, strategies, sources, fsdp)


def _strategy(graph: Graph, node: Node, rule: Rule | None, line: OpLine, mesh: Mesh) -> MeshStrategy:
    if line.op != node.op:
        raise PlanError(f"the plan has {line.op} where the model has {node.op} ({node.module}, {node.source})")
    chosen = []
    for position, axis in enumerate(mesh.axes):
        inputs, outputs = line.on_axis(position)
        legal = axis_strategies(graph, node, rule, axis.size, (*inputs, *outputs))
        match = next((s for s in legal if s.inputs == inputs and s.outputs == outputs), None)
        if match is None:
            raise PlanError(
                f"no strategy {Strategy(inputs, outputs)} of {node.op} on axis {axis} ({node.module}, {node.source}); "
                f"there are: {'; '.join(map(str, legal))}"
            )
        chosen.append(match)
    return MeshStrategy(tuple(chosen))


def _source(graph: Graph, node: Node, table: Mapping[str, ParameterPlan], mesh: Mesh) -> Sharding:
    if node.op == PARAMETER:
        return parse(parameter_plan(node.target, table).sharding)
    batch_dim = dict(graph.batch_dims).get(node.target) if node.op == INPUT else None
    return tuple(S(batch_dim) if batch_dim is not None and axis.name in (MICRO, DATA) else R for axis in mesh.axes)


def parameter_plan(name: str, table: Mapping[str, ParameterPlan]) -> ParameterPlan:
    """The entry for a parameter: by its own name, or with ``*`` in the place of one or more indices."""
    if name in table:
        return table[name]
    parts = name.split(".")
    numeric = [i for i, part in enumerate(parts) if part.isdigit()]
    for count in range(1, len(numeric) + 1):
        for chosen in itertools.combinations(numeric, count):
            pattern = ".".join("*" if i in chosen else part for i, part in enumerate(parts))
            if pattern in table:
                return table[pattern]
    raise PlanError(f"the plan says nothing of parameter {name!r}; it knows {', '.join(sorted(table)[:5])}, ...")
