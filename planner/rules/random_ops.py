"""Ops that draw random numbers. All are lowered with seeds that differ exactly over the axes that split the output.

A dropout is linear in its input for a given mask, and ranks that hold pending sums of one tensor draw the same mask.
"""

from __future__ import annotations

from planner.graph import DTYPE_BYTES
from planner.rules.base import Call, Rule, Strategy, dims_rule, rule
from planner.rules.dims import aligned, numbered, through
from planner.sharding import P, R


@rule("aten.dropout.default", "aten.native_dropout.default")
def dropout(call: Call) -> Rule:
    return through(call, range(len(call.out)), linear=({0},), random=True, flops_per_point=1.0, extra_saved_bytes_per_point=1.0)


@rule("aten.feature_dropout.default")
def feature_dropout(call: Call) -> Rule:
    """One draw for each (sample, channel), so the dims after these are whole."""
    n = len(call.out)
    return through(call, range(n), whole=range(2, n), linear=({0},), random=True, flops_per_point=1.0)


@rule("aten.alpha_dropout.default", "aten.feature_alpha_dropout.default", "aten.rrelu.default")
def affine_dropout(call: Call) -> Rule:
    """Dropped elements take a value of their own, so it is not linear. The noise is kept in the output's dtype."""
    n = len(call.out)
    whole = range(2, n) if "feature" in call.node.op else ()
    saves = ("in0",) if "rrelu" in call.node.op else ()
    noise = DTYPE_BYTES[call.node.outputs[0].dtype]
    return through(call, range(n), whole=whole, random=True, flops_per_point=1.0, saves=saves, extra_saved_bytes_per_point=noise)


@rule(
    "aten.bernoulli.default", "aten.bernoulli.p", "aten.bernoulli.Tensor", "aten.poisson.default",
    "aten.normal.Tensor_float", "aten.normal.float_Tensor", "aten.normal.Tensor_Tensor",
)  # fmt: skip
def drawn(call: Call) -> Rule:
    out = numbered(call.out)
    return dims_rule(call, [aligned(spec.shape, call.out) for spec in call.specs], [out], random=True)


@rule(
    "aten.rand_like.default", "aten.randn_like.default", "aten.randint_like.default", "aten.randint_like.low_dtype",
    "aten.uniform.default", "aten.exponential.default", "aten.log_normal.default", "aten.cauchy.default", "aten.geometric.default",
    "aten.normal_functional.default",
)  # fmt: skip
def drawn_like(call: Call) -> Rule:
    dims = numbered(call.out)
    return dims_rule(call, [dims], [dims], random=True, extra=(Strategy((P,), (R,)),))


@rule(
    "aten.rand.default", "aten.randn.default", "aten.randint.default", "aten.randint.low", "aten.randperm.default",
    "aten.normal.float_float",
)  # fmt: skip
def drawn_from_nothing(call: Call) -> Rule:
    """Drawn whole on every rank from one seed, so that the numbers do not depend on the layout."""
    dims = numbered(call.out)
    return dims_rule(call, [], [dims], whole={dim[0] for dim in dims if dim}, random=True)


@rule("aten.multinomial.default")
def multinomial(call: Call) -> Rule:
    shape = call.shape(0)
    batch = numbered(shape[:-1])
    return dims_rule(call, [(*batch, ("k",))], [(*batch, ("n",))], whole={"k", "n"}, random=True)

