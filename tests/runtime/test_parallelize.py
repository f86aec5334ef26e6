"""Training through a plan equals training the plain model: any legal choice of shardings, in real processes."""

from __future__ import annotations

from typing import Any

import builds
import pytest
import torch
import torch.distributed as dist
from builds import natural_plan, plan_of
from conftest import Pool
from float64 import doubled
from harness import built, run_equal

from planner.errors import InputError, PlanError, PlanWarning, WorkerError
from runtime.api import ParallelModule, parallelize

MESHES: list[dict[str, int]] = [
    {},
    {"data": 2},
    {"tensor": 2},
    {"data": 2, "tensor": 2},
    {"data": 2, "microbatches": 4},
    {"pipe": 2},
    {"pipe": 2, "microbatches": 4},
    {"pipe": 3, "microbatches": 2},
    {"pipe": 2, "data": 2, "microbatches": 2},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("build", [builds.plain, builds.tied], ids=["plain", "tied"])
def test_random_plans(build: Any, mesh: dict[str, int]) -> None:
    run_equal(build, plan_of(build, seed=sum(mesh.values()), **mesh), steps=2)


@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 2, "tensor": 2}, {"pipe": 2, "data": 2, "microbatches": 4}], ids=str)
@pytest.mark.parametrize("which", [True, ("a.weight", "n.weight", "e.weight")], ids=["all", "some"])
def test_fully_sharded_parameters(mesh: dict[str, int], which: Any) -> None:
    run_equal(builds.tied, plan_of(builds.tied, fsdp=which, seed=1, **mesh), steps=2)


def test_float32() -> None:
    run_equal(builds.tied, plan_of(builds.tied, dtype=torch.float32, fsdp=True, data=2, tensor=2), dtype=torch.float32)


def test_gpipe() -> None:
    plan = plan_of(builds.tied, pipe=2, microbatches=4).model_copy(update={"schedule": "gpipe"})
    run_equal(builds.tied, plan, steps=2)


@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 2, "tensor": 2}, {"pipe": 2, "data": 2}], ids=str)
def test_buffers_follow_the_global_batch(mesh: dict[str, int]) -> None:
    run_equal(builds.buffers, plan_of(builds.buffers, **mesh), steps=2)


@pytest.mark.parametrize("mesh", [{"data": 2, "microbatches": 2}, {"data": 3}], ids=str)
def test_each_rank_is_given_its_own_part(mesh: dict[str, int]) -> None:
    run_equal(builds.plain, plan_of(builds.plain, **mesh), steps=2, batch="local")


def test_parameters_that_serve_outputs_only() -> None:
    run_equal(builds.auxiliary, plan_of(builds.auxiliary, pipe=2), steps=2)


# ---------------------------------------------------------------- forward


def forward(plan: Any, build: Any, options: dict[str, Any], train: bool) -> Any:
    model, args, kwargs, _ = built(build, torch.float64)
    parallel = parallelize(model.train(train), plan, **options)
    return parallel(*args, **kwargs), dist.get_rank(), [(n, b.clone()) for n, b in parallel.named_buffers()]


@pytest.mark.parametrize("mesh", [{"data": 2}, {"pipe": 2, "data": 2, "microbatches": 2}, {"tensor": 2, "microbatches": 2}], ids=str)
def test_outputs_keep_the_models_own_structure(pool: Pool, mesh: dict[str, int]) -> None:
    plan = plan_of(builds.auxiliary, **mesh)
    model, args, _, _ = built(builds.auxiliary, torch.float64)
    want = model(*args)
    for got, _, _ in pool.run(forward, plan.world_size, plan, builds.auxiliary, {}, True):
        assert isinstance(got, tuple) and isinstance(got[2], tuple) and got[2][1] is None
        torch.testing.assert_close(got[0], want[0].detach())
        torch.testing.assert_close(got[1], want[1].detach())
        assert torch.equal(got[2][0], want[2][0]) and got[2][0].dtype == torch.bool


def test_local_outputs_are_this_ranks_part(pool: Pool) -> None:
    plan = natural_plan(builds.tied, data=2, microbatches=2)
    lengths = set()
    model, args, _, _ = built(builds.tied, torch.float64)
    want = model(*args)["logits"].detach()
    for got, rank, _ in pool.run(forward, 2, plan, builds.tied, {"outputs": "local"}, True):
        share = torch.cat([want[4 * m + 2 * rank : 4 * m + 2 * rank + 2] for m in range(2)])
        torch.testing.assert_close(got["logits"], share)
        lengths.add(got["logits"].shape[0])
    assert lengths == {4}


def test_forward_in_training_updates_buffers_and_evaluation_does_not(pool: Pool) -> None:
    plan = plan_of(builds.buffers, data=2)
    model, args, _, _ = built(builds.buffers, torch.float64)
    for train in (True, False):
        model.train(train)
        twin = {n: b.clone() for n, b in model.named_buffers()}
        _, _, found = pool.run(forward, 2, plan, builds.buffers, {}, train)[0]
        model(*args)
        for name, value in found:
            torch.testing.assert_close(value, dict(model.named_buffers())[name])
            assert train or torch.equal(value, twin[name])
        for name, value in twin.items():
            dict(model.named_buffers())[name].copy_(value)


# ---------------------------------------------------------------- randomness


def dropped(plan: Any) -> Any:
    torch.manual_seed(100 + dist.get_rank())
    model, (x,), _, _ = built(builds.dropping, torch.float64)
    parallel = parallelize(model, plan)
    steps = [parallel.step(x).item() for _ in range(2)]
    parallel.eval()
    evaluated = [parallel(x).item() for _ in range(2)]
    return steps, evaluated, parallel.step(x).item(), {n for n, p in parallel.named_parameters() if p.grad is None}


def test_dropout_moves_on_with_steps_and_is_off_in_eval(pool: Pool) -> None:
    model, (x,), _, _ = built(builds.dropping, torch.float64)
    quiet = model.eval()(x).item()
    for mesh in ({"data": 2}, {"pipe": 2}):
        (first, *others) = pool.run(dropped, 2, plan_of(builds.dropping, **mesh))
        steps, evaluated, stepped, without = first
        assert steps[0] != steps[1]
        assert evaluated == pytest.approx([quiet, quiet]) and stepped == pytest.approx(quiet)
        assert without <= {"a.weight", "a.bias"}
        assert others[0][:3] == first[:3]


def test_dropout_with_gathered_parameters_in_evaluation(pool: Pool) -> None:
    model, (x,), _, _ = built(builds.dropping, torch.float64)
    quiet = model.eval()(x).item()
    plan = plan_of(builds.dropping, data=2, fsdp=["b.weight"])
    for steps, evaluated, stepped, _ in pool.run(dropped, 2, plan):
        assert steps[0] != steps[1]
        assert evaluated == pytest.approx([quiet, quiet]) and stepped == pytest.approx(quiet)


# ---------------------------------------------------------------- parameters and gradients


def several(plan: Any) -> Any:
    """Gradients of two steps without zero_grad, norms, names."""
    model, args, _, _ = built(builds.tied, torch.float64)
    parallel = parallelize(model, plan)
    parallel.step(*args)
    parallel.step(*args)
    gradients = parallel.gather_gradients()
    norms = [parallel.clip_grad_norm_(1e9, kind).item() for kind in (2.0, float("inf"), 3.0)]
    before = parallel.clip_grad_norm_(0.25).item()
    after = parallel.clip_grad_norm_(1e9).item()
    names = [n for n, _ in parallel.named_parameters()]
    return gradients, norms, before, after, names, sorted(parallel.state_dict())


@pytest.mark.parametrize(
    ("mesh", "fsdp"), [({"data": 2, "tensor": 2}, ()), ({"data": 2}, True), ({"pipe": 2, "tensor": 2, "microbatches": 2}, ())], ids=str
)
def test_gradients_accumulate_and_are_counted_once(pool: Pool, mesh: dict[str, int], fsdp: Any) -> None:
    model, args, _, _ = built(builds.tied, torch.float64)
    for _ in range(2):
        model(*args)["loss"].backward()
    vector = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    plan = plan_of(builds.tied, fsdp=fsdp, **mesh)
    names: set[str] = set()
    for gradients, norms, before, after, own, keys in pool.run(several, plan.world_size, plan):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)
        assert norms == pytest.approx([vector.norm(p).item() for p in (2.0, float("inf"), 3.0)])
        assert before == pytest.approx(vector.norm().item()) and after == pytest.approx(0.25, rel=1e-4)
        names |= set(own)
        assert set(keys) <= set(model.state_dict()) and ("e.weight" in keys) == ("head.weight" in keys)
    assert names == {n for n, _ in model.named_parameters()}


def adam(plan: Any) -> Any:
    model, args, _, _ = built(builds.tied, torch.float64)
    parallel: ParallelModule = parallelize(model, plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(3):
        parallel.step(*args)
        optimizer.step()
        optimizer.zero_grad()
    return parallel.gather_state_dict()


def test_optimizers_take_the_parameters_as_they_are(pool: Pool) -> None:
    model, args, _, _ = built(builds.tied, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(*args)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = plan_of(builds.tied, fsdp=["a.weight", "e.weight"], data=2, tensor=2)
    for state in pool.run(adam, 4, plan):
        torch.testing.assert_close(state, dict(model.state_dict()))


def differing(plan: Any) -> Any:
    torch.manual_seed(dist.get_rank())
    model = doubled(builds.Tied())
    first = model.state_dict()["a.weight"].clone()
    return first, parallelize(model, plan).gather_state_dict()


def test_ranks_with_other_values_take_the_first_ones(pool: Pool) -> None:
    (first, state), (_, other) = pool.run(differing, 2, plan_of(builds.tied, data=2, seed=4))
    assert torch.equal(state["a.weight"], first) and torch.equal(other["a.weight"], first)


# ---------------------------------------------------------------- refusals


def refused(plan: Any, model: Any, args: Any = None, **options: Any) -> None:
    parallel = parallelize(doubled(model), plan, **options)
    if args is not None:
        parallel.step(*args)


def test_what_does_not_fit_is_refused_with_both_values() -> None:
    plan = plan_of(builds.plain)
    with pytest.raises(PlanError, match="made for 2 processes, 1 is running"):
        refused(plan_of(builds.plain, data=2), builds.Plain())
    with pytest.raises(PlanError, match="fingerprint"):
        other = builds.Plain()
        other.a = torch.nn.Linear(8, 16, bias=False)
        refused(plan, other)
    with pytest.raises(PlanError, match=r"parameter 'a.weight' is float64\[16,8\], the plan was made for float64\[32,8\]"):
        named = plan.model.model_copy(update={"parameters": {"a.weight": "float64[32,8]"}})
        refused(plan.model_copy(update={"model": named}), builds.Plain())
    with pytest.raises(InputError, match="batch='all'"):
        refused(plan, builds.Plain(), batch="all")
    x, y = torch.randn(4, 8).double(), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(PlanError, match=r"float64\[4, 8\], the plan was made for float64\[8, 8\]"):
        refused(plan, builds.Plain(), (x, y))
    with pytest.raises(PlanError, match="pass parallelize"):
        changed = plan.model.model_copy(update={"loss": "callable"})
        refused(plan.model_copy(update={"model": changed}), builds.Plain())


def test_another_torch_is_a_warning() -> None:
    plan = plan_of(builds.plain)
    changed = plan.model.model_copy(update={"torch": "2.0.0"})
    with pytest.warns(PlanWarning, match=r"made with torch 2\.0\.0"):
        refused(plan.model_copy(update={"model": changed}), builds.Plain())


def lonely(plan: Any) -> None:
    model, args, _, _ = built(builds.plain, torch.float64)
    parallel = parallelize(model, plan, timeout_s=2.0)
    if dist.get_rank() == 0:
        parallel.step(*args)
    else:
        dist.barrier()


@pytest.mark.parametrize("mesh", [{"data": 2}, {"pipe": 2}], ids=str)
def test_a_rank_that_waits_for_nobody_gives_up_and_says_where(pool: Pool, mesh: dict[str, int]) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 \(pipe 0, data 0, tensor 0\), (backward|forward|gradient|waiting)"):
        pool.run(lonely, 2, plan_of(builds.plain, seed=3, **mesh), timeout_s=40)
