"""Parameters: how one may be stored, and what a storage costs in bytes and seconds.

A parameter is stored with one type per ranked axis and used by ops in another or the same::

    used R     stored R        its gradient is a pending sum, all-reduced over the axis once per step
               stored by fully_shard (data axis): gathered for use, forward and backward, gradients scattered
               stored S(d) (tensor axis): gathered inline
    used I     stored I        the gradient is the same on every rank, nothing to do;  or S(d) on the tensor axis, gathered
    used S(d)  stored S(d)     nothing to do
    used P     stored I        (R without gradient): counted on one rank of the axis

Bytes of one parameter on one rank, n its local elements::

    parameters   n x its dtype, and a copy in the compute dtype under mixed precision
    gradients    n x its dtype                                   (trainable ones)
    state        n x the optimizer's bytes per element: adamw two float32, sgd none, sgd-momentum one
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.costs import BUCKET_BYTES, Pricer, largest_numel
from planner.errors import InputError
from planner.graph import DTYPE_BYTES, Spec
from planner.ilp.problem import QUANTITIES, Array, Q
from planner.mesh import DATA, MICRO, TENSOR
from planner.sharding import I, P, R, S, Sharding, Type, show, splits_evenly, splits_whole

FSDP_BUFFERS = 3
"""Whole copies of a gathered unit at once: the one in use, the next one on its way, gradients before they are scattered."""


@dataclass(frozen=True)
class Optimizer:
    """``states``: float32 tensors (float64 for float64 parameters) as large as the parameter. None: there is no backward at all."""

    name: str
    states: float | None

    @staticmethod
    def of(optimizer: str | int) -> Optimizer:
        """A name, or bytes of state per parameter element. Raises InputError."""
        if isinstance(optimizer, bool) or not isinstance(optimizer, (str, int)):
            raise InputError(f"optimizer={optimizer!r}: expected one of {', '.join(map(repr, STATES))} or bytes of state per parameter")
        if isinstance(optimizer, int):
            if optimizer < 0:
                raise InputError(f"optimizer={optimizer}: bytes of state per parameter, must be at least 0")
            return Optimizer(f"{optimizer} bytes per parameter", optimizer / 4)
        if optimizer not in STATES:
            raise InputError(f"optimizer={optimizer!r}: expected one of {', '.join(map(repr, STATES))} or bytes of state per parameter")
        return Optimizer(optimizer, STATES[optimizer])

    @property
    def trains(self) -> bool:
        return self.states is not None

    def state_bytes(self, dtype: str) -> float:
        """Bytes of state per element."""
        return (self.states or 0.0) * max(4, DTYPE_BYTES.get(dtype, 4))

    def traffic_bytes(self, dtype: str) -> float:
        """Bytes per element that a step reads and writes: parameter and states both ways, the gradient once."""
        return 3 * DTYPE_BYTES.get(dtype, 4) + 2 * self.state_bytes(dtype)


STATES: dict[str, float | None] = {"adamw": 2.0, "sgd": 0.0, "sgd-momentum": 1.0, "none": None}


@dataclass(frozen=True)
class Storage:
    """How a parameter is stored and how its ops use it."""

    stored: Sharding
    use: Sharding
    fsdp: bool = False

    def __str__(self) -> str:
        return f"{show(self.stored)}{' fsdp' if self.fsdp else ''} -> {show(self.use)}"


def storages(spec: Spec, uses: Iterable[Sharding], grad: bool, pricer: Pricer, zero: int | None) -> tuple[Storage, ...]:
    """Every storage of a parameter for every sharding that some op wants it in. ``zero``: 0 no fsdp, 1 to 3 fsdp wherever it can be."""
    found: dict[tuple[Sharding, Sharding, bool], Storage] = {}
    axes, sizes = pricer.axes, pricer.sizes
    for use in uses:
        per_axis = [_stored(axis.name, type_, spec, n, grad) for axis, type_, n in zip(axes, use, sizes)]
        for stored in itertools.product(*per_axis):
            if not _lines_up(spec, stored, sizes):
                continue
            for fsdp in _fsdp(spec, stored, use, grad, pricer, zero):
                found.setdefault((stored, use, fsdp), Storage(stored, use, fsdp))
    return tuple(found.values())


def _stored(axis: str, use: Type, spec: Spec, ranks: int, grad: bool) -> list[Type]:
    """Types that a parameter used as ``use`` may be stored with on one axis."""
    if axis == MICRO:
        return [R]
    if use.is_split:
        return [use]
    if use == P:
        return [I if grad else R]
    options = [use]
    if axis == TENSOR and spec.shape:
        dims = [d for d, size in enumerate(spec.shape) if splits_evenly(size, ranks)] or [
            d for d, size in enumerate(spec.shape) if splits_whole(size, ranks)
        ]
        options += [S(d) for d in dims[:1]]
    return options


def _lines_up(spec: Spec, stored: Sharding, sizes: tuple[int, ...]) -> bool:
    """False where two axes split one dim unevenly."""
    for dim in {t.dim for t in stored if t.is_split}:
        ranks = [n for t, n in zip(stored, sizes) if t.is_split and t.dim == dim]
        if len(ranks) > 1 and spec.shape[dim] % math.prod(ranks):
            return False
    return True


def _fsdp(spec: Spec, stored: Sharding, use: Sharding, grad: bool, pricer: Pricer, zero: int | None) -> tuple[bool, ...]:
    data = pricer.mesh.index(DATA)
    possible = grad and pricer.training and data is not None and bool(spec.shape) and stored[data] == R and use[data] == R
    if not possible or zero == 0:
        return (False,)
    return (False, True) if zero is None else (True,)


@dataclass(frozen=True)
class Unit:
    """What is gathered together: the fully_shard unit that a parameter is in. ``nbytes``: of all its parameters, whole."""

    nbytes: float


def storage_cost(
    storage: Storage, spec: Spec, trainable: bool, pricer: Pricer, optimizer: Optimizer, unit: Unit, total_bytes: float
) -> Array:
    """Quantities of one parameter. ``total_bytes``: of all trainable parameters, the most that one bucketed all-reduce can carry."""
    cost = np.zeros(len(QUANTITIES))
    item = DTYPE_BYTES.get(spec.dtype, 4)
    local = largest_numel(spec, storage.stored, pricer.sizes)
    held = -(-local // pricer.mesh.data) if storage.fsdp else local
    copy = pricer.precision.itemsize(spec.dtype) if pricer.precision.dtype(spec.dtype) != spec.dtype else 0
    cost[Q["parameters"]] = held * item + (0 if storage.fsdp else local * copy)
    inline = pricer.convert(spec, storage.stored, storage.use, trainable and pricer.training)
    if inline is not None:
        cost += inline
    if not (trainable and pricer.training and optimizer.trains):
        return cost
    cost[Q["gradients"]] = held * item
    cost[Q["state"]] = held * optimizer.state_bytes(spec.dtype)
    again = (pricer.mesh.microbatches - 1) * 3 * held * item
    cost[Q["optimizer"]] = float(pricer.profile.optimizer_time_s(held * optimizer.traffic_bytes(spec.dtype) + again))
    for position, axis in enumerate(pricer.axes):
        gathered = storage.fsdp and axis.name == DATA
        if storage.stored[position] == R and not axis.is_time and not gathered:
            cost[Q["sync"]] += local * item * rate(pricer, "all_reduce", min(BUCKET_BYTES, total_bytes), position)
            cost[Q["sync"]] += 2 * pricer.move_s(spec.dtype, 2 * local * item)  # into the bucket and out of it
        if gathered:
            sent = local * pricer.precision.itemsize(spec.dtype)
            cost[Q["gather"]] += sent * 2 * rate(pricer, "all_gather", unit.nbytes, position)
            cost[Q["gather"]] += local * item * rate(pricer, "reduce_scatter", unit.nbytes, position)
            cost[Q["forward"]] += pricer.move_s(spec.dtype, 2 * sent)  # out of the gathered buffer
            cost[Q["backward"]] += pricer.move_s(spec.dtype, 2 * sent) + pricer.move_s(spec.dtype, 2 * local * item)
    return cost


def rate(pricer: Pricer, collective: str, nbytes: float, axis: int) -> float:
    """Seconds per byte of a collective that carries ``nbytes`` at once: its latency is shared by what travels together."""
    return pricer.collective_s(collective, max(nbytes, 1.0), axis) / max(nbytes, 1.0)


def gathered_bytes(storage: Storage, spec: Spec, pricer: Pricer) -> float:
    """Bytes that a fully_shard parameter takes up while its unit is gathered."""
    if not storage.fsdp:
        return 0.0
    return FSDP_BUFFERS * largest_numel(spec, storage.stored, pricer.sizes) * pricer.precision.itemsize(spec.dtype)
