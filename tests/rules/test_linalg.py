"""Decompositions and solvers against the law: batch dims split, matrices whole."""

import dataclasses

import pytest
import torch
from law import SAMPLES, check, draw, f, ops_here, samples, spec_of

from planner.rules.base import one_axis, rule_of
from planner.rules.linalg import ONE_MATRIX

BEFORE = set(SAMPLES)


def regular(x):
    """Positive definite, well conditioned: x xT + 3."""
    return x @ x.mT + 3 * torch.eye(x.shape[-1], dtype=x.dtype)


def lower(x):
    return torch.tril(x, -1) + 2 * torch.eye(x.shape[-1], dtype=x.dtype)


RECTANGULAR = ("linalg_qr", "linalg_pinv", "pinverse", "linalg_svdvals")
for _form in ONE_MATRIX:
    _op, _name = f"aten.{_form}", _form.split(".")[0]
    _further = (2,) if "power" in _name else (1e-15,) if _form == "linalg_pinv.default" else ()
    if _name in RECTANGULAR:
        samples(_op, (f(8, 4, 3), *_further), (f(7, 4, 4), *_further))
    elif _name in ("linalg_eigh", "linalg_svd", "svd"):
        # the signs of the vectors are free, so only what does not depend on them has a gradient: none is asked for here
        samples(_op, (f(8, 3, 3, make=regular, grad=False),))
    elif _name == "cholesky_inverse":
        samples(_op, (f(8, 3, 3, make=lower),))
    else:
        samples(_op, (f(8, 3, 3, make=regular), *_further), (f(2, 7, 3, 3, make=regular), *_further))
samples("aten.linalg_matrix_norm.default", (f(8, 4, 3), 2), (f(8, 4, 3), 1, (-1, -2), True))
samples("aten.linalg_matrix_norm.str_ord", (f(8, 4, 3), "fro"), (f(7, 4, 3), "nuc"))
samples("aten.linalg_solve.default", (f(8, 3, 3, make=regular), f(8, 3, 2)), (f(8, 3, 3, make=regular), f(8, 3)))
samples("aten.linalg_solve.default", (f(7, 3, 3, make=regular), f(3, 2)))
samples("aten.cholesky_solve.default", (f(8, 3, 2), f(8, 3, 3, make=lower)), (f(7, 3, 2), f(3, 3, make=lower)))
samples("aten.linalg_solve_triangular.default", (f(8, 3, 3, make=lower), f(8, 3, 2)), upper=False)
samples("aten.triangular_solve.default", (f(8, 3, 2), f(8, 3, 3, make=lower), False))

OPS = ops_here(BEFORE)


@pytest.mark.parametrize("op", OPS)
def test_law(op):
    check(op)


def test_a_norm_over_other_dims_has_no_rule():
    case = draw(SAMPLES["aten.linalg_matrix_norm.default"][0])
    node = dataclasses.replace(case.node, args=(case.node.args[0], 2, (0, 1)))
    assert rule_of(node, [spec_of(case.tensors[0])]) is None


def test_a_matrix_stays_whole():
    case = draw(SAMPLES["aten.linalg_inv.default"][0])
    assert {str(s) for s in one_axis(case.rule, (True,), (True,), 2)} == {"I -> I", "R -> R", "S(0) -> S(0)"}
