"""Cutting segments into stages, against trying every cut."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from planner.errors import InfeasibleError
from planner.stages import Weights, cut


def weights(seed: int, n: int) -> Weights:
    rng = random.Random(seed)
    seconds = tuple(rng.choice([0.0, 1.0, 2.0, 5.0]) + rng.random() for _ in range(n))
    inner = [(rng.random(), rng.random()) for _ in range(n - 1)]
    return Weights(seconds, tuple(rng.random() for _ in range(n)), tuple(rng.random() for _ in range(n)), ((0.0, 0.0), *inner, (0.0, 0.0)))


def stages_of(borders: tuple[int, ...], n: int) -> tuple[int, ...]:
    return tuple(sum(border <= i for border in borders) for i in range(n))


def slowest(w: Weights, stages: tuple[int, ...]) -> float:
    times = []
    for k in range(max(stages) + 1):
        mine = [i for i, s in enumerate(stages) if s == k]
        times.append(sum(w.seconds[i] for i in mine) + w.borders[mine[0]][0] + w.borders[mine[-1] + 1][1])
    return max(times)


def fullest(w: Weights, stages: tuple[int, ...], in_flight: list[int]) -> list[float]:
    return [sum(w.state[i] + in_flight[k] * w.saved[i] for i, s in enumerate(stages) if s == k) for k in range(max(stages) + 1)]


@pytest.mark.parametrize("pipe", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_no_cut_is_better(seed: int, pipe: int) -> None:
    n, in_flight = 7, [pipe - k for k in range(pipe)]
    w = weights(seed, n)
    every = [stages_of(borders, n) for borders in itertools.combinations(range(1, n), pipe - 1)]
    found = cut(w, pipe, in_flight)
    assert slowest(w, found) == pytest.approx(min(slowest(w, s) for s in every))
    limit = sorted(max(fullest(w, s, in_flight)) for s in every)[2]
    light = cut(w, pipe, in_flight, limit + 1e-12)
    fitting = [s for s in every if max(fullest(w, s, in_flight)) <= limit + 1e-12]
    assert light in fitting and slowest(w, light) == pytest.approx(min(slowest(w, s) for s in fitting))


def test_where_no_cut_fits_the_heaviest_stage_is_as_light_as_can_be() -> None:
    w, in_flight = weights(3, 6), [2, 1]
    every = [stages_of(borders, 6) for borders in itertools.combinations(range(1, 6), 1)]
    found = cut(w, 2, in_flight, 1e-9)
    assert max(fullest(w, found, in_flight)) == pytest.approx(min(max(fullest(w, s, in_flight)) for s in every))


def test_equal_segments_are_shared_evenly() -> None:
    w = Weights((1.0,) * 12, (0.0,) * 12, (0.0,) * 12, ((0.0, 0.0),) * 13)
    found = cut(w, 4, [4, 3, 2, 1])
    assert [found.count(k) for k in range(4)] == [3, 3, 3, 3] and list(found) == sorted(found)


def test_too_few_segments() -> None:
    w = Weights((1.0,) * 2, (0.0,) * 2, (0.0,) * 2, ((0.0, 0.0),) * 3)
    with pytest.raises(InfeasibleError, match="3 stages needs at least 3 segments, the model has 2"):
        cut(w, 3, [1, 1, 1], math.inf)
