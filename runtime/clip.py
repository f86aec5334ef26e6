"""The norm of all gradients over all ranks, every element counted once, and scaling by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import InputError
from runtime.groups import Ranks
from runtime.parameters import Held


def gradient_norm(held: Iterable[Held], ranks: Ranks, norm_type: float = 2.0) -> Tensor:
    """The ``norm_type`` norm (any p > 0, or inf) of all gradients as one vector; a float64 scalar, the same on every rank."""
    if not norm_type > 0:
        raise InputError(f"norm_type={norm_type}, must be above 0 (2 and inf are usual)")
    grads = [h.local_grad for h in held if h.parameter.grad is not None and h.counts_here(ranks)]
    norms = [torch.linalg.vector_norm(g, norm_type).to(torch.float64) for g in grads if g is not None and g.numel()]
    infinite = math.isinf(norm_type)
    zero = torch.zeros((), dtype=torch.float64, device=ranks.device)
    if infinite:
        total = torch.stack(norms).amax() if norms else zero
    else:
        total = torch.stack(norms).pow(norm_type).sum() if norms else zero
    if ranks.groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=ranks.groups["world"])
    return total if infinite else total.pow(1.0 / norm_type)


def clip_gradients(held: Iterable[Held], ranks: Ranks, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``: scale all gradients so that their norm is at most ``max_norm``; returns the norm before."""
    everything = list(held)
    total = gradient_norm(everything, ranks, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {total.item()}; set error_if_nonfinite=False to go on")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for one in everything:
        grad = one.local_grad
        if grad is not None:
            grad.mul_(scale.to(grad.dtype) if not grad.is_complex() else scale)
    return total
