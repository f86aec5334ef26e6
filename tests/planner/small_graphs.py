"""Small graphs made by hand and at random, so that tests of costs and solvers need no model."""

from __future__ import annotations

import random
from dataclasses import replace

from cost_models import HardwareProfile, load_profile
from planner.attempt import Prepared, Request, Workshop
from planner.candidates import Candidate, Pins
from planner.costs import Precision
from planner.graph import INPUT, PARAMETER, Graph, Node, Spec, Value
from planner.ilp.contract import contract
from planner.ilp.formulate import formulate
from planner.ilp.problem import Choice, Problem
from planner.ilp.solve_pulp import solve
from planner.memory import Optimizer
from planner.mesh import Mesh


class Maker:
    """Builds a graph node by node; every method returns the Value it makes."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.specs: dict[Value, Spec] = {}
        self.grads: dict[Value, bool] = {}

    def add(
        self, name: str, op: str, shape: tuple[int, ...], args: tuple = (), grad: bool = True, target: str = "", module: str = ""
    ) -> Value:
        spec = Spec(shape, "float32")
        self.nodes.append(Node(name, op, args, (), (spec,), (grad,), module=module, target=target))
        value = Value(name)
        self.specs[value], self.grads[value] = spec, grad
        return value

    def input(self, name: str, shape: tuple[int, ...]) -> Value:
        return self.add(f"x_{name}", INPUT, shape, grad=False, target=name)

    def parameter(self, name: str, shape: tuple[int, ...], trains: bool = True) -> Value:
        return self.add(f"p_{name}", PARAMETER, shape, grad=trains, target=name)

    def op(self, name: str, op: str, shape: tuple[int, ...], *args: object, module: str = "") -> Value:
        grad = any(self.grads[a] for a in args if isinstance(a, Value))
        return self.add(name, op, shape, args, grad, module=module)

    def linear(self, name: str, x: Value, out: int, module: str = "", bias: bool = False) -> Value:
        *lead, width = self.specs[x].shape
        extra = (self.parameter(f"{name}.bias", (out,)),) if bias else ()
        weight = self.parameter(f"{name}.weight", (out, width))
        return self.op(name, "aten.linear.default", (*lead, out), x, weight, *extra, module=module)

    def graph(self, outputs: Value, batch: tuple[tuple[str, int], ...] = (("x", 0),)) -> Graph:
        loss = self.op("loss", "aten.sum.default", (), outputs)
        sources = [n for n in self.nodes if n.is_source]
        others = [n for n in self.nodes if not n.is_source]
        spec = {"args": [{"tensor": "x", "shape": list(self.nodes[0].outputs[0].shape), "dtype": "float32"}], "kwargs": {}}
        return Graph((*sources, *others), outputs=outputs, loss=loss, batch_dims=batch, in_spec=spec)


def mlp(layers: int = 2, batch: int = 8, width: int = 16, hidden: int = 64) -> Graph:
    """``layers`` equal blocks under ``blocks.<i>``: x + down(relu(up(x)))."""
    make = Maker()
    x = make.input("x", (batch, width))
    for i in range(layers):
        module = f"blocks.{i}"
        h = make.linear(f"{module}.up", x, hidden, module)
        h = make.op(f"{module}.relu", "aten.relu.default", (batch, hidden), h, module=module)
        h = make.linear(f"{module}.down", h, width, module)
        x = make.op(f"{module}.add", "aten.add.Tensor", (batch, width), x, h, module=module)
    return make.graph(x)


def random_graph(seed: int) -> Graph:
    """Three to six ops, linear, pointwise, view or binary, on tensors of two or three dims."""
    rng, make = random.Random(seed), Maker()
    shape: tuple[int, ...] = rng.choice([(8, 12), (8, 4, 12), (6, 8)])
    values = [make.input("x", shape)]
    values.append(make.linear("first", values[0], rng.choice([8, 12, 16]), "blocks.0"))
    for i in range(rng.randint(2, 4)):
        module = f"blocks.{i + 1}"
        x = rng.choice(values[1:])
        shape = make.specs[x].shape
        kind = rng.choice(["linear", "unary", "binary", "transpose", "view"])
        if kind == "linear":
            values.append(make.linear(f"linear{i}", x, rng.choice([8, 12]), module, rng.random() < 0.5))
        elif kind == "unary":
            values.append(make.op(f"unary{i}", rng.choice(["aten.relu.default", "aten.neg.default"]), shape, x, module=module))
        elif kind == "binary":
            y = rng.choice([v for v in values[1:] if make.specs[v].shape == shape])
            values.append(make.op(f"binary{i}", rng.choice(["aten.add.Tensor", "aten.mul.Tensor"]), shape, x, y, module=module))
        elif kind == "transpose":
            flipped = (*shape[:-2], shape[-1], shape[-2])
            values.append(make.op(f"transpose{i}", "aten.transpose.int", flipped, x, len(shape) - 2, len(shape) - 1, module=module))
        else:
            *lead, last = shape
            split = (*lead, 2, last // 2)
            values.append(make.op(f"view{i}", "aten.view.default", split, x, split, module=module))
    return make.graph(values[-1])


def profile(name: str = "h100:4") -> HardwareProfile:
    return load_profile(name, ranks=4)


def workshop(graph: Graph, memory: float = 1e12, optimizer: str = "adamw", gpus: int = 4, hardware: str = "h100:4") -> Workshop:
    request = Request(gpus, memory, Optimizer.of(optimizer), Precision(), Pins(), 30.0)
    return Workshop(graph, load_profile(hardware, ranks=gpus), request)


def prepared(graph: Graph, mesh: Mesh, recompute: str = "none", memory: float = 1e12, optimizer: str = "adamw") -> Prepared:
    shop = workshop(graph, memory, optimizer, mesh.world_size, f"h100:{mesh.world_size}")
    return shop.prepare(Candidate(mesh, "1f1b" if mesh.pipe > 1 else "none", recompute))


def solved(problem: Problem) -> Choice:
    """The solver's choice."""
    contraction = contract(problem)
    formulation = formulate(contraction)
    solution = solve(formulation.program, 30.0)
    assert solution.values is not None, solution.status
    return contraction.expand(formulation.choice(solution.values))


def thinned(problem: Problem, seed: int, most: int) -> Problem:
    """The problem with strategies left out at random until there are at most ``most`` choices."""
    rng = random.Random(seed)
    keep = [list(range(op.strategies)) for op in problem.ops]

    def choices() -> int:
        product = 1
        for rows in keep:
            product *= len(rows)
        return product

    while choices() > most:
        rows = rng.choice([rows for rows in keep if len(rows) > 1])
        rows.remove(rng.choice(rows))
    ops, peaks = [], list(problem.peaks)
    for index, (op, rows) in enumerate(zip(problem.ops, keep)):
        wants, makes = tuple(w[rows] for w in op.wants), tuple(m[rows] for m in op.makes)
        ops.append(replace(op, cost=op.cost[rows], wants=wants, makes=makes))
        peaks = [replace(p, ops=tuple((i, v[rows] if i == index else v) for i, v in p.ops)) for p in peaks]
    return replace(problem, ops=tuple(ops), peaks=tuple(peaks))
