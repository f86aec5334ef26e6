"""The solver against trying everything, the size of problems, and what PuLP must not get away with."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from small_graphs import mlp, prepared, random_graph, thinned

from planner.blocks import segments
from planner.errors import InputError
from planner.evaluate import evaluate, least
from planner.ilp.brute import brute
from planner.ilp.contract import Contraction, contract, trivial
from planner.ilp.formulate import TIE, formulate
from planner.ilp.problem import Problem, Q
from planner.ilp.program import Affine, Program
from planner.ilp.solve_pulp import solve, solver_names
from planner.mesh import Mesh

MESHES = [Mesh(1, 2, 1), Mesh(1, 1, 2), Mesh(1, 1, 3), Mesh(1, 2, 2), Mesh(1, 2, 1, 2), Mesh(2, 2, 1, 2), Mesh(2, 1, 2, 2)]
PER_MESH = 30
CLOSE = 5 * TIE


def optimum(contraction: Contraction, goal: str = "time") -> float:
    """What the solver finds, priced by ``evaluate``; infinite where it finds that there is nothing."""
    formulation = formulate(contraction, goal)
    solution = solve(formulation.program, 30.0, gap=0.0)
    if solution.status == "infeasible":
        return math.inf
    assert solution.values is not None and solution.status == "optimal"
    bill = evaluate(contraction.problem, contraction.expand(formulation.choice(solution.values)))
    assert bill.legal
    if goal == "memory":
        return float(max(bill.peaks))
    assert bill.fits(contraction.problem.memory_limit * (1 + 1e-6))
    # the program's own objective is the bill, up to the tie-breaks
    assert solution.objective * formulation.scale == pytest.approx(bill.step_time_s, rel=CLOSE)
    assert solution.bound * formulation.scale / (1 + formulation.ties) <= bill.step_time_s * (1 + 1e-9)
    return bill.step_time_s


def seeds(mesh: Mesh, count: int) -> list[int]:
    """Seeds of random graphs with a segment for every stage."""
    fitting = (seed for seed in itertools.count() if len(segments(random_graph(seed))) >= mesh.pipe)
    return list(itertools.islice(fitting, count))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_solver_agrees_with_trying_everything(mesh: Mesh) -> None:
    bound = 0
    for seed in seeds(mesh, PER_MESH):
        problem = thinned(prepared(random_graph(seed), mesh).tables.problem, seed, 150)
        found = brute(problem)
        fastest = math.inf if found is None else found[1].step_time_s
        assert optimum(trivial(problem)) == pytest.approx(fastest, rel=CLOSE), f"seed {seed}"
        if found is None or seed % 2:
            continue
        assert least(problem) <= fastest
        smallest = brute(problem, "memory")
        assert smallest is not None
        low, high = max(smallest[1].peaks), max(found[1].peaks)
        limited = dataclasses.replace(problem, memory_limit=low + random.Random(seed).random() * (high - low))
        limited_found = brute(limited)
        assert limited_found is not None
        bound += limited_found[0] != found[0]
        assert optimum(trivial(limited)) == pytest.approx(limited_found[1].step_time_s, rel=CLOSE), f"seed {seed} with a limit"
        assert optimum(trivial(problem), "memory") == pytest.approx(low, rel=1e-5, abs=2), f"seed {seed} for memory"
    assert bound or mesh.pipe > 1, "no memory limit made a difference: the limits test nothing"


def without_copies(problem: Problem) -> Problem:
    tensors = []
    for tensor in problem.tensors:
        convert = tensor.convert.copy()
        legal = np.isfinite(convert[..., :1])
        convert[..., [Q["forward"], Q["backward"]]] = np.where(legal, 0.0, np.inf)
        tensors.append(dataclasses.replace(tensor, convert=convert))
    return dataclasses.replace(problem, tensors=tuple(tensors))


@pytest.mark.parametrize("mesh", [Mesh(1, 2, 1), Mesh(1, 1, 2), Mesh(2, 1, 2, 2)], ids=str)
def test_joining_views_loses_nothing_but_copies(mesh: Mesh) -> None:
    """Gathering along the first dim needs no copy, so a conversion before or after a view may differ by one. By nothing else."""
    joined = 0
    for seed in seeds(mesh, 20):
        problem = without_copies(prepared(random_graph(seed), mesh).tables.problem)
        views = dataclasses.replace(
            problem, ops=tuple(dataclasses.replace(op, follows="view" if op.follows == "view" else "") for op in problem.ops)
        )
        contraction = contract(views)
        joined += len(problem.ops) - len(contraction.clusters)
        assert optimum(contraction) == pytest.approx(optimum(trivial(problem)), rel=CLOSE), f"seed {seed}"
    assert joined > 10


def test_what_joining_gives_up() -> None:
    """Joining restricts the problem, and never to something better. What it gives up on 60 toys, where one copy is a tenth of a step:
    18 % at most, and all but 1.3 % of that is copies. (On the models of tests/models.py it was 0.03 % at most.)"""
    for seed in range(60):
        problem = prepared(random_graph(seed), Mesh(1, 1, 2)).tables.problem
        exact, joined = optimum(trivial(problem)), optimum(contract(problem))
        assert exact * (1 - CLOSE) <= joined <= exact * 1.2, f"seed {seed}"
        bare = without_copies(problem)
        assert optimum(contract(bare)) <= optimum(trivial(bare)) * 1.02, f"seed {seed} without copies"


@pytest.mark.parametrize("mesh", [Mesh(1, 4, 1), Mesh(1, 2, 2), Mesh(2, 1, 2, 4)], ids=str)
def test_a_hundred_layers_have_the_variables_of_four(mesh: Mesh) -> None:
    sizes = []
    for layers in (4, 100):
        formulation = formulate(contract(prepared(mlp(layers), mesh).tables.problem))
        sizes.append(sum(map(len, formulation.x)))
    assert sizes[0] == sizes[1] > 0


def test_same_problem_same_choice() -> None:
    choices = []
    for _ in range(2):
        contraction = contract(prepared(mlp(3), Mesh(1, 2, 2)).tables.problem)
        formulation = formulate(contraction)
        solution = solve(formulation.program, 30.0)
        assert solution.values is not None
        choices.append(contraction.expand(formulation.choice(solution.values)))
    assert choices[0] == choices[1]


def test_expand_gives_every_op_its_strategy() -> None:
    problem = prepared(mlp(2), Mesh(1, 1, 2)).tables.problem
    contraction = contract(problem)
    assert len(contraction.clusters) < len(problem.ops)
    for cluster in range(len(contraction.clusters)):
        for s in range(contraction.clusters[cluster].strategies):
            choice = [0] * len(contraction.clusters)
            choice[cluster] = s
            expanded = contraction.expand(choice)
            chosen = contraction.clusters[cluster]
            assert all(expanded[op] == chosen.rows[s, i] for i, op in enumerate(chosen.members))


def test_brute_refuses_what_would_take_for_ever() -> None:
    with pytest.raises(InputError, match="too many to try"):
        brute(prepared(mlp(2), Mesh(1, 2, 2)).tables.problem)


# ---------------------------------------------------------------- the solver itself


def knapsack(items: int, seed: int = 0) -> Program:
    """Hard enough that no solver ends it in the blink of an eye."""
    rng, program = np.random.default_rng(seed), Program()
    variables = [program.variable(integer=True) for _ in range(items)]
    program.objective = Affine(0.0, {v: -float(c) for v, c in zip(variables, rng.integers(90, 110, items))})
    for _ in range(12):
        weights = rng.integers(90, 110, items)
        program.at_most(Affine(0.0, {v: float(w) for v, w in zip(variables, weights)}), float(weights.sum() / 2 + 0.5))
    return program


def test_highs_is_the_first_choice() -> None:
    assert solver_names()[0] == "HiGHS"


@pytest.mark.parametrize("name", solver_names())
def test_solvers_agree_on_known_answers(name: str) -> None:
    program = Program()
    a, b = program.variable(upper=math.inf, integer=True), program.variable(upper=math.inf)
    program.objective = Affine(7.0, {a: 3.0, b: 1.0})
    program.at_least(Affine(0.0, {a: 2.0, b: 1.0}), 4.0)
    program.at_most(Affine(0.0, {b: 1.0}), 1.5)
    solution = solve(program, 10.0, gap=0.0, solver=name)
    assert solution.status == "optimal" and solution.values == pytest.approx((2.0, 0.0))
    assert solution.objective == pytest.approx(13.0) and solution.bound <= solution.objective + 1e-9
    program.at_most(Affine(0.0, {a: 1.0}), 1.0)
    infeasible = solve(program, 10.0, solver=name)
    assert infeasible.status == "infeasible" and infeasible.values is None


def test_running_out_of_time_is_not_called_optimal() -> None:
    solution = solve(knapsack(400), time_limit=0.2, gap=0.0)
    assert solution.status in ("feasible", "unknown")
    if solution.values is None:
        assert solution.objective == math.inf
    else:
        assert solution.bound < solution.objective


def test_a_row_that_cannot_hold_is_infeasible_without_a_solver() -> None:
    program = Program()
    program.at_least(Affine(1.0), 2.0, "too little")
    assert program.infeasible == "too little" and solve(program).status == "infeasible"
