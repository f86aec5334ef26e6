"""The quotient of a graph: equal nodes of equal segments become one op class, so 100 layers have the variables of one.

Segments with equal ``class_id`` are equal in ops, arguments, shapes and inner wiring, and get one strategy list. So::

    op class      c = (segment class, position in the segment); a source by its first reader; a sink by what it delivers
    tensor class  t = (op class, output)
    group       t, C = the instances of t whose readers within one stage are the set C of (op class, input position)

A conversion of an instance is made once per stage and shared by all its readers there, so conversions are counted per group. Where
the readers differ from instance to instance (the first block reads the embedding, the others read a block) a position of an op
class is simply read in several groups.

What does not depend on a parameter is computed in every stage that needs it; the rest is computed in its own stage, and crosses
every border between there and its last reader, as the lowering does it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from planner.blocks import Segment, segments
from planner.graph import INPUT, PARAMETER, Graph, Node, Spec, Value, map_values, values_of

LOSS, BUFFER_SINK, OUTPUT_SINK = "sink.loss", "sink.buffer", "sink.output"
SINKS = (LOSS, BUFFER_SINK, OUTPUT_SINK)
Use = tuple[int, int]
"""(op class, input position)."""
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class OpClass:
    """Equal ops: ``node`` represents them, ``members`` are their names in execution order.
    ``segment_class`` is -1 for sources and sinks."""

    index: int
    node: Node
    members: tuple[str, ...]
    segment_class: int = -1
    position: int = 0

    @property
    def is_sink(self) -> bool:
        return self.node.op in SINKS


@dataclass(frozen=True)
class TensorClass:
    """Output ``output`` of op class ``producer``."""

    index: int
    producer: int
    output: int
    spec: Spec
    grad: bool


@dataclass(frozen=True)
class Group:
    """Instances of a tensor class with the same readers within a stage; ``count``: how many, per stage."""

    tensor: int
    readers: tuple[Use, ...]
    count: Counts


@dataclass(frozen=True)
class Layout:
    """The fold laid over stages: how many instances each stage runs, converts and sends."""

    pipe: int
    ops: Counts
    """[op class, stage]: instances that run there (for a source: that are held there)."""
    groups: tuple[Group, ...]
    crossings: Counts
    """[tensor class, stage]: instances sent over the border to the next stage."""
    shared: tuple[tuple[int, tuple[int, ...], int], ...]
    """Parameters held in several stages: (op class, the stages, how many instances)."""
    segments: Counts
    """[segment class, stage]: segments there."""


@dataclass(frozen=True)
class Fold:
    """A graph, its segments and their classes. ``training``: the loss is wanted, else the outputs."""

    graph: Graph
    training: bool
    segments: tuple[Segment, ...] = field(init=False)
    ops: tuple[OpClass, ...] = field(init=False)
    tensors: tuple[TensorClass, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", segments(self.graph))
        object.__setattr__(self, "ops", tuple(self._classes()))
        tensors = [(op.index, i, spec, op.node.grad[i]) for op in self.ops if not op.is_sink for i, spec in enumerate(op.node.outputs)]
        object.__setattr__(self, "tensors", tuple(TensorClass(n, *fields) for n, fields in enumerate(tensors)))

    # ------------------------------------------------------------ classes

    def _classes(self) -> list[OpClass]:
        found: dict[tuple[object, ...], list[str]] = {}
        place: dict[tuple[object, ...], tuple[int, int]] = {}
        for node in self.graph.nodes:
            if node.is_source:
                found.setdefault(self._source_key(node), []).append(node.name)
        for segment in self.segments:
            for position, name in enumerate(segment.nodes):
                key = ("op", segment.class_id, position)
                found.setdefault(key, []).append(name)
                place[key] = (segment.class_id, position)
        classes = [
            OpClass(i, self.graph.by_name[names[0]], tuple(names), *place.get(key, (-1, 0))) for i, (key, names) in enumerate(found.items())
        ]
        for node in self._sinks():
            classes.append(OpClass(len(classes), node, (node.name,)))
        return classes

    def _source_key(self, node: Node) -> tuple[object, ...]:
        uses = self.graph.users.get(Value(node.name), ())
        if node.op == INPUT or not uses:
            return ("source", node.name)
        reader, position = uses[0]
        segment = self.segment_of[reader.name]
        within = self.segments[segment].nodes.index(reader.name)
        return ("source", self.segments[segment].class_id, within, position, node.op, node.outputs[0], node.grad)

    def _sinks(self) -> list[Node]:
        if self.training and self.graph.loss is not None:
            wanted = [(LOSS, "loss", self.graph.loss)]
            wanted += [(BUFFER_SINK, name, value) for name, value in self.graph.mutations]
        else:
            wanted = [(OUTPUT_SINK, str(i), value) for i, value in enumerate(dict.fromkeys(values_of(self.graph.outputs)))]
        return [Node(f"{op}:{name}", op, args=(value,), target=name) for op, name, value in wanted]

    @functools.cached_property
    def segment_of(self) -> Mapping[str, int]:
        """Node name -> index of its segment."""
        return {name: segment.index for segment in self.segments for name in segment.nodes}

    @functools.cached_property
    def class_of(self) -> Mapping[str, int]:
        """Node (or sink) name -> op class."""
        return {name: op.index for op in self.ops for name in op.members}

    @functools.cached_property
    def tensor_at(self) -> Mapping[tuple[int, int], int]:
        """(op class, output) -> tensor class."""
        return {(t.producer, t.output): t.index for t in self.tensors}

    def tensor_of(self, value: Value) -> int:
        return self.tensor_at[self.class_of[value.node], value.index]

    @functools.cached_property
    def readers(self) -> Mapping[int, frozenset[Use]]:
        """Tensor class -> every (op class, position) that reads one of its instances, dead or alive."""
        found: dict[int, set[Use]] = {t.index: set() for t in self.tensors}
        for node in [*self.graph.nodes, *(op.node for op in self.ops if op.is_sink)]:
            for position, value in enumerate(node.inputs):
                found[self.tensor_of(value)].add((self.class_of[node.name], position))
        return {t: frozenset(uses) for t, uses in found.items()}

    def inside(self, op: int, position: int) -> bool:
        """True if an op class reads this input from its own segment."""
        node = self.ops[op].node
        made = node.inputs[position].node
        return node.name in self.segment_of and self.segment_of.get(made) == self.segment_of[node.name]

    # ------------------------------------------------------------ stages

    @functools.cached_property
    def alive(self) -> tuple[Node, ...]:
        """Nodes that the loss (or the outputs) and updated buffers depend on, in execution order."""
        needed = {value.node for op in self.ops if op.is_sink for value in op.node.inputs}
        found = []
        for node in reversed(self.graph.nodes):
            if node.name in needed:
                found.append(node)
                needed.update(value.node for value in node.inputs)
        return tuple(reversed(found))

    def travels(self, name: str) -> bool:
        """True for an activation: computed in its own stage only, and sent to others."""
        return name in self.segment_of and name in self.graph.parameter_dependent

    def lay(self, stage_of_segment: Sequence[int], pipe: int) -> Layout:
        """Count everything per stage. ``stage_of_segment``: per segment its stage, ascending."""
        ops = np.zeros((len(self.ops), pipe), np.int64)
        crossings = np.zeros((len(self.tensors), pipe), np.int64)
        groups: dict[tuple[int, tuple[Use, ...]], Counts] = {}
        held: dict[str, list[int]] = {}
        stage_of = {node.name: stage_of_segment[self.segment_of[node.name]] for node in self.alive if node.name in self.segment_of}
        own: list[list[Node]] = [[] for _ in range(pipe)]
        for node in self.alive:
            if self.travels(node.name):
                own[stage_of[node.name]].append(node)
        for stage in range(pipe):
            here = self._nodes_here(stage, own[stage], stage_of, pipe)
            for node in here:
                ops[self.class_of[node.name], stage] += 1
                if node.op == PARAMETER:
                    held.setdefault(node.name, []).append(stage)
            for key in self._reads(here):
                groups.setdefault(key, np.zeros(pipe, np.int64))[stage] += 1
        for value, last in self._last_stages(own, pipe).items():
            crossings[self.tensor_of(value), stage_of[value.node] : last] += 1
        for key in self._idle:
            groups.setdefault(key, np.zeros(pipe, np.int64))
        shared: dict[tuple[int, tuple[int, ...]], int] = {}
        for name, stages in held.items():
            if len(stages) > 1:
                held_by = (self.class_of[name], tuple(stages))
                shared[held_by] = shared.get(held_by, 0) + 1
        segments_count = np.zeros((max((s.class_id for s in self.segments), default=-1) + 1, pipe), np.int64)
        for segment, stage in zip(self.segments, stage_of_segment):
            segments_count[segment.class_id, stage] += 1
        ordered = tuple(Group(t, readers, count) for (t, readers), count in sorted(groups.items(), key=lambda item: item[0]))
        return Layout(pipe, ops, ordered, crossings, tuple((c, stages, n) for (c, stages), n in sorted(shared.items())), segments_count)

    def _nodes_here(self, stage: int, own: Sequence[Node], stage_of: Mapping[str, int], pipe: int) -> list[Node]:
        """The stage's own activations, whatever they need that does not travel, and its sinks."""
        here = [*own, *(op.node for op in self.ops if op.is_sink and self._delivers(op.node, stage, stage_of, pipe))]
        needed = {value.node for node in here for value in node.inputs}
        for node in self._stationary:
            if node.name in needed:
                here.append(node)
                needed.update(value.node for value in node.inputs)
        return here

    @functools.cached_property
    def _stationary(self) -> tuple[Node, ...]:
        """Live sources and ops that every stage computes for itself, last ones first."""
        return tuple(node for node in reversed(self.alive) if not self.travels(node.name))

    def _delivers(self, sink: Node, stage: int, stage_of: Mapping[str, int], pipe: int) -> bool:
        name = sink.inputs[0].node
        if sink.op == BUFFER_SINK and self.travels(name):
            return stage_of[name] == stage
        return sink.op == BUFFER_SINK or stage == pipe - 1

    def _reads(self, here: Iterable[Node]) -> list[tuple[int, tuple[Use, ...]]]:
        reads: dict[Value, list[Use]] = {}
        for node in here:
            for position, value in enumerate(node.inputs):
                reads.setdefault(value, []).append((self.class_of[node.name], position))
        return [(self.tensor_of(value), tuple(sorted(set(uses)))) for value, uses in reads.items()]

    @functools.cached_property
    def _idle(self) -> tuple[tuple[int, tuple[Use, ...]], ...]:
        """What only a forward pass reads: costs nothing in a step, but must have a legal conversion."""
        alive = {node.name for node in self.alive}
        return tuple(self._reads([node for node in self.graph.nodes if node.name not in alive]))

    def _last_stages(self, own: Sequence[Sequence[Node]], pipe: int) -> dict[Value, int]:
        """Activation -> the last stage that reads it."""
        found: dict[Value, int] = {}
        for stage, nodes in enumerate(own):
            found.update((value, stage) for node in nodes for value in node.inputs)
        for op in self.ops:
            if op.is_sink and op.node.op != BUFFER_SINK:
                found.update((value, pipe - 1) for value in op.node.inputs)
        return {value: stage for value, stage in found.items() if self.travels(value.node)}

    # ------------------------------------------------------------ the representatives alone

    @functools.cached_property
    def quotient(self) -> Graph:
        """The representatives as a graph of their own: what follows from op to op is the same for all equal blocks."""

        def represent(value: Value) -> Value:
            return Value(self.ops[self.class_of[value.node]].node.name, value.index)

        representatives = {op.node.name for op in self.ops}
        nodes = [
            replace(
                node, args=map_values(node.args, represent), kwargs=tuple((key, map_values(arg, represent)) for key, arg in node.kwargs)
            )
            for node in self.graph.nodes
            if node.name in representatives
        ]
        mutations = tuple((name, represent(value)) for name, value in self.graph.mutations)
        loss = represent(self.graph.loss) if self.graph.loss is not None else None
        return Graph(tuple(nodes), mutations=mutations, loss=loss, batch_dims=self.graph.batch_dims, frozen=self.graph.frozen)
