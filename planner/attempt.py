"""One candidate of the search: its tables, its solution without and with the memory limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cost_models import HardwareProfile
from planner.candidates import Batch, Candidate, Pins
from planner.costs import Precision, Pricer
from planner.errors import BatchError
from planner.evaluate import Bill, evaluate
from planner.fold import Fold, Layout
from planner.graph import Graph
from planner.ilp.contract import Contraction, contract
from planner.ilp.formulate import formulate
from planner.ilp.problem import Choice
from planner.ilp.solve_pulp import solve
from planner.memory import Optimizer
from planner.mesh import Mesh
from planner.micro import propagate, propagate_micro
from planner.prepare import cut_stages, memory_floor, repeated_classes
from planner.rules.base import Strategy
from planner.strategies import Catalogue
from planner.tables import Builder, Options, Tables

GAP = 1e-4
"""Relative gap at which a plan counts as optimal."""


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
class Prepared:
    """A candidate's tables, cut into stages."""

    tables: Tables
    stages: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True)
class Found:
    """A priced candidate. ``bill`` is None where there is no plan for it. ``bound``: no plan for it is faster; ``free_bound``: not even
    without a memory limit. ``memory``: True where memory ruled plans out."""

    candidate: Candidate
    bound: float
    free_bound: float = 0.0
    bill: Bill | None = None
    choice: Choice | None = None
    prepared: Prepared | None = None
    memory: bool = False
    why: str = ""

    @property
    def time(self) -> float:
        return self.bill.step_time_s if self.bill else math.inf


@dataclass
class Workshop:
    """Builds and solves candidates of one graph on one profile."""

    graph: Graph
    profile: HardwareProfile
    request: Request
    fold: Fold = field(init=False)
    catalogue: Catalogue = field(init=False)

    def __post_init__(self) -> None:
        self.fold = Fold(self.graph, self.request.optimizer.trains)
        self.catalogue = Catalogue(self.fold)
        size = Batch.of(self.graph).size
        self._batch_divisor = next((n for n in range(2, size + 1) if size % n == 0), 1)
        self._micro: dict[int, Mapping[str, Strategy] | BatchError] = {}
        self._natural: dict[int, Mapping[int, Strategy]] = {}

    def prepare(self, candidate: Candidate) -> Prepared:
        """Raises BatchError where an op mixes the batch, InfeasibleError where there are fewer segments than stages."""
        mesh, request = candidate.mesh, self.request
        pricer = Pricer(self.profile, mesh, request.precision, request.optimizer.trains)
        recompute = {} if candidate.recompute == "none" else dict.fromkeys(repeated_classes(self.fold), candidate.recompute)
        options = Options(request.optimizer, candidate.schedule, request.memory_limit, recompute, request.pins.zero)
        # with both axes, ops follow the batch on the data axis: searching the product of both would take long and find little
        data = self.natural(mesh.data) if mesh.data > 1 and mesh.tensor > 1 else {}
        batch = {i: strategy.factor for i, strategy in self.natural(self._batch_divisor).items() if strategy.factor}
        builder = Builder(self.catalogue, pricer, options, self.micro(mesh), data, batch)
        stages = cut_stages(builder)
        layout = self.fold.lay(stages, mesh.pipe)
        return Prepared(builder.tables(layout), stages, layout)

    def micro(self, mesh: Mesh) -> Mapping[str, Strategy]:
        m = mesh.microbatches
        if m == 1:
            return {}
        if m not in self._micro:
            try:
                self._micro[m] = propagate_micro(self.fold.quotient, m).strategies
            except BatchError as error:
                self._micro[m] = error
        found = self._micro[m]
        if isinstance(found, BatchError):
            raise found
        return found

    def natural(self, ranks: int) -> Mapping[int, Strategy]:
        """Op class -> the strategy that follows the batch over an axis of ``ranks``."""
        if ranks not in self._natural:
            self._natural[ranks] = natural_on_data(self.catalogue, ranks)
        return self._natural[ranks]

    def solve(self, candidate: Candidate, prepared: Prepared, bound: float, best: float, seconds: float) -> Found:
        """``bound``: known already; ``best``: time of the best plan so far; ``seconds``: what each solve may take."""
        problem = prepared.tables.problem
        contraction = contract(problem)
        free = self._optimise(replace(contraction, problem=problem.without_memory_limit()), bound, seconds)
        if isinstance(free, str):
            return Found(candidate, math.inf, math.inf, why=free)
        choice, bill, proved = free
        if choice is None or bill is None:
            return Found(candidate, proved, proved, why="not solved within the time limit")
        if bill.fits(problem.memory_limit):
            return Found(candidate, proved, proved, bill, choice, prepared)
        if memory_floor(problem) > problem.memory_limit:
            return Found(candidate, math.inf, proved, memory=True, why="does not fit into memory")
        if proved >= best:
            return Found(candidate, proved, proved, memory=True, why="cannot be faster")
        tight = self._optimise(contraction, proved, seconds)
        if isinstance(tight, str):
            return Found(candidate, math.inf, proved, memory=True, why="does not fit into memory")
        choice, bill, bounded = tight
        if choice is None or bill is None or not bill.fits(problem.memory_limit):
            return Found(candidate, bounded, proved, memory=True, why="not solved within the time limit")
        return Found(candidate, bounded, proved, bill, choice, prepared, memory=True)

    def _optimise(self, contraction: Contraction, bound: float, seconds: float) -> tuple[Choice | None, Bill | None, float] | str:
        """(choice, its bill, proved bound); a text where there is no legal choice."""
        formulation = formulate(contraction)
        solution = solve(formulation.program, seconds, GAP)
        if solution.status == "infeasible":
            return "no legal strategy"
        proved = max(bound, solution.bound * formulation.scale / (1 + formulation.ties))
        if solution.values is None:
            return None, None, proved
        choice = contraction.expand(formulation.choice(solution.values))
        bill = evaluate(contraction.problem, choice)
        return choice, bill, min(proved, bill.step_time_s)


def natural_on_data(catalogue: Catalogue, ranks: int) -> Mapping[int, Strategy]:
    """Op class -> the strategy that follows the batch over ``ranks``; empty where an op cannot follow it."""
    try:
        natural = propagate(catalogue.fold.quotient, ranks).strategies
    except BatchError:
        return {}
    return {op.index: natural[op.node.name] for op in catalogue.fold.ops if op.index in catalogue.rules}
