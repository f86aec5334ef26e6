"""Faults of other systems, each a small input with what is right in its docstring (``cases``). Here each gives what is right.

Real gloo processes through the public surface, float32, within the case's own tolerance. Every case at all of its layouts comes
first; what a case asks beyond equality follows, by its number. Random plans then reach the tensor splits that no optimiser would
choose at these sizes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.record import (
    Plain,
    Record,
    case,
    differ,
    differences,
    layout_of,
    loss_of,
    make_plan,
    numbers,
    on_a_rank,
    plain,
    planned,
    sgd,
)
from float64 import doubled
from harness import tree
from random_plans import random_plan
from simulated_run import run as simulated
from torch import nn

from planner import auto_parallelize
from planner.blocks import segments
from planner.errors import BatchError, InfeasibleError, PlanError, WorkerError
from planner.inputs import bind
from planner.mesh import Mesh
from planner.oplines import OpLine
from planner.outputs import rebuild
from planner.plan import Plan
from planner.sharding import R, S
from planner.trace import capture
from runtime.api import parallelize
from runtime.launch import run_processes

MORE: dict[int, list[tuple[dict[str, int], dict[str, int]]]] = {
    3: [({}, dict(pp=2)), ({}, dict(pp=2, microbatches=1))],
    4: [(dict(p=0.0), layout) for layout in (dict(tp=2), dict(dp=2), dict(dp=2, tp=2))],
    10: [(dict(batch=1), dict(pp=2)), (dict(batch=1), dict(pp=4)), ({}, dict(pp=2)), ({}, dict(dp=4))],
    14: [({}, dict(pp=p, microbatches=m)) for p in (2, 3) for m in (1, 2)] + [({}, dict(pp=4, microbatches=1))],
    22: [({}, dict(dp=2, pp=2, zero=3))],
}
"""What docstrings name besides ``EXPECT``: case -> (build options, layout)."""
REFUSED: list[tuple[int, dict[str, int], dict[str, int], str]] = [
    (3, {}, dict(dp=4), r"batch of 6 .* 4 data ranks"),
    (3, {}, dict(pp=2, microbatches=2), r"batch_norm.* mixes the batch.* 2 micro-batches"),
    (3, {}, dict(dp=2, microbatches=3), r"batch_norm.* mixes the batch.* 3 micro-batches"),
    (10, {}, dict(pp=2, microbatches=4), r"batch of 7 .* 4 micro-batches"),
    (10, {}, dict(pp=4, microbatches=4), r"batch of 7 .* 4 micro-batches"),
    (10, dict(batch=1), dict(pp=2, microbatches=4), r"microbatches=4 .*'x' \[1, 20\]"),
    (10, dict(batch=1), dict(pp=4, microbatches=4), r"microbatches=4 .*'x' \[1, 20\]"),
    (14, dict(batch=1), dict(pp=4, microbatches=2), r"microbatches=2 .*'x' \[1, 3, 16, 24\]"),
]
"""The layouts at which the case allows an error and there is one, or a batch of one row cannot be cut: what the error says."""


def text(*parts: Any) -> str:
    return "-".join(" ".join(f"{k}{v}" for k, v in part.items()) if isinstance(part, dict) else str(part) for part in parts if part != {})


def equal_layouts() -> list[Any]:
    """(number, build options, layout) of every case at every layout, apart from those refused."""
    found = []
    for number in numbers():
        expect = case(number).EXPECT
        builds = [{}, *expect.get("also_build", [])] if expect["kind"] == "equal" else [{}] if number == 30 else []
        wanted = [*itertools.product(builds, expect.get("layouts", [])), *MORE.get(number, [])]
        refused = [(build, layout) for n, build, layout, _ in REFUSED if n == number]
        wanted = [pair for pair in wanted if pair not in refused]
        found += [pytest.param(number, *pair, id=text(f"{number:02d}", *pair)) for pair in wanted]
    return found


@pytest.mark.parametrize(("number", "build", "layout"), equal_layouts())
def test_equal_to_the_plain_model(number: int, build: dict[str, int], layout: dict[str, int]) -> None:
    """Losses, gradients, the state after the steps, and outputs in their structure, on every rank."""
    one = case(number)
    plan = make_plan(one, layout, build)
    want, records = plain(one, build), planned(one, plan, build)
    bad = [f"rank {rank}: {text}" for rank, got in enumerate(records) for text in differences(got, want, one)]
    assert not bad, f"{plan.mesh.mesh()}: " + "\n".join(bad[:12])
    assert {key: getattr(plan.mesh, key) for key in ("data", "tensor", "pipe")} == {
        key: size for key, size in layout_of(layout).items() if key in ("data", "tensor", "pipe")
    }
    assert not any(bool(t.isnan().any()) for got in records for g in got.gradients for t in g.values() if t is not None)
    copies_agree(records)
    BEYOND.get(number, lambda plan, records, want: None)(plan, records, want)


def copies_agree(records: list[Record]) -> None:
    """Ranks that hold a parameter whole hold the same gradient and, after the steps, bitwise the same values."""
    for name in {name for record in records for name in record.held}:
        holders = [record for record in records if name in record.held and record.held[name].is_whole]
        for other in holders[1:]:
            first, own = holders[0].held[name].grad, other.held[name].grad
            assert (first is None) == (own is None) and (first is None or own is None or torch.equal(first, own)), f"gradient of {name}"
            assert torch.equal(holders[0].values[name], other.values[name]), name


@pytest.mark.parametrize(("number", "build", "layout", "message"), [pytest.param(*r, id=text(f"{r[0]:02d}", *r[1:3])) for r in REFUSED])
def test_refused_before_launch_naming_the_numbers(number: int, build: dict[str, int], layout: dict[str, int], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        make_plan(case(number), layout, build)


# ---------------------------------------------------------------- what single cases ask beyond equality


def tied_table(plan: Plan, records: list[Record], want: Record) -> None:
    """01: both ends of the pipeline hold the table, and the export has it under both names."""
    holders = [record for record in records if "tok.weight" in record.values]
    assert len(holders) == plan.world_size
    for record in records:
        assert torch.equal(record.state["tok.weight"], record.state["head.weight"])


def whole_mask(plan: Plan, records: list[Record], want: Record) -> None:
    """05: the mask buffer is not split by heads."""
    assert all(record.values["causal"].shape == (64, 64) for record in records)


def plausible_choices(plan: Plan, records: list[Record], want: Record) -> None:
    """16: whole numbers in range, probabilities that sum to one."""
    for record in records:
        out = record.output
        assert all(out[key].dtype == torch.int64 for key in ("token", "kept", "position"))
        assert int(out["token"].min()) >= 0 and int(out["token"].max()) < 101
        assert torch.isfinite(out["probs"]).all() and torch.allclose(out["probs"].sum(-1), torch.ones(4), atol=1e-5)


def unused_rows(plan: Plan, records: list[Record], want: Record) -> None:
    """18: no gradient leaks to ids that no bag holds."""
    _, (ids, *_), _ = case(18).build()
    unused = sorted(set(range(37)) - set(ids.tolist()))
    assert all(torch.count_nonzero(record.gradients[0]["bag.weight"][unused]) == 0 for record in records)  # type: ignore[index]


def frozen_stay_frozen(plan: Plan, records: list[Record], want: Record) -> None:
    """22: only the adapters train; the memory model counts two numbers of optimizer state for each of their elements, once."""
    trainable = case(22).EXPECT["trainable"]
    for record in records:
        assert any(held.trainable for held in record.held.values())
        for name, held in record.held.items():
            assert held.trainable == (name in trainable) and (held.grad is not None) == held.trainable, name
    adapters_bytes = 2 * 4 * (3 * 24 + 24 * 3)
    assert sum(kinds.get("optimizer", 0) for kinds in plan.predicted.memory) <= adapters_bytes


def island_kept(plan: Plan, records: list[Record], want: Record) -> None:
    """26: the float32 island inside the bfloat16 region is honoured exactly, dtypes are the model's."""
    for record in records:
        assert torch.equal(record.output["probe"], torch.ones(1, 1))
        assert {key: str(t.dtype) for key, t in record.output.items()} == {k: f"torch.{d}" for k, d in case(26).EXPECT["dtypes"].items()}


BEYOND = {1: tied_table, 5: whole_mask, 16: plausible_choices, 18: unused_rows, 22: frozen_stay_frozen, 26: island_kept}


# ---------------------------------------------------------------- 04: dropout


def masks_on_a_rank(plan: Plan) -> dict[str, Any]:
    """Twice from the same seed, once from another, once in evaluation; and one loss with its gradients each time."""
    one, found = case(4), {}
    for name, seed in (("first", 11), ("again", 11), ("other", 12)):
        model, args, _ = one.build()
        torch.manual_seed(seed)
        parallel = parallelize(model, plan, loss=loss_of(one), timeout_s=60.0)
        found[name] = (parallel(*args), parallel.step(*args), parallel.gather_gradients())
    found["evaluation"] = parallel.eval()(*args)
    return found


def plan_that_splits_the_hidden_mask() -> Plan:
    """A random plan of the case's own kind: rows over data, ``rep_mask`` whole on tensor, ``hid_mask`` split there."""
    model, args, _ = case(4).build()
    graph = capture(model, args, loss=loss_of(case(4))).graph
    for seed in itertools.count():
        plan = random_plan(graph, Mesh(data=2, tensor=2), seed)
        rep, hid = (OpLine.parse(line).outputs[0] for part in plan.segments for line in part.ops if line.startswith("aten.dropout"))
        if rep == (S(0), R) and hid == (S(0), S(2)):
            return plan.model_copy(update={"model": plan.model.model_copy(update={"loss": "callable"})})
    raise AssertionError


@pytest.mark.parametrize("layout", [*case(4).EXPECT["layouts"], {}], ids=lambda layout: text(layout) or "hidden-split")
def test_04_masks(layout: dict[str, int]) -> None:
    one = case(4)
    plan = make_plan(one, layout) if layout else plan_that_splits_the_hidden_mask()
    ranks = run_processes(masks_on_a_rank, plan.world_size, (plan,), timeout_s=60, start="fork")
    model, (x,), _ = one.build()
    for rank in ranks:
        out, rep_mask, hid_mask = rank["first"][0]
        # (a) one mask serves all ranks: what came out was made with it, whichever rank made it
        assert not list(differ("ranks", rank, ranks[0], 0.0))
        made = model.down(torch.nn.functional.gelu(model.up(x * rep_mask)) * hid_mask)
        assert not list(differ("out", out, made.detach(), one.EXPECT["tol"]))
        # (b), (c) parts of the batch and of the hidden dim are dropped differently, whoever holds them
        assert not torch.equal(rep_mask[:4], rep_mask[4:]) and not torch.equal(hid_mask[..., :64], hid_mask[..., 64:])
        assert not torch.equal(hid_mask[:4], hid_mask[4:]) and not torch.equal(rep_mask, hid_mask[..., :64])
        # (d) the kept share, and the scale of what is kept
        for mask in (rep_mask, hid_mask):
            assert abs(float((mask != 0).float().mean()) - 0.75) < 0.05
            assert torch.equal(mask.unique(), torch.tensor([0.0, 1 / 0.75]))
        # (e) reproducible from the seed, and only from the seed
        assert not list(differ("same seed", rank["again"], rank["first"], 0.0))
        assert not torch.equal(rank["other"][0][1], rep_mask)
        # (f)
        want = model.eval()(x)
        assert not list(differ("evaluation", rank["evaluation"], tuple(t.detach() for t in want), one.EXPECT["tol"]))
        model.train()


# ---------------------------------------------------------------- 20: structure


def calls_on_a_rank(plan: Plan) -> list[Any]:
    model, args, kwargs = case(20).build()
    parallel = parallelize(model, plan, loss=loss_of(case(20)))
    return [parallel(*args, **kwargs), parallel(**dict(reversed(kwargs.items())), input_ids=args[0])]


@pytest.mark.parametrize("layout", case(20).EXPECT["layouts"], ids=text)
def test_20_every_way_to_call(layout: dict[str, int]) -> None:
    plan = make_plan(case(20), layout)
    model, args, kwargs = case(20).build()
    with torch.no_grad():
        want = model(*args, **kwargs)
    assert want["hidden"] is None and isinstance(want["stats"], tuple)
    assert not {"attn_bias", "position_ids"} & set(plan.model.batch_dims)
    for outputs in run_processes(calls_on_a_rank, plan.world_size, (plan,), timeout_s=60, start="fork"):
        for out in outputs:
            assert not list(differ("output", out, want, 1e-5))


# ---------------------------------------------------------------- 25: checkpoints in any layout


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=case(25).EXPECT["optimizer"]["lr"])


def train(module: Any, optimizer: torch.optim.Optimizer, args: Any, steps: int) -> None:
    for _ in range(steps):
        module.step(*args)
        optimizer.step()
        optimizer.zero_grad()


def saved_on_a_rank(plan: Plan, folder: Path) -> None:
    one = case(25)
    model, args, _ = one.build()
    parallel = parallelize(model, plan, loss=loss_of(one))
    optimizer = adamw(parallel)
    train(parallel, optimizer, args, one.EXPECT["steps"][0])
    parallel.save(folder, optimizer)


def loaded_on_a_rank(plan: Plan, folder: Path, device: str) -> Any:
    """(output after loading, state, exp_avg, exp_avg_sq and step by name after the further steps)."""
    one = case(25)
    model, (_, args, _) = one.build(device)[0], one.build()
    parallel = parallelize(model, plan, loss=loss_of(one))
    optimizer = adamw(parallel)
    parallel.load(folder, optimizer)
    output = parallel(*args)
    train(parallel, optimizer, args, one.EXPECT["steps"][1])
    moments = {}
    for name, parameter in parallel.named_parameters():
        state = optimizer.state[parameter]
        moments[name] = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}
    return output, parallel.gather_state_dict(), moments


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    plan = make_plan(case(25), case(25).EXPECT["save_layout"])
    run_processes(saved_on_a_rank, plan.world_size, (plan, folder), timeout_s=60, start="fork")
    return folder


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("layout", case(25).EXPECT["load_layouts"], ids=lambda layout: text(layout) or "one")
def test_25_training_goes_on_in_another_layout(checkpoint: Path, layout: dict[str, int], device: str) -> None:
    one = case(25)
    model, args, _ = one.build()
    whole = Plain(model, loss_of(one))
    optimizer = adamw(whole)
    train(whole, optimizer, args, one.EXPECT["steps"][0])
    output = whole(*args)
    train(whole, optimizer, args, one.EXPECT["steps"][1])
    want = {name: optimizer.state[p] for name, p in model.named_parameters()}
    plan = make_plan(one, layout)
    ranks = run_processes(loaded_on_a_rank, plan.world_size, (plan, checkpoint, device), timeout_s=60, start="fork")
    for got_output, state, moments in ranks:
        assert not list(differ("forward", got_output, output, one.EXPECT["tol"]))
        assert not list(differ("state", state, dict(model.state_dict()), one.EXPECT["tol"]))
        assert "decay" not in state and state["wt"].shape == (6, 10)
        for name, fields in moments.items():
            assert not list(differ(name, dict(sorted(fields.items())), dict(sorted(want[name].items())), one.EXPECT["tol"]))
    assert {name for _, _, moments in ranks for name in moments} == set(want)


# ---------------------------------------------------------------- 26: a stage border inside the region


@pytest.mark.parametrize("border", ["l2", "norm", "l3"])
def test_26_a_stage_border_inside_the_region(border: str) -> None:
    one = case(26)
    plan = make_plan(one, dict(pp=2, microbatches=2))
    model, args, kwargs = one.build()
    graph = capture(model, (args, kwargs), loss=loss_of(one)).graph
    parts = segments(graph)
    modules = [{graph.by_name[name].module for name in part.nodes} for part in parts]
    at = next(i for i, names in enumerate(modules) if any(re.search(rf"\b{border}$", name) for name in names))
    cut = [{"first": 0, "last": at}, {"first": at, "last": len(parts)}]
    plan = Plan.from_json(json.dumps({**json.loads(plan.to_json()), "stages": cut}))
    want, records = plain(one), planned(one, plan)
    assert not [text for got in records for text in differences(got, want, one)]
    island_kept(plan, records, want)


# ---------------------------------------------------------------- 28: memory


@pytest.mark.parametrize("asked", case(28).EXPECT["memory_cases"], ids=lambda c: f"{c['gpus']}x{c['limit'] >> 20}MiB")
def test_28_memory(asked: dict[str, Any]) -> None:
    one = case(28)
    model, args, _ = one.build()
    options = dict(example_inputs=args, hardware="cpu", memory_per_gpu=asked["limit"], loss=loss_of(one), optimizer="adamw")
    if not asked["feasible"]:
        with pytest.raises(InfeasibleError) as caught:
            auto_parallelize(model, asked["gpus"], **options)
        message = str(caught.value)
        assert re.search(r"\bbig\b", message) and f"{asked['limit'] >> 20} MiB" in message
        # the smallest amount is named, it is at least the 16 MiB of weights, gradients and state over all GPUs, and it is enough
        (least,) = (int(n) for n in re.findall(r"least that would do is (\d+) bytes", message))
        assert 16 * 2**20 / asked["gpus"] <= least
        plan = auto_parallelize(model, asked["gpus"], **{**options, "memory_per_gpu": least})
        assert 0.99 * least <= max(plan.predicted.peak_memory_bytes) <= least
        return
    plan = auto_parallelize(model, asked["gpus"], **options)
    assert max(plan.predicted.peak_memory_bytes) <= asked["limit"]
    if "must_shard" in asked:
        (big,) = [p for p in plan.parameters if p.name == "big"]
        assert big.fsdp or "S(" in big.sharding
    plan = Plan.from_json(plan.to_json())
    want, records = plain(one), planned(one, plan)
    assert not [text for got in records for text in differences(got, want, one)]
    if "must_shard" in asked:
        assert all(record.values["big"].numel() <= 2**20 // 2 for record in records if "big" in record.values)


# ---------------------------------------------------------------- 30: plan files


EXPORT = """
import sys, torch
sys.path[:0] = sys.argv[1:]
torch.set_num_threads(1)
from cases.record import case, make_plan
sys.stdout.write(make_plan(case(30), dict(dp=2, tp=2)).to_json())
"""


def test_30_equal_bytes_from_any_process() -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-c", EXPORT, str(here), str(here.parent)]
    runs = [
        subprocess.Popen(command, env=dict(os.environ, PYTHONHASHSEED=seed), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for seed in ("1", "2")
    ]
    first, second = (run.communicate(timeout=200)[0] for run in runs)
    assert first == second and first
    plan = Plan.from_json(first)
    assert Plan.from_json(json.dumps(json.loads(first))) == plan
    assert {"parts.größe-1.weight", "parts.with space.bias", "weight"} <= set(plan.model.parameters)
    assert not re.search(rb"NaN|Infinity", first)


def refused_on_a_rank(plan: Plan) -> str:
    model, _, _ = case(30).build()
    with pytest.raises(PlanError) as caught:
        parallelize(model, plan, loss=loss_of(case(30)))
    return str(caught.value)


@pytest.mark.parametrize("running", [1, 2])
def test_30_another_number_of_processes(running: int) -> None:
    plan = make_plan(case(30), dict(dp=2, tp=2))
    messages = run_processes(refused_on_a_rank, running, (plan,), timeout_s=case(30).EXPECT["timeout_s"], start="fork")
    assert len(messages) == running
    assert all("4 processes" in message and re.search(rf"\b{running} (is|are) running", message) for message in messages)


def test_30_another_model() -> None:
    (other,) = case(30).EXPECT["also_build"]
    model, _, _ = case(30).build(**other)
    with pytest.raises(PlanError, match=r"parameter 'parts\.größe-1\.weight' is float32\[40,6\].*float32\[32,6\]"):
        parallelize(model, make_plan(case(30), {}), loss=loss_of(case(30)))
    with pytest.raises(WorkerError, match=r"parts\.größe-1\.weight"):
        plan = make_plan(case(30), dict(dp=2))
        run_processes(on_a_rank, 2, (30, plan, other, None), timeout_s=60, start="fork")


def test_30_one_process_needs_no_launcher() -> None:
    one = case(30)
    plan = make_plan(one, {})
    assert plan.world_size == 1
    got = on_a_rank(30, plan, {}, sgd)
    assert not torch.distributed.is_initialized()
    assert not differences(got, plain(one), one)


# ---------------------------------------------------------------- random plans


MESHES = [Mesh(tensor=2), Mesh(tensor=4), Mesh(data=2, tensor=2)]
RANDOM = [1, 3, 5, 7, 8, 12, 14, 17, 18, 20, 22, 26, 30]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("number", RANDOM)
def test_any_legal_plan(number: int, mesh: Mesh) -> None:
    """Every choice of shardings gives the plain model's loss and gradients, in float64 (26, whose dtypes are the point, in its own);
    ranks are threads."""
    one, loss_fn = case(number), loss_of(case(number))
    model, args, kwargs = one.build()
    tolerance = one.EXPECT["grad_tol"] if number == 26 else 1e-10
    if number != 26:
        args, kwargs = tree((args, kwargs), lambda t: t.double() if t.is_floating_point() else t)
        doubled(model)
    captured = capture(model, (args, kwargs), loss=loss_fn)
    inputs = bind(captured.graph.in_spec, args, kwargs)
    plan = random_plan(captured.graph, mesh, seed=number)
    losses, gradients, mutations, _ = simulated(captured.graph, captured.constants, plan, model, inputs)
    output = model(*args, **kwargs)
    want = loss_fn(output) if loss_fn else output
    want.backward()
    for loss in losses:
        assert math.isclose(float(loss), float(want.detach()), rel_tol=tolerance)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert not list(differ(name, gradients[name], parameter.grad, tolerance))
    buffers = dict(model.named_buffers())
    for name, value in mutations.items():
        assert not list(differ(name, value, buffers[name], tolerance))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_16_any_legal_plan(mesh: Mesh) -> None:
    one = case(16)
    model, args, _ = one.build()
    captured = capture(model, args)
    graph = captured.graph.without_gradients()
    for seed in range(3):
        plan = random_plan(graph, mesh, seed)
        values = simulated(graph, captured.constants, plan, model, bind(graph.in_spec, args, {}), "forward", training=False)[-1]
        with torch.no_grad():
            assert not list(differ("output", rebuild(graph.outputs, values, captured.output_types), model(*args), one.EXPECT["tol"]))
