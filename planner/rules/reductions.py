"""Ops that reduce dims: a sum over a split dim leaves a pending sum, anything else needs the dim whole.

    sum:    d0 d1 -> d0          any factor
    mean:   d0 r1 -> d0          a split r1 is summed and divided by its global size (kernel "scaled_sum"): a pending sum
    amax:   d0 r1 -> d0          r1 whole

Factors of reduced dims are called ``r<dim>``, the others ``d<dim>``: the kernel of ``mean`` tells them apart by that.
"""

from __future__ import annotations

from typing import Any

from planner.graph import Arg
from planner.rules.base import Call, Dim, Dims, Rule, Strategy, dims_rule, rule
from planner.rules.dims import aligned, dim_of, dims_of, numbered, through
from planner.sharding import P, S


def reduce(call: Call, dims: Arg, sums: bool = False, **fields: Any) -> Rule:
    """Every output lacks ``dims`` (or has them with size 1, where the call keeps them)."""
    shape = call.shape(0)
    gone = set(dims_of(dims, len(shape)))
    x: Dims = tuple(((f"r{i}" if i in gone else f"d{i}",) if size != 1 else ()) for i, size in enumerate(shape))
    kept: list[Dim] = [x[i] for i in range(len(shape)) if i not in gone]
    if len(call.out) == len(shape):
        kept = [() if i in gone else x[i] for i in range(len(shape))]
    whole = set() if sums else {dim[0] for i, dim in enumerate(x) if i in gone and dim}
    return dims_rule(call, [x], [tuple(kept)] * len(call.node.outputs), whole=whole, sums=sums, flops_per_point=1.0, **fields)


def _linear(call: Call) -> tuple[set[int], ...]:
    """Sums of booleans count; a pending sum of booleans does not exist."""
    return ({0},) if call.specs[0].dtype != "bool" else ()


@rule("aten.sum.default", "aten.sum.dim_IntList")
def sum_(call: Call) -> Rule:
    return reduce(call, call.arg(1, "dim"), sums=True, linear=_linear(call))


@rule("aten.nansum.default")
def nansum(call: Call) -> Rule:
    return reduce(call, call.arg(1, "dim"), sums=True, saves=("in0",))


@rule("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero(call: Call) -> Rule:
    return reduce(call, call.arg(1, "dim"), sums=True)


@rule("aten.trace.default")
def trace(call: Call) -> Rule:
    return reduce(call, None, linear=({0},))


@rule("aten.mean.default", "aten.mean.dim")
def mean(call: Call) -> Rule:
    """The plain mean of a part divides by the part's size; over a split dim the kernel divides by the global count."""
    dims = dims_of(call.arg(1, "dim"), len(call.shape(0)))
    split = [i for i in dims if call.shape(0)[i] != 1]
    extra = tuple(Strategy((S(i),), (P,), factor=f"r{i}", kernel="scaled_sum") for i in split)
    return reduce(call, dims, linear=({0},), extra=extra)


# ---------------------------------------------------------------- the reduced dim is whole


@rule("aten.sum_to_size.default")
def sum_to_size(call: Call) -> Rule:
    """What broadcasting added is summed away: leading dims, and those of size 1 in the result."""
    shape, out = call.shape(0), call.out
    first = len(shape) - len(out)
    x = tuple(
        ((f"r{i}" if i < first or out[i - first] == 1 else f"d{i}",) if size != 1 else ()) for i, size in enumerate(shape)
    )
    kept = tuple(dim if dim and dim[0].startswith("d") else () for dim in x[first:])
    return dims_rule(call, [x], [kept], linear=_linear(call), flops_per_point=1.0, local_args=((1, "shape"),))


@rule("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default", "aten.median.default", "aten.nanmedian.default")
def extreme(call: Call) -> Rule:
    return reduce(call, call.arg(1, "dim"), saves=("in0", "out0"))


@rule("aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.nanmedian.dim")
def extreme_with_index(call: Call) -> Rule:
    return reduce(call, call.arg(1, "dim"), saves=("out1",))


@rule("aten.mode.default")
def mode(call: Call) -> Rule:
    return reduce(call, call.arg(1, "dim", -1), saves=("out1",))


@rule("aten.kthvalue.default")
def kthvalue(call: Call) -> Rule:
    return reduce(call, call.arg(2, "dim", -1), saves=("out1",))


@rule("aten.aminmax.default")
def aminmax(call: Call) -> Rule:
    return reduce(call, dict(call.node.kwargs).get("dim"), saves=("in0", "out0", "out1"))


@rule("aten.quantile.scalar", "aten.nanquantile.scalar")
def quantile(call: Call) -> Rule:
    return reduce(call, call.arg(2, "dim"), saves=("in0",))


@rule("aten.nanmean.default")
def nanmean(call: Call) -> Rule:
    """How many numbers there are is known only once all are seen."""
    return reduce(call, call.arg(1, "dim"), saves=("in0",))


@rule("aten.argmax.default", "aten.argmin.default")
def arg_extreme(call: Call) -> Rule:
    return reduce(call, call.arg(1, "dim"))


@rule(
    "aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims", "aten._is_all_true.default",
    "aten._is_any_true.default",
)  # fmt: skip
def logical(call: Call) -> Rule:
    return reduce(call, call.arg(1, "dim"))


@rule("aten.prod.default", "aten.prod.dim_int")
def prod(call: Call) -> Rule:
    return reduce(call, call.arg(1, "dim"), saves=("in0", "out0"))


@rule("aten.logsumexp.default", "aten.special_logsumexp.default")
def logsumexp(call: Call) -> Rule:
    return reduce(call, call.arg(1, "dim"), saves=("in0", "out0"))


@rule(
    "aten.var.default", "aten.var.dim", "aten.var.correction", "aten.std.default", "aten.std.dim", "aten.std.correction",
    "aten.var_mean.default", "aten.var_mean.dim", "aten.var_mean.correction", "aten.std_mean.default", "aten.std_mean.dim",
    "aten.std_mean.correction",
)  # fmt: skip
def spread(call: Call) -> Rule:
    """The first overload's second argument says whether it is unbiased, not which dims."""
    dims = None if call.node.op.endswith(".default") else call.arg(1, "dim")
    return reduce(call, dims, saves=("in0", "out0") if ".std" in call.node.op else ("in0",))


@rule(
    "aten.norm.Scalar", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype", "aten.norm.ScalarOpt_dtype",
    "aten.linalg_vector_norm.default", "aten.linalg_norm.default",
)  # fmt: skip
def norm(call: Call) -> Rule:
    return reduce(call, call.arg(2, "dim"), saves=("in0", "out0"))


# ---------------------------------------------------------------- along a dim that stays


@rule("aten.cumsum.default")
def cumsum(call: Call) -> Rule:
    return _along(call, linear=_linear(call))


@rule("aten.cumprod.default")
def cumprod(call: Call) -> Rule:
    return _along(call, saves=("in0", "out0"))


@rule("aten.logcumsumexp.default")
def logcumsumexp(call: Call) -> Rule:
    return _along(call, saves=("in0", "out0"))


@rule("aten.cummax.default", "aten.cummin.default")
def cumulative_extreme(call: Call) -> Rule:
    return _along(call, saves=("in0", "out1"))


def _along(call: Call, **fields: Any) -> Rule:
    dim = dim_of(call.arg(1, "dim"), len(call.out))
    return through(call, range(len(call.out)), whole=(dim,), flops_per_point=1.0, **fields)


# ---------------------------------------------------------------- two tensors, one dim compared


@rule("aten.cosine_similarity.default", "aten.pairwise_distance.default")
def compared(call: Call) -> Rule:
    """Both broadcast; the dim that is compared (the last of a distance) is whole."""
    a, b = call.shape(0), call.shape(1)
    n = max(len(a), len(b))
    padded = [(1,) * (n - len(shape)) + shape for shape in (a, b)]
    shape = tuple(max(sizes) for sizes in zip(*padded))
    distance = call.node.op == "aten.pairwise_distance.default"
    dim = n - 1 if distance else dim_of(call.arg(2, "dim", 1), n)
    out = [dims for i, dims in enumerate(numbered(shape)) if i != dim]
    if len(call.out) == n:
        out.insert(dim, ())
    inputs = [aligned(a, shape), aligned(b, shape)]
    saves = ("in0",) if distance else ("in0", "in1")
    return dims_rule(call, inputs, [tuple(out)], whole={f"d{dim}"}, sums=False, flops_per_point=6.0, saves=saves)


@rule("aten.cross.default", "aten.linalg_cross.default")
def cross(call: Call) -> Rule:
    """Without a dim, ``aten.cross`` takes the first of size 3: dims before it stay whole, lest a part of one becomes 3 long."""
    out = numbered(call.out)
    found = call.arg(2, "dim", None if call.node.op == "aten.cross.default" else -1)
    dim = call.out.index(3) if found is None else dim_of(found, len(out))
    whole = {dims[0] for i, dims in enumerate(out) if dims and (i == dim or (found is None and i < dim))}
    inputs = [aligned(spec.shape, call.out) for spec in call.specs]
    return dims_rule(call, inputs, [out], linear=({0, 1},), whole=whole, flops_per_point=3.0, saves=("in0", "in1"))


@rule("aten._weight_norm.default")
def weight_norm(call: Call) -> Rule:
    """``v`` is normalised over all dims but one; linear in the length ``g``."""
    dim = dim_of(call.arg(2, "dim", 0), len(call.out))
    v = numbered(call.out)
    g = tuple(dims if i == dim else () for i, dims in enumerate(v)) if len(call.shape(1)) == len(v) else (v[dim],)
    whole = {dims[0] for i, dims in enumerate(v) if dims and i != dim}
    return dims_rule(call, [v, g], [v], linear=({1},), whole=whole, flops_per_point=3.0, saves=("in0", "in1"))
