"""Recomputation of a segment in the backward: torch's activation checkpointing, inside the segment's forward.

It sits inside, so that hooks on the segment (fully_shard's gathers) run once around forward and backward and not around the
recomputation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SAVED_OPS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product", "linear")
"""Ops whose results "selective" keeps: those that cost most to compute again."""


def recompute_segment(module: fx.GraphModule, how: str) -> fx.GraphModule:
    """``how``: "none", "selective" (keep results of matmul-like ops) or "full" (keep the segment's inputs only)."""
    if how == "none":
        return module
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    plain = module.forward

    def forward(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args)
        return checkpoint(plain, *args, **options)

    module.forward = forward
    return module


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = getattr(op, "__name__", str(op)).split(".")[0]
    keep = any(name == saved or name.startswith(saved) for saved in SAVED_OPS)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
