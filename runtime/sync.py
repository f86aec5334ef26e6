"""Gradients that are pending sums: all-reduced once per step, in buckets, while the last micro-batch's backward still runs.

    sync.begin()                     gradients of earlier steps are set aside, so that they are not summed again
    ... backward of micro-batches
    sync.arm()                       before the last backward: a bucket starts its all-reduce when its last gradient is there
    ... last backward
    sync.finish()                    start what is left, wait, put the sums in place
    sync.restore()                   add what was set aside

Buckets start in one fixed order, the same on all ranks of a group, whatever the order in which gradients appear. Copies of a tied
parameter in several pipeline stages are summed over these stages afterwards, in the order of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import WorkerError
from runtime.groups import Ranks
from runtime.parameters import Held

BUCKET_BYTES = 25 * 2**20


@dataclass
class Bucket:
    """Gradients that travel as one tensor over one group."""

    group: str
    """Name in ``Ranks.groups``: "data", "tensor" or "stage" (both)."""
    held: list[Held]
    late: bool
    """True for gradients that fully_shard puts in place at the end of the backward."""
    missing: set[str] = field(default_factory=set)
    flat: Tensor | None = None
    work: dist.Work | None = None


def group_name(axes: Iterable[str]) -> str:
    named = sorted(axes)
    return named[0] if len(named) == 1 else "stage"


def buckets_of(held: Iterable[Held], limit_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Last parameters first, since the backward reaches them first; one dtype and one group per bucket."""
    open_: dict[tuple[str, torch.dtype, bool], Bucket] = {}
    filled: dict[int, int] = {}
    done: list[Bucket] = []
    for one in reversed(list(held)):
        if not one.sync_axes or not one.parameter.requires_grad:
            continue
        key = (group_name(one.sync_axes), one.parameter.dtype, one.fsdp)
        nbytes = one.local.numel() * one.parameter.dtype.itemsize
        bucket = open_.get(key)
        if bucket is None or filled[id(bucket)] + nbytes > limit_bytes:
            bucket = open_[key] = Bucket(key[0], [], key[2])
            filled[id(bucket)] = 0
            done.append(bucket)
        bucket.held.append(one)
        filled[id(bucket)] += nbytes
    return done


class GradientSync:
    """The gradient sums of one rank's parameters."""

    def __init__(
        self, held: Mapping[str, Held], ranks: Ranks, shared: Iterable[tuple[int, ...]] = (), limit_bytes: int = BUCKET_BYTES
    ) -> None:
        """``shared``: the sets of stages that share a parameter, over the whole model; collective over all ranks."""
        self.held, self.ranks = held, ranks
        self.buckets = buckets_of(held.values(), limit_bytes)
        self.tied = sorted((h for h in held.values() if len(h.stages) > 1 and h.parameter.requires_grad), key=lambda h: h.name)
        self.tied_groups = {stages: ranks.stage_group(stages) for stages in sorted({s for s in shared if len(s) > 1})}
        self.earlier: dict[str, Tensor] = {}
        self.armed = False
        self.started = 0
        for bucket in self.buckets:
            for one in bucket.held:
                if not bucket.late:
                    one.parameter.register_post_accumulate_grad_hook(self._hook(bucket, one.name))

    def _hook(self, bucket: Bucket, name: str) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if self.armed:
                bucket.missing.discard(name)
                self._start_ready()

        return ready

    # ------------------------------------------------------------ a step

    def begin(self) -> None:
        self.armed, self.started = False, 0
        self.earlier.clear()
        for name, one in self.held.items():
            if one.parameter.grad is not None:
                self.earlier[name] = one.parameter.grad
                one.parameter.grad = None

    def arm(self) -> None:
        self.armed = True
        for bucket in self.buckets:
            bucket.missing = {one.name for one in bucket.held}

    def _start_ready(self) -> None:
        while self.started < len(self.buckets):
            bucket = self.buckets[self.started]
            if bucket.late or bucket.missing:
                return
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        parts = []
        for one in bucket.held:
            grad = one.local_grad
            parts.append(one.local.new_zeros(one.local.numel()) if grad is None else grad.reshape(-1))
        bucket.flat = torch.cat(parts) if parts else None
        if bucket.flat is not None:
            bucket.work = dist.all_reduce(bucket.flat, group=self.ranks.groups[bucket.group], async_op=True)
        self.started += 1

    def finish(self) -> None:
        """Raises WorkerError naming the bucket's first and last parameter where a wait outlives its limit."""
        self.armed = False
        while self.started < len(self.buckets):
            self._start(self.buckets[self.started])
        for bucket in self.buckets:
            self._land(bucket)
        for one in self.tied:
            self._sum_over_stages(one)

    def restore(self) -> None:
        self.armed = False
        for name, grad in self.earlier.items():
            now = self.held[name].parameter
            now.grad = grad if now.grad is None else grad.add_(now.grad)
        self.earlier.clear()

    def _land(self, bucket: Bucket) -> None:
        if bucket.flat is None or bucket.work is None:
            return
        try:
            bucket.work.wait()
        except RuntimeError as error:
            names = f"{bucket.held[0].name} ... {bucket.held[-1].name}"
            raise WorkerError(f"sum of gradients over {bucket.group} ({names}) failed at {self.ranks.place}: {error}") from error
        at = 0
        for one in bucket.held:
            grad = one.local_grad
            if grad is not None:
                grad.copy_(bucket.flat[at : at + grad.numel()].view_as(grad))
            at += one.local.numel()
        bucket.flat = bucket.work = None

    def _sum_over_stages(self, one: Held) -> None:
        """A stage that reads a tied copy without a gradient takes part with zeros."""
        if one.parameter.grad is None:
            one.parameter.grad = torch.zeros_like(one.parameter)
        grad = one.local_grad
        assert grad is not None
        total = grad.contiguous()
        try:
            dist.all_reduce(total, group=self.tied_groups[one.stages])
        except RuntimeError as error:
            raise WorkerError(f"sum of gradients of {one.name} over stages {one.stages} failed at {self.ranks.place}: {error}") from error
        if total is not grad:
            grad.copy_(total)
