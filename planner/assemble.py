"""From a search result to a ``Plan``: op lines per segment class, parameters folded by name, predictions, runners-up, warnings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from cost_models import HardwareProfile
from planner.assignment import parameter_plan
from planner.attempt import Found, Request
from planner.fold import Fold, OpClass
from planner.graph import PARAMETER, Graph
from planner.ilp.problem import Q
from planner.memory import Storage
from planner.oplines import OpLine
from planner.plan import (
    Alternative,
    MeshPlan,
    ModelPlan,
    ParameterPlan,
    Plan,
    Predicted,
    SegmentPlan,
    StagePlan,
)
from planner.rules.base import MeshStrategy
from planner.search import Result
from planner.sharding import Sharding, show

LossKind = Literal["output", "callable", "none"]


def assemble(result: Result, graph: Graph, request: Request, profile: HardwareProfile, name: str, loss: LossKind) -> Plan:
    """The plan of the best candidate found."""
    best, fold = result.best, result.fold
    mesh = best.candidate.mesh
    assert best.prepared is not None
    stored = storage_by_name(best, fold)
    names = folded_names(fold, stored)
    specs = {node.target: str(node.outputs[0]) for node in graph.of(PARAMETER)}
    ends = [sum(stage <= k for stage in best.prepared.stages) for k in range(mesh.pipe)]
    return Plan(
        model=ModelPlan(
            name=name,
            fingerprint=graph.fingerprint(),
            torch=torch.__version__,
            loss=loss,
            parameters={shown: specs[member] for shown, member in names.items()},
            inputs=graph.in_spec,
            batch_dims=dict(graph.batch_dims),
        ),
        mesh=MeshPlan(pipe=mesh.pipe, data=mesh.data, tensor=mesh.tensor, microbatches=mesh.microbatches),
        schedule=best.candidate.schedule,  # type: ignore[arg-type]
        stages=[StagePlan(first=first, last=last) for first, last in zip([0, *ends], ends)],
        segments=segment_plans(best, fold),
        parameters=[ParameterPlan(name=shown, sharding=show(stored[member][0]), fsdp=stored[member][1]) for shown, member in names.items()],
        optimizer=request.optimizer.name,
        precision=request.precision.name,  # type: ignore[arg-type]
        hardware=profile.name,
        hardware_id=profile.id,
        memory_per_gpu=int(request.memory_limit),
        predicted=predicted(result),
        solver=result.report,
        alternatives=[alternative(found) for found in result.others],
        warnings=warnings_of(result),
    )


# ---------------------------------------------------------------- ops


def segment_plans(best: Found, fold: Fold) -> list[SegmentPlan]:
    members: dict[int, list[int]] = {}
    for segment in fold.segments:
        members.setdefault(segment.class_id, []).append(segment.index)
    repeated = {class_id for class_id, indices in members.items() if len(indices) > 1}
    plans = []
    for class_id, indices in members.items():
        segment = fold.segments[indices[0]]
        how = best.candidate.recompute if class_id in repeated else "none"
        ops = [op_line(best, fold.ops[fold.class_of[name]]) for name in segment.nodes]
        plans.append(SegmentPlan(name=segment.name or "model", segments=indices, ops=ops, recompute=how))  # type: ignore[arg-type]
    return plans


def op_line(best: Found, op: OpClass) -> str:
    assert best.prepared is not None and best.choice is not None
    strategy = best.prepared.tables.labels[op.index][best.choice[op.index]]
    assert isinstance(strategy, MeshStrategy)
    whole: Sharding = ()
    inputs = strategy.inputs if strategy.per_axis else (whole,) * len(op.node.inputs)
    outputs = strategy.outputs if strategy.per_axis else (whole,) * len(op.node.outputs)
    return str(OpLine(op.node.op, inputs, outputs, strategy.kernel))


# ---------------------------------------------------------------- parameters


def storage_by_name(best: Found, fold: Fold) -> dict[str, tuple[Sharding, bool]]:
    """Parameter -> (stored sharding, fsdp)."""
    assert best.prepared is not None and best.choice is not None
    found = {}
    for op in fold.ops:
        if op.node.op == PARAMETER:
            storage = best.prepared.tables.labels[op.index][best.choice[op.index]]
            assert isinstance(storage, Storage)
            for name in op.members:
                found[fold.graph.by_name[name].target] = (storage.stored, storage.fsdp)
    return found


def folded_names(fold: Fold, stored: Mapping[str, tuple[Sharding, bool]]) -> dict[str, str]:
    """Name to write, with ``*`` for the index of equal blocks where the pattern means these parameters only -> one of them."""
    specs = {node.target: node.outputs[0] for node in fold.graph.of(PARAMETER)}
    shown: dict[str, str] = {}
    for op in fold.ops:
        if op.node.op != PARAMETER:
            continue
        names = [fold.graph.by_name[name].target for name in op.members]
        pattern = common_pattern(names)
        if pattern is not None and pattern not in shown:
            shown[pattern] = names[0]
        else:
            shown.update({name: name for name in names})
    entries = {text: ParameterPlan(name=text, sharding=show(stored[member][0])) for text, member in shown.items()}
    for name in stored:  # a pattern of one class may also match a parameter of another
        found = shown[parameter_plan(name, entries).name]
        if stored[found] != stored[name] or specs[found] != specs[name]:
            shown[name] = name
    return shown


def common_pattern(names: Sequence[str]) -> str | None:
    """``h.*.w`` for names that differ in one index only; None for a single name, or names that differ otherwise."""
    split = [name.split(".") for name in names]
    if len(names) < 2 or len({len(parts) for parts in split}) > 1:
        return None
    differing = [i for i, parts in enumerate(zip(*split)) if len(set(parts)) > 1]
    if len(differing) != 1 or not all(parts[differing[0]].isdigit() for parts in split):
        return None
    return ".".join("*" if i == differing[0] else part for i, part in enumerate(split[0]))


# ---------------------------------------------------------------- predictions and runners-up


def predicted(result: Result) -> Predicted:
    bill = result.best.bill
    assert bill is not None
    return Predicted(
        step_time_s=math.fsum(bill.breakdown.values()),
        peak_memory_bytes=list(bill.peaks),
        breakdown=bill.breakdown,
        memory=[dict(kinds) for kinds in bill.memory],
        replicated_time_share=replicated_share(result),
    )


def replicated_share(result: Result) -> float:
    """Share of the compute time that ops without a rule take."""
    prepared, choice = result.best.prepared, result.best.choice
    assert prepared is not None and choice is not None
    ops = prepared.tables.problem.ops
    seconds = [float(op.cost[s, [Q["forward"], Q["backward"]]].sum() * op.count.sum()) for op, s in zip(ops, choice)]
    total = math.fsum(seconds)
    without = math.fsum(seconds[op.index] for op in result.catalogue.without_rule())
    return min(1.0, without / total) if total else 0.0


def alternative(found: Found) -> Alternative:
    if found.bill is not None:
        time, why = found.bill.step_time_s, f"{max(found.bill.peaks) / 2**20:.4g} MiB per GPU"
    elif math.isfinite(found.bound):
        time, why = found.bound, f"at least this long: {found.why}"
    else:
        time, why = None, found.why
    return Alternative(what=str(found.candidate)[:4096], step_time_s=time, why=why[:4096])


def warnings_of(result: Result) -> list[str]:
    """One line per kind of op that runs whole on every rank for want of a rule."""
    best = result.best
    assert best.prepared is not None and best.choice is not None
    count: Counter[str] = Counter()
    first: dict[str, OpClass] = {}
    cost: dict[str, float] = {}
    if not best.candidate.mesh.axes:
        return []
    for op in result.catalogue.without_rule():
        priced = best.prepared.tables.problem.ops[op.index]
        count[op.node.op] += len(op.members)
        first.setdefault(op.node.op, op)
        seconds = float(priced.cost[best.choice[op.index], [Q["forward"], Q["backward"]]].sum() * priced.count.sum())
        cost[op.node.op] = cost.get(op.node.op, 0.0) + seconds
    lines = []
    for name, n in sorted(count.items(), key=lambda item: -cost[item[0]]):
        node = first[name].node
        where = f"first in module {node.module or 'the model'} ({node.source or 'unknown line'})"
        times = f"{n} time{'s' if n > 1 else ''}, {cost[name] * 1e3:.3g} ms per micro-batch"
        lines.append(f"{name} has no sharding rule and runs whole on every rank: {times}, {where}")
    return lines
