"""Norms against the law; batch norm with its statistics over split batches and spaces."""

import pytest
import torch
from given import positive
from law import SAMPLES, check, draw, f, fixed, ops_here, samples

from planner.rules.base import one_axis

BEFORE = set(SAMPLES)
EPS = 1e-5

samples(
    "aten.layer_norm.default",
    (f(4, 5, 7), [7], f(7), f(7), EPS),
    (f(5, 6, 8), [6, 8]),
    (f(4, 8), [8], f(8)),
    (f(6, 7), [7], None, None, 1e-3),
)
samples("aten.layer_norm.default", (f(4, 5, 8), [8], f(8), f(8)), mesh=True)
samples("aten.native_layer_norm.default", (f(4, 5, 7), [7], f(7), f(7), EPS), (f(5, 6, 8), [6, 8], None, None, EPS))
samples("aten.rms_norm.default", (f(4, 5, 8), [8], f(8), 1e-6), (f(4, 7), [7]), (f(4, 3, 6), [3, 6], f(3, 6)), mesh=True)
samples("aten._fused_rms_norm.default", (f(4, 5, 8), [8], f(8), 1e-6))
samples("aten.group_norm.default", (f(5, 12, 3, 2), 4, f(12), f(12), EPS), (f(4, 6, 5), 6), (f(4, 8, 3), 4), (f(3, 6, 5), 1))
samples("aten.native_group_norm.default", (f(5, 12, 3, 2), f(12), f(12), 5, 12, 6, 4, EPS))
samples(
    "aten.instance_norm.default",
    (f(4, 6, 5), f(6), f(6), None, None, True, 0.1, EPS, False),
    (f(4, 6, 5), None, None, fixed(6), fixed(6, make=positive), False, 0.1, EPS, False),
)
STATISTICS = (fixed(6), fixed(6, make=positive))
samples(
    "shard.batch_norm",
    *((f(*shape), f(6), f(6), *STATISTICS, training, 0.1, EPS) for shape in ((5, 6, 4, 3), (7, 6)) for training in (True, False)),
    (f(4, 6, 3), None, None, None, None, True, 0.1, EPS),
    (f(4, 6, 3), None, f(6), *STATISTICS, True, 0.3, EPS),
    mesh=True,
)
samples(
    "aten.batch_norm.default",
    (f(4, 6, 3), f(6), f(6), None, None, True, 0.1, EPS, False),
    (f(4, 6, 3), f(6), f(6), *STATISTICS, False, 0.1, EPS, False),
)


@pytest.mark.parametrize("op", ops_here(BEFORE))
def test_law(op):
    check(op)


def test_batch_norm_splits_the_batch_by_its_kernel_only():
    case = draw(SAMPLES["shard.batch_norm"][0])
    kernels = {s.factor: s.kernel for s in one_axis(case.rule, case.grad_in, case.node.grad, 2) if s.factor}
    assert kernels == {"c": "", "n": "batch_norm", "s0": "batch_norm", "s1": "batch_norm"}


def test_batch_norm_that_updates_in_place_has_no_rule():
    from planner.graph import Node, Spec, Value
    from planner.rules import rule_of

    args = (Value("x"), None, None, Value("mean"), Value("var"), True, 0.1, EPS, False)
    node = Node("node", "aten.batch_norm.default", args, (), (Spec((4, 6), "float64"),), (True,))
    assert rule_of(node, [Spec((4, 6), "float64"), Spec((6,), "float64"), Spec((6,), "float64")]) is None


def test_shard_batch_norm_is_torch_batch_norm():
    from runtime.ops import batch_norm

    torch.manual_seed(0)
    module = torch.nn.BatchNorm2d(6, momentum=0.3, dtype=torch.float64)
    x = torch.randn(4, 6, 3, 2, dtype=torch.float64)
    mean, var = module.running_mean.clone(), module.running_var.clone()
    y, new_mean, new_var = batch_norm(x, module.weight, module.bias, mean, var, True, 0.3, EPS)
    torch.testing.assert_close(module(x), y)
    torch.testing.assert_close(module.running_mean, new_mean)
    torch.testing.assert_close(module.running_var, new_var)
    assert mean.eq(0).all() and var.eq(1).all()
