"""Mixed precision: parameters and gradients stay in float32, sums are close to the plain model's, float16 is scaled."""

from __future__ import annotations

from typing import Any

import builds
import pytest
import torch
import torch.distributed as dist
from builds import plan_of
from conftest import Pool
from harness import built
from torch import nn

from planner.mesh import Mesh
from runtime.api import parallelize
from runtime.groups import Ranks
from runtime.scaling import GROWTH_INTERVAL, INITIAL, LossScale


def mixed(plan: Any) -> Any:
    model, (args, _), _ = builds.tied()
    parallel = parallelize(model, plan)
    loss = parallel.step(*args)
    dtypes = {p.dtype for p in parallel.parameters()} | {p.grad.dtype for p in parallel.parameters() if p.grad is not None}
    return loss.item(), parallel.gather_gradients(), dtypes


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize(
    ("mesh", "fsdp"), [({}, ()), ({"data": 2}, True), ({"tensor": 2}, ()), ({"pipe": 2, "microbatches": 2}, ())], ids=str
)
def test_mixed_precision_is_near(pool: Pool, precision: str, mesh: dict[str, int], fsdp: Any) -> None:
    model, (args, _), _ = builds.tied()
    want = model(*args)["loss"]
    want.backward()
    plan = plan_of(builds.tied, dtype=torch.float32, fsdp=fsdp, **mesh).model_copy(update={"precision": precision})
    for loss, gradients, dtypes in pool.run(mixed, plan.world_size, plan):
        assert dtypes == {torch.float32}
        assert loss == pytest.approx(want.item(), rel=0.03) and loss != want.item()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert (gradients[name] - parameter.grad).norm() < 0.1 * parameter.grad.norm() + 1e-4


def overflowing(plan: Any) -> Any:
    model, (args, _), _ = builds.tied()
    parallel = parallelize(model, plan)
    parallel.step(*args)
    kept = parallel.gather_gradients()
    scale = parallel._own.scale
    before = scale.value
    scale.value = 2.0**100
    parallel.step(*args)
    after = parallel.gather_gradients()
    return before, scale.value, all(torch.equal(kept[n], after[n]) for n in kept), dist.get_rank()


def test_an_overflow_drops_its_step_on_all_ranks(pool: Pool) -> None:
    plan = plan_of(builds.tied, dtype=torch.float32, tensor=2).model_copy(update={"precision": "fp16-mixed"})
    for before, after, unchanged, _ in pool.run(overflowing, 2, plan):
        assert (before, after) == (INITIAL, 2.0**99) and unchanged


def test_the_scale_grows_after_many_good_steps() -> None:
    scale = LossScale("fp16-mixed", Ranks(Mesh(), 0, torch.device("cpu"), 1.0))
    for _ in range(GROWTH_INTERVAL):
        scale.unscale([])
    assert scale.value == 2 * INITIAL
    assert LossScale("bf16-mixed", scale.ranks).value == 1.0


def compiled(plan: Any) -> Any:
    model, args, _, _ = built(builds.plain, torch.float64)
    parallel = parallelize(model, plan, compile=True)
    return parallel.step(*args).item(), parallel.gather_gradients()


@pytest.mark.parametrize("fsdp", [(), ["a.weight", "c.weight"]], ids=str)
def test_compiled_segments(pool: Pool, monkeypatch: pytest.MonkeyPatch, fsdp: Any) -> None:
    """With dynamo and its graphs, without a C++ compiler's minutes."""
    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: plain(self, backend="aot_eager"))
    model, args, _, _ = built(builds.plain, torch.float64)
    want = model(*args)
    want.backward()
    plan = plan_of(builds.plain, seed=1, fsdp=fsdp, data=2)
    for loss, gradients in pool.run(compiled, 2, plan, timeout_s=150):
        assert loss == pytest.approx(want.item())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad)
