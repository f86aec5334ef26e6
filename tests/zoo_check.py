"""One model of a zoo under one layout: captured, planned, run, and compared with the plain model.

A zoo is a folder with a module ``zoo``: ``names()``, ``get(name)`` -> an entry with ``build()`` and ``inputs(batch)`` (keyword
arguments), and ``loss_of(output)``. Used by benchmarks/zoo.py and tests/test_zoo.py.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from float64 import doubled
from harness import Reference, figures
from random_plans import random_plan
from simulated_run import run
from torch import Tensor, nn

from cost_models import load_profile
from planner.assemble import assemble
from planner.assignment import assign
from planner.candidates import Pins
from planner.costs import Precision
from planner.errors import BatchError, CaptureError, InfeasibleError
from planner.graph import Graph
from planner.inputs import bind
from planner.memory import Optimizer
from planner.mesh import Mesh
from planner.plan import Plan
from planner.search import Request, search
from planner.trace import Captured, capture
from runtime.launch import run_processes

BATCH = 4
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""By the least precise dtype that a model computes with."""
FLOOR = {torch.float64: 1e-5, torch.float32: 1e-3}
"""A gradient is compared with its own norm, or with this share of the norm of all gradients where that is more: a gradient that is zero
but for rounding has no relative error."""
LAYOUTS: dict[str, tuple[int, dict[str, int]] | Mesh] = {
    "data=2": (2, {"data": 2}),
    "tensor=2": (2, {"tensor": 2}),
    "pipe=2": (2, {"pipe": 2, "microbatches": 2}),
    "data=2 tensor=2": (4, {"data": 2, "tensor": 2}),
    "gpus=4": (4, {}),
    "random tensor=2": Mesh(tensor=2),
    "random data=2 tensor=2": Mesh(data=2, tensor=2),
}
"""What the optimiser chooses under a forced layout (gpus, layout), and random legal plans on a mesh."""


@dataclass(frozen=True)
class Outcome:
    """``status``: "equal", "random" (the plain model draws random numbers, so there is nothing to be equal to: it ran), "refused" (a
    typed error says why) or "FAILED". ``replicated``: share of the FLOPs in ops that some axis does not divide."""

    status: str
    detail: str = ""
    dtype: str = ""
    replicated: float | None = None
    planning_s: float | None = None
    seconds: float = 0.0


@dataclass
class Subject:
    """A model, its batch, its graph, and what it computes by itself."""

    model: nn.Module
    kwargs: dict[str, Any]
    dtype: torch.dtype
    loss_of: Callable[[Any], Tensor]
    captured: Captured
    reference: Reference
    random: bool

    @staticmethod
    def of(entry: Any, loss_of: Callable[[Any], Tensor]) -> Subject:
        """In float64 where the model allows it. Raises CaptureError."""
        try:
            return Subject._of(entry, loss_of, torch.float64)
        except (RuntimeError, CaptureError):
            return Subject._of(entry, loss_of, torch.float32)

    @staticmethod
    def _of(entry: Any, loss_of: Callable[[Any], Tensor], dtype: torch.dtype) -> Subject:
        runs = []
        for seed in (0, 1):
            model, kwargs = build(entry, dtype)
            torch.manual_seed(seed)
            loss = loss_of(model(**kwargs))
            loss.backward()
            gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            runs.append((loss.detach(), gradients, dict(model.named_buffers())))
        model, kwargs = build(entry, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            captured = capture(model, ((), kwargs), loss=loss_of)
        loss, gradients, after = runs[0]
        return Subject(model, kwargs, dtype, loss_of, captured, Reference([loss], [gradients], after), not torch.equal(loss, runs[1][0]))

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    @property
    def tolerance(self) -> float:
        used = {spec.dtype for node in self.graph.nodes for spec in node.outputs}
        low = [TOLERANCE[dtype] for dtype in (torch.bfloat16, torch.float16) if str(dtype).removeprefix("torch.") in used]
        return max([TOLERANCE[self.dtype], *low])


def build(entry: Any, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    model, kwargs = entry.build(), entry.inputs(BATCH)
    if dtype == torch.float64:
        model = doubled(model)
        kwargs = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}
    return model, kwargs


def make_plan(subject: Subject, layout: str, time_limit: float = 60.0) -> Plan:
    wanted = LAYOUTS[layout]
    if isinstance(wanted, Mesh):
        return random_plan(subject.graph, wanted, seed=0)
    gpus, forced = wanted
    profile = load_profile("cpu", ranks=gpus)
    request = Request(gpus, float(profile.memory_bytes), Optimizer.of("adamw"), Precision("fp32"), Pins.of(forced, gpus), time_limit)
    found = search(subject.graph, profile, request)
    return assemble(found, subject.graph, request, profile, type(subject.model).__name__, "callable")


def replicated_share(plan: Plan, graph: Graph) -> float:
    """Share of the forward's FLOPs in ops that some ranked axis of the mesh leaves whole on every rank."""
    laid, whole, total = assign(plan, graph), 0.0, 0.0
    ranked = [i for i, axis in enumerate(laid.mesh.axes) if not axis.is_time]
    for name, rule in laid.rules.items():
        if rule is None or not ranked:
            continue
        total += rule.flops
        if not all(laid.strategies[name].per_axis[i].factor for i in ranked):
            whole += rule.flops
    return whole / total if total else 0.0


def simulated_errors(subject: Subject, plan: Plan) -> Iterator[tuple[float, str]]:
    """(relative error, of what), of a run with ranks as threads."""
    inputs = bind(subject.graph.in_spec, (), subject.kwargs)
    losses, gradients, mutated, _ = run(subject.graph, subject.captured.constants, plan, subject.model, inputs)
    want = subject.reference
    known = {n: g for n, g in want.gradients[0].items() if g is not None}
    total = float(torch.stack([g.norm().double() for g in known.values()]).norm()) if known else 0.0
    for rank, loss in enumerate(losses):
        yield error(loss, want.losses[0], 1e-9), f"loss on rank {rank}"
    for name, gradient in known.items():
        got = gradients.get(name, torch.zeros_like(gradient))
        yield error(got, gradient, FLOOR[subject.dtype] * total), f"gradient of {name}"
    for name in gradients.keys() - known.keys():
        yield float(gradients[name].norm()), f"gradient of {name}, which has none"
    for name, value in mutated.items():
        if name in want.state:
            yield error(value, want.state[name], 1e-9), f"buffer {name}"


def error(got: Tensor, want: Tensor, floor: float) -> float:
    """Norm of the difference over the norm of what is right, or over ``floor`` where that is more."""
    if got.shape != want.shape:
        return float("inf")
    wide = torch.complex128 if want.is_complex() else torch.float64
    difference = float((got.to(wide) - want.to(wide)).norm())
    return difference / max(float(want.to(wide).norm()), floor, 1e-30) if difference == difference else float("inf")


def real_errors(subject: Subject, entry: Any, plan: Plan, timeout_s: float) -> Iterator[tuple[float, str]]:
    """The same through ``parallelize`` in gloo processes."""

    def again() -> tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]], Callable[..., Tensor]]:
        return entry.build(), ((), entry.inputs(BATCH)), subject.loss_of

    want = Reference(subject.reference.losses, subject.reference.gradients, {})
    arguments = (again, plan, subject.dtype, want, {})
    for rank, found in enumerate(run_processes(figures, plan.world_size, arguments, timeout_s=timeout_s, start="fork")):
        for what, relative in found.items():
            if what != "names of state":
                yield relative, f"rank {rank}: {what}"


def check(subject: Subject, entry: Any, layout: str, simulate: bool = True, timeout_s: float = 120.0) -> Outcome:
    """Plan and run one layout. Errors that are no refusals are raised."""
    started = time.perf_counter()
    dtype = str(subject.dtype).removeprefix("torch.")
    try:
        plan = make_plan(subject, layout)
    except (BatchError, InfeasibleError) as refusal:
        # infeasible: a model that cannot be cut in as many stages
        return Outcome("refused", str(refusal), dtype, seconds=time.perf_counter() - started)
    planning = time.perf_counter() - started
    is_random = isinstance(LAYOUTS[layout], Mesh)
    found = simulated_errors(subject, plan) if simulate or is_random else real_errors(subject, entry, plan, timeout_s)
    bad = sorted(((e, what) for e, what in found if not e <= subject.tolerance), reverse=True)
    share = replicated_share(plan, subject.graph)
    status = "random" if subject.random else "FAILED" if bad else "equal"
    detail = "; ".join(f"{what}: {e:.2g}" for e, what in bad[:3]) if status == "FAILED" else str(plan.mesh.mesh())
    return Outcome(status, detail, dtype, share, None if is_random else planning, time.perf_counter() - started)


def outcomes(
    entry: Any, loss_of: Callable[[Any], Tensor], layouts: Mapping[str, Any] | list[str], **options: Any
) -> Iterator[tuple[str, Outcome]]:
    """(layout, outcome) for every layout; a model that cannot be captured is refused in all of them."""
    try:
        subject = Subject.of(entry, loss_of)
    except CaptureError as refusal:
        yield from ((layout, Outcome("refused", str(refusal))) for layout in layouts)
        return
    except Exception as failure:
        yield from ((layout, failed(failure)) for layout in layouts)
        return
    for layout in layouts:
        try:
            yield layout, check(subject, entry, layout, **options)
        except Exception as failure:
            yield layout, failed(failure)


def failed(failure: Exception) -> Outcome:
    return Outcome("FAILED", f"{type(failure).__name__} at {_place(failure)}: {failure}")


def _place(failure: BaseException) -> str:
    """file:line of the innermost frame that is not torch's."""
    frame, place = failure.__traceback__, ""
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if "site-packages" not in name and "threading.py" not in name:
            place = f"{name.rsplit('/', 1)[-1]}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place
