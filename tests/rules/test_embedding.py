"""Embeddings against the law, also with the rows of the table split."""

import pytest
import torch
from given import given
from law import SAMPLES, check, f, ints, ops_here, samples

from planner.graph import Node, Spec, Value
from planner.rules import one_axis, rule_of

BEFORE = set(SAMPLES)


def ids(*shape, rows):
    return ints(*shape, low=0, high=rows)


OFFSETS = given(0, 2, 5, 5)
samples(
    "aten.embedding.default",
    (f(10, 6), ids(4, 5, rows=10)),
    (f(7, 4), given(3)),
    (f(7, 4), ids(4, 3, rows=7), 6),
    (f(5, 3), ids(9, rows=5), 0),
)
samples("aten.embedding.default", (f(7, 4), ids(6, rows=7), 0, True))
samples("aten.embedding.default", (f(12, 6), ids(4, 8, rows=12), 3), mesh=True)
samples(
    "aten.embedding_bag.default",
    *((f(10, 6), ids(9, rows=10), OFFSETS, False, mode) for mode in (0, 1, 2)),
    (f(10, 6), ids(9, rows=10), OFFSETS, False, 0, False, f(9)),
)
samples("aten.embedding_bag.padding_idx", (f(10, 6), ids(9, rows=10), OFFSETS, False, 1, False, None, False, 2))
samples("aten._embedding_bag.default", (f(10, 7), ids(9, rows=10), OFFSETS))
samples("aten.one_hot.default", (ids(4, 3, rows=5), 5))


@pytest.mark.parametrize("op", ops_here(BEFORE))
def test_law(op):
    check(op)


def test_rows_split_into_a_pending_sum():
    node = Node("node", "aten.embedding.default", (Value("w"), Value("i")), (), (Spec((4, 6), "float32"),), (True,))
    rule = rule_of(node, [Spec((10, 6), "float32"), Spec((4,), "int64")])
    assert "S(0),R -> P @vocab_embedding" in {str(s) for s in one_axis(rule, (True, False), (True,), 4)}


def test_one_hot_without_a_number_of_classes_has_no_rule():
    node = Node("node", "aten.one_hot.default", (Value("i"),), (), (Spec((4, 3), "int64"),), (False,))
    assert rule_of(node, [Spec((4,), "int64")]) is None


def test_padding_row_gets_no_gradient_on_the_rank_that_has_it():
    from runtime.kernels import KERNELS, KernelInfo

    weight = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    info = KernelInfo("aten.embedding.default", (("tensor", "v"),), {"v": 6}, {"v": 3})
    rows = KERNELS["vocab_embedding"](torch.ops.aten.embedding.default, [weight, torch.tensor([1, 4, 5]), 4], {}, info)
    rows.sum().backward()
    assert rows.tolist() == [[0, 0], [1, 1], [1, 1]] and weight.grad.tolist() == [[0, 0], [0, 0], [1, 1]]
