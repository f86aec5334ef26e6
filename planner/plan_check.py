"""Whether a plan makes sense as a whole: what types alone cannot say.

Each law is one short function that yields a complaint (field, value, what is allowed) for every breach; ``check`` raises the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from planner.errors import PlanError, ReshardError
from planner.graph import DTYPE_BYTES
from planner.oplines import OpLine
from planner.plan import Plan
from planner.sharding import R
from planner.sharding import parse as parse_sharding

Law = Callable[[Plan], Iterator[str]]

_TENSOR = re.compile(r"[a-z][a-z0-9_]{1,31}\[(\d{1,18}(,\d{1,18})*)?\]")


def check(plan: Plan) -> None:
    """Raises PlanError naming the field, its value and what is allowed."""
    for law in LAWS:
        for complaint in law(plan):
            raise PlanError(complaint)


def _mesh(plan: Plan) -> Iterator[str]:
    if plan.world_size > 2**20:
        yield f"mesh: {plan.mesh.mesh()} is {plan.world_size} GPUs, at most {2**20} are allowed"
    if plan.mesh.pipe > 1 and plan.schedule == "none":
        yield f"schedule: 'none' with pipe={plan.mesh.pipe}; a pipeline of several stages needs a schedule"


def _stages(plan: Plan) -> Iterator[str]:
    if len(plan.stages) != plan.mesh.pipe:
        yield f"stages: there are {len(plan.stages)}, the mesh has pipe={plan.mesh.pipe}: one stage per pipe coordinate"
        return
    expected = 0
    for i, stage in enumerate(plan.stages):
        if stage.first != expected or stage.last < stage.first:
            yield f"stages[{i}]: segments [{stage.first}, {stage.last}), must start at {expected} and not end before it"
            return
        expected = stage.last
    total = sum(len(segment.segments) for segment in plan.segments)
    if expected != total:
        yield f"stages[{len(plan.stages) - 1}].last: {expected}, but the plan has {total} segments: stages must hold all of them"


def _segments(plan: Plan) -> Iterator[str]:
    seen: dict[int, int] = {}
    total = sum(len(segment.segments) for segment in plan.segments)
    for i, segment in enumerate(plan.segments):
        if not segment.segments:
            yield f"segments[{i}].segments: empty; {segment.name!r} must name at least one segment of the graph"
        for index in segment.segments:
            if index >= total:
                yield f"segments[{i}].segments: {index} is out of range, the plan has {total} segments (0 to {total - 1})"
            if index in seen:
                yield f"segments[{i}].segments: {index} is also in segments[{seen[index]}]; a segment belongs to one class"
            seen[index] = i


def _ops(plan: Plan) -> Iterator[str]:
    axes = plan.mesh.mesh().axes
    for i, segment in enumerate(plan.segments):
        for j, text in enumerate(segment.ops):
            where = f"segments[{i}].ops[{j}]"
            try:
                line = OpLine.parse(text)
            except PlanError as error:
                yield f"{where}: {text!r}: {error}"
                continue
            for sharding in line.inputs + line.outputs:
                if len(sharding) != len(axes):
                    yield (
                        f"{where}: {text!r} has a sharding of {len(sharding)} types, "
                        f"the mesh has {len(axes)} typed axes ({', '.join(map(str, axes)) or 'none'})"
                    )


def _parameters(plan: Plan) -> Iterator[str]:
    axes = plan.mesh.mesh().axes
    names: set[str] = set()
    for i, parameter in enumerate(plan.parameters):
        where = f"parameters[{i}] {parameter.name!r}"
        if parameter.name in names:
            yield f"{where}: given twice; each parameter (class) has one storage"
        names.add(parameter.name)
        try:
            types = parse_sharding(parameter.sharding)
        except ReshardError as error:
            yield f"{where}: sharding {parameter.sharding!r}: {error}"
            continue
        if len(types) != len(axes):
            yield f"{where}: sharding {parameter.sharding!r} has {len(types)} types, the mesh has {len(axes)} typed axes"
            continue
        for axis, type_ in zip(axes, types):
            if type_.kind == "P":
                yield f"{where}: P on {axis.name}; a parameter is stored I, R or S(dim)"
            if axis.is_time and type_ != R:
                yield f"{where}: {type_} on {axis.name}; a parameter is R there"
            if axis.name == "data" and parameter.fsdp and type_ != R:
                yield f"{where}: fsdp with {type_} on data; fsdp stores what is used as R there"
        if parameter.fsdp and plan.mesh.data == 1:
            yield f"{where}: fsdp, but the mesh has data=1: there is nothing to split over"
        yield from _fits_shape(where, types, plan.model.parameters.get(parameter.name))
    for name, text in plan.model.parameters.items():
        if not _TENSOR.fullmatch(text):
            yield f"model.parameters[{name!r}]: {text!r}, must be a dtype and a shape such as 'float32[64,64]'"


def _fits_shape(where: str, types: tuple[Any, ...], text: str | None) -> Iterator[str]:
    if text is None or not _TENSOR.fullmatch(text):
        return
    inner = text[text.index("[") + 1 : -1]
    dims = inner.count(",") + 1 if inner else 0
    for type_ in types:
        if type_.is_split and type_.dim >= dims:
            yield f"{where}: {type_} of a tensor {text}, which has {dims} dims"


def _predictions(plan: Plan) -> Iterator[str]:
    predicted = plan.predicted
    for name in ("peak_memory_bytes", "memory"):
        if len(getattr(predicted, name)) != plan.mesh.pipe:
            yield f"predicted.{name}: {len(getattr(predicted, name))} entries, one for each of the {plan.mesh.pipe} stages are needed"
    for i, (peak, kinds) in enumerate(zip(predicted.peak_memory_bytes, predicted.memory)):
        if sum(kinds.values()) != peak:
            yield f"predicted.memory[{i}]: sums to {sum(kinds.values())} bytes, peak_memory_bytes[{i}] is {peak}"
    total = math.fsum(predicted.breakdown.values())
    if not math.isclose(total, predicted.step_time_s, rel_tol=1e-6, abs_tol=1e-12):
        yield f"predicted.breakdown: sums to {total:.9g} s, step_time_s is {predicted.step_time_s:.9g} s"


def _solver(plan: Plan) -> Iterator[str]:
    report = plan.solver
    if report.bound > report.objective * (1 + 1e-6) + 1e-12:
        yield f"solver.bound: {report.bound:.9g} s is above the objective of {report.objective:.9g} s; a lower bound cannot be"
    if report.objective > 0 and not math.isclose(report.gap, 1 - report.bound / report.objective, abs_tol=1e-6):
        yield f"solver.gap: {report.gap:.6g}, but (objective - bound) / objective is {1 - report.bound / report.objective:.6g}"


def _inputs(plan: Plan) -> Iterator[str]:
    root = plan.model.inputs
    if not (isinstance(root, dict) and root.keys() == {"args", "kwargs"} and type(root["args"]) is list and _is_pairs(root["kwargs"])):
        yield f"model.inputs: {str(root)[:80]!r}, must be an object of 'args' (a list) and 'kwargs' (a list of [name, entry])"
        return
    for complaint in _tree({"list": [{"list": root["args"]}, {"dict": root["kwargs"]}]}):
        yield f"model.inputs: {complaint}"
    tensors = input_tensors(plan)
    for name, dim in plan.model.batch_dims.items():
        if name not in tensors:
            yield f"model.batch_dims: {name!r} is no tensor of model.inputs ({', '.join(map(repr, tensors)) or 'none'})"
        elif dim >= len(tensors[name]):
            yield f"model.batch_dims[{name!r}]: dim {dim}, the tensor has {len(tensors[name])} dims"


def _tree(node: Any) -> Iterator[str]:
    """Complaints about a node of an ``in_spec``: a tensor, a plain value, or a container of nodes."""
    keys = node.keys() if isinstance(node, dict) else set()
    if keys == {"tensor", "shape", "dtype"}:
        if type(node["tensor"]) is not str or node["dtype"] not in DTYPE_BYTES or not _is_shape(node["shape"]):
            yield f"{str(node)[:120]!r}, a tensor needs a name, a shape of integers from 0 and one of the dtypes {', '.join(DTYPE_BYTES)}"
    elif keys == {"value"}:
        if not (node["value"] is None or type(node["value"]) in (bool, int, float, str)):
            yield f"{str(node)[:120]!r}, a value is null, a boolean, a number or a string"
    elif keys in ({"list"}, {"tuple"}) and isinstance(node.get("list", node.get("tuple")), list):
        for item in node.get("list", node.get("tuple")):
            yield from _tree(item)
    elif keys == {"dict"} and _is_pairs(node["dict"]):
        for _, item in node["dict"]:
            yield from _tree(item)
    else:
        yield f"{str(node)[:120]!r}, must be one of {{tensor, shape, dtype}}, {{value}}, {{list}}, {{tuple}}, {{dict}}"


def _is_pairs(pairs: Any) -> bool:
    """[[key, node], ...] with different keys."""
    if type(pairs) is not list or not all(type(p) is list and len(p) == 2 and type(p[0]) is str for p in pairs):
        return False
    return len({key for key, _ in pairs}) == len(pairs)


def _is_shape(shape: Any) -> bool:
    return type(shape) is list and all(type(size) is int and size >= 0 for size in shape)


def input_tensors(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor among the model's inputs."""
    found: dict[str, tuple[int, ...]] = {}

    def visit(node: Any) -> None:
        if isinstance(node, dict) and isinstance(node.get("tensor"), str) and _is_shape(node.get("shape")):
            found[node["tensor"]] = tuple(node["shape"])
        elif isinstance(node, (dict, list)):
            for item in node.values() if isinstance(node, dict) else node:
                visit(item)

    visit(plan.model.inputs)
    return found


LAWS: tuple[Law, ...] = (_mesh, _stages, _segments, _ops, _parameters, _predictions, _solver, _inputs)
