"""Price any choice of strategies without a solver: what the plan predicts, and what confirms every incumbent.

Per stage k, from the quantities of ``ilp.problem`` (C compute, X communication that compute waits for, G gathers, u units, s slowdown)::

    T[k]  = X + max(C + G ((1 - 1/u)(1 - 1/s) + 1/u),  G)          one micro-batch: all gathers but the first run beside compute,
                                                                    which they slow down
    E[k]  = optimizer + sync                                        gradients that fit into one bucket are summed after the backward;
            optimizer + max(sync (1 - 1/s), sync - backward)        more buckets start during the last backward
    step  = (m - 1) max_k T[k]  +  sum_k T[k]  +  max_k E[k]         1F1B and GPipe alike: the bubble is sum T - max T

    memory[k] = parameters + gradients + state + saved * micro-batches in flight + the largest peak
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.ilp.problem import Array, Choice, Problem, Q, Reading, Saving, Tensor, Times

MEMORY = ("parameters", "gradients", "optimizer", "activations", "transient")


@dataclass(frozen=True)
class Bill:
    """``step_time_s`` is infinite where a conversion does not exist. ``memory`` [stage]: bytes by kind."""

    step_time_s: float
    breakdown: dict[str, float]
    memory: tuple[dict[str, int], ...]
    communication_s: float
    """Seconds of communication on the busiest stage, hidden or not."""
    conversions: float

    @property
    def peaks(self) -> tuple[int, ...]:
        return tuple(sum(kinds.values()) for kinds in self.memory)

    @property
    def legal(self) -> bool:
        return math.isfinite(self.step_time_s)

    def fits(self, limit: float) -> bool:
        return self.legal and max(self.peaks, default=0) <= limit


def evaluate(problem: Problem, choice: Choice) -> Bill:
    """The bill of one strategy per op."""
    totals = quantities(problem, choice)
    if not np.isfinite(totals).all():
        return Bill(math.inf, {}, (), math.inf, math.inf)
    breakdown = step_breakdown(totals, problem.times)
    memory = tuple(_memory(problem, choice, totals, k) for k in range(problem.stages))
    communication = totals[Q["forward_comm"]] + totals[Q["backward_comm"]] + totals[Q["gather"]]
    return Bill(
        step_time_s=math.fsum(breakdown.values()),
        breakdown=breakdown,
        memory=memory,
        communication_s=float((communication * problem.times.microbatches + totals[Q["sync"]]).max()),
        conversions=float(totals[Q["conversions"]].sum()),
    )


def quantities(problem: Problem, choice: Choice) -> Array:
    """[quantity, stage] of everything together."""
    totals = problem.fixed.copy()
    for op, s in zip(problem.ops, choice):
        totals += np.outer(op.cost[s], op.count)
    for tensor in problem.tensors:
        made = type_made(problem, tensor, choice)
        for reading in tensor.readings:
            for target in sorted({int(problem.ops[op].wants[i][choice[op]]) for op, i in reading.readers}):
                cost = conversion(tensor, reading, made, target)
                if not np.isfinite(cost).all():
                    return np.full_like(totals, np.inf)
                totals += np.outer(cost, reading.count)
            totals[Q["saved"]] += _saved(problem, tensor, reading.saving, choice) * reading.count
        if tensor.crossings.any():
            forward, backward = tensor.send[tensor.made.index(made)]
            totals[Q["backward_comm"]] += backward * tensor.crossings
            totals[Q["forward_comm"], 1:] += forward * tensor.crossings[:-1]
            totals[Q["conversions"]] += tensor.crossings
    return totals


def type_made(problem: Problem, tensor: Tensor, choice: Choice) -> int:
    op, output = tensor.producer
    return int(problem.ops[op].makes[output][choice[op]])


def conversion(tensor: Tensor, reading: Reading, made: int, target: int) -> Array:
    """Quantities of converting one instance; what is recomputed converts a second time in the backward. All inf where illegal."""
    cost = tensor.convert[tensor.made.index(made), tensor.wanted.index(target)]
    if not np.isfinite(cost).all():
        return np.full_like(cost, np.inf)
    return twice(cost) if reading.again else cost


def twice(cost: Array) -> Array:
    cost = cost.copy()
    cost[..., Q["backward"]] += cost[..., Q["forward"]]
    cost[..., Q["backward_comm"]] += cost[..., Q["forward_comm"]]
    return cost


def kept_types(problem: Problem, tensor: Tensor, saving: Saving, choice: Choice) -> set[int]:
    made = type_made(problem, tensor, choice)
    kept = {int(problem.ops[op].wants[i][choice[op]]) for op, i in saving.readers}
    if saving.made:
        kept.add(made)
    return kept - {made} if saving.free else kept


def _saved(problem: Problem, tensor: Tensor, saving: Saving, choice: Choice) -> float:
    return sum(tensor.nbytes[type_] for type_ in sorted(kept_types(problem, tensor, saving, choice)))


def step_breakdown(totals: Array, times: Times) -> dict[str, float]:
    """Seconds by kind of one step; they sum to the step's time."""
    m, hidden = times.microbatches, 1 - 1 / times.slowdown
    forward, backward, gather = (totals[Q[name]] for name in ("forward", "backward", "gather"))
    inline = totals[Q["forward_comm"]] + totals[Q["backward_comm"]]
    exposed = np.maximum(gather * gather_share(times), gather - forward - backward)
    per_micro = inline + forward + backward + exposed
    sync = totals[Q["sync"]]
    if times.sync_overlaps:
        sync = np.maximum(sync * hidden, sync - backward)
    ends = totals[Q["optimizer"]] + sync
    slowest, last = int(per_micro.argmax()), int(ends.argmax())
    return {
        "forward": float(m * forward[slowest]),
        "backward": float(m * backward[slowest]),
        "communication": float(m * inline[slowest]),
        "gather": float(m * exposed[slowest]),
        "bubble": float(per_micro.sum() - per_micro[slowest]),
        "gradient sync": float(sync[last]),
        "optimizer": float(totals[Q["optimizer"], last]),
    }


def gather_share(times: Times) -> Array:
    """Per stage the share of the gathers that the step waits for even where compute hides them: the first unit, and the slowdown."""
    first = 1 / np.array(times.units, float)
    return (1 - first) * (1 - 1 / times.slowdown) + first


def _memory(problem: Problem, choice: Choice, totals: Array, stage: int) -> dict[str, int]:
    peak = max((_peak(problem, choice, i) for i, p in enumerate(problem.peaks) if p.stages[stage]), default=0.0)
    amounts = (
        totals[Q["parameters"], stage],
        totals[Q["gradients"], stage],
        totals[Q["state"], stage],
        totals[Q["saved"], stage] * problem.times.in_flight[stage],
        peak,
    )
    return {kind: math.ceil(amount - 1e-6) for kind, amount in zip(MEMORY, amounts)}


def _peak(problem: Problem, choice: Choice, index: int) -> float:
    peak = problem.peaks[index]
    nbytes = sum(float(values[choice[op]]) for op, values in peak.ops)
    return nbytes + sum(_saved(problem, problem.tensors[t], saving, choice) for t, saving in peak.saved)


def least(problem: Problem) -> float:
    """A bound that costs nothing: every op at its cheapest, no conversions. Seconds."""
    totals = np.zeros_like(problem.fixed)
    seconds = [Q[name] for name in ("forward", "backward", "forward_comm", "backward_comm")]
    for op in problem.ops:
        best = op.cost[:, seconds].sum(1).min() if op.strategies else math.inf
        totals[Q["forward"]] += best * op.count
        totals[Q["optimizer"]] += op.cost[:, Q["optimizer"]].min() * op.count
    return math.fsum(step_breakdown(totals, problem.times).values())
