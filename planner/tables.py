"""From a fold, a mesh and a stage cut to the arrays of ``ilp.problem``: strategies and prices of everything."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.costs import BUCKET_BYTES, Pricer, saved_positions
from planner.fold import Fold, Group, Layout, OpClass, TensorClass
from planner.graph import DTYPE_BYTES, PARAMETER
from planner.ilp.problem import QUANTITIES, Array, Op, Peak, Problem, Q, Reading, Saving, Tensor, Times
from planner.memory import Optimizer, Storage, Unit, gathered_bytes, storage_cost, storages
from planner.rules.base import MeshStrategy, Strategy
from planner.sharding import Sharding, show
from planner.strategies import MATMUL_LIKE, Catalogue, sink_sharding, source_sharding

Label = MeshStrategy | Storage | Sharding
"""What a strategy index of an op class means: of an op, of a parameter, of another source or a sink."""


@dataclass(frozen=True)
class Options:
    """What is fixed for one problem besides the mesh. ``recompute``: segment class -> "selective" or "full", where it is not "none"."""

    optimizer: Optimizer
    schedule: str
    memory_limit: float
    recompute: Mapping[int, str] = field(default_factory=dict)
    zero: int | None = None


@dataclass(frozen=True)
class Tables:
    """A problem, and what its strategy indices mean. ``problem.ops`` are the op classes of the fold, in order."""

    problem: Problem
    labels: tuple[tuple[Label, ...], ...]


@dataclass
class Builder:
    """Builds the tables of one mesh; ``tables(layout)`` may be called for several cuts."""

    catalogue: Catalogue
    pricer: Pricer
    options: Options
    micro: Mapping[str, Strategy]
    data: Mapping[int, Strategy] = field(default_factory=dict)
    batch: Mapping[int, str] = field(default_factory=dict)
    _types: dict[Sharding, int] = field(default_factory=dict)
    _conversions: dict[tuple[object, ...], Array | None] = field(default_factory=dict)

    @property
    def fold(self) -> Fold:
        return self.catalogue.fold

    def tables(self, layout: Layout) -> Tables:
        ops = self.ops(layout)
        tensors = self._tensors(ops, layout)
        mesh = self.pricer.mesh
        fixed = np.zeros((len(QUANTITIES), layout.pipe))
        self._add_shared(fixed, layout)
        problem = Problem(
            name=f"{mesh} {self.options.schedule}",
            ops=ops,
            tensors=tensors,
            peaks=tuple(self._peaks(tensors, layout)),
            types=tuple(show(sharding) for sharding in self._types),
            stages=layout.pipe,
            times=self._times(layout),
            memory_limit=self.options.memory_limit,
            fixed=fixed,
        )
        return Tables(problem, self.labels)

    def ops(self, layout: Layout) -> tuple[Op, ...]:
        return tuple(self._op(op, layout) for op in self.fold.ops)

    def intern(self, sharding: Sharding) -> int:
        return self._types.setdefault(sharding, len(self._types))

    # ------------------------------------------------------------ labels

    @functools.cached_property
    def labels(self) -> tuple[tuple[Label, ...], ...]:
        """Per op class the meaning of its strategies; parameters last, since their storages follow from what ops want."""
        found: dict[int, tuple[Label, ...]] = {}
        for op in self.fold.ops:
            if op.node.op != PARAMETER:
                found[op.index] = self._labels_of(op)
        for op in self.fold.ops:
            if op.node.op == PARAMETER:
                found[op.index] = self._storages(op, found)
        return tuple(found[op.index] for op in self.fold.ops)

    def _labels_of(self, op: OpClass) -> tuple[Label, ...]:
        mesh = self.pricer.mesh
        if op.is_sink:
            return (sink_sharding(self.fold, op, mesh, self.micro),)
        if op.node.is_source:
            return (source_sharding(self.fold, op, mesh),)
        return tuple(self.catalogue.over(op, mesh, self.micro, self.data, self.batch))

    def _storages(self, op: OpClass, labels: Mapping[int, tuple[Label, ...]]) -> tuple[Storage, ...]:
        tensor = self.fold.tensor_at[op.index, 0]
        wanted = {_wanted(label, position) for reader, position in sorted(self.fold.readers[tensor]) for label in labels[reader]}
        whole = source_sharding(self.fold, op, self.pricer.mesh)
        return storages(op.node.outputs[0], sorted(wanted) or [whole], op.node.grad[0], self.pricer, self.options.zero)

    def _trains(self, op: OpClass) -> bool:
        """True if the parameter gets a gradient."""
        return self.fold.training and op.node.grad[0]

    # ------------------------------------------------------------ ops

    @functools.cached_property
    def _costs(self) -> tuple[tuple[Array, Array], ...]:
        """Per op class (quantities [strategies, quantities], working bytes [strategies]), before recomputation."""
        return tuple(self._cost(op) for op in self.fold.ops)

    def _cost(self, op: OpClass) -> tuple[Array, Array]:
        labels = self.labels[op.index]
        if op.node.op == PARAMETER:
            spec = op.node.outputs[0]
            rows = [
                storage_cost(s, spec, self._trains(op), self.pricer, self.options.optimizer, self._unit(op), self._trained_bytes)
                for s in labels
                if isinstance(s, Storage)
            ]
            return np.array(rows), np.zeros(len(rows))
        if op.is_sink or op.node.is_source:
            cost = np.zeros((1, len(QUANTITIES)))
            if op.node.is_source:
                (sharding,) = labels
                assert isinstance(sharding, tuple)
                cost[0, Q["parameters"]] = self.pricer.bytes_of(op.node.outputs[0], sharding)
            return cost, np.zeros(1)
        c = self.catalogue
        strategies = [s for s in labels if isinstance(s, MeshStrategy)]
        return self.pricer.op(op.node, c.specs(op), c.rules[op.index], strategies, c.grad_in(op), c.grad_out(op))

    def _op(self, op: OpClass, layout: Layout) -> Op:
        labels = self.labels[op.index]
        cost = self._costs[op.index][0].copy()
        mode = self.options.recompute.get(op.segment_class, "none")
        kind = self._kind(op)
        if mode == "full" or (mode == "selective" and kind not in MATMUL_LIKE):
            cost[:, Q["backward"]] += cost[:, Q["forward"]]
            cost[:, Q["backward_comm"]] += cost[:, Q["forward_comm"]]
            cost[:, Q["saved"]] = 0.0
        saves_in, saves_out = self._saves(op, mode)
        unary = len(op.node.inputs) == 1 and op.index in self.catalogue.rules
        return Op(
            name=op.node.name,
            cost=cost,
            count=layout.ops[op.index],
            wants=tuple(np.array([self.intern(_wanted(s, i)) for s in labels]) for i in range(len(op.node.inputs))),
            makes=tuple(np.array([self.intern(_made(s, i)) for s in labels]) for i in range(len(op.node.outputs))),
            saves_in=saves_in,
            saves_out=saves_out,
            follows={"view": "view", "memory": "pointwise"}.get(kind, "") if unary else "",
        )

    def _kind(self, op: OpClass) -> str:
        rule = self.catalogue.rules.get(op.index)
        return rule.kind if rule else "memory"

    def _saves(self, op: OpClass, mode: str) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        inputs, outputs = len(op.node.inputs), len(op.node.outputs)
        trains = self.fold.training and op.index in self.catalogue.rules and any(self.catalogue.grad_out(op))
        if not trains or mode == "full":
            return (False,) * inputs, (False,) * outputs
        if mode == "selective":
            return (False,) * inputs, (self._kind(op) in MATMUL_LIKE,) * outputs
        return saved_positions(self.catalogue.rules[op.index], inputs, outputs)

    def smallest(self, t: TensorClass, producer: Op) -> float:
        """Bytes of the smallest part that the producer can make of a tensor."""
        shardings = tuple(self._types)
        return min(self.pricer.bytes_of(t.spec, shardings[i]) for i in set(producer.makes[t.output].tolist()))

    # ------------------------------------------------------------ tensors

    def _tensors(self, ops: Sequence[Op], layout: Layout) -> tuple[Tensor, ...]:
        groups: dict[int, list[Group]] = {}
        for group in layout.groups:
            groups.setdefault(group.tensor, []).append(group)
        return tuple(self._tensor(t, ops, groups.get(t.index, []), layout) for t in self.fold.tensors)

    def _tensor(self, t: TensorClass, ops: Sequence[Op], groups: Sequence[Group], layout: Layout) -> Tensor:
        shardings = tuple(self._types)
        made = tuple(sorted(set(ops[t.producer].makes[t.output].tolist())))
        uses = {use for group in groups for use in group.readers}
        wanted = tuple(sorted({int(w) for reader, position in uses for w in ops[reader].wants[position]}))
        convert = np.full((len(made), len(wanted), len(QUANTITIES)), np.inf)
        parameter = self.fold.ops[t.producer].node.op == PARAMETER
        tied = len(uses) > 1
        for i, source in enumerate(made):
            for j, target in enumerate(wanted):
                if source == target:
                    convert[i, j] = 0.0
                elif not parameter or tied:
                    cost = self._conversion(t, shardings[source], shardings[target])
                    if cost is not None:
                        convert[i, j] = cost
        send = np.zeros((len(made), 2))
        if layout.crossings[t.index].any():
            seconds = np.array([self.pricer.send_s(self.pricer.bytes_of(t.spec, shardings[i])) for i in made])
            send[:, 0], send[:, 1] = seconds, seconds * t.grad
        return Tensor(
            name=f"{self.fold.ops[t.producer].node.name}:{t.output}",
            producer=(t.producer, t.output),
            made=made,
            wanted=wanted,
            convert=convert,
            nbytes={i: self.pricer.bytes_of(t.spec, shardings[i]) for i in {*made, *wanted}},
            send=send,
            crossings=layout.crossings[t.index],
            readings=tuple(self._reading(t, group, ops) for group in groups),
        )

    def _conversion(self, t: TensorClass, source: Sharding, target: Sharding) -> Array | None:
        key = (t.spec, t.grad, source, target)
        if key not in self._conversions:
            self._conversions[key] = self.pricer.convert(t.spec, source, target, t.grad)
        return self._conversions[key]

    def _reading(self, t: TensorClass, group: Group, ops: Sequence[Op]) -> Reading:
        recompute = self.options.recompute
        again = bool(group.readers) and recompute.get(self._segment_class(group.readers[0][0]), "none") != "none"
        saving = self._saving(t, group.readers, ops)
        return Reading(group.readers, group.count, saving, again)

    def _saving(self, t: TensorClass, readers: Sequence[tuple[int, int]], ops: Sequence[Op]) -> Saving:
        producer = self.fold.ops[t.producer]
        savers = tuple((op, i) for op, i in readers if ops[op].saves_in and ops[op].saves_in[i])
        outer = [op for op, i in readers if self.options.recompute.get(self._segment_class(op)) and not self.fold.inside(op, i)]
        made = bool(ops[t.producer].saves_out and ops[t.producer].saves_out[t.output]) or (bool(outer) and not producer.node.is_source)
        return Saving(savers, made, free=producer.node.is_source)

    def _segment_class(self, op: int) -> int:
        return self.fold.ops[op].segment_class

    # ------------------------------------------------------------ parameters together

    @functools.cached_property
    def _trained_bytes(self) -> float:
        """Bytes of all trainable parameters that one rank may hold at most."""
        mesh = self.pricer.mesh
        total = sum(len(op.members) * op.node.outputs[0].nbytes for op in self.fold.ops if op.node.op == PARAMETER and self._trains(op))
        return total / (mesh.pipe * mesh.tensor)

    @functools.cached_property
    def _unit_bytes(self) -> Mapping[int, float]:
        """Segment class -> bytes of the trainable parameters that its ops read."""
        found: dict[int, float] = {}
        for op in self.fold.ops:
            if op.node.op == PARAMETER and self._trains(op):
                spec, segment = op.node.outputs[0], self._home(op)
                found[segment] = found.get(segment, 0.0) + spec.numel * DTYPE_BYTES.get(spec.dtype, 4) / self.pricer.mesh.tensor
        return found

    def _home(self, op: OpClass) -> int:
        """Segment class of a parameter's first reader, -1 where nothing reads it."""
        readers = self.fold.readers[self.fold.tensor_at[op.index, 0]]
        return min((self._segment_class(reader) for reader, _ in readers), default=-1)

    def _unit(self, op: OpClass) -> Unit:
        return Unit(self._unit_bytes.get(self._home(op), 0.0))

    def _add_shared(self, fixed: Array, layout: Layout) -> None:
        """Gradients of a parameter that several stages hold are summed over them, once per step."""
        for index, stages, count in layout.shared:
            op = self.fold.ops[index]
            if self._trains(op):
                nbytes = op.node.outputs[0].nbytes / self.pricer.mesh.tensor
                group = self.pricer.profile.group(len(stages), self.pricer.mesh.stride("pipe"))
                seconds = float(self.pricer.profile.collective_time_s("all_reduce", nbytes, group))
                fixed[Q["sync"], list(stages)] += count * seconds

    # ------------------------------------------------------------ peaks and times

    def _peaks(self, tensors: Sequence[Tensor], layout: Layout) -> list[Peak]:
        found = []
        for op in self.fold.ops:
            work = self._costs[op.index][1]
            if work.any() and layout.ops[op.index].any():
                found.append(Peak(op.node.name, tuple(layout.ops[op.index] > 0), ((op.index, work),)))
        homes: dict[int, list[tuple[int, Array]]] = {}
        for op in self.fold.ops:
            if op.node.op == PARAMETER:
                labels = self.labels[op.index]
                nbytes = np.array([gathered_bytes(s, op.node.outputs[0], self.pricer) for s in labels if isinstance(s, Storage)])
                if nbytes.any():
                    homes.setdefault(self._home(op), []).append((op.index, nbytes))
        for home, members in sorted(homes.items()):
            stages = layout.segments[home] > 0 if home >= 0 else np.ones(layout.pipe, bool)
            found.append(Peak(f"gathered parameters of segment class {home}", tuple(map(bool, stages)), tuple(members)))
        found += [self._recomputed(segment, tensors, layout) for segment in sorted(self.options.recompute)]
        return found

    def _recomputed(self, segment: int, tensors: Sequence[Tensor], layout: Layout) -> Peak:
        """What one recomputed segment keeps while its backward runs."""
        extra = [(op.index, self._costs[op.index][0][:, Q["saved"]]) for op in self.fold.ops if op.segment_class == segment]
        saved: dict[tuple[int, Saving], None] = {}
        for tensor, t in zip(tensors, self.fold.tensors):
            for reading in tensor.readings:
                inside = tuple((op, i) for op, i in reading.readers if self._segment_class(op) == segment)
                savers = tuple((op, i) for op, i in inside if self._saves(self.fold.ops[op], "none")[0][i])
                own = self.fold.ops[t.producer].segment_class == segment
                made = own and self._saves(self.fold.ops[t.producer], "none")[1][t.output]
                if savers or made:
                    saved[t.index, Saving(savers, made, free=self.fold.ops[t.producer].node.is_source)] = None
        return Peak(
            f"recomputed segment class {segment}",
            tuple(bool(n) for n in layout.segments[segment]),
            tuple((i, s) for i, s in extra if s.any()),
            tuple(saved),
        )

    def _times(self, layout: Layout) -> Times:
        mesh, m = self.pricer.mesh, self.pricer.mesh.microbatches
        in_flight = [min(mesh.pipe - k, m) if self.options.schedule == "1f1b" else m for k in range(mesh.pipe)]
        held: list[set[int]] = [set() for _ in range(mesh.pipe)]
        for op in self.fold.ops:
            if op.node.op == PARAMETER:
                for k in np.flatnonzero(layout.ops[op.index]):
                    held[k].add(self._home(op))
        units = [max(1, sum(int(layout.segments[c, k]) for c in held[k] if c >= 0)) for k in range(mesh.pipe)]
        return Times(
            microbatches=m,
            slowdown=self.pricer.profile.overlap_slowdown,
            in_flight=tuple(in_flight if mesh.pipe > 1 else [1]),
            units=tuple(units),
            sync_overlaps=self._trained_bytes > BUCKET_BYTES,
        )


def _wanted(label: Label, position: int) -> Sharding:
    if isinstance(label, MeshStrategy):
        return label.inputs[position] if label.per_axis else ()
    assert isinstance(label, tuple)
    return label


def _made(label: Label, output: int) -> Sharding:
    if isinstance(label, MeshStrategy):
        return label.outputs[output] if label.per_axis else ()
    return label.use if isinstance(label, Storage) else label
