"""The timed kernels: each builder takes a step of the plan and gives a function to call, with its size.

Sizes: FLOPs for arithmetic, bytes read plus written for memory, nccl-tests "size" for collectives (see ``cost_models.links``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cost_models.measure.plan import Sample


@dataclass(frozen=True)
class Kernel:
    """``run()`` does the work ``per_call`` times; ``size`` is that of one."""

    run: Callable[[], object]
    size: float
    per_call: int = 1


def build_compute(sample: Sample, device: torch.device) -> Kernel:
    """The kernel of a compute sample."""
    dtype = getattr(torch, sample.series.dtype)
    return BUILDERS[sample.series.what](sample.step, dtype, device)


def _launch(step: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    x = torch.zeros(step, dtype=dtype, device=device)
    return Kernel(lambda: x + 1, step)


def _memory(nbytes: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    """A product of two tensors into a fresh third: ``nbytes`` in all, allocation and page faults as in a model."""
    count = max(1, nbytes // 3 // dtype.itemsize)
    x, y = torch.ones(count, dtype=dtype, device=device), torch.ones(count, dtype=dtype, device=device)
    return Kernel(lambda: x * y, 3 * count * dtype.itemsize)


def _matmul(side: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    x, w = torch.ones(side, side, dtype=dtype, device=device), torch.ones(side, side, dtype=dtype, device=device)
    return Kernel(lambda: F.linear(x, w), 2.0 * side**3)


def _attention(length: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    """Causal attention, 4 heads of 64: both products counted whole, as planners count them."""
    q, k, v = (torch.randn(1, 4, length, 64, device=device).to(dtype) for _ in range(3))
    return Kernel(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 4.0 * 4 * length**2 * 64)


def _conv(channels: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    """3 x 3 convolution, batch 4, 16 x 16 pixels (64 x 64 on a GPU), padding 1."""
    side = 64 if device.type == "cuda" else 16
    x = torch.ones(4, channels, side, side, dtype=dtype, device=device)
    w = torch.ones(channels, channels, 3, 3, dtype=dtype, device=device)
    return Kernel(lambda: F.conv2d(x, w, padding=1), 2.0 * 4 * channels**2 * 9 * side**2)


def _optimizer(nbytes: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    """AdamW (foreach) over 4 parameters; bytes: parameter and two moments read and written, gradient read: 7 per element."""
    count = max(1, nbytes // 7 // 4 // dtype.itemsize)
    parameters = [torch.ones(count, dtype=dtype, device=device, requires_grad=True) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    return Kernel(optimizer.step, 7 * 4 * count * dtype.itemsize)


BUILDERS: dict[str, Callable[[int, torch.dtype, torch.device], Kernel]] = {
    "launch": _launch,
    "memory": _memory,
    "matmul": _matmul,
    "attention": _attention,
    "conv": _conv,
    "optimizer": _optimizer,
}


def build_collective(sample: Sample, group: dist.ProcessGroup | None, device: torch.device) -> Kernel:
    """The kernel of a collective sample over this rank's ``group``; float32 elements, size divisible by the ranks."""
    what, ranks = sample.series.what, sample.series.ranks
    count = max(1, sample.step // 4 // ranks) * ranks
    whole, part = torch.zeros(count, device=device), torch.zeros(count // ranks, device=device)
    other = torch.zeros(count, device=device)
    if what == "send":
        return Kernel(_ping_pong(whole), count * 4, per_call=2)
    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
    }
    return Kernel(runs[what], count * 4)


def _ping_pong(message: torch.Tensor) -> Callable[[], object]:
    """Neighbours 0-1, 2-3, ... send a message there and back, all pairs at once; a last odd rank rests."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    peer = rank ^ 1

    def run() -> None:
        if peer >= ranks:
            return
        first, second = (dist.send, dist.recv) if rank < peer else (dist.recv, dist.send)
        first(message, peer)
        second(message, peer)

    return run
