"""Joining tensors against the law: the joined dim whole, the others split, and sums of their inputs."""

import pytest
import torch
from law import SAMPLES, check, draw, f, fixed, ints, kept_elements, ops_here, samples, told_elements

from planner.rules.base import one_axis

BEFORE = set(SAMPLES)

samples("aten.cat.default", ([f(8, 7), f(8, 5)], 1), ([f(8, 7), f(4, 7), fixed(2, 7)],), mesh=True)
samples("aten.cat.default", ([f(0), f(8, 7)], -1), ([ints(8, 7), ints(8, 1)], 1))
samples("aten.concat.default", ([f(8, 7), f(8, 5)], 1))
samples("aten.concatenate.default", ([f(8, 7), f(8, 5)], -1))
samples("aten.hstack.default", ([f(8, 7), f(8, 5)],), ([f(8), f(7)],))
samples("aten.vstack.default", ([f(8, 7), f(4, 7)],))
samples("aten.dstack.default", ([f(8, 7, 4), f(8, 7, 2)],))
samples("aten.column_stack.default", ([f(8, 7), f(8, 2)],))
samples("aten.stack.default", ([f(8, 7), f(8, 7)],), ([f(8, 7), f(8, 7), f(8, 7)], -1))
samples("aten.slice_scatter.default", (f(8, 7), f(8, 3), 1, 2, 5), (f(8, 7), f(4, 7), 0, 0, 8, 2))
samples("aten.select_scatter.default", (f(8, 7), f(8), 1, 3))
samples("aten.diff.default", (f(8, 7),), (f(8, 7), 2, 0), (f(8, 7), 1, -1, f(8, 1)), (f(8, 7), 1, 1, f(8, 2), f(8, 1)))
samples("aten.broadcast_tensors.default", ([f(8, 1), f(7)],), ([f(8, 7), f(8, 7)],))
samples("aten.meshgrid.default", ([f(8), f(7)],))
samples("aten.meshgrid.indexing", ([f(8), f(7), f(4)],), indexing="xy")
samples("aten.meshgrid.indexing", ([f(8), f(7)],), indexing="ij")
samples("aten.block_diag.default", ([f(4, 3), f(2, 5)],))

OPS = ops_here(BEFORE)


@pytest.mark.parametrize("op", OPS)
def test_law(op):
    check(op)


@pytest.mark.parametrize("op", OPS)
def test_keeps_what_autograd_keeps(op):
    assert kept_elements(op) == told_elements(op)


def test_pending_sums_pass_a_cat_only_together():
    case = draw(SAMPLES["aten.cat.default"][0])
    texts = {str(s) for s in one_axis(case.rule, (True, True), (True,), 2)}
    assert texts == {"I,I -> I", "R,R -> R", "S(0),S(0) -> S(0)", "P,P -> P"}
    assert case.outputs[0].dtype == torch.float64
