"""Several tensors into one, or one of several into each place: the joined dim is whole, everything else passes. Sums of their inputs."""

from __future__ import annotations

from planner.rules.base import Call, Dims, Rule, dims_rule, rule
from planner.rules.dims import aligned, dim_of, numbered


def _terms(call: Call) -> tuple[set[int], ...]:
    """Each input is a term of its own: zeros everywhere but in its place."""
    return tuple({i} for i in range(len(call.specs)))


def _joined(call: Call, dim: int) -> Rule:
    """Inputs differ in ``dim`` only. An empty 1-d tensor, which torch lets pass in any ``cat``, has no factor to split."""
    out = tuple(("o",) if i == dim else factors for i, factors in enumerate(numbered(call.out)))
    inputs: list[Dims] = []
    for k, spec in enumerate(call.specs):
        if len(spec.shape) != len(call.out):
            inputs.append(((f"i{k}",),))
            continue
        inputs.append(tuple((f"i{k}",) if i == dim else factors for i, factors in enumerate(out)))
    return dims_rule(call, inputs, [out], linear=_terms(call), whole={"o", *(f"i{k}" for k in range(len(inputs)))})


@rule("aten.cat.default", "aten.concat.default", "aten.concatenate.default")
def cat(call: Call) -> Rule:
    return _joined(call, dim_of(call.arg(1, "dim", 0), len(call.out)))


@rule("aten.hstack.default", "aten.vstack.default", "aten.dstack.default", "aten.column_stack.default")
def named_cat(call: Call) -> Rule | None:
    """The forms that take tensors of the output's rank; those that add dims first have no rule."""
    if any(len(spec.shape) != len(call.out) for spec in call.specs):
        return None
    name = call.node.op.split(".")[1]
    return _joined(call, {"vstack": 0, "dstack": 2}.get(name, 1 if len(call.out) > 1 else 0))


@rule("aten.stack.default")
def stack(call: Call) -> Rule:
    dim = dim_of(call.arg(1, "dim", 0), len(call.out))
    out = tuple(("o",) if i == dim else factors for i, factors in enumerate(numbered(call.out)))
    one = tuple(factors for i, factors in enumerate(out) if i != dim)
    return dims_rule(call, [one] * len(call.specs), [out], linear=_terms(call), whole={"o"})


@rule("aten.slice_scatter.default", "aten.select_scatter.default")
def scattered(call: Call) -> Rule:
    """``src`` written over a slice of ``self`` along one dim."""
    n = len(call.out)
    dim = dim_of(call.arg(2, "dim", 0), n)
    whole = tuple(("o",) if i == dim else factors for i, factors in enumerate(numbered(call.out)))
    if call.node.op == "aten.select_scatter.default":
        src = tuple(factors for i, factors in enumerate(whole) if i != dim)
    else:
        src = tuple(("s",) if i == dim else factors for i, factors in enumerate(whole))
    return dims_rule(call, [whole, src], [whole], linear=_terms(call), whole={"o"} if "select" in call.node.op else {"o", "s"})


@rule("aten.diff.default")
def diff(call: Call) -> Rule:
    dim = dim_of(call.arg(2, "dim", -1), len(call.out))
    return _joined(call, dim)


@rule("aten.broadcast_tensors.default")
def broadcast_tensors(call: Call) -> Rule:
    out = numbered(call.out)
    return dims_rule(
        call, [aligned(spec.shape, call.out) for spec in call.specs], [out] * len(call.node.outputs), linear=_terms(call), kind="view"
    )


@rule("aten.meshgrid.default", "aten.meshgrid.indexing")
def meshgrid(call: Call) -> Rule | None:
    """One factor per tensor, in every output. Indexing "xy" swaps the first two dims."""
    if any(len(spec.shape) != 1 for spec in call.specs):
        return None
    n = len(call.specs)
    order = list(range(n))
    if dict(call.node.kwargs).get("indexing") == "xy" and n > 1:
        order[0], order[1] = 1, 0
    own = [numbered(call.out)[order.index(i)] for i in range(n)]
    return dims_rule(call, [(factor,) for factor in own], [numbered(call.out)] * n, linear=_terms(call), kind="view")


@rule("aten.block_diag.default")
def block_diag(call: Call) -> Rule:
    inputs = [tuple((f"i{k}_{d}",) for d in range(len(spec.shape))) for k, spec in enumerate(call.specs)]
    whole = {factor for dims in inputs for dim in dims for factor in dim}
    return dims_rule(call, inputs, [(("m",), ("n",))], linear=_terms(call), whole=whole | {"m", "n"})
