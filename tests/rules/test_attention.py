"""Attention against the law: masks, causality, grouped heads; the FLOPs that it says it makes."""

import pytest
from law import SAMPLES, bools, check, draw, f, ops_here, samples

from planner.rules.base import one_axis

BEFORE = set(SAMPLES)
OP = "aten.scaled_dot_product_attention.default"


def qkv(*shape, keys=None, heads=None, width=None):
    """Shapes of query [*, L, E], key [*, S, E] and value [*, S, V]."""
    key = list(shape)
    key[-2] = keys or shape[-2]
    if heads:
        key[-3] = heads
    return f(*shape), f(*key), f(*key[:-1], width or shape[-1])


samples(OP, (*qkv(4, 6, 5, 8, keys=7, width=4),), (*qkv(4, 7, 8),), (*qkv(4, 6, 5, 8), f(5, 5)), (*qkv(2, 3, 4, 5, 6),))
samples(
    OP, (*qkv(4, 6, 5, 8, keys=7), f(1, 6, 5, 7)), (*qkv(4, 6, 5, 8, keys=7), f(4, 1, 1, 7)), (*qkv(4, 6, 5, 8), f(4, 6, 5, 1)), scale=0.3
)
samples(OP, (*qkv(4, 6, 7, 8), None, 0.0, True), (*qkv(2, 7, 8), None, 0.0, True), (*qkv(7, 8), None, 0.0, True), mesh=True)
samples(OP, (*qkv(2, 3, 9, 8, keys=7), None, 0.0, True), (*qkv(2, 3, 5, 8, keys=9), None, 0.0, True))
samples(OP, (*qkv(4, 6, 7, 8, heads=2), None, 0.0, True), (*qkv(4, 6, 7, 8, heads=2), f(4, 6, 7, 7)), enable_gqa=True)
samples(
    OP, (*qkv(2, 12, 5, 8, heads=3), f(1, 1, 5, 5)), (*qkv(4, 4, 5, 8, heads=1),), (*qkv(4, 8, 5, 4, heads=4),), enable_gqa=True, mesh=True
)
samples("aten._scaled_dot_product_flash_attention_for_cpu.default", (*qkv(4, 6, 5, 8, keys=7),), (*qkv(4, 6, 5, 8), 0.0, True))
samples("aten._scaled_dot_product_flash_attention_for_cpu.default", (*qkv(4, 6, 5, 8),), attn_mask=f(4, 1, 5, 5, grad=False))


@pytest.mark.parametrize("op", ops_here(BEFORE))
def test_law(op):
    check(op)


def texts(case, ranks):
    return {str(s) for s in one_axis(case.rule, case.grad_in, case.node.grad, ranks)}


def case_of(*args, **kwargs):
    from law import Sample

    return draw(Sample(OP, args, kwargs))


def test_boolean_mask_of_one_row_stays_whole_where_queries_split():
    case = case_of(*qkv(4, 6, 8, 8), bools(8, 8))
    assert "S(2),R,R,S(0) -> S(2)" in texts(case, 2)
    assert "S(0),S(0),S(0),R -> S(0)" in texts(case, 2)


def test_causal_queries_split_by_their_kernel():
    case = case_of(*qkv(4, 6, 8, 8), None, 0.0, True)
    assert "S(2),R,R -> S(2) @causal_attention" in texts(case, 2)
    assert "S(2),R,R -> S(2)" not in texts(case, 2)


def test_fewer_key_heads_than_ranks():
    case = case_of(*qkv(4, 8, 4, 8, heads=2), enable_gqa=True)
    assert "S(1),S(1),S(1) -> S(1)" in texts(case, 2)
    assert "S(1),S(1),S(1) -> S(1)" not in texts(case, 4)
    assert "S(1),R,R -> S(1) @grouped_heads" in texts(case, 4)


@pytest.mark.parametrize("kwargs", [{}, {"enable_gqa": True}], ids=["equal heads", "grouped heads"])
def test_flops(kwargs):
    """Two products of 2 L S E multiply-adds per head."""
    case = case_of(*qkv(4, 6, 5, 8, keys=7, heads=2 if kwargs else None), **kwargs)
    assert case.rule.flops == pytest.approx(2 * (2 * 4 * 6 * 5 * 7 * 8))


def test_causal_flops_count_what_is_seen():
    case = case_of(*qkv(4, 6, 8, 8), None, 0.0, True)
    assert case.rule.flops == pytest.approx(2 * (2 * 4 * 6 * 8 * (8 * 9 / 2)))


def test_dropout_is_random():
    assert case_of(*qkv(4, 6, 8, 8), None, 0.1).rule.random
    assert not case_of(*qkv(4, 6, 8, 8)).rule.random
