"""Products of matrices against the law: every form, uneven sizes, pending sums and the added term."""

import pytest
from law import SAMPLES, check, draw, f, fixed, kept_elements, ops_here, samples, split_factors, told_elements

from planner.rules.matmul import parse_equation

BEFORE = set(SAMPLES)

# legend: m, n sizes of the result, k the contraction; 8 is even over 2 and 4 ranks, 7 and 5 are not
samples("aten.linear.default", (f(2, 8, 7), f(6, 7), f(6)), (f(8, 7), f(5, 7), None), (f(7), f(8, 7), f(8)), mesh=True)
samples("aten.linear.default", (f(8, 7), f(6, 7)), (f(3, 4, 8), f(8)), (fixed(8, 7), f(5, 7), f(5)))
samples("aten.mm.default", (f(8, 7), f(7, 6)), mesh=True)
samples("aten.bmm.default", (f(4, 8, 7), f(4, 7, 6)))
samples("aten.mv.default", (f(8, 7), f(7)))
samples("aten.dot.default", (f(8), f(8)), (f(7), f(7)))
samples("aten.vdot.default", (f(8), f(8)))
samples("aten.outer.default", (f(8), f(7)))
samples("aten.ger.default", (f(8), f(7)))
samples("aten.linalg_vecdot.default", (f(8, 7), f(8, 7)), (f(6, 8, 7), f(8, 7)), dim=-2)
samples("aten.addmm.default", (f(6), f(8, 7), f(7, 6)), (f(8, 6), f(8, 7), f(7, 6)), (f(8, 1), f(8, 7), f(7, 6)), mesh=True)
samples("aten.addmm.default", (f(6), f(8, 7), f(7, 6)), beta=0.5, alpha=2.0)
samples("aten.baddbmm.default", (f(4, 8, 6), f(4, 8, 7), f(4, 7, 6)), (f(8, 6), f(4, 8, 7), f(4, 7, 6)), beta=0.3)
samples("aten.addbmm.default", (f(8, 6), f(4, 8, 7), f(4, 7, 6)), alpha=0.7)
samples("aten.addmv.default", (f(8), f(8, 7), f(7)))
samples("aten.addr.default", (f(8, 7), f(8), f(7)))
for _op in ("aten.matmul.default", "aten.linalg_matmul.default"):
    samples(
        _op, (f(8, 7), f(7, 6)), (f(7), f(7, 6)), (f(8, 7), f(7)), (f(7), f(7)), (f(3, 8, 7), f(7, 6)), (f(8, 7), f(3, 7, 6)),
        (f(4, 1, 8, 7), f(1, 3, 7, 6)), (f(7), f(4, 7, 6)), (f(4, 8, 7), f(7)),
    )  # fmt: skip
samples("aten.inner.default", (f(8, 7), f(6, 7)), (f(7), f(7)))
samples("aten.tensordot.default", (f(8, 7, 4), f(4, 6, 7), (1, 2), (2, 0)), (f(8, 7), f(7, 6), (-1,), (0,)))
samples("aten.bilinear.default", (f(8, 7), f(8, 5), f(6, 7, 5), f(6)), (f(8, 7), f(8, 5), f(6, 7, 5), None))
samples("aten.cdist.default", (f(8, 5), f(7, 5)), (f(4, 8, 5), f(4, 7, 5)))
samples("aten._cdist_forward.default", (fixed(8, 5), fixed(7, 5), 2.0, None))
samples("aten.einsum.default", ("bhqd,bhkd->bhqk", [f(4, 2, 7, 8), f(4, 2, 5, 8)]), mesh=True)
samples(
    "aten.einsum.default", ("...d,ed->...e", [f(3, 8, 7), f(6, 7)]), ("ij,jk", [f(8, 7), f(7, 6)]), ("i,j->ij", [f(8), f(7)]),
    ("bi,bj,ijk->bk", [f(8, 4), f(8, 5), f(4, 5, 7)]), ("b...->...", [f(8, 7)]), ("ij->ji", [f(8, 7)]), ("ij->", [f(8, 7)]),
    ("b i, b i -> b", [f(8, 7), f(1, 7)]), ("...i,...i->...", [f(8, 7, 4), f(7, 4)]),
)  # fmt: skip

OPS = ops_here(BEFORE)


@pytest.mark.parametrize("op", OPS)
def test_law(op):
    check(op)


@pytest.mark.parametrize("op", OPS)
def test_keeps_what_autograd_keeps(op):
    assert kept_elements(op) == told_elements(op)


def test_factors_are_split_evenly_and_unevenly():
    assert {"b0", "b1", "k", "n"} <= {factor for factor, _ in split_factors("aten.linear.default")}
    assert split_factors("aten.mm.default") == {("m", False), ("m", True), ("k", False), ("n", True)}


def test_flops_of_a_linear():
    case = draw(SAMPLES["aten.linear.default"][0])
    assert case.rule.flops == 2 * 2 * 8 * 7 * 6
    assert case.rule.kind == "matmul"


def test_equations():
    assert parse_equation("...ij,jk->...ik", [(2, 3, 4, 5), (5, 6)], 4) == (
        [["e0", "e1", "i", "j"], ["j", "k"]], ["e0", "e1", "i", "k"],
    )  # fmt: skip
    assert parse_equation("ba,ac", [(2, 3), (3, 4)], 2) == ([["b", "a"], ["a", "c"]], ["b", "c"])
    assert parse_equation("ii->i", [(3, 3)], 1) is None
