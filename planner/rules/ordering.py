"""Ops that look for an order: the dim in question is whole. Legend: v the ordered dim, k what is kept of it, d dims that pass."""

from __future__ import annotations

import math

from planner.graph import Arg
from planner.rules.arguments import Arguments, lead, text
from planner.rules.base import Call, Rule, rule


@rule("aten.topk.default")
def topk(call: Call) -> Rule:
    """``topk(self, k, dim, ...) -> (values, indices)``."""
    return _ordered(call, call.arg(2, "dim", -1))


@rule("aten.sort.default")
def sort(call: Call) -> Rule:
    """``sort(self, dim, descending) -> (values, indices)``."""
    return _ordered(call, call.arg(1, "dim", -1))


@rule("aten.sort.stable", "aten.argsort.stable")
def stable_sort(call: Call) -> Rule:
    """``sort(self, *, stable, dim, descending) -> (values, indices)``, ``argsort`` -> indices."""
    return _ordered(call, dict(call.node.kwargs).get("dim", -1))


@rule("aten.argsort.default")
def argsort(call: Call) -> Rule:
    """``argsort(self, dim, descending) -> indices``."""
    return _ordered(call, call.arg(1, "dim", -1))


def _ordered(call: Call, dim: Arg) -> Rule:
    """The dim whose order is sought is whole; values and indices lie alike."""
    args = Arguments(call, "self")
    shape = args.shape("self")
    outputs = len(call.node.outputs)
    if not shape:
        return args.rule({"self": "."}, ", ".join(["."] * outputs))
    at = int(dim) % len(shape)
    d = lead("d", len(shape))
    before, after = [*d[:at], "v", *d[at + 1 :]], [*d[:at], "k", *d[at + 1 :]]
    return args.rule(
        {"self": text(before)},
        ", ".join([text(after)] * outputs),
        whole=["v", "k"],
        saves=("out1",) if outputs > 1 else (),
        # comparisons of a merge sort
        flops_per_point=max(1.0, math.log2(max(2, shape[at]))) / call.out[at],
    )


@rule("aten.searchsorted.Tensor", "aten.bucketize.Tensor")
def search_sorted(call: Call) -> Rule:
    """``searchsorted(sorted [*, V], self [*, N])``, ``bucketize(self, boundaries [V])``: boundaries whole, with or without batch dims."""
    bucketize = call.node.op == "aten.bucketize.Tensor"
    args = Arguments(call, "self boundaries" if bucketize else "boundaries self out_int32 right side sorter")
    d = lead("d", len(args.shape("self")))
    shared = len(args.shape("boundaries")) - 1
    boundaries = text(d[:shared], "v")
    return args.rule(
        {"self": text(d), "boundaries": boundaries, "sorter": boundaries}, text(d), whole=["v"] if shared == 0 else ["v", d[-1]]
    )


@rule("aten.histc.default")
def histogram(call: Call) -> Rule:
    """``histc(self, bins, min, max)``: counts add up over parts. Without limits they come from the data, and nothing splits."""
    args = Arguments(call, "self")
    d = lead("d", len(args.shape("self")))
    from_data = call.arg(2, "min", 0) == call.arg(3, "max", 0)
    return args.rule({"self": text(d)}, "bins", whole=["bins", *(d if from_data else [])])
