"""Normalizations. Legend: b batch-like dims, n normalised dims, c channels, g groups of channels, s spatial dims."""

from __future__ import annotations

import math

from planner.rules.arguments import Arguments, accumulate_bytes, all_reduces, lead, text
from planner.rules.base import Call, Rule, Strategy, rule
from planner.sharding import I, S


@rule("aten.layer_norm.default", "aten.native_layer_norm.default")
def layer_norm(call: Call) -> Rule:
    """``layer_norm(input, normalized_shape, weight, bias)``; the native form also returns mean and rstd, with dims of size 1."""
    return _over_last(call, "input normalized_shape weight bias eps cudnn_enable", reduces=2)


@rule("aten.rms_norm.default", "aten._fused_rms_norm.default")
def rms_norm(call: Call) -> Rule:
    """``rms_norm(input, normalized_shape, weight, eps)``; the fused form also returns rstd."""
    return _over_last(call, "input normalized_shape weight eps", reduces=1)


def _over_last(call: Call, schema: str, reduces: int) -> Rule:
    args = Arguments(call, schema)
    shape = args.shape("input")
    normalized = len(call.arg(1, "normalized_shape"))
    b, n = lead("b", len(shape) - normalized), lead("n", normalized)
    stats = len(call.node.outputs) - 1
    rows = math.prod(shape[: len(b)])
    nbytes = rows * accumulate_bytes(call.specs[0].dtype)
    extra: tuple[Strategy, ...] = ()
    if not stats:
        # one sum per statistic, one after another; the gradients that flow back through them are summed together
        comm = all_reduces(nbytes, forward=reduces) + all_reduces(reduces * nbytes, backward=1)
        extra = tuple(
            args.extra(
                {"input": S(len(b) + i), "weight": S(i), "bias": S(i)},
                (S(len(b) + i),),
                factor,
                "norm",
                comm,
            )
            for i, factor in enumerate(n)
        )
    return args.rule(
        {"input": text(b, n), "weight": text(n), "bias": text(n)},
        ", ".join([text(b, n)] + [text(b, ["1"] * normalized)] * stats),
        whole=n,
        saves=("input", "weight"),
        flops_per_point=8.0,
        extra_saved_bytes_per_point=4.0 * reduces / math.prod(shape[len(b) :]),
        extra=extra,
    )


@rule("aten.group_norm.default")
def group_norm(call: Call) -> Rule:
    """``group_norm(input [N, C, *], num_groups, weight [C], bias [C])``: whole groups may be split over ranks."""
    args = Arguments(call, "input num_groups weight bias eps cudnn_enabled")
    groups = int(call.arg(1, "num_groups"))
    shape = args.shape("input")
    s = lead("s", len(shape) - 2)
    return args.rule(
        {"input": text("n", "(g c)", s), "weight": "(g c)", "bias": "(g c)"},
        text("n", "(g c)", s),
        sizes={"g": groups, "c": shape[1] // groups},
        whole=["c", *s],
        saves=("input", "weight"),
        flops_per_point=8.0,
        local_args=((1, "g"),),
    )


@rule("aten.native_group_norm.default")
def native_group_norm(call: Call) -> Rule:
    """``native_group_norm(input, weight, bias, N, C, HxW, group, eps)``: its size arguments are localised for the batch only."""
    args = Arguments(call, "input weight bias N C HxW group eps")
    s = lead("s", len(args.shape("input")) - 2)
    return args.rule(
        {"input": text("n", "c", s), "weight": "c", "bias": "c"},
        f"{text('n', 'c', s)}, n g, n g",
        whole=["c", "g", *s],
        saves=("input", "weight"),
        flops_per_point=8.0 / call.node.outputs[1].shape[1],
        local_args=((3, "n"),),
    )


@rule("aten.instance_norm.default")
def instance_norm(call: Call) -> Rule | None:
    """``instance_norm(input [N, C, *], weight, bias, running_mean, running_var, use_input_stats, ...)`` without running statistics."""
    args = Arguments(call, "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled")
    from_input = bool(call.arg(5, "use_input_stats"))
    if from_input and args.has("running_mean"):
        return None
    s = lead("s", len(args.shape("input")) - 2)
    return args.rule(
        {"input": text("n", "c", s), **dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "c")},
        text("n", "c", s),
        whole=s if from_input else (),
        saves=("input", "weight"),
        flops_per_point=8.0,
    )


@rule("aten.batch_norm.default", "shard.batch_norm")
def batch_norm(call: Call) -> Rule | None:
    """``batch_norm(input [N, C, *], weight, bias, running_mean, running_var, training, momentum, eps)``.

    ``shard.batch_norm`` returns (output, new running mean, new running var), see ``runtime.ops``. Channels split as they are. In
    training the statistics are over the batch and all spatial dims, which split with a kernel that sums over the axis; in evaluation
    they split as in any pointwise op. Either way the new statistics are the same on every rank.
    """
    args = Arguments(call, "input weight bias running_mean running_var training momentum eps cudnn_enabled")
    training = bool(call.arg(5, "training"))
    with_statistics = call.node.op == "shard.batch_norm"
    if training and not with_statistics and args.has("running_mean"):
        return None  # it would update its buffers in place
    shape = args.shape("input")
    dims = ["n", "c", *lead("s", len(shape) - 2)]
    nbytes = shape[1] * accumulate_bytes(call.specs[0].dtype)
    # forward: the sums, then the squares around the mean; backward: both sums at once
    comm = all_reduces(nbytes, forward=2) + all_reduces(2 * nbytes, backward=1) if training else ()
    over = [factor for factor in dims if factor != "c"]
    outputs = ", c, c" if with_statistics else ""
    extra = tuple(
        args.extra({"input": S(i)}, (S(i), I, I)[: 3 if with_statistics else 1], factor, "batch_norm" if training else "", comm)
        for i, factor in enumerate(dims)
        if factor != "c"
    )
    return args.rule(
        {"input": text(dims), **dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "c")},
        text(dims) + outputs,
        whole=over,
        saves=("input", "weight"),
        flops_per_point=8.0,
        extra=extra,
    )
