"""From quantities to the time of a step."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from small_graphs import mlp, prepared, solved

from planner.evaluate import evaluate, step_breakdown
from planner.ilp.problem import QUANTITIES, Op, Problem, Q, Reading, Tensor, Times
from planner.mesh import Mesh


def totals(stages: int = 1, **quantities: float | list[float]) -> np.ndarray:
    table = np.zeros((len(QUANTITIES), stages))
    for name, value in quantities.items():
        table[Q[name]] = value
    return table


def step(table: np.ndarray, times: Times) -> float:
    return math.fsum(step_breakdown(table, times).values())


def test_one_stage_is_micro_batches_one_after_another() -> None:
    assert step(totals(forward=1.0, backward=2.0, forward_comm=0.5, optimizer=4.0), Times(microbatches=3)) == pytest.approx(3 * 3.5 + 4)


def test_pipeline_has_a_bubble() -> None:
    """p equal stages, m micro-batches: (m + p - 1) T."""
    times = Times(microbatches=5, in_flight=(3, 2, 1), units=(1, 1, 1))
    breakdown = step_breakdown(totals(3, forward=1.0, backward=1.0), times)
    assert math.fsum(breakdown.values()) == pytest.approx((5 + 3 - 1) * 2) and breakdown["bubble"] == pytest.approx(2 * 2)
    uneven = step(totals(2, forward=[1.0, 3.0]), Times(microbatches=4, in_flight=(2, 1), units=(1, 1)))
    assert uneven == pytest.approx(3 * 3 + 1 + 3)


def test_gathers_hide_behind_compute_but_for_the_first_and_the_slowdown() -> None:
    table = totals(forward=4.0, backward=6.0, gather=4.0)
    assert step(table, Times(units=(4,))) == pytest.approx(10 + 1)
    assert step(table, Times(units=(4,), slowdown=2.0)) == pytest.approx(10 + 3 * 0.5 + 1)
    assert step(table, Times(units=(1,))) == pytest.approx(10 + 4)
    assert step(totals(forward=1.0, gather=9.0), Times(units=(100,))) == pytest.approx(9.0), "gathers that take longer than compute"


def test_gradient_sums_overlap_the_backward_only_in_several_buckets() -> None:
    table = totals(forward=1.0, backward=3.0, sync=2.0)
    assert step(table, Times(sync_overlaps=False)) == pytest.approx(4 + 2)
    assert step(table, Times(sync_overlaps=True)) == pytest.approx(4)
    assert step(table, Times(sync_overlaps=True, slowdown=2.0)) == pytest.approx(4 + 1)
    assert step(totals(backward=3.0, sync=5.0), Times(sync_overlaps=True)) == pytest.approx(3 + 2)


@pytest.mark.parametrize("mesh", [Mesh(1, 4, 1), Mesh(1, 2, 2), Mesh(2, 1, 2, 4)], ids=str)
def test_breakdown_and_memory_add_up(mesh: Mesh) -> None:
    problem = prepared(mlp(4), mesh).tables.problem
    bill = evaluate(problem, solved(problem))
    assert bill.step_time_s == pytest.approx(math.fsum(bill.breakdown.values())) and len(bill.memory) == mesh.pipe
    assert bill.peaks == tuple(sum(kinds.values()) for kinds in bill.memory)
    assert bill.fits(max(bill.peaks)) and not bill.fits(max(bill.peaks) - 1)


def forked(count: int = 3) -> Problem:
    """One op makes A; two readers want A (at the price of 5) or B (at 1). Converting A to B costs 3, and ``count`` instances share it."""
    times, none = np.array([count]), np.zeros((1, len(QUANTITIES)))
    dear = np.zeros((2, len(QUANTITIES)))
    dear[:, Q["forward"]] = [5.0, 1.0]
    types = np.array([0, 1])
    convert = np.zeros((1, 2, len(QUANTITIES)))
    convert[0, 1, Q["forward_comm"]], convert[0, 1, Q["conversions"]] = 3.0, 1.0
    reading = Reading(((1, 0), (2, 0)), times)
    tensor = Tensor("t", (0, 0), (0,), (0, 1), convert, {0: 8.0, 1: 4.0}, np.zeros((1, 2)), np.zeros(1, int), (reading,))
    ops = (
        Op("maker", none, times, (), (np.array([0]),)),
        Op("left", dear, times, (types,), ()),
        Op("right", dear, times, (types,), ()),
    )
    return Problem("forked", ops, (tensor,), types=("A", "B"))


@pytest.mark.parametrize(("choice", "seconds", "conversions"), [((0, 0, 0), 30, 0), ((0, 1, 1), 15, 3), ((0, 0, 1), 27, 3)])
def test_readers_share_a_conversion(choice: tuple[int, ...], seconds: float, conversions: float) -> None:
    bill = evaluate(forked(), choice)
    assert bill.step_time_s == pytest.approx(seconds) and bill.conversions == conversions


def test_the_solver_shares_it_too() -> None:
    assert solved(forked()) == (0, 1, 1)


def test_no_conversion_no_plan() -> None:
    problem = forked()
    convert = problem.tensors[0].convert.copy()
    convert[0, 1] = math.inf
    cut_off = dataclasses.replace(problem, tensors=(dataclasses.replace(problem.tensors[0], convert=convert),))
    assert not evaluate(cut_off, (0, 1, 1)).legal and solved(cut_off) == (0, 0, 0)
