"""Fewer variables: ops that follow a neighbour are decided together with it.

* A view or unary pointwise op with one reader is joined to that reader: it makes what the reader wants, and conversions happen before
  it. (For a view that is the same communication. A pointwise op could also run on less and be gathered after: that is given up.)
* A view that is the only reader of its tensor is joined to the producer: conversions happen after it, with the same communication.
* A parameter with one storage for every type that its only reader wants is joined to the reader.

Joining views and pointwise ops is a restriction, not a proof: the bound of a solution speaks of the joined problem.
``test_what_joining_gives_up`` (tests/planner/test_ilp.py) measures what it costs against every op on its own (``trivial``).

A joined *cluster* has as strategies the combinations in which the tensors between its members fit. Of combinations that look alike from
outside, those that another beats in every quantity are dropped. ``Contraction.expand`` takes a choice of clusters back to one of ops.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.ilp.problem import Array, Choice, Ints, Problem, Q, Tensor, Use


@dataclass(frozen=True)
class Cluster:
    """``members``: ops; ``rows`` [strategies of the cluster, members]: the strategy of each."""

    members: tuple[int, ...]
    rows: Ints

    @property
    def strategies(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Contraction:
    problem: Problem
    clusters: tuple[Cluster, ...]
    internal: frozenset[int]
    """Tensors that lie within a cluster: never converted."""

    @functools.cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """Op -> (cluster, column of its rows)."""
        return {op: (c, column) for c, cluster in enumerate(self.clusters) for column, op in enumerate(cluster.members)}

    def spread(self, op: int, values: Array | Ints) -> Array | Ints:
        """What an op has per strategy, per strategy of its cluster."""
        cluster, column = self.place[op]
        return values[self.clusters[cluster].rows[:, column]]

    def wants(self, use: Use) -> Ints:
        return self.spread(use[0], self.problem.ops[use[0]].wants[use[1]]).astype(np.int64)

    def makes(self, use: Use) -> Ints:
        return self.spread(use[0], self.problem.ops[use[0]].makes[use[1]]).astype(np.int64)

    def cost(self, cluster: int) -> Array:
        """[strategies, quantities] of one instance of every member, and of the tensors between them."""
        return cluster_cost(self.problem, self.clusters[cluster], self.internal)

    def count(self, cluster: int) -> Ints:
        return self.problem.ops[self.clusters[cluster].members[0]].count

    def expand(self, choice: Sequence[int]) -> Choice:
        found = {op: int(cluster.rows[s, column]) for cluster, s in zip(self.clusters, choice) for column, op in enumerate(cluster.members)}
        return tuple(found[op] for op in range(len(self.problem.ops)))


def contract(problem: Problem) -> Contraction:
    """Join what can be joined, to a fixed point."""
    state = _State(problem)
    for index in range(len(problem.tensors)):
        state.join_to_reader(index)
    for index in range(len(problem.tensors)):
        state.join_to_producer(index)
    for index in range(len(problem.tensors)):
        state.join_parameter(index)
    clusters = [c for i, c in enumerate(state.clusters) if i == state.owner[c.members[0]]]
    internal = frozenset(state.internal)
    return Contraction(problem, tuple(prune(problem, c, internal) for c in clusters), internal)


def trivial(problem: Problem) -> Contraction:
    """Every op on its own."""
    clusters = tuple(Cluster((i,), np.arange(op.strategies)[:, None]) for i, op in enumerate(problem.ops))
    return Contraction(problem, clusters, frozenset())


class _State:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.clusters = [Cluster((i,), np.arange(op.strategies)[:, None]) for i, op in enumerate(problem.ops)]
        self.owner = list(range(len(problem.ops)))
        self.internal: set[int] = set()
        self.tensors_of: dict[Use, int] = {}
        """How many tensors an input position reads (its instances may read different ones)."""
        for tensor in problem.tensors:
            for use in {use for reading in tensor.readings for use in reading.readers}:
                self.tensors_of[use] = self.tensors_of.get(use, 0) + 1

    def only_reader(self, tensor: Tensor) -> Use | None:
        """The one position that reads the tensor, if producer and reader run equally often and nothing is sent."""
        if len(tensor.readings) != 1 or len(tensor.readings[0].readers) != 1 or tensor.crossings.any():
            return None
        (use,) = tensor.readings[0].readers
        counts = (self.problem.ops[tensor.producer[0]].count, self.problem.ops[use[0]].count, tensor.readings[0].count)
        alike = all((c == counts[0]).all() for c in counts) and bool(counts[0].any())
        return use if alike and self.tensors_of[use] == 1 else None

    def follows(self, op: int, kinds: tuple[str, ...]) -> bool:
        return all(self.problem.ops[i].follows in kinds for i in self.clusters[self.owner[op]].members)

    def join_to_reader(self, index: int) -> None:
        tensor = self.problem.tensors[index]
        use = self.only_reader(tensor)
        op = self.problem.ops[tensor.producer[0]]
        if use is None or len(op.makes) != 1 or not self.follows(tensor.producer[0], ("view", "pointwise")):
            return
        if set(self.column(use[0], self.wants(use))) <= set(self.column(tensor.producer[0], self.makes(tensor))):
            self.join(index, tensor, use)

    def join_to_producer(self, index: int) -> None:
        tensor = self.problem.tensors[index]
        use = self.only_reader(tensor)
        if use is None or index in self.internal or not self.follows(use[0], ("view",)):
            return
        if set(self.column(tensor.producer[0], self.makes(tensor))) <= set(self.column(use[0], self.wants(use))):
            self.join(index, tensor, use)

    def join_parameter(self, index: int) -> None:
        tensor = self.problem.tensors[index]
        use = self.only_reader(tensor)
        producer = self.problem.ops[tensor.producer[0]]
        if use is None or index in self.internal or producer.wants or producer.follows:
            return
        made = producer.makes[0].tolist()
        if len(set(made)) == len(made) and not np.isfinite(_off_diagonal(tensor)).any():
            self.join(index, tensor, use)

    def wants(self, use: Use) -> Ints:
        return self.problem.ops[use[0]].wants[use[1]]

    def makes(self, tensor: Tensor) -> Ints:
        return self.problem.ops[tensor.producer[0]].makes[tensor.producer[1]]

    def column(self, op: int, values: Ints) -> list[int]:
        """Values of an op over the strategies of its cluster."""
        cluster = self.clusters[self.owner[op]]
        return [int(v) for v in values[cluster.rows[:, cluster.members.index(op)]]]

    def join(self, index: int, tensor: Tensor, use: Use) -> None:
        a, b = self.owner[tensor.producer[0]], self.owner[use[0]]
        if a == b:
            return
        made = np.array(self.column(tensor.producer[0], self.makes(tensor)))
        wanted = np.array(self.column(use[0], self.wants(use)))
        left, right = np.nonzero(made[:, None] == wanted[None, :])
        if not len(left):
            return
        rows = np.concatenate([self.clusters[a].rows[left], self.clusters[b].rows[right]], axis=1)
        self.internal.add(index)
        joined = prune(self.problem, Cluster(self.clusters[a].members + self.clusters[b].members, rows), frozenset(self.internal))
        self.clusters[b] = joined
        for member in joined.members:
            self.owner[member] = b


def _off_diagonal(tensor: Tensor) -> Array:
    """Conversion costs between different types."""
    different = np.array(tensor.made)[:, None] != np.array(tensor.wanted)[None, :]
    return tensor.convert[different]


def cluster_cost(problem: Problem, cluster: Cluster, internal: frozenset[int]) -> Array:
    total = np.zeros((cluster.strategies, problem.fixed.shape[0]))
    column = {op: i for i, op in enumerate(cluster.members)}
    for op in cluster.members:
        total += problem.ops[op].cost[cluster.rows[:, column[op]]]
    for index in sorted(internal):
        tensor = problem.tensors[index]
        op, output = tensor.producer
        if op in column:
            saving = tensor.readings[0].saving
            if (saving.readers or saving.made) and not saving.free:
                made = problem.ops[op].makes[output][cluster.rows[:, column[op]]]
                total[:, Q["saved"]] += np.array([tensor.nbytes[int(type_)] for type_ in made])
    return total


def prune(problem: Problem, cluster: Cluster, internal: frozenset[int]) -> Cluster:
    """Drop combinations that another one with the same outside beats in every quantity."""
    if len(cluster.members) == 1 or cluster.strategies == 1:
        return cluster
    column = {op: i for i, op in enumerate(cluster.members)}
    hidden = {use for i in internal for reading in problem.tensors[i].readings for use in reading.readers}
    made = {problem.tensors[i].producer for i in internal}
    outside: list[Ints] = []
    for op in cluster.members:
        rows = cluster.rows[:, column[op]]
        outside += [w[rows] for i, w in enumerate(problem.ops[op].wants) if (op, i) not in hidden]
        outside += [m[rows] for i, m in enumerate(problem.ops[op].makes) if (op, i) not in made]
    cost = [cluster_cost(problem, cluster, internal)]
    for peak in problem.peaks:
        cost += [values[cluster.rows[:, column[op]]][:, None] for op, values in peak.ops if op in column]
        for t, _ in peak.saved:
            if t in internal and problem.tensors[t].producer[0] in column:
                cost.append(_peak_bytes(problem, cluster, column, t)[:, None])
    keys = np.stack(outside, axis=1) if outside else np.zeros((cluster.strategies, 0), np.int64)
    kept = _undominated(keys, np.concatenate(cost, axis=1))
    return Cluster(cluster.members, cluster.rows[kept])


def _peak_bytes(problem: Problem, cluster: Cluster, column: dict[int, int], tensor: int) -> Array:
    op, output = problem.tensors[tensor].producer
    made = problem.ops[op].makes[output][cluster.rows[:, column[op]]]
    return np.array([problem.tensors[tensor].nbytes[int(type_)] for type_ in made])


def _undominated(keys: Ints, cost: Array) -> Ints:
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, key in enumerate(map(tuple, keys.tolist())):
        groups.setdefault(key, []).append(i)
    kept: list[int] = []
    for members in groups.values():
        for i in members:
            better = [j for j in members if j != i and (cost[j] <= cost[i]).all() and ((cost[j] < cost[i]).any() or j < i)]
            if not better:
                kept.append(i)
    return np.array(sorted(kept), np.int64)
