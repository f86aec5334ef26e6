"""Looking rows up in a table. Legend: v rows of the table, d width, i index dims."""

from __future__ import annotations

from planner.rules.arguments import Arguments, lead, text
from planner.rules.base import Call, Rule, rule
from planner.sharding import P, R, S


@rule("aten.embedding.default")
def embedding(call: Call) -> Rule:
    """``embedding(weight [V, D], indices [*], padding_idx, scale_grad_by_freq, sparse)``.

    A table split by rows runs a kernel: every rank looks up the rows that it has, zero for the others: a pending sum.
    """
    args = Arguments(call, "weight indices padding_idx scale_grad_by_freq sparse")
    by_frequency = bool(call.arg(3, "scale_grad_by_freq", False))
    i = lead("i", len(args.shape("indices")))
    split_rows = args.extra({"weight": S(0)}, (P,), "v", "vocab_embedding")
    return args.rule(
        {"weight": "v d", "indices": text(i)},
        text(i, "d"),
        linear=("weight",),
        # counts of an index are over the whole batch
        whole=["v", *i] if by_frequency else ["v"],
        saves=("indices",),
        extra=() if by_frequency else (split_rows,),
    )


@rule("aten.embedding_bag.default", "aten.embedding_bag.padding_idx", "aten._embedding_bag.default")
def embedding_bag(call: Call) -> Rule:
    """``embedding_bag(weight [V, D], indices, offsets, ...)``: offsets count into all indices, so only the width of the table splits.

    Outputs after the first are bookkeeping for the backward, the same on every rank (but for the maximum, which is not split).
    """
    args = Arguments(call, "weight indices offsets scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx")
    rest = [lead(f"x{k}_", len(spec.shape)) for k, spec in enumerate(call.node.outputs[1:])]
    takes_maximum = int(call.arg(4, "mode", 0)) == 2
    split_width = args.extra({"weight": S(1)}, (S(1), *[R] * len(rest)), "d", "")
    return args.rule(
        {"weight": "v d", "indices": "i", "offsets": "o", "per_sample_weights": "i"},
        ", ".join(["bags d", *map(text, rest)]),
        whole=["v", "d", "i", "o", "bags", *[name for names in rest for name in names]],
        saves=("indices", "offsets", *(f"out{k}" for k in range(1, len(rest) + 1))),
        extra=() if takes_maximum else (split_width,),
    )


@rule("aten.one_hot.default")
def one_hot(call: Call) -> Rule | None:
    """``one_hot(indices, num_classes)``; without a number of classes the shape depends on the data."""
    args = Arguments(call, "indices num_classes")
    if int(call.arg(1, "num_classes", -1)) < 0:
        return None
    i = lead("i", len(args.shape("indices")))
    return args.rule({"indices": text(i)}, text(i, "c"), whole=["c"])
