"""Ranks that planned for themselves may hold different plans: refused on every rank, naming both, instead of a hang."""

import torch
import torch.distributed as dist
from models import gpt2

from planner import auto_parallelize
from planner.errors import PlanError
from runtime import parallelize


def test_different_plans_are_refused(pool):
    model, inputs, _ = gpt2()
    plans = [auto_parallelize(model, 2, example_inputs=inputs, hardware="cpu", layout=layout) for layout in (dict(data=2), dict(tensor=2))]

    def body() -> str:
        try:
            parallelize(model, plans[dist.get_rank()])
        except PlanError as error:
            return str(error)
        return ""

    for text in pool.run(body, 2):
        assert "rank 0 was given plan" in text and "rank 1 plan" in text


def test_equal_plans_are_not(pool):
    model, inputs, _ = gpt2()
    plan = auto_parallelize(model, 2, example_inputs=inputs, hardware="cpu", layout=dict(data=2))

    def body() -> float:
        return float(parallelize(model, plan.from_json(plan.to_json())).step(**inputs[1]))

    assert torch.isfinite(torch.tensor(pool.run(body, 2))).all()
