"""From a model to a plan: candidates, pins, limits, what is refused and in which words."""

from __future__ import annotations

import subprocess
import sys
import warnings

import models
import pytest
import torch
from small_graphs import mlp, solved, workshop
from torch import nn

from planner import Plan, auto_parallelize
from planner.assignment import assign
from planner.attempt import Workshop
from planner.candidates import Batch, Bounds, Candidate, Pins, candidates, divisors, relieved
from planner.errors import BatchError, InfeasibleError, InputError, ReplicatedOpWarning
from planner.evaluate import evaluate, least
from planner.graph import Graph
from planner.mesh import Mesh
from planner.plan_check import check
from planner.search import search
from planner.trace import capture

MIB = 2**20


def plan_of(model: nn.Module, *args: torch.Tensor, gpus: int = 4, hardware: str = "h100", **options: object) -> Plan:
    plan = auto_parallelize(model, gpus, example_inputs=args, hardware=f"{hardware}:{gpus}", **options)  # type: ignore[arg-type]
    check(plan)
    assert Plan.from_json(plan.to_json()) == plan
    return plan


class Wide(nn.Module):
    """One parameter that holds nearly everything, on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.empty(1024, 1024, device="meta"))
        self.inp, self.out = nn.Linear(4, 1024, device="meta"), nn.Linear(1024, 2, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.inp(x) @ self.big)).pow(2).mean()


X = torch.empty(4, 4, device="meta")

# ---------------------------------------------------------------- whole plans


@pytest.mark.parametrize("build", [models.gpt2, models.llama, models.convnet, models.mlp], ids=lambda f: f.__name__)
def test_plans_of_models(build) -> None:
    model, inputs, loss = build()
    plan = auto_parallelize(model, gpus=4, example_inputs=inputs, loss=loss, hardware="h100:4")
    check(plan)
    assign(plan, capture(model, inputs, loss=loss).graph)
    assert plan.world_size == 4 and plan.solver.status == "optimal" and plan.solver.gap < 1e-3
    assert plan.solver.bound <= plan.predicted.step_time_s == plan.solver.objective
    shapes = {(p, d, t) for p in (1, 2, 4) for d in (1, 2, 4) for t in (1, 2, 4) if p * d * t == 4}
    assert len(plan.alternatives) == len(shapes) - 1 and "candidates" in plan.solver.scope
    times = [a.step_time_s for a in plan.alternatives if a.step_time_s is not None]
    assert all(time >= plan.predicted.step_time_s * (1 - 1e-3) for time in times)


def test_same_arguments_same_bytes() -> None:
    model, inputs, _ = models.gpt2()
    texts = {
        auto_parallelize(model, gpus=2, example_inputs=inputs, hardware="h100:2").model_copy(update={"solver": None}).__repr__()
        for _ in range(2)
    }
    assert len(texts) == 1


def test_layers_fold_into_one_class() -> None:
    sizes = []
    for layers in (3, 12):
        model, inputs, _ = models.gpt2(layers=layers)
        plan = auto_parallelize(model, gpus=4, example_inputs=inputs, hardware="h100:4", layout=dict(data=2, tensor=2))
        sizes.append((len(plan.segments), len(plan.parameters), len(plan.model.parameters)))
        assert any(s.name == "transformer.h.*" and len(s.segments) == layers for s in plan.segments)
    assert sizes[0] == sizes[1]


def test_one_gpu_leaves_nothing_to_choose() -> None:
    plan = plan_of(Wide(), X, gpus=1)
    assert plan.solver.status == "forced" and plan.solver.gap < 1e-6 and plan.mesh.mesh() == Mesh()


def test_inference_has_no_backward() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    plan = plan_of(model, torch.empty(8, 16), gpus=2, optimizer="none")
    assert plan.optimizer == "none" and plan.predicted.breakdown["backward"] == plan.predicted.breakdown["optimizer"] == 0
    assert all(kinds["gradients"] == kinds["optimizer"] == 0 for kinds in plan.predicted.memory)


# ---------------------------------------------------------------- memory


def test_memory_limits_are_kept() -> None:
    for limit in (64 * MIB, 8 * MIB):
        plan = plan_of(Wide(), X, memory_per_gpu=limit)
        assert max(plan.predicted.peak_memory_bytes) <= limit
    storage = {p.name: p for p in plan.parameters}["big"]
    assert "S(" in storage.sharding or storage.fsdp, "16 MiB of state in 8 MiB: big must be split"


@pytest.mark.parametrize(("gpus", "limit"), [(4, MIB), (1, 8 * MIB)])
def test_what_cannot_fit_is_refused_with_numbers(gpus: int, limit: int) -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(Wide(), X, gpus=gpus, memory_per_gpu=limit)
    text = str(caught.value)
    assert "'big'" in text and str(limit) in text and "memory_per_gpu=" in text
    enough = int(text.rsplit("memory_per_gpu=", 1)[1])
    assert enough > limit
    plan = plan_of(Wide(), X, gpus=gpus, memory_per_gpu=enough)
    assert max(plan.predicted.peak_memory_bytes) <= enough, "the least that would do does"


def test_recomputation_and_micro_batches_come_when_memory_binds() -> None:
    model, inputs, _ = models.gpt2(layers=6, batch=16)
    free = auto_parallelize(model, gpus=2, example_inputs=inputs, hardware="h100:2", layout=dict(data=2))
    assert free.mesh.microbatches == 1 and {s.recompute for s in free.segments} == {"none"}
    tight = auto_parallelize(
        model,
        gpus=2,
        example_inputs=inputs,
        hardware="h100:2",
        layout=dict(data=2),
        memory_per_gpu=max(free.predicted.peak_memory_bytes) // 2,
    )
    saves = tight.mesh.microbatches > 1 or any(s.recompute == "full" and len(s.segments) > 1 for s in tight.segments)
    assert saves and tight.predicted.step_time_s > free.predicted.step_time_s


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("layout", [
    dict(data=4), dict(tensor=4), dict(pipe=2, data=2, microbatches=4), dict(pipe=4, schedule="gpipe"), dict(data=2, tensor=2, zero=3),
    dict(data=2, recompute="full"), dict(data=2, tensor=2, recompute="selective", microbatches=2), dict(pipe=2, tensor=2, microbatches=2),
])  # fmt: skip
def test_what_is_pinned_is_kept(layout: dict) -> None:
    model, inputs, _ = models.gpt2(layers=4)
    plan = auto_parallelize(model, gpus=4, example_inputs=inputs, hardware="h100:4", layout=layout)
    check(plan)
    for name in ("pipe", "data", "tensor", "microbatches"):
        assert getattr(plan.mesh, name) == layout.get(name, getattr(plan.mesh, name))
    if "schedule" in layout:
        assert plan.schedule == layout["schedule"]
    if "recompute" in layout:
        assert {s.recompute for s in plan.segments if len(s.segments) > 1} == {layout["recompute"]}
    if layout.get("zero") == 3:
        assert all(p.fsdp or "R" not in p.sharding.split(",")[0] for p in plan.parameters)


def test_zero_0_keeps_parameters_whole_over_data() -> None:
    model, inputs, _ = models.gpt2()
    plan = auto_parallelize(model, gpus=4, example_inputs=inputs, hardware="h100:4", layout=dict(data=2, tensor=2, zero=0))
    assert not any(p.fsdp for p in plan.parameters)


def test_a_tensor_axis_is_used() -> None:
    model, inputs, _ = models.gpt2()
    plan = auto_parallelize(model, gpus=2, example_inputs=inputs, hardware="h100:2", layout=dict(tensor=2))
    heavy = [op for s in plan.segments for op in s.ops if op.startswith(("aten.addmm", "aten.linear"))]
    assert heavy and all("S(" in op for op in heavy)


@pytest.mark.parametrize(("layout", "words"), [
    (dict(date=2), "unknown key 'date'"),
    (dict(data=3), "data=3 is 3 GPUs, which gpus=4"),
    (dict(data=2, tensor=2, pipe=2), "pipe=2 x data=2 x tensor=2 is 8 GPUs, but gpus=4"),
    (dict(data=0), "data=0, must be at least 1"),
    (dict(data="2"), "data='2', must be a whole number"),
    (dict(zero=4), "zero=4, must be 0 to 3"),
    (dict(schedule="zigzag"), "schedule='zigzag'; there are 'none', '1f1b', 'gpipe'"),
    (dict(recompute="some"), "recompute='some'"),
])  # fmt: skip
def test_wrong_layouts(layout: dict, words: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_of(Wide(), X, layout=layout)
    assert words in str(caught.value)


@pytest.mark.parametrize(("options", "words"), [
    (dict(gpus=0), "gpus=0"), (dict(gpus=2.0), "gpus=2.0"), (dict(precision="fp8"), "precision='fp8'"),
    (dict(optimizer="adam"), "optimizer='adam'"), (dict(memory_per_gpu="70 parsec"), "memory_per_gpu='70 parsec'"),
    (dict(memory_per_gpu=0), "memory_per_gpu=0"), (dict(time_limit=0), "time_limit=0"),
])  # fmt: skip
def test_wrong_arguments(options: dict, words: str) -> None:
    with pytest.raises(InputError) as caught:
        auto_parallelize(Wide(), **{"example_inputs": (X,), "hardware": "h100", **options})
    assert words in str(caught.value)


def test_memory_in_words() -> None:
    assert plan_of(Wide(), X, gpus=1, memory_per_gpu="1.5GiB").memory_per_gpu == int(1.5 * 2**30)


def test_training_needs_a_loss() -> None:
    with pytest.raises(InputError, match="pass loss="):
        plan_of(nn.Linear(4, 4), torch.empty(4, 4))


# ---------------------------------------------------------------- batches


def test_a_batch_that_does_not_divide_names_both_numbers() -> None:
    for layout, words in ((dict(data=4), "batch of 6 .* 4 data ranks"), (dict(pipe=4, microbatches=4), "batch of 6 .* 4 micro-batches")):
        with pytest.raises(BatchError, match=words):
            plan_of(Wide(), torch.empty(6, 4, device="meta"), layout=layout)
    plan = plan_of(Wide(), torch.empty(6, 4, device="meta"))
    assert plan.mesh.data in (1, 2), "what is not pinned is chosen so that it divides"


def test_an_uneven_batch_is_allowed_where_it_is_asked_for() -> None:
    plan = plan_of(Wide(), torch.empty(7, 4, device="meta"), gpus=2, layout=dict(data=2))
    assert plan.mesh.data == 2 and plan.mesh.microbatches == 1


def test_batch_norm_refuses_micro_batches() -> None:
    model, inputs, loss = models.convnet()
    with pytest.raises(BatchError, match="batch_norm"):
        auto_parallelize(model, gpus=2, example_inputs=inputs, loss=loss, hardware="h100:2", layout=dict(data=2, microbatches=2))


def test_micro_batch_counts() -> None:
    assert divisors(12, 100) == [1, 2, 3, 4, 6, 12] and divisors(64, 8) == [1, 2, 4, 8]
    assert divisors(96, 48) == [1, 2, 4, 8, 16, 32, 48]
    graph = mlp(8, batch=64)
    found = candidates(graph, workshop(graph).profile, 4, Pins())
    counts = sorted(c.mesh.microbatches for c, _ in found if c.mesh.pipe == 4)
    assert counts == [4, 8, 16, 32] and sum(first for c, first in found if c.mesh.pipe == 4) == 1
    assert {c.mesh.microbatches for c, _ in found if c.mesh.pipe == 1} == {1}
    assert Batch.of(graph) == Batch(64, "x", 0)


def test_what_relieves_memory() -> None:
    graph = mlp(8, batch=64)
    one = relieved(Candidate(Mesh(1, 4, 1, 1), "none"), graph, Pins(), parts=3.5)
    assert [str(c) for c in one] == ["pipe=1 data=4 tensor=1 microbatches=4", "pipe=1 data=4 tensor=1 microbatches=1 recompute=full"]
    assert relieved(Candidate(Mesh(1, 4, 1, 1), "none"), graph, Pins(microbatches=1, recompute="none"), 1.0) == []


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("hardware", ["h100:4", "cpu:4"])
def test_bounds_are_bounds(hardware: str) -> None:
    """Whole-op bound <= cheapest strategies <= solved, for every candidate."""
    model, inputs, _ = models.gpt2()
    shop: Workshop = workshop(capture(model, inputs).graph, hardware=hardware)
    bounds = Bounds(shop.catalogue, shop.profile, shop.request.precision)
    tried = 0
    for candidate, _ in candidates(shop.graph, shop.profile, 4, Pins()):
        problem = shop.prepare(candidate).tables.problem
        time = evaluate(problem, solved(problem)).step_time_s
        assert bounds.step_s(candidate) <= least(problem) * (1 + 1e-9) <= time * (1 + 1e-9), str(candidate)
        tried += 1
    assert tried >= 6


def test_no_candidate_that_was_ruled_out_is_faster() -> None:
    graph: Graph = mlp(8, batch=64, width=256, hidden=1024)
    shop = workshop(graph)
    found = search(graph, shop.profile, shop.request)
    for candidate, _ in candidates(graph, shop.profile, 4, Pins()):
        problem = shop.prepare(candidate).tables.problem
        assert evaluate(problem, solved(problem)).step_time_s >= found.best.time * (1 - 1e-3), str(candidate)


def test_the_time_limit_leaves_a_gap_and_says_so() -> None:
    graph: Graph = mlp(8, batch=64, width=256, hidden=1024)
    shop = workshop(graph)
    request = shop.request.__class__(**{**shop.request.__dict__, "time_limit": 1e-6})
    report = search(graph, shop.profile, request).report
    assert report.status == "feasible" and report.bound < report.objective and "not reached" in report.scope
    assert report.gap == pytest.approx(1 - report.bound / report.objective)


# ---------------------------------------------------------------- ops without a rule


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.renorm(self.inp(x), 2, 0, 1.0)).pow(2).mean()


def test_an_op_without_a_rule_is_named_with_its_cost() -> None:
    with pytest.warns(ReplicatedOpWarning, match=r"renorm.* has no sharding rule .* ms .*test_search\.py"):
        plan = plan_of(Odd(), torch.empty(4, 8, 8), gpus=2, layout=dict(data=2))
    assert len(plan.warnings) == 1 and 0 < plan.predicted.replicated_time_share < 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_of(Odd(), torch.empty(4, 8, 8), gpus=1).warnings == []


def test_planning_prints_nothing_but_its_notes() -> None:
    """HiGHS would print a banner, PuLP a deprecation: in a process of its own, since both do it once."""
    code = (
        "import torch; from planner import auto_parallelize; "
        "auto_parallelize(torch.nn.Linear(8, 8), 2, hardware='h100', loss=lambda y: y.sum())"
    )
    run = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "" and "pulp" not in run.stderr.lower()
