"""When each stage runs which micro-batch: the predicted step as a list of events, without a device in sight.

    stage 0  F0 F1 F2 B0 F3 B1 ...          1F1B: a stage runs at most (stages - index) micro-batches ahead
    stage 1     F0 F1 B0 F2 ...

The plan knows the step's time, not each stage's, so all stages are drawn equally long: one forward and backward of a micro-batch takes
(step - what follows the last backward) / (micro-batches + stages - 1), divided between them as the predicted compute is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.plan import Plan

AFTER = ("optimizer", "gradient", "sync")
"""A kind of time whose name holds one of these comes after the last backward."""


@dataclass(frozen=True)
class Event:
    """``kind``: "F" forward, "B" backward, or the name of what follows the last backward. Times in seconds from the step's start."""

    stage: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        return f"{self.kind}{self.microbatch}" if self.kind in "FB" else self.kind


Order = list[tuple[str, int]]


def gpipe(stages: int, stage: int, microbatches: int) -> Order:
    """All forwards, then all backwards."""
    return [("F", m) for m in range(microbatches)] + [("B", m) for m in range(microbatches)]


def one_f_one_b(stages: int, stage: int, microbatches: int) -> Order:
    """Run ahead by (stages - stage - 1), then one forward and one backward in turn."""
    ahead = min(stages - stage - 1, microbatches)
    order = [("F", m) for m in range(ahead)]
    for m in range(microbatches - ahead):
        order += [("F", ahead + m), ("B", m)]
    return order + [("B", m) for m in range(microbatches - ahead, microbatches)]


ORDERS: dict[str, Callable[[int, int, int], Order]] = {
    "none": one_f_one_b,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": one_f_one_b,
    "zero-bubble": one_f_one_b,
}


def run(orders: list[Order], forward_s: float, backward_s: float) -> list[Event]:
    """Play the stages' orders: F waits for the same F one stage before, B for the same B one stage after."""
    done: dict[tuple[int, str, int], float] = {}
    clock = [0.0] * len(orders)
    queues = [list(order) for order in orders]
    events = []
    while any(queues):
        ready = [k for k, queue in enumerate(queues) if queue and _needs(k, *queue[0], len(orders)) <= done.keys()]
        if not ready:
            raise ValueError(f"the orders wait for each other: next are {[queue[0] for queue in queues if queue]}")
        for k in ready:
            kind, m = queues[k].pop(0)
            start = max([clock[k]] + [done[need] for need in _needs(k, kind, m, len(orders))])
            clock[k] = start + (forward_s if kind == "F" else backward_s)
            done[k, kind, m] = clock[k]
            events.append(Event(k, kind, m, start, clock[k]))
    return sorted(events, key=lambda e: (e.stage, e.start_s))


def _needs(stage: int, kind: str, microbatch: int, stages: int) -> set[tuple[int, str, int]]:
    if kind == "F":
        return {(stage - 1, "F", microbatch)} if stage else set()
    return {(stage, "F", microbatch)} | ({(stage + 1, "B", microbatch)} if stage + 1 < stages else set())


def _forward_share(plan: Plan) -> float:
    """Share of the forward in the compute time; a third where the plan does not tell them apart."""
    forward, backward = (plan.predicted.breakdown.get(kind, 0.0) for kind in ("forward", "backward"))
    return forward / (forward + backward) if forward and backward else 1 / 3


def timeline(plan: Plan) -> list[Event]:
    """The predicted step of a plan; the last event ends at ``plan.predicted.step_time_s``."""
    stages, microbatches = plan.mesh.pipe, plan.mesh.microbatches
    tail = {kind: t for kind, t in sorted(plan.predicted.breakdown.items()) if t > 0 and any(word in kind for word in AFTER)}
    slot = (plan.predicted.step_time_s - sum(tail.values())) / (microbatches + stages - 1)
    trained = plan.model.loss != "none" and plan.optimizer != "none"
    forward = slot * _forward_share(plan) if trained else slot
    orders = [ORDERS[plan.schedule](stages, k, microbatches) for k in range(stages)]
    if not trained:
        orders = [[item for item in order if item[0] == "F"] for order in orders]
    events = run(orders, forward, slot - forward)
    end = max(e.end_s for e in events)
    for kind in sorted(tail, key=lambda kind: ("optimizer" in kind, kind)):
        events += [Event(k, kind, 0, end, end + tail[kind]) for k in range(stages)]
        end += tail[kind]
    return events
