"""Losses. Legend: n0, n1, ... the dims that a mean counts, c classes (or features), ``.`` a scalar.

A loss with reduction "sum" splits like any sum. With "mean" the count is that of the whole batch, so a split runs the kernel
``mean_loss``: the sum of the local part over the global count, which is the product of all factors named n. Means over a number of
targets that depends on the data (cross entropy with ``ignore_index``) are rewritten by the capture into a sum and a
``shard.valid_count``; where they are not, they stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from planner.rules.arguments import Arguments, accumulate_bytes, all_reduces, broadcast, broadcast_shape, lead, text
from planner.rules.base import Call, Rule, Strategy, parse_dims, rule
from planner.sharding import I, P, R, S, Type

NONE, MEAN, SUM = 0, 1, 2


def _loss(
    args: Arguments,
    dims: Mapping[str, str],
    rows: Sequence[str],
    reduction: int,
    whole: Sequence[str] = (),
    extra: Sequence[Strategy] = (),
    **fields: Any,
) -> Rule:
    """A loss whose unreduced form has the dims ``rows``, all counted by a mean."""
    kernels: list[Strategy] = list(extra)
    if reduction == MEAN:
        whole = [*whole, *rows]
        kernels += [Strategy(types, (P,), factor=row, kernel="mean_loss") for row in rows if (types := _split(args, dims, row))]
    fields.setdefault("flops_per_point", 4.0)
    return args.rule(dims, text(rows) if reduction == NONE else ".", whole=whole, extra=tuple(kernels), **fields)


def _split(args: Arguments, dims: Mapping[str, str], factor: str) -> tuple[Type, ...]:
    """S where a tensor has the factor, R where it has not."""
    tensors = [parse_dims(one)[0] for one in args.dims(dims)]
    return tuple(S(tensor.index((factor,))) if (factor,) in tensor else R for tensor in tensors)


def _pointwise(call: Call, schema: str, saves: Sequence[str] = ("self", "target", "weight", "pos_weight")) -> Rule:
    args = Arguments(call, schema)
    reduction = int(call.arg(schema.split().index("reduction"), "reduction", MEAN))
    shape = broadcast_shape(*(spec.shape for spec in call.specs))
    rows = lead("n", len(shape))
    dims = {name: broadcast(args.shape(name), rows, shape) for name in args.names}
    return _loss(args, dims, rows, reduction, saves=saves)


@rule("aten.mse_loss.default", "aten.l1_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default", "aten.kl_div.default",
      "aten.soft_margin_loss.default")  # fmt: skip
def pointwise_loss(call: Call) -> Rule:
    return _pointwise(call, "self target reduction")


@rule("aten.binary_cross_entropy.default")
def binary_cross_entropy(call: Call) -> Rule:
    return _pointwise(call, "self target weight reduction")


@rule("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(call: Call) -> Rule:
    return _pointwise(call, "self target weight pos_weight reduction")


@rule("aten.hinge_embedding_loss.default")
def hinge_embedding_loss(call: Call) -> Rule:
    return _pointwise(call, "self target margin reduction")


@rule("aten.poisson_nll_loss.default")
def poisson_nll_loss(call: Call) -> Rule:
    return _pointwise(call, "self target log_input full eps reduction")


@rule("aten.margin_ranking_loss.default")
def margin_ranking_loss(call: Call) -> Rule:
    return _pointwise(call, "self other target margin reduction", saves=("self", "other", "target"))


@rule("aten.cosine_embedding_loss.default")
def cosine_embedding_loss(call: Call) -> Rule:
    """``cosine_embedding_loss(input1 [N, C], input2, target [N], margin, reduction)``."""
    args = Arguments(call, "input1 input2 target margin reduction")
    rows = lead("n", len(args.shape("target")))
    pair = text(rows, "c")
    dims = {"input1": pair, "input2": pair, "target": text(rows)}
    return _loss(args, dims, rows, int(call.arg(4, "reduction", MEAN)), whole=("c",), saves=("input1", "input2", "target"))


@rule("aten.triplet_margin_loss.default")
def triplet_margin_loss(call: Call) -> Rule:
    """``triplet_margin_loss(anchor [*, C], positive, negative, margin, p, eps, swap, reduction)``."""
    args = Arguments(call, "anchor positive negative margin p eps swap reduction")
    rows = lead("n", len(args.shape("anchor")) - 1)
    dims = dict.fromkeys(("anchor", "positive", "negative"), text(rows, "c"))
    return _loss(args, dims, rows, int(call.arg(7, "reduction", MEAN)), whole=("c",), saves=("anchor", "positive", "negative"))


@rule("aten.multi_margin_loss.default")
def multi_margin_loss(call: Call) -> Rule:
    """``multi_margin_loss(self [N, C], target [N], p, margin, weight [C], reduction)``."""
    args = Arguments(call, "self target p margin weight reduction")
    rows = lead("n", len(args.shape("target")))
    dims = {"self": text(rows, "c"), "target": text(rows), "weight": "c"}
    return _loss(args, dims, rows, int(call.arg(5, "reduction", MEAN)), whole=("c",), saves=("self", "target", "weight"))


@rule("aten.multilabel_margin_loss.default")
def multilabel_margin_loss(call: Call) -> Rule:
    """``multilabel_margin_loss(self [N, C], target [N, C], reduction)``."""
    args = Arguments(call, "self target reduction")
    rows = lead("n", len(args.shape("self")) - 1)
    dims = dict.fromkeys(("self", "target"), text(rows, "c"))
    return _loss(args, dims, rows, int(call.arg(2, "reduction", MEAN)), whole=("c",), saves=("self", "target"))


# ---------------------------------------------------------------- classification


def _class_dims(args: Arguments, class_dim: int) -> tuple[list[str], str]:
    """Counted dims, and the dims of the logits with the classes among them."""
    rows = lead("n", len(args.shape("self")) - 1)
    return rows, text(rows[:class_dim], "c", rows[class_dim:])


@rule("aten.cross_entropy_loss.default")
def cross_entropy(call: Call) -> Rule:
    """``cross_entropy_loss(self [N, C, *], target [N, *] or like self, weight [C], reduction, ignore_index, label_smoothing)``.

    Split classes run the kernel ``vocab_cross_entropy``: all-reduce of the maxima, then of the sums of exponentials and the target's
    logit (and, smoothed or with probabilities, the sums that they need) together; no logits move.
    """
    args = Arguments(call, "self target weight reduction ignore_index label_smoothing")
    logits, target = args.shape("self"), args.shape("target")
    reduction = int(call.arg(3, "reduction", MEAN))
    class_dim = min(1, len(logits) - 1)
    rows, full = _class_dims(args, class_dim)
    as_probabilities = target == logits and call.specs[args.at("target")].is_float
    dims = {"self": full, "target": full if as_probabilities else text(rows), "weight": "c"}
    if reduction == MEAN and not as_probabilities:
        return args.rule(dims, ".", whole=["c", *rows], saves=("self", "target"), flops_per_point=6.0)
    nbytes = math.prod(logits) // max(1, logits[class_dim]) * accumulate_bytes(call.specs[0].dtype)
    types = {"self": S(class_dim), "weight": S(0), **({"target": S(class_dim)} if as_probabilities else {})}
    comm = all_reduces(nbytes, forward=1) + all_reduces(3 * nbytes, forward=1)
    vocabulary = [args.extra(types, (I,), "c", "vocab_cross_entropy", comm)] if reduction != MEAN else []
    return _loss(args, dims, rows, reduction, whole=("c",), extra=vocabulary, saves=("self", "target"), flops_per_point=6.0)


@rule("aten.nll_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss2d.default")
def nll_loss(call: Call) -> Rule:
    """``nll_loss(self [N, C, *], target [N, *], weight [C], reduction, ignore_index)``, linear in its log-probabilities.

    Split classes run the kernel ``vocab_nll_loss``: every rank picks what it has, a pending sum.
    """
    args = Arguments(call, "self target weight reduction ignore_index")
    reduction = int(call.arg(3, "reduction", MEAN))
    class_dim = min(1, len(args.shape("self")) - 1)
    rows, full = _class_dims(args, class_dim)
    dims = {"self": full, "target": text(rows), "weight": "c"}
    if reduction == MEAN:
        return args.rule(dims, ".", whole=["c", *rows], linear=("self",), saves=("self", "target", "weight"))
    vocabulary = args.extra({"self": S(class_dim), "weight": S(0)}, (P,), "c", "vocab_nll_loss")
    return args.rule(
        dims,
        text(rows) if reduction == NONE else ".",
        whole=["c"],
        linear=("self",),
        saves=("self", "target", "weight"),
        extra=(vocabulary,),
    )


@rule("shard.valid_count")
def valid_count(call: Call) -> Rule:
    """``valid_count(target [N, *], weight [C] or None, ignore_index, dtype)``: the denominator of a mean over valid targets."""
    args = Arguments(call, "target weight ignore_index dtype")
    rows = lead("n", len(args.shape("target")))
    return args.rule({"target": text(rows), "weight": "c"}, ".", whole=["c"])
