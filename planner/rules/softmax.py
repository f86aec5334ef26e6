"""Softmax and its kin. Legend: d0, d1, ... the tensor's dims, one of them the softmax dim."""

from __future__ import annotations

import math

from planner.rules.arguments import Arguments, accumulate_bytes, all_reduces, lead, text
from planner.rules.base import Call, Rule, rule
from planner.sharding import S


@rule("aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten._log_softmax.default", "aten._safe_softmax.default")
def softmax(call: Call) -> Rule:
    """``softmax(input, dim, dtype)``. A split softmax dim runs a kernel: all-reduce of the maxima and of the sums, and of one sum in
    the backward."""
    args = Arguments(call, "input dim")
    shape = args.shape("input")
    if not shape:
        return args.rule({"input": "."}, ".", saves=("out0",), flops_per_point=5.0)
    dims = lead("d", len(shape))
    split = int(call.arg(1, "dim")) % len(shape)
    nbytes = math.prod(shape) // max(1, shape[split]) * accumulate_bytes(call.node.outputs[0].dtype)
    extra = (args.extra({"input": S(split)}, (S(split),), dims[split], "softmax", all_reduces(nbytes, forward=2, backward=1)),)
    return args.rule(
        {"input": text(dims)},
        text(dims),
        whole=[dims[split]],
        saves=("out0",),
        flops_per_point=5.0,
        extra=() if call.node.op == "aten._safe_softmax.default" else extra,
    )
