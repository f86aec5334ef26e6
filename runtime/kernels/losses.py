"""Losses over parts: means with the global count, cross entropy over split classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.collectives import Group
from runtime.kernels.base import KernelInfo, kernel
from runtime.kernels.embedding import own
from runtime.kernels.exchange import as_op_would, groups_of, largest, total, wide

NONE, MEAN, SUM = 0, 1, 2


@kernel("mean_loss")
def mean_loss(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """A mean over all factors named n: the sum of the local part over the global count. A pending sum."""
    position = [argument.name for argument in op._schema.arguments].index("reduction")  # type: ignore[attr-defined]
    if position < len(args):
        args[position] = SUM
    else:
        kwargs["reduction"] = SUM
    return op(*args, **kwargs) / math.prod(size for factor, size in info.sizes.items() if factor.startswith("n"))


# ---------------------------------------------------------------- cross entropy over split classes
#
# Per row, with l = log(sum_c exp(x_c)) over all classes, q the target distribution and w the class weights:
#
#     loss = sum_c q_c w_c (l - x_c) = mass l - picked,    mass = sum_c q_c w_c,  picked = sum_c q_c w_c x_c
#     dx_c = g (exp(x_c - l) mass - q_c w_c),              d(q_c w_c) = g (l - x_c)
#
# One all-reduce finds the maxima, a second one sums exp, mass and picked; the backward exchanges nothing.


def _log_sum_with(x: Tensor, mass: Tensor, picked: Tensor, groups: Sequence[Group]) -> tuple[Tensor, Tensor, Tensor]:
    """(l, mass, picked) of all classes from those of the local ones; ``x`` [N, C]."""
    top = largest(x.amax(1), groups)
    exps, mass, picked = total(torch.stack([(x - top[:, None]).exp().sum(1), mass, picked]), groups)
    return exps.log() + top, mass, picked


class IndexedCrossEntropy(torch.autograd.Function):
    """Targets [N] are classes: q is (1 - smoothing) at the target and smoothing / C everywhere, the first weighed by w_target.

    Nothing of the size of the logits is kept besides the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore: int,
        smooth: float,
        start: int,
        classes: int,
        groups: Sequence[Group],
    ) -> Tensor:
        w = wide(x)
        at, missing = own(target, start, x.shape[1])
        valid = (target != ignore).to(w.dtype)
        at_target = (1 - smooth) * valid.masked_fill(missing, 0) * (1 if weight is None else wide(weight)[at])
        everywhere = w.new_full((x.shape[1],), smooth / classes) if weight is None else smooth / classes * wide(weight)
        mass = at_target + valid * everywhere.sum()
        picked = at_target * w.gather(1, at[:, None])[:, 0]
        if smooth:
            picked = picked + valid * (w @ everywhere)
        log_sum, mass, picked = _log_sum_with(w, mass, picked, groups)
        ctx.smooth = smooth
        ctx.save_for_backward(x, log_sum, mass, at, at_target, valid, everywhere)
        return mass * log_sum - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, log_sum, mass, at, at_target, valid, everywhere = ctx.saved_tensors
        dx = (wide(x) - log_sum[:, None]).exp_().mul_((grad * mass)[:, None])
        if ctx.smooth:
            dx.sub_((grad * valid)[:, None] * everywhere)
        dx.scatter_add_(1, at[:, None], -(grad * at_target)[:, None])
        return dx.to(x.dtype), None, None, None, None, None, None, None


class DenseCrossEntropy(torch.autograd.Function):
    """Targets are distributions: ``q`` [N, C], times the class weights, split as the logits are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor, groups: Sequence[Group]) -> Tensor:
        w = wide(x)
        log_sum, mass, picked = _log_sum_with(w, q.sum(1), (q * w).sum(1), groups)
        ctx.save_for_backward(x, q, log_sum, mass)
        return mass * log_sum - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, q, log_sum, mass = ctx.saved_tensors
        log_p = wide(x) - log_sum[:, None]
        dx = grad[:, None] * (log_p.exp() * mass[:, None] - q)
        return dx.to(x.dtype), (-grad[:, None] * log_p if ctx.needs_input_grad[1] else None), None


def _rows(x: Tensor) -> Tensor:
    """[N, C, *] or [C] -> [rows, C]."""
    return x.unsqueeze(0) if x.dim() == 1 else x.movedim(1, -1).reshape(-1, x.shape[1])


def _one_target(x: Tensor) -> Tensor:
    """A target for logits of one element."""
    return x.new_zeros((1,) * max(0, x.dim() - 1), dtype=torch.long)


def _given(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    return {"weight": None, "reduction": MEAN, "ignore_index": -100, "label_smoothing": 0.0} | dict(zip(names, args)) | kwargs


@kernel("vocab_cross_entropy")
def vocab_cross_entropy(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """``cross_entropy_loss`` with the classes split (sum or unreduced); the same result on every rank."""
    given = _given(args, kwargs)
    logits, target, weight, smooth = given["self"], given["target"], given["weight"], float(given["label_smoothing"])
    logits = as_op_would(op, logits, _one_target(logits))
    classes, groups = info.sizes["c"], groups_of(info)
    if target.is_floating_point():
        q = wide(_rows(target)) * (1 - smooth) + smooth / classes
        loss = DenseCrossEntropy.apply(_rows(logits), q if weight is None else q * weight, groups)
    else:
        loss = IndexedCrossEntropy.apply(
            _rows(logits), target.reshape(-1), weight, int(given["ignore_index"]), smooth, info.start("c"), classes, groups
        )
    loss = loss.to(logits.dtype)
    return loss.sum() if given["reduction"] == SUM else loss.view(logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else ())


@kernel("vocab_nll_loss")
def vocab_nll_loss(op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], info: KernelInfo) -> Tensor:
    """``nll_loss`` with the classes split (sum or unreduced): every rank picks the targets that it has. A pending sum."""
    given = _given(args, kwargs)
    x, target, weight = as_op_would(op, given["self"], _one_target(given["self"])), given["target"], given["weight"]
    rows = _rows(x)
    at, missing = own(target.reshape(-1), info.start("c"), rows.shape[1])
    share = (~missing & (target.reshape(-1) != given["ignore_index"])).to(rows.dtype)
    loss = -rows.gather(1, at[:, None])[:, 0] * (share if weight is None else share * weight[at])
    return loss.sum() if given["reduction"] == SUM else loss.view(target.shape)
