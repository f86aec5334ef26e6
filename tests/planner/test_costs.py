"""Prices of ops, conversions and sends, and the counts they are multiplied with."""

from __future__ import annotations

import numpy as np
import pytest
from small_graphs import Maker, mlp, prepared, profile, workshop

from planner.costs import Precision, Pricer
from planner.fold import Fold
from planner.graph import Spec
from planner.ilp.problem import Q
from planner.memory import Optimizer
from planner.mesh import Mesh
from planner.sharding import parse
from planner.strategies import Catalogue
from planner.tables import Builder, Options

TWO_BY_TWO = Mesh(1, 2, 2)
BIG = Spec((4096, 4096), "float32")


def pricer(mesh: Mesh = TWO_BY_TWO, precision: str = "fp32", training: bool = True) -> Pricer:
    return Pricer(profile("h100:8"), mesh, Precision(precision), training)


def step(source: str, target: str, spec: Spec = BIG, grad: bool = True, **options: object) -> np.ndarray:
    cost = pricer(**options).convert(spec, parse(source), parse(target), grad)  # type: ignore[arg-type]
    assert cost is not None
    return cost


def test_conversion_costs_its_collectives_both_ways() -> None:
    p, nbytes = pricer(), BIG.nbytes
    gather = step("S(0),R", "R,R")
    assert gather[Q["forward_comm"]] == pytest.approx(p.collective_s("all_gather", nbytes, 0))
    assert gather[Q["backward_comm"]] == pytest.approx(p.collective_s("reduce_scatter", nbytes, 0))
    assert gather[Q["conversions"]] == 2
    assert step("I,R", "R,R")[Q["backward_comm"]] == pytest.approx(p.collective_s("all_reduce", nbytes, 0))
    exchange = step("S(0),R", "S(1),R")
    assert exchange[Q["forward_comm"]] == pytest.approx(p.collective_s("all_to_all", nbytes / 2, 0))


def test_other_axes_make_a_conversion_smaller() -> None:
    assert step("S(0),S(1)", "R,S(1)")[Q["forward_comm"]] < step("S(0),R", "R,R")[Q["forward_comm"]]


def test_no_gradient_no_backward() -> None:
    assert step("S(0),R", "R,R", grad=False)[Q["backward_comm"]] == 0
    assert step("S(0),R", "R,R", training=False)[Q["backward_comm"]] == 0
    assert not step("I,I", "R,R", grad=False).any()


def test_what_does_not_exist_has_no_price() -> None:
    assert pricer().convert(BIG, parse("S(0),R"), parse("P,R"), True) is None


def test_time_axis_never_communicates() -> None:
    p = pricer(Mesh(1, 1, 1, 4))
    cost = p.convert(BIG, parse("R"), parse("S(0)"), True)
    assert cost is not None and cost[Q["forward_comm"]] == cost[Q["backward_comm"]] == cost[Q["conversions"]] == 0


def test_mixed_precision_halves_what_travels() -> None:
    half, full = pricer(precision="bf16-mixed"), pricer()
    assert half.bytes_of(BIG, parse("S(0),R")) * 2 == full.bytes_of(BIG, parse("S(0),R")) == BIG.nbytes / 2
    assert half.bytes_of(Spec((8,), "int64"), parse("R,R")) == 64


def linear_costs(mesh: Mesh, batch: int = 4096, width: int = 4096) -> dict[str, np.ndarray]:
    """Strategy text -> quantities of x @ w.T with a gradient for both."""
    make = Maker()
    x = make.linear("first", make.input("x", (batch, width)), width)
    make.linear("second", x, width)
    graph = make.graph(list(make.specs)[-1])
    fold = Fold(graph, True)
    catalogue = Catalogue(fold)
    op = fold.ops[fold.class_of["second"]]
    strategies = catalogue.over(op, mesh, {}, {}, {})
    p = Pricer(profile("h100:8"), mesh, Precision(), True)
    costs, _ = p.op(op.node, catalogue.specs(op), catalogue.rules[op.index], strategies, catalogue.grad_in(op), catalogue.grad_out(op))
    return {str(s): cost for s, cost in zip(strategies, costs)}


def test_splitting_divides_the_work_and_backward_is_two_products() -> None:
    alone = linear_costs(Mesh(1, 1, 1))[" -> "]
    assert alone[Q["backward"]] == pytest.approx(2 * alone[Q["forward"]], rel=0.05)
    for text, cost in linear_costs(Mesh(1, 1, 2)).items():
        if "S(" in text:
            assert alone[Q["forward"]] / 2 <= cost[Q["forward"]] < 0.6 * alone[Q["forward"]], text


def test_tables_are_read_by_the_row() -> None:
    make = Maker()
    ids = make.input("x", (8, 16))
    table = make.parameter("table", (1_000_000, 64))
    make.op("lookup", "aten.embedding.default", (8, 16, 64), table, ids)
    graph = make.graph(list(make.specs)[-1])
    fold = Fold(graph, True)
    catalogue, op = Catalogue(fold), fold.ops[fold.class_of["lookup"]]
    strategies = catalogue.over(op, Mesh(), {}, {}, {})
    p = Pricer(profile(), Mesh(), Precision(), True)
    cost, _ = p.op(op.node, catalogue.specs(op), catalogue.rules[op.index], strategies, catalogue.grad_in(op), catalogue.grad_out(op))
    assert cost[0, Q["forward"]] < p.move_s("float32", 64e6), "forward reads rows, not the table"
    assert cost[0, Q["backward"]] > p.move_s("float32", 256e6), "backward writes a gradient as large as the table"


def test_micro_batches_make_ops_smaller_and_sum_to_no_less() -> None:
    whole = prepared(mlp(2, batch=4096, width=1024, hidden=4096), Mesh(1, 2, 1)).tables.problem
    parts = prepared(mlp(2, batch=4096, width=1024, hidden=4096), Mesh(1, 2, 1, 4)).tables.problem
    for a, b in zip(whole.ops, parts.ops):
        if a.cost[:, Q["forward"]].min() > 0:
            assert b.cost[:, Q["forward"]].min() < a.cost[:, Q["forward"]].min() <= 4 * b.cost[:, Q["forward"]].min() * (1 + 1e-9)


# ---------------------------------------------------------------- counting


def test_fold_counts_instances_per_stage() -> None:
    fold = Fold(mlp(6), True)
    n = len(fold.segments)
    assert n == 6
    one, two = fold.lay((0,) * n, 1), fold.lay((0, 0, 0, 1, 1, 1), 2)
    assert (two.ops.sum(1) == one.ops.sum(1)).all(), "no op is lost or done twice"
    assert one.ops.sum() == len(fold.graph.nodes) + 1
    assert two.crossings[:, 0].sum() == 1 and not two.crossings[:, 1].any()
    reads = {(v, node.name, i) for node in fold.graph.nodes for i, v in enumerate(node.inputs)}
    assert sum(int(g.count.sum()) * len(g.readers) for g in one.groups) == len(reads) + 1


def test_residual_reads_are_one_group() -> None:
    """x is read by the block's first projection and by its add: one conversion serves both."""
    fold = Fold(mlp(6), True)
    layout = fold.lay((0,) * 6, 1)
    add = fold.class_of["blocks.2.add"]
    groups = [g for g in layout.groups if g.tensor == fold.tensor_at[add, 0]]
    assert any(len(g.readers) == 2 and g.count.sum() == 3 for g in groups)


def test_values_that_skip_a_stage_cross_both_borders() -> None:
    make = Maker()
    x = make.linear("a", make.input("x", (8, 16)), 16, "blocks.0")
    y = make.linear("b", x, 16, "blocks.1")
    z = make.linear("c", y, 16, "blocks.2")
    graph = make.graph(make.op("skip", "aten.add.Tensor", (8, 16), z, x, module="blocks.2"))
    fold = Fold(graph, True)
    layout = fold.lay((0, 1, 2), 3)
    assert layout.crossings[fold.tensor_at[fold.class_of["a"], 0]].tolist() == [1, 1, 0]
    assert layout.crossings[fold.tensor_at[fold.class_of["b"], 0]].tolist() == [0, 1, 0]


def test_a_tied_parameter_is_held_and_summed_in_both_stages() -> None:
    make = Maker()
    table = make.parameter("tied", (16, 16))
    x = make.op("a", "aten.linear.default", (8, 16), make.input("x", (8, 16)), table, module="blocks.0")
    y = make.linear("b", x, 16, "blocks.1")
    graph = make.graph(make.op("c", "aten.linear.default", (8, 16), y, table, module="blocks.2"))
    layout = Fold(graph, True).lay((0, 1, 2), 3)
    assert [(stages, count) for _, stages, count in layout.shared] == [((0, 2), 1)]
    problem = prepared(graph, Mesh(3, 1, 1, 2)).tables.problem
    assert problem.fixed[Q["sync"]][[0, 2]].all() and not problem.fixed[Q["sync"]][1]


def test_heavy_ops_are_split_on_every_axis() -> None:
    shop = workshop(mlp(3))
    builder = Builder(shop.catalogue, pricer(Mesh(1, 1, 2)), Options(Optimizer.of("adamw"), "none", 1e12), {})
    for op in shop.fold.ops:
        if op.index in shop.catalogue.heavy:
            assert all("S(" in str(label) for label in builder.labels[op.index])
    assert shop.catalogue.heavy
