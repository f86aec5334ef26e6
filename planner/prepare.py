"""What the search needs of a candidate before its tables are laid over stages: weights of segments, floors, repeated blocks."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from planner.fold import Fold
from planner.graph import PARAMETER, Value
from planner.ilp.problem import Array, Problem, Q
from planner.stages import Weights, cut
from planner.tables import Builder

STATE = tuple(Q[name] for name in ("parameters", "gradients", "state"))
TIME = tuple(Q[name] for name in ("forward", "backward", "forward_comm", "backward_comm"))


def repeated_classes(fold: Fold) -> tuple[int, ...]:
    """Segment classes of which there are several: the blocks that recomputation is for."""
    count = Counter(segment.class_id for segment in fold.segments)
    return tuple(sorted(class_id for class_id, n in count.items() if n > 1))


def cut_stages(builder: Builder) -> tuple[int, ...]:
    """Stage of every segment, cut by the time and memory of the cheapest strategies."""
    pipe, m = builder.pricer.mesh.pipe, builder.pricer.mesh.microbatches
    if pipe == 1:
        return (0,) * len(builder.fold.segments)
    in_flight = [min(pipe - k, m) if builder.options.schedule == "1f1b" else m for k in range(pipe)]
    return cut(weigh(builder), pipe, in_flight, builder.options.memory_limit)


def weigh(builder: Builder) -> Weights:
    fold = builder.fold
    n = len(fold.segments)
    layout = fold.lay((0,) * n, 1)
    ops = builder.ops(layout)
    classes = max(segment.class_id for segment in fold.segments) + 1
    seconds, saved, state = (np.zeros(classes) for _ in range(3))
    for op, priced in zip(fold.ops, ops):
        if op.segment_class >= 0:
            share = priced.count[0] / max(1, len(op.members))
            seconds[op.segment_class] += share * priced.cost[:, TIME].sum(1).min()
        elif op.node.op == PARAMETER and fold.readers[fold.tensor_at[op.index, 0]]:
            home = min(fold.ops[reader].segment_class for reader, _ in fold.readers[fold.tensor_at[op.index, 0]])
            members = sum(segment.class_id == home for segment in fold.segments)
            if home >= 0:
                state[home] += len(op.members) / max(1, members) * priced.cost[:, STATE].sum(1).min()
    for t in fold.tensors:
        home = fold.ops[t.producer].segment_class
        read = any(ops[reader].saves_in and ops[reader].saves_in[i] for reader, i in fold.readers[t.index])
        if home >= 0 and (read or (ops[t.producer].saves_out and ops[t.producer].saves_out[t.output])):
            saved[home] += builder.smallest(t, ops[t.producer])
    ids = [segment.class_id for segment in fold.segments]
    return Weights(
        tuple(float(seconds[i]) for i in ids),
        tuple(float(state[i]) for i in ids),
        tuple(float(saved[i]) for i in ids),
        tuple(_borders(builder)),
    )


def _borders(builder: Builder) -> list[tuple[float, float]]:
    """Seconds to send what crosses each border between segments, with every value in its smallest part."""
    fold, n = builder.fold, len(builder.fold.segments)
    last_read: dict[Value, int] = {}
    for node in fold.alive:
        for value in node.inputs:
            if fold.travels(value.node):
                last_read[value] = max(last_read.get(value, 0), fold.segment_of[node.name])
    parts = builder.pricer.mesh.data * builder.pricer.mesh.microbatches
    borders = [[0.0, 0.0] for _ in range(n + 1)]
    for op in fold.ops:
        for name in op.members:
            for index, spec in enumerate(op.node.outputs if op.segment_class >= 0 else ()):
                value = Value(name, index)
                if value in last_read:
                    took = builder.pricer.send_s(spec.numel * builder.pricer.precision.itemsize(spec.dtype) / parts)
                    for border in range(fold.segment_of[name] + 1, last_read[value] + 1):
                        borders[border][0] += took
                        borders[border][1] += took * op.node.grad[index]
    return [(forward, backward) for forward, backward in borders]


def memory_floor(problem: Problem) -> float:
    """No choice needs fewer bytes on the fullest stage: everything in its smallest part."""
    return float(np.max(_state_floor(problem) + _saved_floor(problem)))


def parts_that_fit(problem: Problem) -> float:
    """How many times smaller the saved activations must be at least to fit; infinite where they never do."""
    room = problem.memory_limit - _state_floor(problem)
    if (room <= 0).any():
        return math.inf
    return float(np.max(_saved_floor(problem) / room))


def _state_floor(problem: Problem) -> Array:
    total = problem.fixed[list(STATE)].sum(0)
    for op in problem.ops:
        total = total + op.cost[:, STATE].sum(1).min() * op.count
    return np.asarray(total)


def _saved_floor(problem: Problem) -> Array:
    total = np.zeros(problem.stages)
    for op in problem.ops:
        total += op.cost[:, Q["saved"]].min() * op.count
    for tensor in problem.tensors:
        for reading in tensor.readings:
            if not reading.saving.free and (reading.saving.readers or reading.saving.made):
                total += min(tensor.nbytes.values()) * reading.count
    return total * np.array(problem.times.in_flight, float)
