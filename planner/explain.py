"""Why a plan is as it is, as text: what was chosen, against what, and what binds."""

from __future__ import annotations

from collections.abc import Iterator

from planner.plan import Alternative, Plan
from planner.show import units
from planner.show.terminal import run_lengths, segment_names
from planner.show.words import describe, mesh_line, no_rule, proof, runner_up, share_of, storage, summary

TIGHT = 0.9
"""A stage that uses more than this share of the memory limit is called tight."""


def explain(plan: Plan) -> str:
    """Sections of plain text, one after the other, each with a heading line."""
    sections = [
        (_title(plan), _overview(plan)),
        ("What binds", _binds(plan)),
        ("Why this mesh", _mesh(plan)),
        ("What is sharded how", _sharded(plan)),
        ("How parameters are stored", _stored(plan)),
        ("How sure this is", _sure(plan)),
        ("Warnings", iter(plan.warnings)),
    ]
    blocks = []
    for heading, lines in sections:
        body = [f"  {line}" for line in lines]
        if body:
            blocks.append("\n".join([heading, *body]))
    return "\n\n".join(blocks) + "\n"


def _title(plan: Plan) -> str:
    mesh = f"{mesh_line(plan)}, micro-batches {plan.mesh.microbatches}"
    return f"{plan.model.name} on {plan.world_size} × {plan.hardware}: {mesh}" + (f", {plan.schedule}" if plan.schedule != "none" else "")


def _overview(plan: Plan) -> Iterator[str]:
    peak = max(plan.predicted.peak_memory_bytes, default=0)
    yield f"predicted step {units.seconds(plan.predicted.step_time_s)}, peak memory {units.nbytes(peak)} per GPU"
    kinds = [f"{kind} {units.share(part)}" for kind, value, part in share_of(plan.predicted.breakdown, plan.predicted.step_time_s) if value]
    yield "time: " + ", ".join(kinds)
    names = segment_names(plan)
    for k, stage in enumerate(plan.stages):
        yield f"stage {k}: {run_lengths(names[stage.first : stage.last])}"


# ---------------------------------------------------------------- what binds


def _binds(plan: Plan) -> Iterator[str]:
    yield _memory_binds(plan)
    ranked = share_of(plan.predicted.breakdown, plan.predicted.step_time_s)
    if ranked and ranked[0][1] > 0:
        kind, value, part = ranked[0]
        total = units.seconds(plan.predicted.step_time_s)
        yield f"time: {kind} is the largest part, {units.seconds(value)} of {total} ({units.share(part)})"
    if plan.predicted.replicated_time_share > 0:
        yield f"ops without a rule run whole on every rank: {units.share(plan.predicted.replicated_time_share)} of the compute time"
    split = sum(parameter.fsdp for parameter in plan.parameters)
    if split:
        yield f"storage of {split} of {len(plan.parameters)} parameter classes is split over data: memory is bought with gathers"
    recomputed = [f"{segment.name} ({segment.recompute})" for segment in plan.segments if segment.recompute != "none"]
    if recomputed:
        yield f"activations are recomputed in {', '.join(recomputed)}: memory is bought with time"


def _memory_binds(plan: Plan) -> str:
    peaks, limit = plan.predicted.peak_memory_bytes, plan.memory_per_gpu
    stage = max(range(len(peaks)), key=peaks.__getitem__)
    kinds = plan.predicted.memory[stage]
    largest = max(kinds, key=lambda kind: kinds[kind], default="")
    where = f"stage {stage}, mostly {largest}" if len(peaks) > 1 else f"mostly {largest}"
    text = f"memory: {units.nbytes(peaks[stage])} ({where})"
    if not limit:
        return text
    part = peaks[stage] / limit
    verdict = "the limit is tight" if part > TIGHT else "the limit is not reached"
    return f"{text} of {units.nbytes(limit)}, {units.share(part)}: {verdict}"


# ---------------------------------------------------------------- against what


def _mesh(plan: Plan) -> Iterator[str]:
    if plan.world_size == 1:
        yield "one GPU: there is nothing to choose between"
        return
    if plan.solver.status == "forced":
        yield "the layout left one way only"
    if not plan.alternatives:
        yield "no other mesh was left to compare with"
    for other in plan.alternatives:
        yield _against(plan, other)


def _against(plan: Plan, other: Alternative) -> str:
    told = runner_up(plan, other)
    times = "does not go" if other.step_time_s is None else f"{told.time}, {told.against}"
    return f"{told.what}: {times}" + (f" ({told.why})" if told.why else "")


# ---------------------------------------------------------------- what was chosen


def _sharded(plan: Plan) -> Iterator[str]:
    for segment in plan.segments:
        times = f" ×{len(segment.segments)}" if len(segment.segments) > 1 else ""
        yield f"{segment.name or '(model)'}{times}: {units.count(len(segment.ops), 'op')}"
        for axis, texts in summary(plan, segment).items():
            yield f"  {axis}: {'; '.join(texts)}"
        without = sorted({line.op for line, _ in describe(plan, segment) if no_rule(line)})
        if without and plan.world_size > 1:
            yield f"  no rule for {', '.join(without)}: every rank runs all of it"


def _stored(plan: Plan) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for parameter in plan.parameters:
        alike.setdefault(storage(plan, parameter), []).append(parameter.name)
    for how, names in alike.items():
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        yield f"{how}: {', '.join(names[:8])}{more}"


def _sure(plan: Plan) -> Iterator[str]:
    report = plan.solver
    means = {
        "optimal": "proven optimal under the cost model",
        "feasible": f"no plan is more than {units.share(report.gap)} faster under the cost model",
        "forced": "the layout left one way only",
    }[report.status]
    yield f"{proof(plan)}: {means}; objective {units.seconds(report.objective)}, bound {units.seconds(report.bound)}"
    yield f"the bound speaks about: {report.scope}"
    yield f"costs come from the profile {plan.hardware} ({plan.hardware_id})"
