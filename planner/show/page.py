"""A plan as one self-contained page: style and drawings inline, no script, nothing loaded from anywhere."""

from __future__ import annotations

import functools
import importlib.resources
from html import escape
from itertools import groupby

from planner.oplines import OpLine
from planner.plan import Plan, SegmentPlan
from planner.sharding import Sharding, Type
from planner.sharding import parse as parse_sharding
from planner.show import svg, units
from planner.show.terminal import run_lengths, segment_names
from planner.show.timeline import timeline
from planner.show.words import OnAxis, describe, mesh_line, no_rule, proof, runner_up, share_of, storage, summary

MOST_EVENTS = 1500
"""More boxes than this say nothing in a drawing; the Perfetto trace takes any number."""


@functools.cache
def style() -> str:
    return importlib.resources.files("planner.show").joinpath("style.css").read_text(encoding="utf-8")


def page(plan: Plan) -> str:
    title = escape(f"{plan.model.name}: {mesh_line(plan)}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"></head>\n'
        '<body style="margin:0;background:Canvas"><div style="padding:16px">\n'
        f"{fragment(plan)}\n</div></body></html>\n"
    )


def fragment(plan: Plan) -> str:
    """The page's content with its style, to be put into a notebook."""
    parts = [_head(plan), _mesh(plan), _time(plan), _memory(plan), _schedule(plan), _graph(plan), _parameters(plan), _others(plan)]
    return f'<div class="shardwright"><style>{style()}</style>\n' + "\n".join(part for part in parts if part) + "\n</div>"


def _section(title: str, body: str, css: str = "") -> str:
    return f'<section class="{css}"><h2>{escape(title)}</h2>{body}</section>'


def _table(headings: list[str], rows: list[list[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


# ---------------------------------------------------------------- sections


def _head(plan: Plan) -> str:
    predicted = plan.predicted
    status, _, how = proof(plan).partition(", ")
    peak = max(predicted.peak_memory_bytes, default=0)
    used = f"of {units.nbytes(plan.memory_per_gpu)} ({units.share(peak / plan.memory_per_gpu)})" if plan.memory_per_gpu else ""
    tiles = [
        (units.seconds(predicted.step_time_s), "predicted step time"),
        (units.nbytes(peak), f"peak memory per GPU {used}"),
        (status, f"solver, {how}"),
        (mesh_line(plan).replace("pipe", "").replace("data", "").replace("tensor", ""), "pipe × data × tensor"),
        (str(plan.mesh.microbatches), f"micro-batches, {'no pipeline' if plan.schedule == 'none' else plan.schedule}"),
    ]
    shown = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in tiles)
    line = f"{plan.world_size} × {plan.hardware}, {plan.precision}, optimizer {plan.optimizer}, torch {plan.model.torch}"
    return f'<section><h1>{escape(plan.model.name)}</h1><p class="dim">{escape(line)}</p><div class="tiles">{shown}</div></section>'


def _mesh(plan: Plan) -> str:
    mesh, names = plan.mesh, segment_names(plan)
    captions = [run_lengths(names[stage.first : stage.last]) for stage in plan.stages]
    if mesh.pipe == 1:
        captions = [units.count(len(names), "segment")]
    return _section("Mesh", svg.mesh(mesh.pipe, mesh.data, mesh.tensor, captions))


def _time(plan: Plan) -> str:
    total = plan.predicted.step_time_s
    rows = share_of(plan.predicted.breakdown, total)
    parts = tuple((kind, value, units.seconds(value)) for kind, value, _ in rows if value)
    drawn = svg.bars([svg.Bar("step", parts, units.seconds(total))], label="step time by kind")
    listed = _table(["kind", "time", "share"], [[escape(kind), units.seconds(value), units.share(part)] for kind, value, part in rows])
    return _section("Predicted step time by kind", drawn + listed)


def _memory(plan: Plan) -> str:
    limit = plan.memory_per_gpu
    rows = []
    for k, kinds in enumerate(plan.predicted.memory):
        peak = plan.predicted.peak_memory_bytes[k]
        parts = tuple((kind, float(size), units.nbytes(size)) for kind, size in sorted(kinds.items(), key=lambda kv: -kv[1]) if size)
        rows.append(svg.Bar(f"stage {k}", parts, units.nbytes(peak) + (f" ({units.share(peak / limit)})" if limit else "")))
    return _section("Memory per GPU by kind", svg.bars(rows, float(limit) or None, f"limit {units.nbytes(limit)}", "memory per stage"))


def _schedule(plan: Plan) -> str:
    if plan.mesh.pipe * plan.mesh.microbatches * 2 > MOST_EVENTS:
        return ""
    total = plan.predicted.step_time_s
    drawn = svg.schedule(timeline(plan), plan.mesh.pipe, total, units.seconds(total))
    note = f'<p class="note">{"Stages are drawn equally long; numbers" if plan.mesh.pipe > 1 else "Numbers"} are micro-batches.</p>'
    return _section("One step", drawn + note)


def _graph(plan: Plan) -> str:
    names = segment_names(plan)
    stages = []
    for k, stage in enumerate(plan.stages):
        runs = [(name, len(list(group))) for name, group in groupby(names[stage.first : stage.last])]
        boxes = "→".join(f'<span class="box"><b>{escape(name)}</b>{f" ×{n}" if n > 1 else ""}</span>' for name, n in runs)
        stages.append(f'<div class="stage"><div class="dim">stage {k}</div><div class="chain">{boxes}</div></div>')
    keys = svg.legend(
        [("I invariant", "var(--I)"), ("R replicated", "var(--R)"), ("S(d) split along dim d", "var(--S)"), ("P pending sum", "var(--P)")]
    )
    opened = max(plan.segments, key=lambda segment: len(segment.segments) * len(segment.ops), default=None)
    classes = "".join(_class(plan, segment, segment is opened) for segment in plan.segments)
    return _section("The graph by segments", f'<div class="flow">{"".join(stages)}</div>{keys}{classes}')


def _class(plan: Plan, segment: SegmentPlan, opened: bool) -> str:
    told = describe(plan, segment)
    axes = plan.mesh.mesh().axes
    name = escape(segment.name or "(model)")
    recompute = f", recompute {segment.recompute}" if segment.recompute != "none" else ""
    head = f'<b>{name}</b><span class="dim">×{len(segment.segments)}, {units.count(len(segment.ops), "op")}{recompute}</span>'
    strips = "".join(_strip(i, axis.name, told) for i, axis in enumerate(axes) if not axis.is_time)
    short = "".join(f"<p><b>{axis}</b>: {escape('; '.join(texts))}</p>" for axis, texts in summary(plan, segment).items())
    ranked = [(i, axis.name) for i, axis in enumerate(axes) if not axis.is_time]
    rows = [_op_row(line, words, ranked) for line, words in told]
    listed = _table(["op", *(f"{axis}: in → out" for _, axis in ranked), "in words"], rows)
    attribute = " open" if opened else ""
    return f"<details{attribute}><summary>{head}{strips}</summary>{short}{listed}</details>"


def _strip(axis: int, name: str, told: list[tuple[OpLine, tuple[OnAxis, ...]]]) -> str:
    cells = []
    for line, words in told:
        kind = line.outputs[0][axis].kind if line.outputs else "R"
        tip = f"{line}: " + "; ".join(f"{w.axis}: {w.text}" for w in words)
        cells.append(f'<i class="{kind}" title="{escape(tip)}"></i>')
    return f'<div class="strip"><span>{escape(name)}</span><div>{"".join(cells)}</div></div>'


def _op_row(line: OpLine, words: tuple[OnAxis, ...], axes: list[tuple[int, str]]) -> list[str]:
    note = "no rule" if no_rule(line) else f"kernel {line.kernel}" if line.kernel else ""
    name = f"<code>{escape(line.op.removeprefix('aten.'))}</code>" + (f' <span class="dim">{note}</span>' if note else "")
    cells = [" ".join(chip(s[i]) for s in line.inputs) + " → " + " ".join(chip(s[i]) for s in line.outputs) for i, _ in axes]
    text = "<br>".join(escape(f"{w.axis}: {w.text}") for w in words) or "whole"
    return [name, *cells, text]


def chip(type_: Type) -> str:
    return f'<span class="chip {type_.kind}">{escape(str(type_))}</span>'


def _parameters(plan: Plan) -> str:
    axes = [(i, axis.name) for i, axis in enumerate(plan.mesh.mesh().axes) if not axis.is_time]
    rows = []
    for parameter in plan.parameters:
        types: Sharding = parse_sharding(parameter.sharding)
        rows.append(
            [
                f"<code>{escape(parameter.name)}</code>",
                f"<code>{escape(plan.model.parameters.get(parameter.name, ''))}</code>",
                *(chip(types[i]) for i, _ in axes),
                escape(storage(plan, parameter)),
            ]
        )
    return _section("Parameters", _table(["parameter", "tensor", *(name for _, name in axes), "storage"], rows)) if rows else ""


def _others(plan: Plan) -> str:
    parts = []
    if plan.alternatives:
        told = [runner_up(plan, other) for other in plan.alternatives]
        rows = [[escape(item) for item in (t.what, t.time, t.against, t.why)] for t in told]
        parts.append(_section("Runners-up", _table(["plan", "step", "against this", "why"], rows)))
    report = plan.solver
    text = f"{proof(plan)}; objective {units.seconds(report.objective)}, bound {units.seconds(report.bound)}. {report.scope}"
    parts.append(_section("Solver", f"<p>{escape(text)}</p>"))
    if plan.warnings:
        items = "".join(f"<li>{escape(warning)}</li>" for warning in plan.warnings)
        parts.append(_section("Warnings", f"<ul>{items}</ul>", "warn"))
    return "\n".join(parts)
