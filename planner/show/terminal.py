"""A plan in the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planner.plan import Plan
from planner.sharding import parse as parse_sharding
from planner.show import units
from planner.show.words import mesh_line, proof, runner_up, share_of, storage, summary

BAR = 16
MOST_NAMES = 6


def render(plan: Plan) -> RenderableType:
    """Everything of a plan that fits into a terminal, as one rich renderable."""
    parts: list[RenderableType] = [_head(plan), _stages(plan), _segments(plan), _parameters(plan), _times(plan)]
    if plan.alternatives:
        parts.append(_alternatives(plan))
    parts += [Text(f"! {warning}", style="yellow") for warning in plan.warnings]
    return Group(*parts)


def _head(plan: Plan) -> RenderableType:
    predicted = plan.predicted
    peak = max(predicted.peak_memory_bytes, default=0)
    text = Text()
    text.append(f"{plan.model.name}", style="bold")
    text.append(f" on {plan.world_size} × {plan.hardware}: {mesh_line(plan)}, micro-batches {plan.mesh.microbatches}")
    text.append(f", {plan.schedule}" if plan.schedule != "none" else "")
    text.append(f", {plan.precision}, optimizer {plan.optimizer}\n")
    text.append("predicted step ", style="dim")
    text.append(units.seconds(predicted.step_time_s), style="bold green")
    text.append("   peak memory ", style="dim")
    text.append(units.nbytes(peak), style="bold green")
    if plan.memory_per_gpu:
        text.append(f" of {units.nbytes(plan.memory_per_gpu)} ({units.share(peak / plan.memory_per_gpu)})", style="dim")
    text.append("   solver ", style="dim")
    text.append(f"{proof(plan)}\n", style="green" if plan.solver.status == "optimal" else "yellow")
    return text


def _stages(plan: Plan) -> RenderableType:
    table = Table(title="Stages", title_justify="left", box=None, pad_edge=False)
    for heading in ("stage", "segments", "ranks", "memory per GPU", ""):
        table.add_column(heading)
    names = segment_names(plan)
    limit = plan.memory_per_gpu or max(plan.predicted.peak_memory_bytes, default=1) or 1
    per_stage = plan.mesh.data * plan.mesh.tensor
    for k, stage in enumerate(plan.stages):
        peak = plan.predicted.peak_memory_bytes[k]
        kinds = sorted(plan.predicted.memory[k].items(), key=lambda kv: -kv[1])
        table.add_row(
            str(k),
            escape(run_lengths(names[stage.first : stage.last])),
            f"{k * per_stage}..{(k + 1) * per_stage - 1}" if per_stage > 1 else str(k),
            f"{bar(peak / limit)} {units.nbytes(peak)}",
            ", ".join(f"{kind} {units.nbytes(size)}" for kind, size in kinds if size),
        )
    return table


def segment_names(plan: Plan) -> list[str]:
    """Class name of every segment, in execution order."""
    total = sum(len(segment.segments) for segment in plan.segments)
    names = [""] * total
    for segment in plan.segments:
        for index in segment.segments:
            names[index] = segment.name or "(model)"
    return names


def run_lengths(names: list[str]) -> str:
    """``embed, layers.* ×4, head``."""
    runs: list[tuple[str, int]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in runs) or "(nothing)"


def bar(part: float, width: int = BAR) -> str:
    filled = min(width, round(part * width))
    return "█" * filled + "░" * (width - filled)


def _segments(plan: Plan) -> RenderableType:
    table = Table(title="\nOps by segment class", title_justify="left", box=None, pad_edge=False)
    for heading in ("segment", "×", "ops", "axis", "what is sharded how"):
        table.add_column(heading, justify="right" if heading in ("×", "ops") else "left")
    for segment in plan.segments:
        name = escape(segment.name or "(model)")
        recompute = f" [dim](recompute {segment.recompute})[/dim]" if segment.recompute != "none" else ""
        rows = list(summary(plan, segment).items()) or [("-", ["one rank holds it whole"])]
        for i, (axis, texts) in enumerate(rows):
            first = (name + recompute, str(len(segment.segments)), str(len(segment.ops))) if i == 0 else ("", "", "")
            table.add_row(*first, axis, escape("; ".join(texts)))
    return table


def _parameters(plan: Plan) -> RenderableType:
    """Parameters that are stored alike share a row."""
    table = Table(title="\nParameters by storage", title_justify="left", box=None, pad_edge=False)
    for heading in ("sharding", "storage", "parameters"):
        table.add_column(heading)
    axes = [axis.name for axis in plan.mesh.mesh().axes]
    alike: dict[tuple[str, str], list[str]] = {}
    for parameter in plan.parameters:
        types = parse_sharding(parameter.sharding)
        text = " ".join(f"{axis}:{type_}" for axis, type_ in zip(axes, types) if axis != "micro") or "-"
        alike.setdefault((text, storage(plan, parameter)), []).append(f"{parameter.name} {plan.model.parameters.get(parameter.name, '')}")
    for (text, how), names in alike.items():
        shown = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
        table.add_row(escape(text), escape(how), escape(shown))
    return table


def _times(plan: Plan) -> RenderableType:
    table = Table(title="\nPredicted step time by kind", title_justify="left", box=None, pad_edge=False)
    for heading in ("kind", "time", "share"):
        table.add_column(heading, justify="right" if heading == "time" else "left")
    total = plan.predicted.step_time_s
    for kind, value, share in share_of(plan.predicted.breakdown, total):
        table.add_row(escape(kind), units.seconds(value), f"{bar(share)} {units.share(share)}")
    table.add_row("step", units.seconds(total), "")
    return table


def _alternatives(plan: Plan) -> RenderableType:
    table = Table(title="\nRunners-up", title_justify="left", box=None, pad_edge=False)
    for heading in ("plan", "step", "against this", "why"):
        table.add_column(heading)
    for other in plan.alternatives:
        told = runner_up(plan, other)
        table.add_row(escape(told.what), told.time, told.against, escape(told.why))
    return table
