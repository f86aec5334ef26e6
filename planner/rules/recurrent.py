"""Recurrent layers: the batch splits, everything else is whole.

Legend: b batch, t time; factors of whole dims are named by their length (d64), since nothing else tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from planner.graph import DTYPE_BYTES
from planner.rules.arguments import Arguments, text
from planner.rules.base import Call, Rule, rule

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _whole(shape: Sequence[int]) -> list[str]:
    return [f"d{size}" for size in shape]


def _finish(rule_: Rule, flops: float) -> Rule:
    """Everything but the batch is whole; ``flops`` in all."""
    whole = frozenset(factor for factor, _ in rule_.sizes if factor != "b")
    return replace(rule_, whole=whole, flops_per_point=flops / math.prod(size for _, size in rule_.sizes))


@rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def recurrent(call: Call) -> Rule:
    """``lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first) -> (output, *hidden)``."""
    args = Arguments(call, "input hx params")
    shape = args.shape("input")
    steps = ["b", "t"] if call.arg(8, "batch_first", False) else ["t", "b"]
    named = {name: [spec.shape for spec, of in zip(call.specs, args.names) if of == name] for name in ("hx", "params")}
    hidden = [text(_whole(state[:1]), "b", _whole(state[-1:])) for state in named["hx"]]
    dims: dict[str, str | list[str]] = {
        "input": text(steps, _whole(shape[-1:])),
        "hx": hidden if "hx" in args.lists else hidden[0],
        "params": [text(_whole(p)) for p in named["params"]],
    }
    built = args.rule(
        dims,
        ", ".join([text(steps, _whole(call.out[-1:])), *hidden]),
        saves=("input", "hx", "params", "out0"),
        kind="matmul",
        # per layer, the gates and the state of every step
        extra_saved_bytes_per_point=DTYPE_BYTES[call.node.outputs[0].dtype] * int(call.arg(4, "num_layers")) * (GATES[_cell(call)] + 1),
        random=float(call.arg(5, "dropout", 0.0)) > 0 and bool(call.arg(6, "train", False)),
    )
    return _finish(built, 2.0 * shape[0] * shape[1] * sum(math.prod(p) for p in named["params"] if len(p) == 2))


@rule("aten.gru_cell.default", "aten.lstm_cell.default", "aten.rnn_tanh_cell.default", "aten.rnn_relu_cell.default")
def recurrent_cell(call: Call) -> Rule:
    """``gru_cell(input [B, K], hx [B, H], w_ih, w_hh, b_ih, b_hh) -> hidden [B, H]``; an LSTM's hx and outputs are (hidden, cell)."""
    args = Arguments(call, "input hx w_ih w_hh b_ih b_hh")
    batch = [["b"], []][len(args.shape("input")) == 1]
    hidden = [text(batch, _whole(spec.shape[-1:])) for spec in call.node.outputs]
    dims: dict[str, str | list[str]] = {
        "input": text(batch, _whole(args.shape("input")[-1:])),
        "hx": hidden if "hx" in args.lists else hidden[0],
        **{name: text(_whole(args.shape(name))) for name in ("w_ih", "w_hh", "b_ih", "b_hh") if args.has(name)},
    }
    built = args.rule(dims, ", ".join(hidden), saves=("input", "hx", "w_ih", "w_hh"), kind="matmul",
                      extra_saved_bytes_per_point=DTYPE_BYTES[call.node.outputs[0].dtype] * (GATES[_cell(call)] + 1))  # fmt: skip
    rows = args.shape("input")[0] if batch else 1
    return _finish(built, 2.0 * rows * (math.prod(args.shape("w_ih")) + math.prod(args.shape("w_hh"))))


def _cell(call: Call) -> str:
    return call.node.op.split(".")[1].removesuffix("_cell")
