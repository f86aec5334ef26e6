"""What an op's or a parameter's sharding amounts to, in words that people in the field use.

``describe`` looks at one op on one axis. The words come from a table of readers, first match wins: each reader is one short function
of (op line, types of the inputs, types of the outputs) that returns its words or None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import planner.rules  # noqa: F401  registers the rules, so that an op without one can be told
from planner.oplines import OpLine
from planner.plan import Alternative, ParameterPlan, Plan, SegmentPlan
from planner.rules.base import REGISTRY
from planner.sharding import P, Type
from planner.sharding import parse as parse_sharding
from planner.show import units

Types = Sequence[Type]
Reader = Callable[[OpLine, Types, Types], "str | None"]

# op -> (position of the weight, its dim of outputs, its dim of the contraction); dims of the last two as written in the op
WEIGHTS = {"linear": (1, 0, 1), "addmm": (2, 1, 0), "mm": (1, 1, 0)}
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "dot", "mv"}


@dataclass(frozen=True)
class OnAxis:
    """What one op does on one axis."""

    axis: str
    text: str


def no_rule(line: OpLine) -> bool:
    """True for an op that every rank runs whole because no rule says how to split it."""
    return line.op not in REGISTRY and all(t.kind in "IR" for s in (*line.inputs, *line.outputs) for t in s)


def describe(plan: Plan, segment: SegmentPlan) -> list[tuple[OpLine, tuple[OnAxis, ...]]]:
    """Every op of a segment class with its words on the ranked axes (micro left out: it is time, nothing communicates there)."""
    lines = [OpLine.parse(text) for text in segment.ops]
    axes = [(i, axis.name) for i, axis in enumerate(plan.mesh.mesh().axes) if not axis.is_time]
    told = []
    for position, line in enumerate(lines):
        told.append((line, tuple(OnAxis(name, on_axis(line, i, name, lines[position + 1 :])) for i, name in axes)))
    return told


def on_axis(line: OpLine, axis: int, name: str, following: Sequence[OpLine] = ()) -> str:
    inputs, outputs = line.on_axis(axis)
    text = next(filter(None, (reader(line, inputs, outputs) for reader in READERS)))
    if name == "data" and text in ("split along dim 0", "rows split along dim 0"):
        text = "batch split"
    if text in SUMMED:
        text += _what_follows(axis, following)
    return text


def _what_follows(axis: int, following: Sequence[OpLine]) -> str:
    """Which collective sums a pending output, read from the op that takes it. A plan has no wiring, so this is said only where the next
    op in line (past views that keep the sum pending) is of a kind that takes what was just made."""
    for line in following:
        inputs, _ = line.on_axis(axis)
        if inputs == (P,):
            continue
        kinds = {t.kind for t in inputs}
        if line.name not in TAKES_THE_LAST or len(kinds) != 1:
            return ""
        return WAYS_TO_SUM.get(kinds.pop(), "")
    return ""


SUMMED = ("row-parallel: pending sum", "contraction split: pending sum", "vocabulary split: pending sum")
TAKES_THE_LAST = {"add", "layer_norm", "rms_norm", "view", "reshape", "transpose", "to", "clone", "relu", "gelu", "silu"}
WAYS_TO_SUM = {
    "I": ", then all-reduce",
    "R": ", then all-reduce (both ways)",
    "S": ", then reduce-scatter",
    "P": ", kept pending by the next op",
}


# ---------------------------------------------------------------- readers


def _norule(line: OpLine, inputs: Types, outputs: Types) -> str | None:
    return "replicated: no rule" if no_rule(line) else None


def _whole(line: OpLine, inputs: Types, outputs: Types) -> str | None:
    kinds = {t.kind for t in (*inputs, *outputs)}
    if kinds == {"I"} or kinds == {"I", "R"}:
        return "whole, same work on every rank"
    if kinds <= {"R"}:
        return "whole on every rank"
    return None


def _weighted(line: OpLine, inputs: Types, outputs: Types) -> str | None:
    if line.name not in WEIGHTS:
        return None
    position, out_dim, in_dim = WEIGHTS[line.name]
    weight = inputs[position]
    if weight.is_split and weight.dim == out_dim and outputs[0].is_split:
        return "column-parallel"
    if weight.is_split and weight.dim == in_dim and outputs[0] == P:
        return "row-parallel: pending sum"
    if not weight.is_split and outputs[0].is_split:
        return f"rows split along dim {outputs[0].dim}"
    return None


def _product(line: OpLine, inputs: Types, outputs: Types) -> str | None:
    if line.name in PRODUCTS and outputs[0] == P and all(t.is_split for t in inputs[:2]):
        return "contraction split: pending sum"
    return None


def _embedding(line: OpLine, inputs: Types, outputs: Types) -> str | None:
    if line.name != "embedding" or not inputs[0].is_split:
        return None
    return "vocabulary split: pending sum" if inputs[0].dim == 0 else "hidden dim split"


def _attention(line: OpLine, inputs: Types, outputs: Types) -> str | None:
    if line.name != "scaled_dot_product_attention" or not outputs[0].is_split:
        return None
    return {0: "batch split", 1: "split by heads", 2: "queries split along the sequence"}.get(outputs[0].dim)


def _loss(line: OpLine, inputs: Types, outputs: Types) -> str | None:
    if line.name not in ("cross_entropy_loss", "nll_loss_nd", "nll_loss"):
        return None
    if inputs[0].is_split and inputs[0].dim == 1:
        return "vocabulary split"
    return "batch split: pending sum" if outputs[0] == P else None


def _split(line: OpLine, inputs: Types, outputs: Types) -> str | None:
    dims = sorted({(t.dim, t.groups) for t in outputs if t.is_split})
    if not dims:
        return None
    return "split along dim " + " and ".join(f"{dim}" + (f" inside {groups} groups" if groups > 1 else "") for dim, groups in dims)


def _pending(line: OpLine, inputs: Types, outputs: Types) -> str | None:
    if P in outputs:
        return "linear: passes the pending sum" if P in inputs else "pending sum over the split part"
    return None


def _rest(line: OpLine, inputs: Types, outputs: Types) -> str | None:
    return "whole result on every rank"


READERS: tuple[Reader, ...] = (_norule, _whole, _weighted, _product, _embedding, _attention, _loss, _split, _pending, _rest)


# ---------------------------------------------------------------- parameters and summaries


def storage(plan: Plan, parameter: ParameterPlan) -> str:
    """How a parameter is stored and what happens to its gradient."""
    told = []
    trained = plan.optimizer != "none"
    for axis, type_ in zip(plan.mesh.mesh().axes, parse_sharding(parameter.sharding)):
        if axis.is_time:
            continue
        if axis.name == "data" and parameter.fsdp:
            told.append("FSDP over data: stored split, gathered for use, gradient reduce-scattered")
        elif type_.is_split:
            inside = f" inside {type_.groups} groups" if type_.groups > 1 else ""
            told.append(f"split along dim {type_.dim}{inside} over {axis.name}")
        elif type_.kind == "R" and trained:
            told.append(f"whole over {axis.name}, gradient all-reduced once per step")
        else:
            told.append(f"whole over {axis.name}")
    return "; ".join(told) or "whole"


def summary(plan: Plan, segment: SegmentPlan) -> dict[str, list[str]]:
    """Axis -> what the class does there, the most telling first: ``linear column-parallel (x2)``."""
    counts: dict[str, Counter[str]] = {}
    plain: dict[str, Counter[str]] = {}
    for line, told in describe(plan, segment):
        for item in told:
            text = item.text
            if text in _PLAIN or text.startswith(_PLAIN_STARTS):
                plain.setdefault(item.axis, Counter())[text] += 1
            else:
                counts.setdefault(item.axis, Counter())[f"{line.name} {text}"] += 1
    found: dict[str, list[str]] = {}
    for axis in plan.mesh.mesh().axes:
        telling = [f"{text} (×{n})" if n > 1 else text for text, n in counts.get(axis.name, Counter()).items()]
        others = [f"{n} op{'s' * (n > 1)} {text}" for text, n in plain.get(axis.name, Counter()).most_common()]
        if telling or others:
            found[axis.name] = telling + others
    return found


_PLAIN = {"whole, same work on every rank", "whole on every rank", "whole result on every rank", "batch split"}
_PLAIN_STARTS = ("split along", "rows split", "linear: passes", "pending sum over")


def mesh_line(plan: Plan) -> str:
    mesh = plan.mesh
    parts = [f"{name} {size}" for name, size in (("pipe", mesh.pipe), ("data", mesh.data), ("tensor", mesh.tensor))]
    return " × ".join(parts)


def proof(plan: Plan) -> str:
    """How good the solver says the plan is: ``optimal, gap 0.00 %, 1.50 s``; without the time for a plan from a file."""
    report = plan.solver
    took = f", {units.seconds(report.seconds)}" if report.seconds is not None else ""
    return f"{report.status}, gap {units.share(report.gap)}{took}"


@dataclass(frozen=True)
class RunnerUp:
    """An alternative in words: ``time`` is ``331 ms``, ``≥ 331 ms`` where only a bound is known, or ``-`` where it does not go."""

    what: str
    time: str
    against: str
    why: str


def runner_up(plan: Plan, other: Alternative) -> RunnerUp:
    if other.step_time_s is None:
        return RunnerUp(other.what, "-", "does not go", other.why)
    bounded = other.why.startswith(BOUND)
    sign = "≥ " if bounded else ""
    mine = plan.predicted.step_time_s
    more = other.step_time_s / mine - 1 if mine else 0.0
    why = other.why.removeprefix(BOUND).lstrip(": ")
    return RunnerUp(other.what, sign + units.seconds(other.step_time_s), f"{sign}{100 * more:+.1f} %", why)


BOUND = "at least this long"
"""How a plan says that an alternative's time is a lower bound: it was ruled out without being solved."""


def share_of(breakdown: dict[str, float], total: float) -> list[tuple[str, float, float]]:
    """(kind, seconds, share), largest first."""
    return [(kind, value, value / total if total else 0.0) for kind, value in sorted(breakdown.items(), key=lambda kv: (-kv[1], kv[0]))]
