"""The planning problem of one mesh, micro-batch count and stage cut, as arrays. Knows no solver and no graph.

Sets
    v   ops (op classes; sources and sinks are ops too), with strategies s in S(v)
    t   tensors, each made by one op, read in groups g of (op, input position)
    k   stages
    q   quantities (below): what one instance of an op costs under a strategy, and what a conversion costs

A choice of one strategy per op fixes everything: a tensor is made in the type that its producer makes; each group converts it once
into every other type that one of its readers wants. Per stage k the quantities add up over ops and conversions::

    Q[q,k] = sum_v count[v,k] cost[v,s(v),q]  +  sum_g count[g,k] sum_(wanted types of g) convert[t(g),made,wanted,q]

and ``planner.evaluate`` turns them into time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

QUANTITIES = (
    "forward",  # seconds of compute per micro-batch
    "backward",
    "forward_comm",  # seconds of communication per micro-batch that compute waits for
    "backward_comm",
    "gather",  # seconds of gathering parameters and scattering gradients per micro-batch, beside compute
    "sync",  # seconds of gradient all-reduce per step, beside the last backward
    "optimizer",  # seconds per step
    "conversions",  # how many collectives: breaks ties
    "parameters",  # bytes
    "gradients",
    "state",  # bytes of optimizer state
    "saved",  # bytes kept for the backward, per micro-batch in flight
)
Q = {name: i for i, name in enumerate(QUANTITIES)}
SECONDS = tuple(Q[name] for name in ("forward", "backward", "forward_comm", "backward_comm", "gather", "sync", "optimizer"))

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Use = tuple[int, int]


@dataclass(frozen=True)
class Op:
    """``cost`` [strategies, quantities] of one instance; ``count`` [stages] instances. ``wants`` per input and ``makes`` per output:
    the type (an index into ``Problem.types``) under each strategy. ``saves_in``/``saves_out``: which of them autograd keeps."""

    name: str
    cost: Array
    count: Ints
    wants: tuple[Ints, ...]
    makes: tuple[Ints, ...]
    saves_in: tuple[bool, ...] = ()
    saves_out: tuple[bool, ...] = ()
    follows: str = ""
    """"view" or "pointwise" for an op on one tensor, which may take the sharding of a neighbour (see ``contract``)."""

    @property
    def strategies(self) -> int:
        return len(self.cost)


@dataclass(frozen=True)
class Saving:
    """Which copies of a group's tensor are kept for the backward: one in each type that one of ``readers`` wants, and the one made
    if ``made``. ``free``: the one made costs nothing (a parameter, an input: it is there anyway)."""

    readers: tuple[Use, ...] = ()
    made: bool = False
    free: bool = False


@dataclass(frozen=True)
class Reading:
    """A group: the readers of a tensor in one stage, which share its conversions. ``again``: converted again when recomputed."""

    readers: tuple[Use, ...]
    count: Ints
    saving: Saving = Saving()
    again: bool = False


@dataclass(frozen=True)
class Tensor:
    """``convert`` [types made, types wanted, quantities], inf where there is no conversion; rows and columns follow ``made`` and
    ``wanted`` (indices into ``Problem.types``). ``nbytes``: type -> bytes of the local part. ``send`` [types made, 2]: seconds to
    send it to the next stage, forward and backward; ``crossings`` [stages]: instances sent from stage k to k + 1."""

    name: str
    producer: Use
    made: tuple[int, ...]
    wanted: tuple[int, ...]
    convert: Array
    nbytes: dict[int, float]
    send: Array
    crossings: Ints
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True)
class Peak:
    """Bytes that are there only for a while: the largest peak of a stage counts. ``ops``: (op, bytes per strategy), summed.
    ``saved``: (tensor, saving) whose bytes are summed too: what a recomputed block keeps while it runs its backward."""

    name: str
    stages: tuple[bool, ...]
    ops: tuple[tuple[int, Array], ...]
    saved: tuple[tuple[int, Saving], ...] = ()


@dataclass(frozen=True)
class Times:
    """How quantities become a step: ``microbatches`` through ``stages``, the overlap of communication with compute."""

    microbatches: int = 1
    slowdown: float = 1.0
    """Compute runs this much slower while communication is in flight."""
    in_flight: tuple[int, ...] = (1,)
    """Micro-batches whose saved activations a stage holds at once."""
    units: tuple[int, ...] = (1,)
    """Gathered units per stage: the first gather of a micro-batch hides behind nothing."""
    sync_overlaps: bool = False
    """Gradients fill more than one bucket, so that all-reduces start before the backward ends."""


@dataclass(frozen=True)
class Problem:
    name: str
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    peaks: tuple[Peak, ...] = ()
    types: tuple[str, ...] = ()
    stages: int = 1
    times: Times = Times()
    memory_limit: float = float("inf")
    fixed: Array = field(default_factory=lambda: np.zeros((len(QUANTITIES), 1)))
    """[quantity, stage]: what no choice changes."""

    def without_memory_limit(self) -> Problem:
        return replace(self, memory_limit=float("inf"))


Choice = tuple[int, ...]
"""One strategy index per op."""
