"""Loss scaling for fp16-mixed: small gradients must not vanish in float16.

    scale s      the loss is multiplied by s before each backward, gradients are divided by s after their sums
    overflow     some gradient on some rank is not finite: this step's gradients are dropped (what earlier steps left stays), s halves
    growth       after ``GROWTH_INTERVAL`` steps in a row without overflow, s doubles

As in ``torch.amp.GradScaler``, except that it all happens inside ``step()``: what it leaves in ``.grad`` is never scaled.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from runtime.groups import Ranks
from runtime.parameters import Held

INITIAL, LARGEST = 2.0**16, 2.0**24
GROWTH_INTERVAL = 2000


class LossScale:
    """The scale of one parallel module, the same on every rank. Without scaling it stays 1 and does nothing."""

    def __init__(self, precision: str, ranks: Ranks) -> None:
        self.active, self.ranks = precision == "fp16-mixed", ranks
        self.value = INITIAL if self.active else 1.0
        self.good_steps = 0

    @torch.no_grad()
    def unscale(self, held: Iterable[Held]) -> None:
        """Divide this step's gradients by the scale; drop them on all ranks where any of them overflowed. Collective."""
        if not self.active:
            return
        grads = [(one, grad) for one in held if (grad := one.local_grad) is not None]
        overflow = torch.zeros((), device=self.ranks.device)
        for _, grad in grads:
            overflow += (~torch.isfinite(grad)).any()
            grad.mul_(1.0 / self.value)
        if self.ranks.groups:
            dist.all_reduce(overflow, group=self.ranks.groups["world"])
        if overflow.item() > 0:
            for one, _ in grads:
                one.parameter.grad = None
            self.value, self.good_steps = max(1.0, self.value / 2), 0
            return
        self.good_steps += 1
        if self.good_steps % GROWTH_INTERVAL == 0:
            self.value = min(LARGEST, self.value * 2)
