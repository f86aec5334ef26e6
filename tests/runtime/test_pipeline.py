"""Stages: what crosses them without gradient, skips, stages with nothing to train, schedules and their refusal."""

from __future__ import annotations

from typing import Any

import builds
import pytest
import torch
from builds import Made, plan_of
from harness import run_equal
from torch import Tensor, nn

from planner.errors import PlanError
from planner.graph import Spec, Value
from runtime.pipeline import SCHEDULES, StageRunner
from runtime.stage import Crossing, Stage


class Crossings(nn.Module):
    """A boolean mask and integer indices made early and used late, an activation that skips the middle."""

    def __init__(self, frozen: tuple[str, ...]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        mask, order = first > 0, first.argsort(-1)
        h = torch.tanh(self.b(first))
        h = torch.tanh(self.c(h))
        h = torch.where(mask, h, 0.1 * h).gather(-1, order) + first
        return self.d(h).square().mean()


def crossings(*frozen: str) -> Any:
    def build() -> Made:
        torch.manual_seed(5)
        return Crossings(frozen), ((torch.randn(8, 8),), {}), None

    return build


@pytest.mark.parametrize("frozen", [(), ("a",), ("a", "b"), ("c", "d"), ("a", "b", "c")], ids=lambda names: "frozen " + ",".join(names))
@pytest.mark.parametrize("mesh", [{"pipe": 2, "microbatches": 2}, {"pipe": 4, "microbatches": 2}, {"pipe": 3}], ids=str)
def test_stages(frozen: tuple[str, ...], mesh: dict[str, int]) -> None:
    build = crossings(*frozen)
    run_equal(build, plan_of(build, seed=len(frozen), **mesh), steps=2)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_schedules(schedule: str, microbatches: int) -> None:
    build = crossings()
    plan = plan_of(build, seed=1, pipe=3, microbatches=microbatches).model_copy(update={"schedule": schedule})
    run_equal(build, plan, steps=2)


def test_an_unknown_schedule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.mesh import Mesh
    from runtime.groups import Ranks
    from runtime.pipeline import Pipeline

    stage = Stage(0, 2, nn.Module(), (), (), (), None, (), False, (), ())  # type: ignore[arg-type]
    runner = StageRunner(stage, torch.device("cpu"))
    with pytest.raises(PlanError, match=r"schedule 'zero-bubble' with 2 stages: the runtime has 1f1b, gpipe"):
        Pipeline(runner, Ranks(Mesh(pipe=2), 0, torch.device("cpu"), 1.0), "zero-bubble", 2)


class Doubled(nn.Module):
    def forward(self, received: Tensor, own: Tensor, total: Tensor, micro: int) -> tuple[Tensor, ...]:
        return (received * 2).to(torch.float64), received.sum() + own.sum() + total + micro, torch.tensor(float(micro))


def test_a_runner_sorts_what_a_stage_returns() -> None:
    """Hand-made stage: totals over micro-batches first, then values in the planned dtype, results and buffers apart."""
    crossing = Crossing(Value("h"), Spec((2,), "float32"), True)
    count = nn.Module()
    count.forward = lambda own, micro: (own.sum(),)  # type: ignore[method-assign]
    stage = Stage(1, 3, Doubled(), (crossing,), (crossing,), ("x",), count, ("x",), True, (), ("calls",))  # type: ignore[arg-type]
    runner = StageRunner(stage, torch.device("cpu"))
    runner.prepare([{"x": torch.ones(2)}, {"x": torch.full((2,), 2.0)}])
    sends, results = runner.run([torch.ones(2)], 1)
    assert sends[0].dtype == torch.float32 and sends[0].tolist() == [2.0, 2.0]
    assert results[0].item() == 2 + 4 + 6 + 1
    assert runner.mutated[0].item() == 1.0 and runner.doing == "forward of micro-batch 1"


def test_tied_parameters_on_stages_that_are_no_neighbours() -> None:
    for seed in range(3):
        run_equal(builds.tied, plan_of(builds.tied, seed=seed, pipe=4, microbatches=2), steps=2)
