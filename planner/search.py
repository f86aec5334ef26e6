"""The search around the ILP: the fastest plan over mesh shapes, micro-batch counts, recomputation; with a bound.

Candidates wait in a queue ordered by a lower bound on their step time. The first one is taken and its bound made sharper::

    1. bound from whole-op FLOPs and bytes                (no tables)
    2. bound from its tables: every op at its cheapest    (tables, stage cut)
    3. solved: the ILP without memory rows first; only where the result does not fit, with them

until no candidate left can be faster than the best plan found. One that does not fit also brings the candidates that need less memory:
more micro-batches, recomputation. Within one stage more micro-batches never make a step faster in this cost model, so they are tried
only then.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cost_models import HardwareProfile
from planner.candidates import Batch, Bounds, Candidate, Pins, candidates, relieved
from planner.costs import Precision, Pricer
from planner.errors import BatchError, InfeasibleError
from planner.evaluate import Bill, evaluate, least
from planner.fold import Fold, Layout
from planner.graph import Graph
from planner.ilp.contract import Contraction, contract
from planner.ilp.formulate import formulate
from planner.ilp.problem import Choice, Problem
from planner.ilp.solve_pulp import solve
from planner.memory import Optimizer
from planner.mesh import Mesh
from planner.micro import propagate, propagate_micro
from planner.plan import SolverReport
from planner.prepare import cut_stages, parameter_floor, repeated_classes
from planner.rules.base import Strategy
from planner.scarcity import explain_infeasible
from planner.strategies import SPARED, Catalogue
from planner.tables import Builder, Options, Tables

GAP = 1e-4
"""Relative gap at which a plan counts as optimal."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What the user asks for, checked."""

    gpus: int
    memory_limit: float
    optimizer: Optimizer
    precision: Precision
    pins: Pins
    time_limit: float


@dataclass(frozen=True)
class Found:
    """A priced candidate. ``choice`` is None where there is no plan for it; ``bound``: no plan for it is faster."""

    candidate: Candidate
    bound: float
    bill: Bill | None = None
    choice: Choice | None = None
    tables: Tables | None = None
    stages: tuple[int, ...] = ()
    layout: Layout | None = None
    why: str = ""

    @property
    def time(self) -> float:
        return self.bill.step_time_s if self.bill else math.inf


@dataclass(frozen=True)
class Result:
    best: Found
    others: tuple[Found, ...]
    """The best of every other mesh shape, solved or pruned."""
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
    best: Found | None = None
    solved: int = 0

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.fold = Fold(self.graph, self.request.optimizer.trains)
        self.catalogue = Catalogue(self.fold)
        self.bounds = Bounds(self.catalogue, self.profile, self.request.precision)
        size = Batch.of(self.graph).size
        self.batch_divisor = next((n for n in range(2, size + 1) if size % n == 0), 1)
        self.order = itertools.count()
        self.micro: dict[int, Mapping[str, Strategy] | BatchError] = {}
        self.natural: dict[int, Mapping[int, Strategy]] = {}
        self.built: dict[Candidate, tuple[Tables, tuple[int, ...], Layout]] = {}
        self.seen: set[Candidate] = set()
        self.queue: list[tuple[float, int, Candidate]] = []

    # ------------------------------------------------------------ the queue

    def run(self) -> Result:
        for candidate in candidates(self.graph, self.request.gpus, self.request.pins):
            self.push(candidate, self.bounds.step_s(candidate))
        while self.queue:
            bound, _, candidate = heapq.heappop(self.queue)
            if self.best is not None and (bound >= self.best.time * (1 - GAP) or self.left() <= 0):
                heapq.heappush(self.queue, (bound, -1, candidate))
                break
            if self.left() <= 0 and self.tried:
                heapq.heappush(self.queue, (bound, -1, candidate))
                break
            self.advance(candidate, bound)
        if self.best is None:
            raise self.nothing()
        return self.result()

    def push(self, candidate: Candidate, bound: float) -> None:
        heapq.heappush(self.queue, (bound, next(self.order), candidate))
        self.seen.add(candidate)

    def left(self) -> float:
        """Seconds of the time limit that are left."""
        return self.request.time_limit - (time.perf_counter() - self.started)

    def advance(self, candidate: Candidate, bound: float) -> None:
        """One step: from the first bound to tables, or from tables to a solution."""
        if candidate not in self.built:
            try:
                self.built[candidate] = self.build(candidate)
            except (BatchError, InfeasibleError) as error:
                self.reject(candidate, str(error), error)
                return
            tables = self.built[candidate][0]
            self.push(candidate, max(bound, least(tables.problem)))
            return
        self.progress(f"solving {candidate}")
        found = self.solve(candidate, bound)
        self.built.pop(candidate)
        self.tried.append(found)
        if found.bill is not None and found.time < (self.best.time if self.best else math.inf):
            self.best = found

    def reject(self, candidate: Candidate, why: str, error: Exception) -> None:
        self.tried.append(Found(candidate, math.inf, why=why))
        only = len(self.seen) == 1
        if only and isinstance(error, BatchError):
            raise error

    def relieve(self, candidate: Candidate) -> None:
        for other in relieved(candidate, self.graph, self.request.pins):
            if other.recompute != "none" and not repeated_classes(self.fold):
                continue
            if other not in self.seen:
                self.push(other, self.bounds.step_s(other))

    # ------------------------------------------------------------ one candidate

    def build(self, candidate: Candidate) -> tuple[Tables, tuple[int, ...], Layout]:
        mesh, request = candidate.mesh, self.request
        pricer = Pricer(self.profile, mesh, request.precision, request.optimizer.trains)
        recompute = {} if candidate.recompute == "none" else dict.fromkeys(repeated_classes(self.fold), candidate.recompute)
        options = Options(request.optimizer, candidate.schedule, request.memory_limit, recompute, request.pins.zero)
        # with both axes, ops follow the batch on the data axis: searching the product of both would take long and find little
        data = self.natural_of(mesh.data) if mesh.data > 1 and mesh.tensor > 1 else {}
        batch = {i: strategy.factor for i, strategy in self.natural_of(self.batch_divisor).items() if strategy.factor}
        builder = Builder(self.catalogue, pricer, options, self.micro_of(mesh), data, batch)
        stages = cut_stages(builder)
        layout = self.fold.lay(stages, mesh.pipe)
        return builder.tables(layout), stages, layout

    def micro_of(self, mesh: Mesh) -> Mapping[str, Strategy]:
        m = mesh.microbatches
        if m == 1:
            return {}
        if m not in self.micro:
            try:
                self.micro[m] = propagate_micro(self.graph, m).strategies
            except BatchError as error:
                self.micro[m] = error
        found = self.micro[m]
        if isinstance(found, BatchError):
            raise found
        return found

    def natural_of(self, ranks: int) -> Mapping[int, Strategy]:
        """Op class -> the strategy that follows the batch over an axis of ``ranks``."""
        if ranks not in self.natural:
            self.natural[ranks] = natural_on_data(self.catalogue, ranks)
        return self.natural[ranks]

    def solve(self, candidate: Candidate, bound: float) -> Found:
        tables, stages, layout = self.built[candidate]
        contraction = contract(tables.problem)
        solved = self.optimise(contraction, bound)
        if isinstance(solved, str):
            return Found(candidate, math.inf, why=solved)
        problem = tables.problem
        choice, bill, proved = solved
        if choice is not None and bill is not None and bill.fits(problem.memory_limit):
            return Found(candidate, proved, bill, choice, tables, stages, layout)
        self.relieve(candidate)
        if parameter_floor(problem) > problem.memory_limit:
            return Found(candidate, math.inf, why="parameters alone do not fit into memory")
        if self.best is not None and proved >= self.best.time:
            return Found(candidate, proved, why="not faster")
        tight = self.optimise(contraction, proved, bounded=True)
        if isinstance(tight, str):
            return Found(candidate, math.inf, why="does not fit into memory")
        choice, bill, proved = tight
        if choice is None or bill is None or not bill.fits(problem.memory_limit):
            return Found(candidate, proved, why="no plan found in the time limit")
        return Found(candidate, proved, bill, choice, tables, stages, layout)

    def optimise(self, contraction: Contraction, bound: float, bounded: bool = False) -> tuple[Choice | None, Bill | None, float] | str:
        """(choice, its bill, proved bound); a text where there is no legal choice."""
        problem = contraction.problem
        formulation = formulate(contraction if bounded else replace(contraction, problem=problem.without_memory_limit()))
        solution = solve(formulation.program, max(0.5, self.left()), GAP)
        self.solved += 1
        if solution.status == "infeasible":
            return "no legal strategy"
        proved = max(bound, solution.bound * formulation.scale / (1 + formulation.ties))
        if solution.values is None:
            return None, None, proved
        choice = contraction.expand(formulation.choice(solution.values))
        bill = evaluate(problem, choice)
        return choice, bill, min(proved, bill.step_time_s)

    # ------------------------------------------------------------ the end

    def nothing(self) -> Exception:
        reasons = {found.why for found in self.tried}
        if any("memory" in why for why in reasons):
            tried = [found.candidate for found in self.tried]
            return explain_infeasible(self.fold, self.request.memory_limit, self.request.gpus, self.smallest, tried)
        shown = "; ".join(f"{found.candidate}: {found.why}" for found in self.tried[:6])
        return InfeasibleError(f"no plan for {self.request.gpus} GPUs within the layout and the time limit: {shown}")

    def smallest(self, candidate: Candidate) -> Problem | None:
        """The problem of a candidate, to find the least memory that would do."""
        try:
            return self.build(candidate)[0].problem
        except (BatchError, InfeasibleError):
            return None

    def result(self) -> Result:
        best = self.best
        assert best is not None
        waiting = [Found(candidate, bound, why="cannot be faster") for bound, _, candidate in sorted(self.queue)]
        everything = [*self.tried, *waiting]
        bound = min([best.time, *(found.bound for found in everything)])
        gap = max(0.0, 1 - bound / best.time) if best.time > 0 else 0.0
        forced = best.tables is not None and all(op.strategies == 1 for op in best.tables.problem.ops) and len(everything) == 1
        report = SolverReport(
            status="forced" if forced else "optimal" if gap <= 2 * GAP else "feasible",
            objective=best.time,
            bound=min(bound, best.time),
            gap=gap,
            seconds=time.perf_counter() - self.started,
            scope=self.scope(everything),
            candidates=len(everything),
        )
        return Result(best, self.others(best, everything), report, self.fold, self.catalogue)

    def scope(self, everything: list[Found]) -> str:
        pruned = len(everything) - len(self.tried)
        shapes = sorted({found.candidate.shape for found in everything})
        text = (
            f"{len(everything)} candidates (mesh shape, micro-batches, recomputation) over {len(shapes)} mesh shapes pipe x data x tensor: "
            f"{', '.join('x'.join(map(str, s)) for s in shapes)}; "
            f"{len(self.tried)} solved or found impossible, {pruned} ruled out by their bound. "
            f"Every axis divides the ops that make up {1 - SPARED:.0%} of the FLOPs. "
            "Views and unary ops take the sharding of their neighbour; stages are cut by the cheapest strategies' time; "
            "only the data axis splits the batch"
        )
        if any(f.candidate.mesh.data > 1 and f.candidate.mesh.tensor > 1 for f in everything):
            text += "; with a data and a tensor axis, ops follow the batch on the data axis"
        return text + "; within one stage, more micro-batches are tried only where memory binds."

    def others(self, best: Found, everything: list[Found]) -> tuple[Found, ...]:
        shapes: dict[tuple[int, int, int], Found] = {}
        for found in sorted(everything, key=lambda f: (f.time, f.bound, str(f.candidate))):
            shapes.setdefault(found.candidate.shape, found)
        shapes.pop(best.candidate.shape)
        return tuple(shapes.values())


def natural_on_data(catalogue: Catalogue, ranks: int) -> Mapping[int, Strategy]:
    """Op class -> the strategy that follows the batch over ``ranks``; empty where an op cannot follow it."""
    try:
        natural = propagate(catalogue.fold.graph, ranks).strategies
    except BatchError:
        return {}
    return {op.index: natural[op.node.name] for op in catalogue.fold.ops if op.index in catalogue.rules}
