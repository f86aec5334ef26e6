"""Losses against the law: every reduction, class weights, ignored targets, smoothing, probabilities, split classes."""

import pytest
import torch
from given import given, positive, probabilities
from law import SAMPLES, Sample, check, draw, f, fixed, ints, ops_here, samples

from planner.rules.base import one_axis

BEFORE = set(SAMPLES)
REDUCTIONS = (0, 1, 2)

for _r in REDUCTIONS:
    for _name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        samples(f"aten.{_name}.default", (f(4, 5), f(4, 5), _r))
    samples("aten.soft_margin_loss.default", (f(4, 5), given([[1, -1, 1, 1, -1]] * 4), _r))
    samples("aten.kl_div.default", (f(4, 5), f(4, 5, make=probabilities), _r))
    samples("aten.kl_div.default", (f(4, 5), f(4, 5), _r), log_target=True)
    _scores = f(4, 5, make=probabilities)
    samples(
        "aten.binary_cross_entropy.default",
        (_scores, _scores, None, _r),
        (_scores, fixed(4, 5, make=probabilities), fixed(4, 5, make=positive), _r),
    )
    samples(
        "aten.binary_cross_entropy_with_logits.default",
        (f(4, 5), fixed(4, 5, make=probabilities), fixed(4, 1), fixed(5, make=positive), _r),
    )
    samples("aten.hinge_embedding_loss.default", (f(4, 5), given([[1, -1, 1, 1, -1]] * 4), 1.0, _r))
    samples("aten.poisson_nll_loss.default", (f(4, 5), fixed(4, 5, make=positive), True, False, 1e-8, _r))
    _signs = given(1, -1, -1, 1, 1)
    samples("aten.margin_ranking_loss.default", (f(5), f(5), _signs, 0.1, _r))
    samples("aten.cosine_embedding_loss.default", (f(5, 4), f(5, 4), _signs, 0.1, _r))
    samples("aten.triplet_margin_loss.default", (f(5, 4), f(5, 4), f(5, 4), 1.0, 2.0, 1e-6, False, _r))
    samples("aten.multi_margin_loss.default", (f(5, 4), ints(5, low=0, high=4), 1, 1, fixed(4, make=positive), _r))
    samples("aten.multilabel_margin_loss.default", (f(5, 4), given([[1, 0, -1, 2]] * 5), _r))
samples("aten.mse_loss.default", (f(), f()), (f(8), f(8)))
samples("aten.mse_loss.default", (f(4, 6), f(4, 6), 1), mesh=True)

TARGET = given(3, -100, 0, 6, -100, 2)
SPACE = given([[[0, 6, 2, -100, 1]] * 3, [[5, 5, -100, 3, 4]] * 3, [[-100] * 5] * 3, [[1, 2, 3, 4, 5]] * 3])
WEIGHT = fixed(7, make=positive)
CE = "aten.cross_entropy_loss.default"


def distribution(x):
    return x.softmax(1)


for _r in REDUCTIONS:
    samples(CE, (f(6, 7), TARGET, None, _r), (f(6, 7), TARGET, WEIGHT, _r), (f(6, 7), TARGET, WEIGHT, _r, -100, 0.1))
    samples(
        CE, (f(6, 7), given(3, 1, 2, 6, 2, 0), None, _r, 2, 0.2), (f(4, 7, 3, 5), SPACE, WEIGHT, _r, -100, 0.1), (f(7), given(3), None, _r)
    )
    samples(CE, (f(6, 7), f(6, 7, make=distribution), None, _r), (f(6, 7), f(6, 7, make=distribution), WEIGHT, _r, -100, 0.1))
    samples(CE, (f(4, 7, 3), f(4, 7, 3, make=distribution), None, _r))
    samples("aten.nll_loss.default", (f(6, 7), TARGET, None, _r), (f(6, 7), given(3, 1, 2, 6, 2, 0), WEIGHT, _r, 2))
    samples("aten.nll_loss_nd.default", (f(4, 7, 3, 5), SPACE, WEIGHT, _r))
    samples("aten.nll_loss2d.default", (f(4, 7, 3, 5), SPACE, WEIGHT, _r))
samples(CE, (f(8, 12), given(0, 11, -100, 5, 6, 3, -100, 9), fixed(12, make=positive), 2, -100, 0.1), mesh=True)
samples(
    "shard.valid_count", (TARGET, None, -100, torch.float64), (TARGET, WEIGHT, -100, torch.float64), (SPACE, WEIGHT, -100, torch.float64)
)


@pytest.mark.parametrize("op", ops_here(BEFORE))
def test_law(op):
    check(op)


def kernels(op, *args):
    case = draw(Sample(op, args))
    return {(s.factor, s.kernel) for s in one_axis(case.rule, case.grad_in, case.node.grad, 2) if s.factor}


def test_a_mean_over_valid_targets_is_whole():
    """Its count depends on the data; the capture rewrites it into a sum and a count."""
    assert kernels(CE, f(6, 8), TARGET) == set()


def test_a_mean_over_all_rows_splits_by_its_kernel():
    assert kernels("aten.mse_loss.default", f(6, 8), f(6, 8)) == {("n0", "mean_loss"), ("n1", "mean_loss")}
    assert kernels(CE, f(6, 8), f(6, 8, make=distribution)) == {("n0", "mean_loss")}


def test_classes_split_without_moving_logits():
    case = draw(Sample(CE, (f(6, 8), TARGET, None, 2)))
    split = next(s for s in one_axis(case.rule, case.grad_in, case.node.grad, 2) if s.factor == "c")
    assert str(split) == "S(1),R -> I @vocab_cross_entropy"
    assert sum(comm.nbytes for comm in split.comm) == 4 * 6 * 8
