"""Grouped matrix products of mixtures of experts. Legend: t rows sorted by expert, e experts, k, n widths."""

from __future__ import annotations

from planner.rules.arguments import Arguments
from planner.rules.base import Call, Rule, rule
from planner.sharding import P, S


@rule("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped_mm(call: Call) -> Rule | None:
    """``grouped_mm(input [T, K], weight [E, K, N], offs [E])``: rows ``offs[e - 1] : offs[e]`` times the weight of expert e.

    The rows of an expert are told by their place, so they stay whole. Split experts run the kernel ``grouped_mm``: every rank makes the
    rows of its experts, zero for the others: a pending sum. So do split widths of ``aten._grouped_mm``, which takes no rows whose
    length is not a multiple of 16 bytes: the kernel pads what an uneven split leaves.
    """
    args = Arguments(call, "input weight offs bias")
    if args.has("bias") or not args.has("offs") or len(args.shape("input")) != 2 or len(args.shape("weight")) != 3:
        return None
    aligned = call.node.op == "aten._grouped_mm.default"
    extra = [args.extra({"weight": S(0)}, (P,), "e", "grouped_mm")]
    if aligned:
        extra.append(args.extra({"input": S(1), "weight": S(1)}, (P,), "k", "grouped_mm"))
        extra.append(args.extra({"weight": S(2)}, (S(1),), "n", "grouped_mm"))
    return args.rule(
        {"input": "t k", "weight": "e k n", "offs": "e"},
        "t n",
        linear=("input weight",),
        whole=["t", "e", "k", "n"] if aligned else ["t", "e"],
        saves=("input", "weight"),
        kind="matmul",
        # each row meets one expert
        flops_per_point=2.0 / args.shape("weight")[0],
        extra=tuple(extra),
    )


@rule("shard.expert_mm")
def expert_mm(call: Call) -> Rule:
    """``expert_mm(rows [R, K], weight [E, K, N], expert [R])``: every row by itself times the weight of its expert.

    Split experts run the kernel ``expert_mm``: every rank makes the rows of its experts, zero for the others: a pending sum.
    """
    args = Arguments(call, "rows weight expert")
    return args.rule(
        {"rows": "t k", "weight": "e k n", "expert": "t"},
        "t n",
        linear=("rows weight",),
        whole=["e"],
        saves=("rows", "weight", "expert"),
        kind="matmul",
        flops_per_point=2.0 / args.shape("weight")[0],
        extra=(args.extra({"weight": S(0)}, (P,), "e", "expert_mm"),),
    )
