"""Grouped matrix products of mixtures of experts. Legend: t rows sorted by expert, e experts, k, n widths."""

from __future__ import annotations

from planner.rules.arguments import Arguments
from planner.rules.base import Call, Rule, rule
from planner.sharding import P, S


@rule("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped_mm(call: Call) -> Rule | None:
    """``grouped_mm(input [T, K], weight [E, K, N], offs [E])``: rows ``offs[e - 1] : offs[e]`` times the weight of expert e.

    The rows of an expert are told by their place, so they stay whole. Split experts run the kernel ``grouped_experts``: every rank makes
    the rows of its experts, zero for the others: a pending sum.
    """
    args = Arguments(call, "input weight offs bias")
    if args.has("bias") or not args.has("offs") or len(args.shape("input")) != 2 or len(args.shape("weight")) != 3:
        return None
    experts = args.shape("weight")[0]
    return args.rule(
        {"input": "t k", "weight": "e k n", "offs": "e"},
        "t n",
        linear=("input weight",),
        whole=["t", "e"],
        saves=("input", "weight"),
        kind="matmul",
        flops_per_point=2.0 / experts,
        extra=(args.extra({"weight": S(0)}, (P,), "e", "grouped_experts"),),
    )
