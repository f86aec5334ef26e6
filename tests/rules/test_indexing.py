"""Indexing by data against the law."""

import pytest
import torch
from given import given
from law import SAMPLES, check, draw, f, fixed, ints, ops_here, samples

from planner.graph import Node, Spec, Value
from planner.rules import one_axis, rule_of

BEFORE = set(SAMPLES)


def at(*shape, below):
    return ints(*shape, low=0, high=below)


samples("aten.gather.default", (f(4, 6, 5), 2, at(4, 6, 3, below=5)), (f(4, 6, 5), 1, at(3, 2, 5, below=6)), (f(7), 0, at(5, below=7)))
samples("aten.gather.default", (f(4, 6), -1, at(4, 1, below=6)), (f(), 0, given(0)), (f(4, 6, 8), 2, at(4, 6, 3, below=8)), mesh=True)
DISTINCT = given([[5, 1, 3, 0], [2, 0, 4, 1], [1, 2, 3, 4], [0, 5, 2, 3]])
samples("aten.scatter.src", (f(4, 6), 1, DISTINCT, f(4, 4)), (f(4, 6), 1, DISTINCT, fixed(5, 5)), (f(), 0, given(0), f()))
samples("aten.scatter.value", (f(4, 6), 1, at(4, 3, below=6), 0), (f(4, 6), 1, at(4, 3, below=6), 1.5))
samples("aten.scatter_add.default", (f(4, 6), 1, DISTINCT, f(4, 4)), (f(6), 0, at(9, below=6), f(9)), (f(5, 6), 1, DISTINCT, f(4, 4)))
samples("aten.scatter_add.default", (f(4, 6), 1, DISTINCT, fixed(5, 5)))
for _reduce in ("sum", "amax", "mean", "prod"):
    for _self in (True, False):
        samples("aten.scatter_reduce.two", (f(4, 6), 1, at(4, 5, below=6), f(4, 5), _reduce), include_self=_self)
samples("aten.scatter.reduce", (fixed(4, 6), 1, DISTINCT, fixed(4, 4)), reduce="add")
samples("aten.scatter.value_reduce", (fixed(4, 6), 1, DISTINCT, 2.0), reduce="multiply")
samples("aten.index_select.default", (f(4, 6, 5), 1, at(7, below=6)), (f(4, 6, 5), -1, given(2)), (f(7, 2), 0, at(4, below=7)))
samples("aten.index_add.default", (f(4, 6, 5), 1, at(7, below=6), f(4, 7, 5)), (f(4, 6), 1, given(2), f(4, 1)))
samples("aten.index_add.default", (f(6), 0, at(8, below=6), f(8)), alpha=2, mesh=True)
samples("aten.index_copy.default", (f(4, 6, 5), 1, given(3, 0, 5, 1), f(4, 4, 5)))
samples("aten.index_fill.int_Scalar", (f(4, 6), 1, given(3, 0, 5, 1), 2.0))
samples("aten.index_fill.int_Tensor", (f(4, 6), 1, given(3, 0, 5, 1), f()))
samples("aten.take.default", (f(4, 6), at(5, 3, below=24)))
samples("aten.take_along_dim.default", (f(4, 6), at(4, 3, below=6), 1), (f(4, 6, 5), at(1, 3, 5, below=6), 1), (f(4, 6), at(3, below=24)))

samples(
    "aten.index.Tensor",
    (f(4, 6, 5), [None, at(7, below=6)]),
    (f(4, 6, 5), [at(7, below=4), None, at(7, below=5)]),
    (f(7, 3), [at(5, below=7)]),
)
samples("aten.index.Tensor", (f(4, 6, 5), [at(7, 1, below=4), at(1, 5, below=6)]), (f(4, 6, 5), [None, at(4, 3, below=6), at(3, below=5)]))
samples("aten.index.Tensor", (f(4, 6, 5), [None, given(2)]), (f(4, 4, 5, 5), [None, given(2), None, at(4, below=5)]))
# x[arange(len(x)), ...] and the like: dims of x that run along with dims of the index space
samples(
    "shard.index",
    (f(4, 6, 5), [None, at(4, below=6)], [[0, 0]]),
    (f(4, 6), [None, at(4, 3, below=6)], [[0, 0]]),
    (f(4, 6), [], [[0, 0], [1, 3]]),
)
samples("shard.index", (f(4, 6, 5), [None, None, at(4, 1, 3, below=5)], [[0, 0], [1, 1]]), (f(4, 6, 5), [at(6, 3, below=4)], [[1, 0]]))
samples(
    "shard.index", (f(5, 6, 4), [None, at(6, 1, below=6)], [[0, 0], [2, 1]][1:]), (f(4, 3, 6, 5), [None, None, at(4, below=6)], [[0, 0]])
)
samples("shard.index", (f(4, 6, 8), [None, at(4, 3, below=6)], [[0, 0]]), mesh=True)
for _adds in (False, True):
    samples(
        "aten.index_put.default",
        (f(6, 5), [given(5, 0, 3, 1)], f(4, 5), _adds),
        (f(4, 6, 5), [None, given(5, 0, 3, 1, 4, 2)], f(4, 6, 1), _adds),
        (f(6, 5), [given(5, 0, 3, 1, 2), given(4, 1, 0, 2, 3)], f(5), _adds),
        (f(6, 5), [given(5, 0, 3, 1)], f(1), _adds),
        (f(6, 4, 5), [given(5, 0, 3, 1), None, given(0, 1, 2, 3)], f(4, 4), _adds),
    )
MASK = given([True, False, False, True, True, False], dtype=torch.bool)
samples("aten.index_put.default", (f(6, 5), [MASK], f()), (f(6, 5), [MASK], f(1)))

samples("aten.topk.default", (f(4, 6, 5), 3, 1), (f(4, 6, 5), 3, 1, False), (f(4, 6), 2))
samples("aten.sort.default", (f(4, 6),), (f(4, 6, 5), 1, True), (f(),))
samples("aten.sort.stable", (f(4, 6, 5),), stable=True, dim=0)
samples("aten.argsort.default", (f(4, 6), 0))
samples("aten.argsort.stable", (f(4, 6),), stable=True, dim=1)


def ascending(x):
    return x.sort(-1)[0]


samples("aten.searchsorted.Tensor", (fixed(6, make=ascending), fixed(4, 5)), (fixed(4, 6, make=ascending), fixed(4, 5)))
samples("aten.bucketize.Tensor", (fixed(4, 5), fixed(6, make=ascending)))
samples("aten.histc.default", (fixed(4, 6), 5, -1, 1), (fixed(4, 6), 5))


@pytest.mark.parametrize("op", ops_here(BEFORE))
def test_law(op):
    check(op)


def test_a_mask_has_no_rule():
    node = Node("node", "aten.index.Tensor", (Value("x"), (Value("mask"),)), (), (Spec((3, 5), "float32"),), (True,))
    assert rule_of(node, [Spec((6, 5), "float32"), Spec((6,), "bool")]) is None


def test_rows_that_run_along_split_with_the_batch():
    case = draw(SAMPLES["shard.index"][0])
    assert "S(0),S(0) -> S(0)" in {str(s) for s in one_axis(case.rule, case.grad_in, case.node.grad, 2)}


def test_adding_splits_what_is_added():
    case = draw(SAMPLES["aten.scatter_add.default"][1])
    assert "P,S(0),S(0) -> P" in {str(s) for s in one_axis(case.rule, case.grad_in, case.node.grad, 3)}
