"""What is searched around the ILP: mesh shapes, micro-batch counts, schedules, recomputation; and a bound that needs no tables.

A bound for a candidate with N = data x tensor x micro-batches parts: no op can be cut into more than N parts, so::

    S = sum over ops of time(kind, FLOPs / N, bytes / N), forward and backward     at least, of one micro-batch through all stages
    step >= (m - 1) S / pipe + S
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cost_models import HardwareProfile
from planner.costs import READS_ROWS, Precision
from planner.errors import BatchError, InputError
from planner.graph import INPUT, Graph
from planner.mesh import Mesh, factorisations
from planner.sharding import splits_whole
from planner.strategies import Catalogue

SCHEDULES = ("1f1b", "gpipe")
RECOMPUTE = ("none", "selective", "full")
LAYOUT_KEYS = ("pipe", "data", "tensor", "microbatches", "schedule", "recompute", "zero")
MOST_MICROBATCHES = 8
"""Micro-batches per stage that are searched: the bubble is then below (pipe - 1) / (8 pipe)."""


@dataclass(frozen=True)
class Pins:
    """What the user forces. None: searched. ``zero``: 0 keeps every parameter whole over data, 3 has fully_shard store all of them;
    1 and 2 are stored like 3, the nearest that the runtime does."""

    pipe: int | None = None
    data: int | None = None
    tensor: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    zero: int | None = None

    @staticmethod
    def of(layout: Mapping[str, Any] | None, gpus: int) -> Pins:
        """Read ``layout=``. Raises InputError naming the key, the numbers and what is allowed."""
        layout = dict(layout or {})
        for key, value in layout.items():
            if key not in LAYOUT_KEYS:
                raise InputError(f"layout: unknown key {key!r}; there are {', '.join(LAYOUT_KEYS)}")
            _check(key, value)
        pins = Pins(**layout)
        sizes = {key: layout[key] for key in ("pipe", "data", "tensor") if layout.get(key) is not None}
        product = math.prod(sizes.values())
        shown = " x ".join(f"{key}={size}" for key, size in sizes.items())
        if len(sizes) == 3 and product != gpus:
            raise InputError(f"layout: {shown} is {product} GPUs, but gpus={gpus}")
        if gpus % product:
            raise InputError(f"layout: {shown} is {product} GPUs, which gpus={gpus} is no multiple of")
        return pins


def _check(key: str, value: Any) -> None:
    if value is None:
        return
    if key in ("schedule", "recompute"):
        allowed: tuple[Any, ...] = ("none", *SCHEDULES) if key == "schedule" else RECOMPUTE
        if value not in allowed:
            raise InputError(f"layout: {key}={value!r}; there are {', '.join(map(repr, allowed))}")
    elif isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"layout: {key}={value!r}, must be a whole number")
    elif key == "zero" and not 0 <= value <= 3:
        raise InputError(f"layout: zero={value}, must be 0 to 3")
    elif key != "zero" and value < 1:
        raise InputError(f"layout: {key}={value}, must be at least 1")


@dataclass(frozen=True)
class Candidate:
    mesh: Mesh
    schedule: str
    recompute: str = "none"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(pipe, data, tensor)."""
        return self.mesh.pipe, self.mesh.data, self.mesh.tensor

    def __str__(self) -> str:
        schedule = self.schedule if self.mesh.pipe > 1 else ""
        recompute = f"recompute={self.recompute}" if self.recompute != "none" else ""
        return " ".join(filter(None, (str(self.mesh), schedule, recompute)))


@dataclass(frozen=True)
class Batch:
    """The global batch: ``size`` that data ranks and micro-batches share (0: no input has a batch), and the input it was read from."""

    size: int
    name: str = ""
    dim: int = 0

    @staticmethod
    def of(graph: Graph) -> Batch:
        found = [Batch(n.outputs[0].shape[d], n.target, d) for n in graph.of(INPUT) for name, d in graph.batch_dims if name == n.target]
        if not found:
            return Batch(0)
        common = math.gcd(*(b.size for b in found))
        first = min(found, key=lambda b: (b.size != common, b.size))
        return Batch(common, first.name, first.dim)

    def error(self, what: str) -> BatchError:
        return BatchError(f"the batch of {self.size} (input {self.name!r}, dim {self.dim}) does not divide over {what}")

    def allows(self, data: int, microbatches: int, forced: bool) -> bool:
        """True if the batch can be cut so: evenly; or unevenly over data, if that was asked for and every rank gets something."""
        if self.size == 0:
            return microbatches == 1 and (data == 1 or forced)
        even = self.size % (data * microbatches) == 0
        return even or (forced and microbatches == 1 and splits_whole(self.size, data))


def candidates(graph: Graph, profile: HardwareProfile, gpus: int, pins: Pins) -> list[tuple[Candidate, bool]]:
    """Every candidate that the pins leave open, and whether it is the first to try of its mesh shape.

    Left out: those that only a lack of memory calls for (``relieved`` gives them), and tensor axes that cross nodes, unless pinned.
    Raises BatchError where the pinned sizes do not divide the batch.
    """
    batch = Batch.of(graph)
    found = []
    for pipe, data, tensor in factorisations(gpus):
        if any(pin not in (None, size) for pin, size in ((pins.pipe, pipe), (pins.data, data), (pins.tensor, tensor))):
            continue
        if tensor > profile.gpus_per_node and pins.tensor is None:
            continue
        counts = _microbatches(batch, pipe, data, pins)
        first = min(counts, key=lambda m: abs(math.log(m / (4 * pipe))), default=0)
        for m in counts:
            found.append((Candidate(Mesh(pipe, data, tensor, m), _schedule(pipe, pins), pins.recompute or "none"), m == first))
    if not found:
        raise _no_candidate(graph, batch, gpus, pins)
    return found


def _schedule(pipe: int, pins: Pins) -> str:
    return "none" if pipe == 1 else pins.schedule if pins.schedule in SCHEDULES else "1f1b"


def _microbatches(batch: Batch, pipe: int, data: int, pins: Pins) -> list[int]:
    forced = pins.data is not None
    if pins.microbatches is not None:
        return [pins.microbatches] if batch.allows(data, pins.microbatches, forced) else []
    if not batch.allows(data, 1, forced):
        return []
    if pipe == 1 or batch.size % data or batch.size == 0:
        return [1]
    found = divisors(batch.size // data, MOST_MICROBATCHES * pipe)
    # fewer micro-batches than stages leave stages idle: only where the batch allows no more
    return [m for m in found if m >= pipe] or found[-1:]


def divisors(size: int, most: int) -> list[int]:
    """Divisors up to ``most``; where there are many, powers of two and the largest."""
    found = [m for m in range(1, min(size, most) + 1) if size % m == 0]
    if len(found) > 6:
        found = [m for m in found if m & (m - 1) == 0 or m == found[-1]]
    return found


def _no_candidate(graph: Graph, batch: Batch, gpus: int, pins: Pins) -> Exception:
    parts = [f"{name}={value}" for name, value in (("data", pins.data), ("microbatches", pins.microbatches)) if value is not None]
    if batch.size == 0:
        shapes = ", ".join(f"{node.target!r} {list(node.outputs[0].shape)}" for node in graph.of(INPUT))
        return BatchError(
            f"no input has a batch of more than one row to cut into {' and '.join(parts)} (inputs: {shapes or 'no tensors'}); "
            "where there is one that the graph does not show, name its dim: batch_dims={'x': 0}"
        )
    what = f"{pins.data} data ranks" if pins.data else ""
    if pins.microbatches:
        what += (" and " if what else "") + f"{pins.microbatches} micro-batches"
    return batch.error(what or f"any data size that gpus={gpus} and the rest of the layout allow")


def relieved(candidate: Candidate, graph: Graph, pins: Pins, parts: float) -> list[Candidate]:
    """What to try where memory constrains a candidate: more micro-batches (one stage), recomputation.

    ``parts``: how many times smaller its activations must be at least.
    """
    mesh, batch, found = candidate.mesh, Batch.of(graph), []
    if mesh.pipe == 1 and pins.microbatches is None and batch.size:
        least = mesh.microbatches * max(parts, 1.0)
        every = divisors(batch.size // mesh.data, batch.size)
        larger = [m for m in every if m > mesh.microbatches and m >= least and batch.allows(mesh.data, m, False)]
        if larger:
            found.append(Candidate(Mesh(1, mesh.data, mesh.tensor, larger[0]), candidate.schedule, candidate.recompute))
    if pins.recompute is None and candidate.recompute == "none":
        found.append(Candidate(mesh, candidate.schedule, "full"))
    return found


# ---------------------------------------------------------------- bounds


@dataclass
class Bounds:
    """Lower bounds on the step time of candidates, from whole-op FLOPs and bytes."""

    catalogue: Catalogue
    profile: HardwareProfile
    precision: Precision
    rows: dict[tuple[str, str], list[tuple[float, float, float]]] = field(default_factory=dict)
    """(kind, dtype) -> (runs, FLOPs, bytes) of every kernel."""

    def __post_init__(self) -> None:
        fold = self.catalogue.fold
        alive = {node.name for node in fold.alive}
        for op in fold.ops:
            count = sum(name in alive for name in op.members)
            rule = self.catalogue.rules.get(op.index)
            if rule is None or rule.kind == "view" or not count:
                continue
            specs = self.catalogue.specs(op)
            floats = [s.dtype for s in (*op.node.outputs, *specs) if s.is_float]
            dtype = self.precision.dtype(floats[0]) if floats else "int64"
            ins = [s.numel * self.precision.itemsize(s.dtype) for s in specs]
            outs = [s.numel * self.precision.itemsize(s.dtype) for s in op.node.outputs]
            reads = sum(ins) + (min(0, outs[0] - ins[0]) if op.node.op.startswith(READS_ROWS) and ins else 0)
            kernels = self.rows.setdefault((rule.kind, dtype), [])
            kernels.append((count, rule.flops, reads + sum(outs)))
            grad_in, grad_out = self.catalogue.grad_in(op), self.catalogue.grad_out(op)
            if fold.training and any(grad_in) and any(grad_out):
                moved = sum(n for n, g in zip(ins, grad_in) if g) + sum(n for n, g in zip(outs, grad_out) if g)
                if rule.kind in ("matmul", "conv"):
                    factors = [i for term in rule.linear if len(term) > 1 for i in term] or list(range(len(ins)))
                    runs = max(1, sum(grad_in[i] for i in factors))
                    kernels.append((count * runs, rule.flops, moved / runs))
                else:
                    kernels.append((count, 2.5 * rule.flops, moved))

    def step_s(self, candidate: Candidate) -> float:
        mesh = candidate.mesh
        parts = mesh.data * mesh.tensor * mesh.microbatches
        whole = 0.0
        for (kind, dtype), kernels in self.rows.items():
            runs, flops, nbytes = np.array(kernels).T
            whole += float((runs * self.profile.compute_time_s(kind, dtype, flops / parts, nbytes / parts)).sum())
        return (mesh.microbatches - 1) * whole / mesh.pipe + whole
