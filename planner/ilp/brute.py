"""Every choice of a small problem, priced: what the solver must agree with."""

from __future__ import annotations

import itertools
import math

from planner.errors import InputError
from planner.evaluate import Bill, evaluate
from planner.ilp.problem import Choice, Problem

MOST = 200_000


def brute(problem: Problem, goal: str = "time") -> tuple[Choice, Bill] | None:
    """The best legal choice that fits into the memory limit, None where there is none. ``goal``: "time", or "memory" without a limit.

    Raises InputError for a problem of more than ``MOST`` choices.
    """
    count = math.prod(op.strategies for op in problem.ops)
    if count > MOST:
        raise InputError(f"{problem.name}: {count} choices are too many to try, at most {MOST}")
    best: tuple[Choice, Bill] | None = None
    for choice in itertools.product(*(range(op.strategies) for op in problem.ops)):
        bill = evaluate(problem, choice)
        if not bill.legal or (goal == "time" and not bill.fits(problem.memory_limit)):
            continue
        if best is None or score(bill, goal) < score(best[1], goal):
            best = choice, bill
    return best


def score(bill: Bill, goal: str) -> float:
    return bill.step_time_s if goal == "time" else float(max(bill.peaks))
