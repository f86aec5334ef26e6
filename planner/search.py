"""The search around the ILP: the fastest plan over mesh shapes, micro-batch counts, recomputation; with a bound.

Candidates wait in a queue, first one of every mesh shape, and among those by a lower bound on their step time, which grows sharper::

    1. from whole-op FLOPs and bytes                       (no tables)
    2. from its tables: every op at its cheapest           (tables, stage cut)
    3. from what was solved of the same shape: work does not shrink with more micro-batches, so with m > m0 micro-batches
       step(m) >= step(m0) (1 - (1 - m0/m) (p - 1) / (m0 + p - 1)): at best the bubble of m0 becomes that of m
    4. solved: the ILP without memory rows first; only where the result does not fit, with them

One whose bound is not below the best plan found is done with. Where memory rules plans out, the candidates that need less of it are added:
more micro-batches, recomputation. Within one stage, more micro-batches never make a step faster here, so they are tried only then.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cost_models import HardwareProfile
from planner.attempt import GAP, Found, Prepared, Request, Workshop
from planner.candidates import Bounds, Candidate, candidates, relieved
from planner.errors import BatchError, InfeasibleError
from planner.evaluate import least
from planner.fold import Fold
from planner.graph import Graph
from planner.ilp.problem import Problem
from planner.plan import SolverReport
from planner.prepare import parts_that_fit, repeated_classes
from planner.scarcity import explain_infeasible
from planner.strategies import SPARED, Catalogue

Progress = Callable[[str], None]
FIRST, LATER = 0, 1


@dataclass(frozen=True)
class Result:
    best: Found
    others: tuple[Found, ...]
    """The best of every other mesh shape, solved or ruled out."""
    report: SolverReport
    fold: Fold
    catalogue: Catalogue


def search(graph: Graph, profile: HardwareProfile, request: Request, progress: Progress = lambda text: None) -> Result:
    """Raises BatchError and InfeasibleError."""
    return _Search(graph, profile, request, progress).run()


@dataclass
class _Search:
    graph: Graph
    profile: HardwareProfile
    request: Request
    progress: Progress
    tried: list[Found] = field(default_factory=list)
    ruled_out: list[Found] = field(default_factory=list)
    best: Found | None = None

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.workshop = Workshop(self.graph, self.profile, self.request)
        self.bounds = Bounds(self.workshop.catalogue, self.profile, self.request.precision)
        self.order = itertools.count()
        self.prepared: dict[Candidate, Prepared] = {}
        self.seen: set[Candidate] = set()
        self.queue: list[tuple[int, float, int, Candidate]] = []
        self.errors: list[Exception] = []

    # ------------------------------------------------------------ the queue

    def run(self) -> Result:
        for candidate, first in candidates(self.graph, self.profile, self.request.gpus, self.request.pins):
            self.push(candidate, self.bounds.step_s(candidate), FIRST if first else LATER)
        while self.queue and (self.left() > 0 or not self.tried):
            turn, bound, _, candidate = heapq.heappop(self.queue)
            bound = max(bound, self.derived(candidate))
            if bound >= self.best_time * (1 - GAP):
                self.ruled_out.append(Found(candidate, bound, bound, why="cannot be faster"))
                self.prepared.pop(candidate, None)
            elif candidate not in self.prepared:
                self.prepare(candidate, bound, turn)
            else:
                self.solve(candidate, bound)
        if self.best is None:
            raise self.nothing()
        return self.result(self.best)

    @property
    def best_time(self) -> float:
        return self.best.time if self.best else math.inf

    def push(self, candidate: Candidate, bound: float, turn: int) -> None:
        heapq.heappush(self.queue, (turn, bound, next(self.order), candidate))
        self.seen.add(candidate)

    def left(self) -> float:
        """Seconds of the time limit that are left."""
        return self.request.time_limit - (time.perf_counter() - self.started)

    def derived(self, candidate: Candidate) -> float:
        """A bound from what was solved of the same mesh shape."""
        p, m = candidate.mesh.pipe, candidate.mesh.microbatches
        bound = 0.0
        for found in self.tried:
            other, m0 = found.candidate, found.candidate.mesh.microbatches
            if (
                other.shape == candidate.shape
                and m0 <= m
                and other.recompute in ("none", candidate.recompute)
                and math.isfinite(found.free_bound)
            ):
                bound = max(bound, found.free_bound * (1 - (1 - m0 / m) * (p - 1) / (m0 + p - 1)))
        return bound

    def prepare(self, candidate: Candidate, bound: float, turn: int) -> None:
        try:
            self.prepared[candidate] = self.workshop.prepare(candidate)
        except (BatchError, InfeasibleError) as error:
            self.errors.append(error)
            self.tried.append(Found(candidate, math.inf, math.inf, why=str(error)))
            whole = replace(candidate, mesh=replace(candidate.mesh, microbatches=1))
            if isinstance(error, BatchError) and self.request.pins.microbatches is None and whole not in self.seen:
                self.push(whole, self.bounds.step_s(whole), turn)
            return
        self.push(candidate, max(bound, least(self.prepared[candidate].tables.problem)), turn)

    def solve(self, candidate: Candidate, bound: float) -> None:
        self.progress(f"solving {candidate}")
        prepared = self.prepared.pop(candidate)
        found = self.workshop.solve(candidate, prepared, bound, self.best_time, max(0.5, self.left()))
        self.tried.append(found)
        if found.time < self.best_time:
            self.best = found
        if found.memory:
            self.relieve(candidate, prepared.tables.problem, FIRST if found.bill is None else LATER)

    def relieve(self, candidate: Candidate, problem: Problem, turn: int) -> None:
        """Add what needs less memory than a candidate that memory constrains."""
        for other in relieved(candidate, self.graph, self.request.pins, parts_that_fit(problem)):
            possible = other.recompute == "none" or repeated_classes(self.workshop.fold)
            if possible and other not in self.seen:
                self.push(other, self.bounds.step_s(other), turn)

    # ------------------------------------------------------------ the end

    def nothing(self) -> Exception:
        tried = [found.candidate for found in self.tried if found.memory]
        if tried:
            return explain_infeasible(self.workshop.fold, self.request.memory_limit, self.request.gpus, self.problem_of, tried)
        if self.errors and len(self.errors) == len(self.tried):
            return self.errors[0]
        shown = "; ".join(f"{found.candidate}: {found.why}" for found in self.tried[:6])
        return InfeasibleError(f"no plan for {self.request.gpus} GPUs within the layout and the time limit: {shown}")

    def problem_of(self, candidate: Candidate) -> Problem:
        return self.workshop.prepare(candidate).tables.problem

    def result(self, best: Found) -> Result:
        waiting = [Found(c, max(bound, self.derived(c)), why="not reached within the time limit") for _, bound, _, c in sorted(self.queue)]
        everything = [*self.tried, *self.ruled_out, *waiting]
        bound = min([best.time, *(found.bound for found in everything)])
        gap = max(0.0, 1 - bound / best.time) if best.time > 0 else 0.0
        assert best.prepared is not None
        forced = len(everything) == 1 and all(op.strategies == 1 for op in best.prepared.tables.problem.ops)
        report = SolverReport(
            status="forced" if forced else "optimal" if gap <= 2 * GAP else "feasible",
            objective=best.time,
            bound=bound,
            gap=gap,
            seconds=time.perf_counter() - self.started,
            scope=scope(self.tried, self.ruled_out, waiting),
            candidates=len(everything),
        )
        return Result(best, others(best, everything), report, self.workshop.fold, self.workshop.catalogue)


def scope(tried: list[Found], ruled_out: list[Found], waiting: list[Found]) -> str:
    """What the bound speaks about."""
    everything = [*tried, *ruled_out, *waiting]
    shapes = sorted({found.candidate.shape for found in everything})
    shown = ", ".join("x".join(map(str, shape)) for shape in shapes)
    left = f", {len(waiting)} not reached within the time limit (their bounds count)" if waiting else ""
    sentences = [
        f"{len(everything)} candidates (mesh shape, micro-batches, recomputation) over {len(shapes)} mesh shapes pipe x data x tensor "
        f"({shown}): {len(tried)} solved or found impossible, {len(ruled_out)} ruled out by their bound{left}",
        f"every axis divides the ops that make up {1 - SPARED:.0%} of the FLOPs",
        "only the data axis splits the batch",
        "views and unary ops take the sharding of a neighbour",
        "within one stage, more micro-batches are tried only where memory binds",
    ]
    if any(found.candidate.mesh.data > 1 and found.candidate.mesh.tensor > 1 for found in everything):
        sentences.append("with a data and a tensor axis, ops follow the batch on the data axis")
    if any(found.candidate.mesh.pipe > 1 for found in everything):
        sentences.append("stages are cut by the time of the cheapest strategies, and run at least one micro-batch per stage")
    return "; ".join(sentences) + "."


def others(best: Found, everything: list[Found]) -> tuple[Found, ...]:
    """The best of every other mesh shape, best first."""
    shapes: dict[tuple[int, int, int], Found] = {}
    for found in sorted(everything, key=lambda f: (f.time, f.bound, str(f.candidate))):
        shapes.setdefault(found.candidate.shape, found)
    shapes.pop(best.candidate.shape)
    return tuple(shapes.values())
