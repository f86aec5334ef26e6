"""Reductions against the law: sums leave pending sums, means divide by the global count, the rest keeps its dims whole."""

import pytest
import torch
from law import SAMPLES, bools, check, draw, f, ints, kept_elements, ops_here, samples, told_elements

from planner.rules.base import one_axis
from runtime.kernels import KERNELS, KernelInfo

BEFORE = set(SAMPLES)


def positive(x):
    return x.abs() + 0.3


samples("aten.sum.default", (f(8, 7),), (ints(8, 7),), (bools(8, 7),), (f(),))
samples("aten.sum.dim_IntList", (f(8, 7, 4), (1,)), (f(8, 7, 4), (0, -1), True), (bools(8, 7), (0,)), mesh=True)
samples("aten.sum.dim_IntList", (f(8, 7), None), (f(8, 7), ()))
samples("aten.sum.dim_IntList", (f(8, 7), (0,)), dtype=torch.float32)
samples("aten.nansum.default", (f(8, 7), (1,)), (f(8, 7),))
samples("aten.count_nonzero.default", (ints(8, 7), 1), (ints(8, 7),))
samples("aten.count_nonzero.dim_IntList", (ints(8, 7), (0,)))
samples("aten.trace.default", (f(7, 8),))
samples("aten.mean.default", (f(8, 7),), (f(1),), mesh=True)
samples("aten.mean.dim", (f(8, 7, 4), (1,)), (f(8, 7, 4), (0, -1), True), (f(8, 7), None), (f(8, 1), (1,), True), mesh=True)
samples("aten.mean.dim", (f(8, 7), (0,)), dtype=torch.float32)
samples("aten.mean.default", (f(8, 7),), dtype=torch.float32)

samples("aten.sum_to_size.default", (f(6, 8, 7), (8, 1)), (f(8, 7), (8, 7)), (f(8, 7), (7,)))
samples("aten.nanmean.default", (f(8, 7), (1,)), (f(8, 7),))
for _name in ("amax", "amin"):
    samples(f"aten.{_name}.default", (f(8, 7), (1,)), (f(8, 7), (0,), True), (f(8, 7),))
for _name in ("max", "min", "median", "nanmedian"):
    samples(f"aten.{_name}.default", (f(8, 7),))
    samples(f"aten.{_name}.dim", (f(8, 7), 1), (f(8, 7), 0, True))
for _name in ("argmax", "argmin"):
    samples(f"aten.{_name}.default", (f(8, 7), 1), (f(8, 7),), (f(8, 7), 0, True))
for _name in ("any", "all"):
    samples(f"aten.{_name}.default", (bools(8, 7),))
    samples(f"aten.{_name}.dim", (bools(8, 7), 1), (bools(8, 7), 0, True))
    samples(f"aten.{_name}.dims", (bools(8, 7, 4), (0, 2)))
    samples(f"aten._is_{_name}_true.default", (bools(8, 7),))
samples("aten.mode.default", (f(8, 7),), (f(8, 7), 0, True))
samples("aten.kthvalue.default", (f(8, 7), 2), (f(8, 7), 3, 0, True))
samples("aten.aminmax.default", (f(8, 7),))
samples("aten.aminmax.default", (f(8, 7),), dim=1, keepdim=True)
for _name in ("quantile", "nanquantile"):
    samples(f"aten.{_name}.scalar", (f(8, 7), 0.3, 1), (f(8, 7), 0.5))
samples("aten.prod.default", (f(4, 3),))
samples("aten.prod.dim_int", (f(8, 7), 1), (f(8, 7), 0, True))
for _name in ("logsumexp", "special_logsumexp"):
    samples(f"aten.{_name}.default", (f(8, 7), (1,)), (f(8, 7), (0, 1), True))
for _name in ("var", "std", "var_mean", "std_mean"):
    samples(f"aten.{_name}.default", (f(8, 7),), (f(8, 7), False))
    samples(f"aten.{_name}.dim", (f(8, 7), (1,)), (f(8, 7), (0,), False, True))
    samples(f"aten.{_name}.correction", (f(8, 7), (1,)), (f(8, 7),), correction=0)
samples("aten.norm.Scalar", (f(8, 7),))
samples("aten.norm.ScalarOpt_dim", (f(8, 7), 2, (1,)), (f(8, 7), 1, (0,), True))
samples("aten.norm.ScalarOpt_dim_dtype", (f(8, 7), 2, (1,), False), dtype=torch.float64)
samples("aten.norm.ScalarOpt_dtype", (f(8, 7), 2), dtype=torch.float64)
samples("aten.linalg_norm.default", (f(8, 7), 2, (1,)), (f(8, 7),), (f(4, 8, 7), 2, (-2, -1)))
samples("aten.linalg_vector_norm.default", (f(8, 7), 2, (1,)), (f(8, 7), 1, (0,), True), (f(8, 7),))

samples("aten.cumsum.default", (f(8, 7), 1), (f(8, 7), 0), (bools(8, 7), -1))
samples("aten.cumprod.default", (f(8, 7), 1))
samples("aten.logcumsumexp.default", (f(8, 7), 1))
samples("aten.cummax.default", (f(8, 7), 1))
samples("aten.cummin.default", (f(8, 7), 0))

samples("aten.cosine_similarity.default", (f(8, 7, 4), f(8, 7, 4)), (f(8, 1, 5), f(7, 5), 2))
samples("aten.pairwise_distance.default", (f(8, 7), f(8, 7)), (f(8, 7), f(7), 1.0, 1e-6, True))
samples("aten.cross.default", (f(8, 3), f(8, 3)), (f(8, 3, 5), f(8, 3, 5), 1))
samples("aten.linalg_cross.default", (f(8, 3), f(1, 3)))
samples("aten._weight_norm.default", (f(8, 7), f(8, 1)), (f(8, 7, 4), f(1, 7, 1), 1))

OPS = ops_here(BEFORE)


@pytest.mark.parametrize("op", OPS)
def test_law(op):
    check(op)


COMPOSITE = (
    "aten.cosine_similarity.default", "aten.pairwise_distance.default", "aten._weight_norm.default", "aten.nanmean.default",
    "aten.quantile.scalar", "aten.nanquantile.scalar",
)  # fmt: skip
"""Ops that autograd sees the parts of: the rule tells of their inputs only."""


@pytest.mark.parametrize("op", sorted(set(OPS) - set(COMPOSITE)))
def test_keeps_what_autograd_keeps(op):
    assert kept_elements(op) == told_elements(op)


def test_a_mean_over_a_split_dim_is_scaled_by_the_global_count():
    case = draw(SAMPLES["aten.mean.dim"][0])
    texts = {str(s) for s in one_axis(case.rule, (True,), (True,), 3)}
    assert "S(1) -> P @scaled_sum" in texts  # 7 over 3 ranks: 3, 3, 1
    assert "S(0) -> S(0)" in texts
    part = KERNELS["scaled_sum"](torch.mean, [torch.ones(2, 3), [1]], {}, KernelInfo("aten.mean.dim", sizes={"d0": 2, "r1": 7}))
    assert part.tolist() == pytest.approx([3 / 7, 3 / 7])


def test_a_maximum_is_not_split():
    case = draw(SAMPLES["aten.amax.default"][0])
    assert {str(s) for s in one_axis(case.rule, (True,), (True,), 2)} == {"I -> I", "R -> R", "S(0) -> S(0)"}
