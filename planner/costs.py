"""What one op, one conversion, one send costs on a mesh. All of one rank, the one at coordinate 0 of every axis: it holds the
largest parts.

    compute(op)     = time(kind, local FLOPs, local bytes) forward; backward: one matmul per gradient of a matmul-like op,
                      2.5 forwards for attention (it computes its scores again), bytes of gradients and saved tensors otherwise
    kernel(op)      = its collectives, divided over the other axes that split the op
    convert(t,τ→σ)  = the collectives of ``reshard.steps``, and the copies that they need
    send(t,τ)       = one message of the local part, and one back where it has a gradient

The axis of micro-batches only makes shapes smaller; nothing communicates along it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cost_models import Group, HardwareProfile
from planner.errors import ReshardError
from planner.graph import DTYPE_BYTES, Node, Spec
from planner.ilp.problem import QUANTITIES, Array, Q
from planner.mesh import Axis, Mesh
from planner.reshard import Step, steps
from planner.rules.base import MeshStrategy, Rule
from planner.sharding import Sharding

BUCKET_BYTES = 25 * 10**6
"""Gradients are all-reduced in buckets of this size."""

COMPUTE_DTYPE = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
READS_ROWS = ("aten.embedding.", "aten.embedding_bag.", "aten.index_select.", "aten.gather.", "aten.index.", "aten.take")
"""Ops that read of their first input only as much as they return."""


@dataclass(frozen=True)
class Precision:
    """How mixed precision changes what is computed and kept: float32 is computed and saved in ``compute``, where that is set."""

    name: str = "fp32"

    @property
    def compute(self) -> str | None:
        return COMPUTE_DTYPE.get(self.name)

    def dtype(self, dtype: str) -> str:
        return self.compute if self.compute and dtype == "float32" else dtype

    def itemsize(self, dtype: str) -> int:
        return DTYPE_BYTES.get(self.dtype(dtype), 4)


@dataclass(frozen=True)
class Pricer:
    """Prices of one mesh on one profile. ``training``: gradients flow."""

    profile: HardwareProfile
    mesh: Mesh
    precision: Precision
    training: bool
    _collectives: dict[tuple[str, int, int], float] = field(default_factory=dict, compare=False)
    _moves: dict[tuple[str, int], float] = field(default_factory=dict, compare=False)

    # ------------------------------------------------------------ the mesh

    @functools.cached_property
    def axes(self) -> tuple[Axis, ...]:
        return self.mesh.axes

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return self.mesh.sizes

    @functools.cached_property
    def groups(self) -> tuple[Group | None, ...]:
        """Per typed axis the group of ranks that its collectives run over; None on the axis of time."""
        return tuple(None if a.is_time else self.profile.group(a.size, self.mesh.stride(a.name)) for a in self.axes)

    @functools.cached_property
    def neighbours(self) -> Group:
        """A rank and the one that holds the same part of the next stage."""
        return self.profile.group(2, self.mesh.stride("pipe"))

    # ------------------------------------------------------------ elementary times

    def collective_s(self, name: str, nbytes: float, axis: int) -> float:
        """Seconds of a collective over a typed axis."""
        group = self.groups[axis]
        return 0.0 if group is None else self._collective(name, int(nbytes), group, axis)

    def send_s(self, nbytes: float) -> float:
        return self._collective("send", int(nbytes), self.neighbours, -1)

    def _collective(self, name: str, nbytes: int, group: Group, axis: int) -> float:
        key = (name, nbytes, axis)
        if key not in self._collectives:
            self._collectives[key] = float(self.profile.collective_time_s(name, nbytes, group))
        return self._collectives[key]

    def move_s(self, dtype: str, nbytes: float) -> float:
        """Seconds of a copy on the device that reads and writes so many bytes in all."""
        key = (dtype, int(nbytes))
        if key not in self._moves:
            self._moves[key] = float(self.profile.compute_time_s("memory", dtype, 0.0, key[1]))
        return self._moves[key]

    def bytes_of(self, spec: Spec, sharding: Sharding) -> float:
        """Bytes of the largest local part, in the precision that is computed in."""
        return largest_numel(spec, sharding, self.sizes) * self.precision.itemsize(spec.dtype)

    # ------------------------------------------------------------ conversions

    def convert(self, spec: Spec, source: Sharding, target: Sharding, grad: bool) -> Array | None:
        """Quantities of one conversion, None where there is none."""
        try:
            chain = steps(source, target, spec.shape, self.sizes, grad)
        except ReshardError:
            return None
        cost = np.zeros(len(QUANTITIES))
        for step in chain:
            self._add_step(cost, step, spec, grad and self.training)
        return cost

    def _add_step(self, cost: Array, step: Step, spec: Spec, grad: bool) -> None:
        n = self.sizes[step.axis]
        dtype = self.precision.dtype(spec.dtype)
        whole = math.prod(step.shape) * self.precision.itemsize(spec.dtype)
        if not self.axes[step.axis].is_time:
            for name, phase in zip(step.collectives, ("forward_comm", "backward_comm")):
                if name and (phase == "forward_comm" or grad):
                    cost[Q[phase]] += self.collective_s(name, whole / n if name == "all_to_all" else whole, step.axis)
                    cost[Q["conversions"]] += 1
        forward, backward = copies(step, whole, n)
        cost[Q["forward"]] += self.move_s(dtype, forward) if forward else 0.0
        cost[Q["backward"]] += self.move_s(dtype, backward) if backward and grad else 0.0

    # ------------------------------------------------------------ ops

    def op(
        self,
        node: Node,
        specs: Sequence[Spec],
        rule: Rule | None,
        strategies: Sequence[MeshStrategy],
        grad_in: Sequence[bool],
        grad_out: Sequence[bool],
    ) -> tuple[Array, Array]:
        """Quantities [strategies, quantities] of one run of an op, and the bytes [strategies] that it works on."""
        parts = LocalParts(self, specs, node.outputs, strategies)
        cost = np.zeros((len(strategies), len(QUANTITIES)))
        backward = self.training and any(grad_in) and any(grad_out)
        if rule is None or rule.kind != "view":
            flops = self._flops(rule, strategies)
            kind, dtype = rule.kind if rule else "memory", self._dtype(node, specs)
            reads = parts.inputs.sum(1)
            if node.op.startswith(READS_ROWS) and specs:
                reads += np.minimum(0.0, parts.outputs[:, 0] - parts.inputs[:, 0])
            cost[:, Q["forward"]] = self.profile.compute_time_s(kind, dtype, flops, reads + parts.outputs.sum(1))
            if backward:
                cost[:, Q["backward"]] = self._backward_s(rule, kind, dtype, flops, parts, grad_in, grad_out)
        for row, strategy in zip(cost, strategies):
            self._add_kernel(row, strategy, backward)
        if backward and rule is not None and rule.extra_saved_bytes_per_point:
            item = self.precision.itemsize(node.outputs[0].dtype)
            cost[:, Q["saved"]] = parts.outputs[:, 0] / item * rule.extra_saved_bytes_per_point
        return cost, parts.inputs.sum(1) + parts.outputs.sum(1)

    def _flops(self, rule: Rule | None, strategies: Sequence[MeshStrategy]) -> Array:
        if rule is None or rule.kind in ("memory", "view"):
            return np.zeros(len(strategies))
        whole = rule.flops
        return np.array([whole * self._share(rule, strategy) for strategy in strategies])

    def _share(self, rule: Rule, strategy: MeshStrategy) -> float:
        """The largest part of the op's points that a rank computes, as a share of all."""
        left: dict[str, int] = {}
        for one, n in zip(strategy.per_axis, self.sizes):
            if one.factor:
                left[one.factor] = -(-left.get(one.factor, rule.size[one.factor]) // n)
        return math.prod(part / rule.size[factor] for factor, part in left.items())

    def _dtype(self, node: Node, specs: Sequence[Spec]) -> str:
        floats = [spec.dtype for spec in (*node.outputs, *specs) if spec.is_float]
        return self.precision.dtype(floats[0]) if floats else "int64"

    def _backward_s(
        self, rule: Rule | None, kind: str, dtype: str, flops: Array, parts: LocalParts, grad_in: Sequence[bool], grad_out: Sequence[bool]
    ) -> Array:
        gradients = parts.outputs[:, np.array(grad_out, bool)].sum(1) + parts.inputs[:, np.array(grad_in, bool)].sum(1)
        nbytes = gradients + parts.saved(rule)
        if kind == "memory":
            return self.profile.compute_time_s(kind, dtype, 0.0, nbytes)
        if kind == "attention":
            return self.profile.compute_time_s(kind, dtype, 2.5 * flops, nbytes)
        assert rule is not None
        factors = [i for term in rule.linear if len(term) > 1 for i in term]
        runs = max(1, sum(grad_in[i] for i in factors or range(len(grad_in))))
        return runs * self.profile.compute_time_s(kind, dtype, flops, nbytes / runs)

    def _add_kernel(self, row: Array, strategy: MeshStrategy, backward: bool) -> None:
        for axis, one in enumerate(strategy.per_axis):
            others = math.prod(n for i, n in enumerate(self.sizes) if i != axis and strategy.per_axis[i].factor)
            for comm in one.comm:
                if comm.phase == "forward" or backward:
                    phase = "forward_comm" if comm.phase == "forward" else "backward_comm"
                    row[Q[phase]] += self.collective_s(comm.collective, comm.nbytes / others, axis)
                    row[Q["conversions"]] += 1


def largest_numel(spec: Spec, sharding: Sharding, sizes: Sequence[int]) -> int:
    """Elements of the part that rank 0 holds (``sharding.largest_shape`` in numbers only)."""
    dims = list(spec.shape)
    for type_, n in zip(sharding, sizes):
        if type_.is_split:
            dims[type_.dim] = -(-dims[type_.dim] // n)
    return math.prod(dims)


@dataclass(frozen=True)
class LocalParts:
    """Bytes of the local parts, ``inputs`` [strategies, inputs] and ``outputs`` [strategies, outputs]."""

    pricer: Pricer
    specs: Sequence[Spec]
    out_specs: Sequence[Spec]
    strategies: Sequence[MeshStrategy]

    @functools.cached_property
    def inputs(self) -> Array:
        return self._table(self.specs, [s.inputs for s in self.strategies])

    @functools.cached_property
    def outputs(self) -> Array:
        return self._table(self.out_specs, [s.outputs for s in self.strategies])

    def _table(self, specs: Sequence[Spec], shardings: Sequence[tuple[Sharding, ...]]) -> Array:
        known: dict[tuple[int, Sharding], float] = {}
        table = np.zeros((len(shardings), len(specs)))
        for row, chosen in zip(table, shardings):
            for i, spec in enumerate(specs):
                sharding = chosen[i] if chosen else ()
                if (i, sharding) not in known:
                    known[i, sharding] = self.pricer.bytes_of(spec, sharding)
                row[i] = known[i, sharding]
        return table

    def saved(self, rule: Rule | None) -> Array:
        saves_in, saves_out = saved_positions(rule, len(self.specs), len(self.out_specs))
        return self.inputs[:, np.array(saves_in, bool)].sum(1) + self.outputs[:, np.array(saves_out, bool)].sum(1)


def saved_positions(rule: Rule | None, inputs: int, outputs: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which inputs and outputs autograd keeps; all of them for an op without a rule."""
    if rule is None:
        return (True,) * inputs, (True,) * outputs
    return tuple(f"in{i}" in rule.saves for i in range(inputs)), tuple(f"out{i}" in rule.saves for i in range(outputs))


def copies(step: Step, whole: float, ranks: int) -> tuple[float, float]:
    """Bytes that a step copies on the device, forward and backward, apart from its collectives.

    Slices are views going forward, and zeros with the slice copied into them going back. Gathering or scattering along another dim
    than the first rearranges the whole tensor.
    """
    part = whole / ranks
    pair = (step.source.kind, step.target.kind)
    rearranged = any(t.is_split and (t.dim > 0 or t.groups > 1) for t in (step.source, step.target))
    gathered = 2 * whole if rearranged else 0.0
    return {
        ("R", "S"): (0.0, whole + 2 * part),
        ("I", "S"): (0.0, gathered),
        ("S", "R"): (gathered, gathered),
        ("S", "I"): (gathered, 0.0),
        ("P", "S"): (gathered, gathered),
        ("S", "S"): (4 * part, 4 * part),
        ("R", "P"): (whole, whole),
        ("R", "I"): (0.0, whole),
        ("I", "P"): (whole, 0.0),
    }.get(pair, (0.0, 0.0))
