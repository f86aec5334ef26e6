"""Random ops: the law where the draw is certain (p = 0, p = 1), shapes where it is not, and which ranks draw the same."""

import dataclasses

import pytest
import torch
from law import SAMPLES, apart, check, draw, f, fixed, ints, ops_here, samples, strategies

from planner.mesh import Axis
from planner.sharding import I, P, R, S
from runtime.local_op import local_call

BEFORE = set(SAMPLES)


def certain(x):
    return (x > 0).to(x.dtype)


samples("aten.dropout.default", (f(8, 7), 0.5, False), (f(8, 7), 0.0, True), (f(8, 7), 1.0, True), mesh=True)
samples("aten.native_dropout.default", (f(8, 7), 0.0, True), (f(8, 7), 0.5, False))
samples("aten.feature_dropout.default", (f(8, 7, 4), 0.5, False), (f(8, 7, 4), 1.0, True))
samples("aten.alpha_dropout.default", (f(8, 7), 0.5, False), (f(8, 7), 0.0, True))
samples("aten.feature_alpha_dropout.default", (f(8, 7, 4), 0.5, False))
samples("aten.rrelu.default", (f(8, 7), 0.2, 0.2, True), (f(8, 7), 0.1, 0.3, False))
samples("aten.bernoulli.default", (fixed(8, 7, make=certain),))
samples("aten.bernoulli.p", (fixed(8, 7), 1.0), (fixed(8, 7), 0.0))
samples("aten.bernoulli.Tensor", (fixed(8, 7), fixed(7, make=certain)))
samples("aten.poisson.default", (fixed(8, 7, make=torch.zeros_like),))
samples("aten.normal.Tensor_float", (fixed(8, 7), 0.0))
samples("aten.normal.float_Tensor", (1.5, fixed(8, 7, make=torch.zeros_like)))
samples("aten.normal.Tensor_Tensor", (fixed(8, 7), fixed(8, 7, make=torch.zeros_like)))
for _name in ("rand", "randn"):
    samples(f"aten.{_name}_like.default", (f(8, 7),), values=False)
    samples(f"aten.{_name}.default", ((8, 7),), values=False)
for _name in ("exponential", "log_normal", "cauchy"):
    samples(f"aten.{_name}.default", (fixed(8, 7),), values=False)
samples("aten.uniform.default", (fixed(8, 7), 0.5, 0.5))
samples("aten.normal_functional.default", (fixed(8, 7), 1.5, 0.0))
samples("aten.geometric.default", (fixed(8, 7), 0.5), values=False)
samples("aten.randint_like.default", (ints(8, 7), 1))
samples("aten.randint_like.low_dtype", (ints(8, 7), 3, 4))
samples("aten.randint.default", (1, (8, 7)))
samples("aten.randint.low", (3, 4, (8, 7)))
samples("aten.randperm.default", (8,), values=False)
samples("aten.normal.float_float", (1.5, 0.0, (8, 7)))
samples("aten.multinomial.default", (fixed(8, 5, make=torch.abs), 2), (fixed(5, make=torch.abs), 2), values=False)

OPS = ops_here(BEFORE)


@pytest.mark.parametrize("op", OPS)
def test_law(op):
    check(op)


def mask(sharding, coords):
    """What a dropout of ones keeps, on the rank at ``coords`` of the axes data and tensor."""
    case = draw(SAMPLES["aten.dropout.default"][0])
    strategy = next(s for s in strategies(case, (2, 2)) if s.inputs[0] == sharding)
    node = dataclasses.replace(case.node, args=(case.node.args[0], 0.5, True))
    ones = apart(torch.ones(8, 7, dtype=torch.float64), tuple(R if t == P else t for t in sharding), (2, 2))[coords[0] * 2 + coords[1]]
    return local_call(node, case.rule, strategy, [Axis("data", 2), Axis("tensor", 2)], coords).run([ones]) != 0


@pytest.mark.parametrize("same", [R, I, P])
def test_masks_differ_exactly_over_axes_that_split(same):
    sharding = (S(0), same)
    assert torch.equal(mask(sharding, (0, 0)), mask(sharding, (0, 1)))
    assert not torch.equal(mask(sharding, (0, 0)), mask(sharding, (1, 0)))
    assert not mask(sharding, (0, 0)).all()
