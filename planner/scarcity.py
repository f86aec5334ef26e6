"""Nothing fits: how much would do, what is largest, what helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from planner.candidates import Candidate
from planner.errors import InfeasibleError
from planner.evaluate import evaluate
from planner.fold import Fold
from planner.graph import PARAMETER
from planner.ilp.contract import contract
from planner.ilp.formulate import formulate
from planner.ilp.problem import Problem
from planner.ilp.solve_pulp import solve
from planner.prepare import memory_floor

SECONDS_EACH = 10.0


def explain_infeasible(
    fold: Fold, limit: float, gpus: int, problem_of: Callable[[Candidate], Problem], tried: Sequence[Candidate]
) -> InfeasibleError:
    """The error that names the largest parameter, the limit, and the least memory for which there is a plan."""
    needed, where = least_memory(problem_of, tried)
    parameters = [op for op in fold.ops if op.node.op == PARAMETER]
    text = f"no plan fits into {show_bytes(limit)} per GPU on {gpus} GPU{'s' if gpus > 1 else ''}"
    if parameters:
        largest = max(parameters, key=lambda op: (op.node.outputs[0].nbytes, op.node.target))
        spec = largest.node.outputs[0]
        text += f"; the largest parameter is {largest.node.target!r}, {spec}, {show_bytes(spec.nbytes)}"
    if math.isfinite(needed):
        text += f"; the least that would do is {show_bytes(needed)} per GPU, with {where}"
    text += ". What helps: more GPUs, a smaller batch, an optimizer with less state"
    if needed < math.inf:
        text += f", or memory_per_gpu={math.ceil(needed)}"
    return InfeasibleError(text)


def least_memory(problem_of: Callable[[Candidate], Problem], tried: Sequence[Candidate]) -> tuple[float, str]:
    """(bytes, candidate) of the plan that needs least, over the candidates that were tried."""
    problems = [(candidate, problem_of(candidate)) for candidate in dict.fromkeys(tried)]
    ranked = sorted(problems, key=lambda item: (memory_floor(item[1]), str(item[0])))
    needed, where = math.inf, ""
    for candidate, problem in ranked:
        if memory_floor(problem) >= needed:
            break
        contraction = contract(problem)
        formulation = formulate(contraction, goal="memory")
        solution = solve(formulation.program, SECONDS_EACH)
        if solution.values is None:
            continue
        peak = max(evaluate(problem, contraction.expand(formulation.choice(solution.values))).peaks)
        if peak < needed:
            needed, where = float(peak), str(candidate)
    return needed, where


def show_bytes(nbytes: float) -> str:
    """``8388608 bytes (8 MiB)``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{math.ceil(nbytes)} bytes ({nbytes / size:.4g} {unit})"
    return f"{math.ceil(nbytes)} bytes"
