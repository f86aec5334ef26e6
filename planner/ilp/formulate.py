"""The planning problem as a mixed-integer linear program, over the clusters of ``contract``.

Variables
    x[v,s]   1 if cluster v runs strategy s. A cluster with one strategy has none.
    y[o,τ]   sum of x[v,s] over the s that make output o in type τ; z[i,σ]: the same for inputs wanted in σ. (A variable of its own,
             tied by one row, where the sum is long.)
    f[i,τ,σ] 1 if reader i gets its tensor made in τ and reads it in σ;  w[g,τ,σ]: some reader of group g does, so it is converted
    m[g,σ]   group g keeps a copy in type σ for the backward
    T[k], Tmax, E, W[k]   time per micro-batch of stage k, the largest, the end of the step, the largest peak of memory

Rows
    (1) sum_s x[v,s] = 1
    (2) sum_σ f[i,τ,σ] = y[o,τ],  sum_τ f[i,τ,σ] = z[i,σ]          for every reader i of tensor o; no f where there is no conversion
    (3) w[g,τ,σ] >= f[i,τ,σ]                                      for every reader i of group g; with one reader w is f
    (4) m[g,σ] >= z[i,σ] for every reader that saves it, >= y[o,σ] if the producer does   (- y[o,σ] where the one made is free)
    (5) T[k] >= X + C + share G;  T[k] >= X + G;  Tmax >= T[k]         X, C, G: affine in x and w, see ``planner.evaluate``
    (6) E >= optimizer[k] + sync[k], or with overlapping buckets >= optimizer + hidden sync and >= optimizer + sync - backward
    (7) W[k] >= each peak of stage k that could be the largest;  state[k] + in flight * saved[k] + W[k] <= limit
Objective
    time:    (m - 1) Tmax + sum_k T[k] + E, and TIE of it again for communication and for every collective: ties only
    memory:  the largest stage's memory (what would have to be there)

Rows (4) and (7) are left out where no choice can exceed the limit. All of it is scaled, so that the solver's tolerances are relative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.evaluate import gather_share, twice
from planner.ilp.contract import Contraction
from planner.ilp.problem import Array, Ints, Peak, Problem, Q, Reading, Saving, Tensor, Use
from planner.ilp.program import Affine, Program, total

TIE = 1e-5
"""Weight of communication beside time; and of one collective, in units of a millionth of the step."""
LONG = 4
STATE = ("parameters", "gradients", "state")


@dataclass
class Formulation:
    """``program``, and how its solution reads: ``choice(values)`` gives a strategy per cluster."""

    contraction: Contraction
    program: Program
    x: list[list[int]]
    scale: float
    """Seconds (or bytes) per unit of the objective."""
    ties: float
    """The objective may exceed the true one by this share at most: what the tie-breaks add."""

    def choice(self, values: Sequence[float]) -> tuple[int, ...]:
        return tuple(max(range(len(row)), key=lambda s: values[row[s]]) if row else 0 for row in self.x)


def formulate(contraction: Contraction, goal: str = "time") -> Formulation:
    """``goal``: "time" or "memory"."""
    return _Writer(contraction, goal).write()


@dataclass
class _Writer:
    contraction: Contraction
    goal: str
    program: Program = field(default_factory=Program)
    x: list[list[int]] = field(default_factory=list)
    sums: dict[tuple[str, Use, int], Affine] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        return self.contraction.problem

    def write(self) -> Formulation:
        problem, program = self.problem, self.program
        for cluster in self.contraction.clusters:  # (1)
            n = cluster.strategies
            row = [program.variable(integer=True) for _ in range(n)] if n > 1 else []
            self.x.append(row)
            if row:
                program.exactly(Affine(0.0, dict.fromkeys(row, 1.0)), 1.0)
        stages = range(problem.stages)
        self.totals = [[Affine(float(problem.fixed[q, k])) for k in stages] for q in range(problem.fixed.shape[0])]
        self.add_clusters()
        self.bounded = self.goal == "memory" or memory_bound(self.contraction) > problem.memory_limit
        for index, tensor in enumerate(problem.tensors):
            if index not in self.contraction.internal:
                self.add_tensor(index, tensor)
        if self.bounded:
            self.add_memory()
        scale = self.objective()
        return Formulation(self.contraction, program, self.x, scale, 2 * TIE)

    # ------------------------------------------------------------ x, y, z

    def of(self, cluster: int, values: Array | Ints) -> Affine:
        """``sum_s values[s] x[cluster, s]``."""
        row = self.x[cluster]
        if not row:
            return Affine(float(values[0]))
        return Affine(0.0, {v: float(c) for v, c in zip(row, values) if c})

    def indicator(self, kind: str, use: Use, type_: int) -> Affine:
        """y (kind "makes") or z (kind "wants")."""
        key = (kind, use, type_)
        if key not in self.sums:
            values = self.contraction.makes(use) if kind == "makes" else self.contraction.wants(use)
            found = self.of(self.contraction.place[use[0]][0], (values == type_).astype(float))
            if len(found.terms) > LONG:
                variable = self.program.variable()
                self.program.exactly(found.copy().plus(Affine(0.0, {variable: -1.0})), 0.0)
                found = Affine(0.0, {variable: 1.0})
            self.sums[key] = found
        return self.sums[key]

    def add_clusters(self) -> None:
        for c in range(len(self.contraction.clusters)):
            cost, count = self.contraction.cost(c), self.contraction.count(c)
            for q in np.flatnonzero(cost.any(0)):
                column = self.of(c, cost[:, q])
                for k in np.flatnonzero(count):
                    self.totals[q][k].plus(column, float(count[k]))

    # ------------------------------------------------------------ conversions

    def add_tensor(self, index: int, tensor: Tensor) -> None:
        made = sorted(set(self.contraction.makes(tensor.producer).tolist()))
        for reading in tensor.readings:
            self.add_conversions(tensor, reading, made)
            if self.bounded and reading.count.any():
                saved = self.saved(tensor, reading.saving)
                for k in np.flatnonzero(reading.count):
                    self.totals[Q["saved"]][k].plus(saved, float(reading.count[k]))
        for k in np.flatnonzero(tensor.crossings):
            for type_ in made:
                forward, backward = tensor.send[tensor.made.index(type_)]
                sent = self.indicator("makes", tensor.producer, type_)
                self.totals[Q["backward_comm"]][k].plus(sent, backward * float(tensor.crossings[k]))
                self.totals[Q["forward_comm"]][k + 1].plus(sent, forward * float(tensor.crossings[k]))
            self.totals[Q["conversions"]][k].constant += float(tensor.crossings[k])

    def add_conversions(self, tensor: Tensor, reading: Reading, made: Sequence[int]) -> None:
        """Rows (2) and (3): flows of every reader, and what they share."""
        flows: dict[tuple[int, int], list[Affine]] = {}
        for use in reading.readers:
            for pair, flow in self.flow(tensor, made, use).items():
                flows.setdefault(pair, []).append(flow)
        for (source, target), needs in flows.items():
            cost = tensor.convert[tensor.made.index(source), tensor.wanted.index(target)]
            if reading.again:
                cost = twice(cost)
            if source == target or not cost.any() or not reading.count.any():
                continue
            shared = needs[0]
            if len(needs) > 1:
                shared = Affine(0.0, {self.program.variable(): 1.0})
                for need in needs:
                    self.program.at_least(shared.copy().plus(need, -1.0), 0.0)  # (3)
            for q in np.flatnonzero(cost):
                for k in np.flatnonzero(reading.count):
                    self.totals[q][k].plus(shared, float(cost[q] * reading.count[k]))

    def flow(self, tensor: Tensor, made: Sequence[int], use: Use) -> dict[tuple[int, int], Affine]:
        """f[i,τ,σ] of one reader (2), for the conversions that exist."""
        wanted = sorted(set(self.contraction.wants(use).tolist()))
        y = {source: self.indicator("makes", tensor.producer, source) for source in made}
        z = {target: self.indicator("wants", use, target) for target in wanted}
        finite = np.isfinite(tensor.convert[:, :, 0])
        legal = [(s, t) for s in made for t in wanted if finite[tensor.made.index(s), tensor.wanted.index(t)]]
        why = f"{tensor.name} of {' '.join(self.problem.types[s] for s in made)} as {' '.join(self.problem.types[t] for t in wanted)}"
        if len(made) == 1 or len(wanted) == 1:
            free = z if len(made) == 1 else y
            for one, indicator in free.items():
                if not any(one == (t if len(made) == 1 else s) for s, t in legal):
                    self.program.at_most(indicator, 0.0, why)
            return {(s, t): free[t if len(made) == 1 else s] for s, t in legal}
        flows = {pair: Affine(0.0, {self.program.variable(): 1.0}) for pair in legal}
        for source in made:
            self.program.exactly(total(f for (s, _), f in flows.items() if s == source).plus(y[source], -1.0), 0.0, why)
        for target in wanted:
            self.program.exactly(total(f for (_, t), f in flows.items() if t == target).plus(z[target], -1.0), 0.0, why)
        return flows

    # ------------------------------------------------------------ memory

    def saved(self, tensor: Tensor, saving: Saving) -> Affine:
        """Bytes of the copies kept (4)."""
        types: dict[int, list[Affine]] = {}
        for use in saving.readers:
            for type_ in sorted(set(self.contraction.wants(use).tolist())):
                types.setdefault(type_, []).append(self.indicator("wants", use, type_))
        made = set(self.contraction.makes(tensor.producer).tolist())
        if saving.made and not saving.free:
            for type_ in sorted(made):
                types.setdefault(type_, []).append(self.indicator("makes", tensor.producer, type_))
        result = Affine()
        for type_, needs in types.items():
            there = self.indicator("makes", tensor.producer, type_) if saving.free and type_ in made else None
            if len(needs) == 1 and there is None:
                result.plus(needs[0], tensor.nbytes[type_])
                continue
            m = self.program.variable()
            for need in needs:
                row = Affine(0.0, {m: 1.0}).plus(need, -1.0)
                self.program.at_least(row.plus(there) if there else row, 0.0)
            result.add(m, tensor.nbytes[type_])
        return result

    def add_memory(self) -> None:
        problem = self.problem
        self.unit = memory_bound(self.contraction) if self.goal == "memory" else problem.memory_limit
        self.most = Affine(0.0, {self.program.variable(math.inf): 1.0}) if self.goal == "memory" else Affine(1.0)
        floors = [peak_least(self.contraction, peak) for peak in problem.peaks]
        for k in range(problem.stages):
            largest = Affine(0.0, {self.program.variable(math.inf): 1.0})
            here = [i for i, peak in enumerate(problem.peaks) if peak.stages[k]]
            floor = max((floors[i] for i in here), default=0.0)
            self.program.at_least(largest, floor / self.unit)
            for i in here:
                if peak_most(self.contraction, problem.peaks[i]) > floor:
                    self.program.at_least(largest.copy().plus(self.peak(problem.peaks[i]), -1 / self.unit), 0.0)
            use = largest.copy()
            for name in STATE:
                use.plus(self.totals[Q[name]][k], 1 / self.unit)
            use.plus(self.totals[Q["saved"]][k], problem.times.in_flight[k] / self.unit)
            self.program.at_least(self.most.copy().plus(use, -1.0), 0.0, f"memory of stage {k}")  # (7)

    def peak(self, peak: Peak) -> Affine:
        result = Affine()
        for op, values in peak.ops:
            result.plus(self.of(self.contraction.place[op][0], self.contraction.spread(op, values)))
        for index, saving in peak.saved:
            tensor = self.problem.tensors[index]
            if index in self.contraction.internal:
                made = self.contraction.makes(tensor.producer)
                if not saving.free:
                    place = self.contraction.place[tensor.producer[0]][0]
                    result.plus(self.of(place, np.array([tensor.nbytes[int(t)] for t in made])))
            else:
                result.plus(self.saved(tensor, saving))
        return result

    # ------------------------------------------------------------ objective

    def objective(self) -> float:
        program, problem = self.program, self.problem
        if self.goal == "memory":
            program.objective = self.most
            return self.unit
        scale = max(sum(row[k].constant for row in self.totals[: Q["conversions"]] for k in range(problem.stages)), self.magnitude()) / 100
        times, m = problem.times, problem.times.microbatches
        stage_times = [self.stage_time(k, scale) for k in range(problem.stages)]
        ends = [self.end(k, scale) for k in range(problem.stages)]
        result = total(stage_times)
        if problem.stages == 1:
            result = result.scaled(m)
            result.plus(self.largest(ends[0]))
        else:
            if m > 1:
                result.plus(self.largest([stage_times[k] for k in range(problem.stages)]), m - 1)
            result.plus(self.largest([row for rows in ends for row in rows]))
        result.plus(self.ties(scale, times.microbatches))
        program.objective = result
        return scale

    def magnitude(self) -> float:
        """About the seconds of a step: the dearest strategy of every cluster."""
        names = [Q[n] for n in ("forward", "backward", "forward_comm", "backward_comm")]
        costs = [self.contraction.cost(c)[:, names].sum(1).max() * self.contraction.count(c).max() for c in range(len(self.x))]
        return float(sum(costs)) * self.problem.times.microbatches or 1.0

    def largest(self, rows: Sequence[Affine]) -> Affine:
        """A variable above all of them; the only one itself."""
        if len(rows) == 1:
            return rows[0]
        top = Affine(0.0, {self.program.variable(math.inf): 1.0})
        for row in rows:
            self.program.at_least(top.copy().plus(row, -1.0), 0.0)
        return top

    def stage_time(self, k: int, scale: float) -> Affine:
        """(5)"""
        inline = total([self.totals[Q["forward_comm"]][k], self.totals[Q["backward_comm"]][k]])
        compute = total([self.totals[Q["forward"]][k], self.totals[Q["backward"]][k]])
        gather = self.totals[Q["gather"]][k]
        share = float(gather_share(self.problem.times)[k])
        busy = inline.copy().plus(compute).plus(gather, share)
        if not gather.terms or share >= 1:
            return busy.scaled(1 / scale)
        return self.largest([busy.scaled(1 / scale), inline.copy().plus(gather).scaled(1 / scale)])

    def end(self, k: int, scale: float) -> list[Affine]:
        """(6)"""
        optimizer, sync = self.totals[Q["optimizer"]][k], self.totals[Q["sync"]][k]
        if not self.problem.times.sync_overlaps:
            return [optimizer.copy().plus(sync).scaled(1 / scale)]
        hidden = 1 - 1 / self.problem.times.slowdown
        first = optimizer.copy().plus(sync, hidden)
        second = optimizer.copy().plus(sync).plus(self.totals[Q["backward"]][k], -1.0)
        return [first.scaled(1 / scale), second.scaled(1 / scale)]

    def ties(self, scale: float, microbatches: int) -> Affine:
        """Less communication, then fewer collectives, among plans that are equally fast."""
        names = ("forward_comm", "backward_comm", "gather")
        result = Affine()
        for k in range(self.problem.stages):
            for name in names:
                result.plus(self.totals[Q[name]][k], TIE * microbatches / scale / self.problem.stages)
            result.plus(self.totals[Q["sync"]][k], TIE / scale / self.problem.stages)
            result.plus(self.totals[Q["conversions"]][k], 1e-7 / self.problem.stages)
        return result


def memory_bound(contraction: Contraction) -> float:
    """No choice can need more bytes than this on any stage."""
    problem = contraction.problem
    rows = [Q[name] for name in STATE]
    in_flight = np.array(problem.times.in_flight, float)
    total_bytes = problem.fixed[rows].sum(0)
    for c in range(len(contraction.clusters)):
        cost = contraction.cost(c)
        total_bytes = total_bytes + cost[:, rows].sum(1).max() * contraction.count(c)
        total_bytes = total_bytes + cost[:, Q["saved"]].max() * contraction.count(c) * in_flight
    for index, tensor in enumerate(problem.tensors):
        largest = max(tensor.nbytes.values(), default=0.0)
        for reading in tensor.readings:
            copies = len(reading.saving.readers) + reading.saving.made
            if index not in contraction.internal and copies:
                total_bytes = total_bytes + copies * largest * reading.count * in_flight
    peak = max((peak_most(contraction, p) for p in problem.peaks), default=0.0)
    return float(np.max(total_bytes)) + peak


def peak_most(contraction: Contraction, peak: Peak) -> float:
    saved = sum((len(s.readers) + s.made) * max(contraction.problem.tensors[t].nbytes.values(), default=0.0) for t, s in peak.saved)
    return float(sum(contraction.spread(op, values).max() for op, values in peak.ops) + saved)


def peak_least(contraction: Contraction, peak: Peak) -> float:
    return float(sum(contraction.spread(op, values).min() for op, values in peak.ops))
