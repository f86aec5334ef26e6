"""Solve a ``Program`` with PuLP: HiGHS where highspy is installed, CBC otherwise. The one importer of pulp.

Traps of PuLP 3.3.2, each answered here:

* At the time limit it reports "Optimal": status, bound and incumbent are read from HiGHS itself.
* Without an incumbent the variables still hold numbers: they are used only where HiGHS says that its primal solution is feasible.
* ``HiGHS(warmStart=True)`` is ignored: no warm starts.
* The banner prints even with ``msg=False``: the process's standard output leads nowhere while HiGHS runs.
* CBC tells no bound through PuLP: a solution that CBC calls optimal is its own bound, any other has the bound 0.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pulp

from planner.errors import ShardwrightError
from planner.ilp.program import Program

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True)
class Solution:
    """``values`` per variable, None without an incumbent. ``bound``: no solution is better, in the program's units."""

    status: Status
    values: tuple[float, ...] | None
    objective: float
    bound: float
    seconds: float
    solver: str


def solver_names() -> list[str]:
    """Installed solvers that are used, best first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 drops PULP_CBC_CMD; this project keeps below 4
        return [name for name in ("HiGHS", "PULP_CBC_CMD") if pulp.getSolver(name, msg=False).available()]


@functools.cache
def _first_solver() -> str | None:
    return next(iter(solver_names()), None)


def solve(program: Program, time_limit: float = 60.0, gap: float = 1e-4, solver: str | None = None) -> Solution:
    """Minimise. ``gap``: relative, at which a solution counts as optimal. Raises ShardwrightError where no solver is installed.

    The same program gives the same solution: one thread, fixed order, the solver's own fixed seed. Only a time limit that runs out
    can make a difference.
    """
    started = time.perf_counter()
    if program.infeasible:
        return Solution("infeasible", None, math.inf, math.inf, 0.0, "none")
    if not any(program.integer) and not program.rows:
        return Solution("optimal", (0.0,) * len(program.uppers), program.objective.constant, program.objective.constant, 0.0, "none")
    name = solver or _first_solver()
    if name is None:
        raise ShardwrightError("no solver is installed; install one with: pip install highspy")
    problem, variables = _to_pulp(program)
    if name == "HiGHS":
        return _highs(program, problem, variables, time_limit, gap, started)
    return _cbc(program, problem, variables, time_limit, gap, started)


def _to_pulp(program: Program) -> tuple[Any, list[Any]]:
    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    variables = [
        problem.add_variable(f"v{i:07d}", 0, None if upper == math.inf else upper, pulp.LpInteger if integer else pulp.LpContinuous)
        for i, (upper, integer) in enumerate(zip(program.uppers, program.integer))
    ]
    problem += pulp.LpAffineExpression([(variables[v], c) for v, c in sorted(program.objective.terms.items())]), "objective"
    for number, row in enumerate(program.rows):
        expression = pulp.LpAffineExpression([(variables[v], c) for v, c in sorted(row.terms.items())])
        if row.lower == row.upper:
            sense, bound = pulp.LpConstraintEQ, row.lower
        elif row.upper == math.inf:
            sense, bound = pulp.LpConstraintGE, row.lower
        else:
            sense, bound = pulp.LpConstraintLE, row.upper
        problem.addConstraint(pulp.LpConstraint(expression, sense, f"r{number:07d}", bound))
    return problem, variables


def _highs(program: Program, problem: Any, variables: list[Any], time_limit: float, gap: float, started: float) -> Solution:
    solver = pulp.HiGHS(msg=False, timeLimit=max(0.05, time_limit), gapRel=gap, threads=1, random_seed=0)
    with _quiet():
        problem.solve(solver)
    model = problem.solverModel
    info, status = model.getInfo(), model.getModelStatus().name
    # 2 is HiGHS' "feasible point": kSolutionStatusFeasible
    feasible = int(info.primal_solution_status) == 2
    constant = program.objective.constant
    bound = float(info.mip_dual_bound) if any(program.integer) else float(info.objective_function_value)
    if not math.isfinite(bound):
        bound = -math.inf if not feasible else bound
    seconds = time.perf_counter() - started
    if status in ("kInfeasible", "kUnboundedOrInfeasible"):
        return Solution("infeasible", None, math.inf, math.inf, seconds, "HiGHS")
    if not feasible:
        return Solution("unknown", None, math.inf, bound + constant, seconds, "HiGHS")
    values = tuple(float(v.varValue or 0.0) for v in variables)
    objective = float(info.objective_function_value) + constant
    proved: Status = "optimal" if status == "kOptimal" else "feasible"
    return Solution(proved, values, objective, min(bound + constant, objective), seconds, "HiGHS")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send what native code writes to the standard output nowhere."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # no standard output at all
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _cbc(program: Program, problem: Any, variables: list[Any], time_limit: float, gap: float, started: float) -> Solution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        problem.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=max(1.0, time_limit), gapRel=gap, threads=1))
    seconds = time.perf_counter() - started
    constant = program.objective.constant
    if problem.sol_status == pulp.LpSolutionInfeasible:
        return Solution("infeasible", None, math.inf, math.inf, seconds, "CBC")
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Solution("unknown", None, math.inf, constant, seconds, "CBC")
    values = tuple(float(v.varValue or 0.0) for v in variables)
    objective = program.objective.value(values)
    optimal = problem.sol_status == pulp.LpSolutionOptimal
    return Solution("optimal" if optimal else "feasible", values, objective, objective * (1 - gap) if optimal else constant, seconds, "CBC")
