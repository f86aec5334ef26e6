"""Cut the segments of a model into consecutive pipeline stages: the slowest stage is as fast as can be.

    cost(i, j) = sum of seconds of segments i .. j-1  +  receiving at border i (forward)  +  receiving at border j (backward)

    best[k][j] = min over i < j of max(best[k-1][i], cost(i, j))           i: where stage k begins

over cuts whose stages hold their bytes within the limit, if there are any; otherwise the heaviest stage is made as light as can be, and
time breaks ties. Every border between two segments may be a cut: values that skip stages are threaded through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.errors import InfeasibleError


@dataclass(frozen=True)
class Weights:
    """Per segment: ``seconds`` of one micro-batch, ``state`` bytes held throughout, ``saved`` bytes per micro-batch in flight.
    ``borders`` [segments + 1, 2]: seconds of what crosses before segment i, forward and backward (0 at both ends)."""

    seconds: tuple[float, ...]
    state: tuple[float, ...]
    saved: tuple[float, ...]
    borders: tuple[tuple[float, float], ...]


def cut(weights: Weights, pipe: int, in_flight: Sequence[int], limit: float = math.inf) -> tuple[int, ...]:
    """Stage of every segment. ``in_flight``: micro-batches that each stage holds at once.

    Raises InfeasibleError where there are fewer segments than stages.
    """
    n = len(weights.seconds)
    if n < pipe:
        raise InfeasibleError(f"a pipeline of {pipe} stages needs at least {pipe} segments, the model has {n}; use pipe={n} or less")
    seconds, state, saved = (_prefix(column) for column in (weights.seconds, weights.state, weights.saved))

    def time(i: int, j: int, k: int) -> tuple[float, ...]:
        heavy = state[j] - state[i] + in_flight[k] * (saved[j] - saved[i])
        took = seconds[j] - seconds[i] + weights.borders[i][0] + weights.borders[j][1]
        return (math.inf, math.inf) if heavy > limit else (took, heavy)

    def bytes_first(i: int, j: int, k: int) -> tuple[float, ...]:
        heavy = state[j] - state[i] + in_flight[k] * (saved[j] - saved[i])
        return (heavy, seconds[j] - seconds[i])

    best = _minimax(n, pipe, time)
    if best is None:
        best = _minimax(n, pipe, bytes_first)
    assert best is not None
    return best


def _prefix(values: Sequence[float]) -> list[float]:
    total = [0.0]
    for value in values:
        total.append(total[-1] + value)
    return total


def _minimax(n: int, pipe: int, cost: Callable[[int, int, int], tuple[float, ...]]) -> tuple[int, ...] | None:
    """Stages that minimise the largest cost (compared element by element), None where every cut has an infinite one."""
    best: list[dict[int, tuple[tuple[float, ...], int]]] = [{} for _ in range(pipe)]
    for j in range(1, n + 1):
        best[0][j] = (cost(0, j, 0), 0)
    for k in range(1, pipe):
        for j in range(k + 1, n + 1):
            options = ((max(best[k - 1][i][0], cost(i, j, k)), i) for i in range(k, j) if i in best[k - 1])
            best[k][j] = min(options)
    if math.isinf(best[-1][n][0][0]):
        return None
    ends, j = [n], n
    for k in range(pipe - 1, 0, -1):
        j = best[k][j][1]
        ends.append(j)
    starts = [0, *sorted(ends)[:-1]]
    return tuple(max(k for k in range(pipe) if starts[k] <= i) for i in range(n))
