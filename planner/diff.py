"""What changes from one plan to another, as a list of values that print readably."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from planner.plan import Plan
from planner.show import units
from planner.show.words import summary

NOTHING = "(absent)"


@dataclass(frozen=True)
class Change:
    """One difference. ``section``: model, mesh, settings, stages, ops, parameters, predicted or solver."""

    section: str
    what: str
    before: str
    after: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.before} => {self.after}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class PlanDiff:
    """All differences, in the order of the sections. False where there are none."""

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def of(self, section: str) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.section == section)

    def __str__(self) -> str:
        if not self.changes:
            return "no differences"
        lines = []
        for section in dict.fromkeys(change.section for change in self.changes):
            lines.append(section)
            lines += [f"  {change}" for change in self.of(section)]
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def diff(before: Plan, after: Plan) -> PlanDiff:
    parts = (_model, _mesh, _settings, _stages, _ops, _parameters, _predicted, _solver)
    return PlanDiff(tuple(change for part in parts for change in part(before, after)))


def _fields(section: str, before: Any, after: Any, names: tuple[str, ...], show: Callable[[Any], str] = str) -> Iterator[Change]:
    for name in names:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield Change(section, name, show(old), show(new))


def _dicts(section: str, prefix: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Change]:
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old != new:
            yield Change(section, f"{prefix}{name}", _or_nothing(old), _or_nothing(new))


def _or_nothing(value: Any) -> str:
    return NOTHING if value is None else str(value)


def _model(before: Plan, after: Plan) -> Iterator[Change]:
    yield from _fields("model", before.model, after.model, ("name", "fingerprint", "torch", "loss"))
    if before.model.inputs != after.model.inputs:
        yield Change("model", "inputs", str(before.model.inputs), str(after.model.inputs))
    yield from _dicts("model", "tensor of ", before.model.parameters, after.model.parameters)
    yield from _dicts("model", "batch dim of ", before.model.batch_dims, after.model.batch_dims)


def _mesh(before: Plan, after: Plan) -> Iterator[Change]:
    yield from _fields("mesh", before.mesh, after.mesh, ("pipe", "data", "tensor", "microbatches"))


def _settings(before: Plan, after: Plan) -> Iterator[Change]:
    yield from _fields("settings", before, after, ("schedule", "optimizer", "precision", "hardware", "hardware_id"))
    yield from _fields("settings", before, after, ("memory_per_gpu",), units.nbytes)


def _stages(before: Plan, after: Plan) -> Iterator[Change]:
    old, new = ([f"[{stage.first}, {stage.last})" for stage in plan.stages] for plan in (before, after))
    for k in range(max(len(old), len(new))):
        pair = [side[k] if k < len(side) else NOTHING for side in (old, new)]
        if pair[0] != pair[1]:
            yield Change("stages", f"stage {k}, segments", *pair)


def _ops(before: Plan, after: Plan) -> Iterator[Change]:
    """Ops are matched within segment classes of one name by their place; changed runs of equal length are compared op by op."""
    old, new = ({_class_name(plan, i): segment for i, segment in enumerate(plan.segments)} for plan in (before, after))
    for name in dict.fromkeys([*old, *new]):
        left, right = old.get(name), new.get(name)
        if left is None or right is None:
            counts = [f"{len(side.ops)} ops" if side else NOTHING for side in (left, right)]
            yield Change("ops", name, *counts)
            continue
        if left.recompute != right.recompute:
            yield Change("ops", f"{name} recompute", left.recompute, right.recompute)
        if left.segments != right.segments:
            yield Change("ops", f"{name} segments", _runs(left.segments), _runs(right.segments))
        if before.mesh.mesh().axes == after.mesh.mesh().axes:
            yield from _op_lines(name, left.ops, right.ops)
        else:
            yield from _op_words(name, summary(before, left), summary(after, right))


def _class_name(plan: Plan, index: int) -> str:
    """A class's name, with a number behind it where earlier classes have the same."""
    name = plan.segments[index].name or "(model)"
    earlier = sum((segment.name or "(model)") == name for segment in plan.segments[:index])
    return f"{name} #{earlier + 1}" if earlier else name


def _op_lines(name: str, left: list[str], right: list[str]) -> Iterator[Change]:
    old_ops, new_ops = ([line.partition(": ")[0] for line in side] for side in (left, right))
    for tag, i0, i1, j0, j1 in difflib.SequenceMatcher(None, old_ops, new_ops, autojunk=False).get_opcodes():
        for k in range(max(i1 - i0, j1 - j0)):
            old = left[i0 + k] if i0 + k < i1 else ""
            new = right[j0 + k] if j0 + k < j1 else ""
            if old == new:
                continue
            op = (old or new).partition(": ")[0]
            if tag == "equal":
                old, new = old.partition(": ")[2], new.partition(": ")[2]
            yield Change("ops", f"{name} op {i0 + k} {op}", old or NOTHING, new or NOTHING)


def _op_words(name: str, left: dict[str, list[str]], right: dict[str, list[str]]) -> Iterator[Change]:
    """On meshes with other axes every line differs by its form, so what the ops do is compared axis by axis, in words."""
    for axis in dict.fromkeys([*left, *right]):
        old, new = ("; ".join(side.get(axis, [NOTHING])) for side in (left, right))
        if old != new:
            yield Change("ops", f"{name} on {axis}", old, new)


def _runs(numbers: list[int]) -> str:
    """``0-3, 7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def _parameters(before: Plan, after: Plan) -> Iterator[Change]:
    old, new = ({p.name: p.sharding + (" fsdp" if p.fsdp else "") for p in plan.parameters} for plan in (before, after))
    yield from _dicts("parameters", "", old, new)


def _predicted(before: Plan, after: Plan) -> Iterator[Change]:
    old, new = before.predicted, after.predicted
    yield from _number("predicted", "step time", old.step_time_s, new.step_time_s, units.seconds)
    for kind in sorted({*old.breakdown, *new.breakdown}):
        yield from _number("predicted", kind, old.breakdown.get(kind, 0.0), new.breakdown.get(kind, 0.0), units.seconds)
    peaks = (max(old.peak_memory_bytes, default=0), max(new.peak_memory_bytes, default=0))
    yield from _number("predicted", "peak memory", *peaks, units.nbytes)
    if old.replicated_time_share != new.replicated_time_share:
        shares = (units.share(old.replicated_time_share), units.share(new.replicated_time_share))
        yield Change("predicted", "replicated share of compute", *shares)


def _number(section: str, what: str, old: float, new: float, show: Callable[[float], str]) -> Iterator[Change]:
    if old != new:
        yield Change(section, what, show(old), show(new), f"{100 * (new / old - 1):+.1f} %" if old else "")


def _solver(before: Plan, after: Plan) -> Iterator[Change]:
    yield from _fields("solver", before.solver, after.solver, ("status",))
    if before.solver.gap != after.solver.gap:
        yield Change("solver", "gap", units.share(before.solver.gap), units.share(after.solver.gap))
