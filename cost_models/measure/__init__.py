"""Measuring a machine: ``plan`` says what is timed, ``worker`` times it on every rank, ``fit`` makes a profile of it."""

from __future__ import annotations

from typing import Protocol

from cost_models.errors import ProfileError
from cost_models.profile import HardwareProfile


class Progress(Protocol):
    """Told after every timed sample: the share of the budget that is spent (0 to 1) and what was timed."""

    def __call__(self, share: float, what: str) -> None: ...


def measure_profile(ranks: int, budget_s: float = 30.0, device: str = "cpu", progress: Progress | None = None) -> HardwareProfile:
    """Measure this machine with ``ranks`` processes at work at the same time, within ``budget_s`` seconds in all.

    ``device``: "cpu" (gloo, one thread per process) or "cuda" (nccl, one GPU per process). Raises ``ProfileError`` for a
    wrong argument and ``MeasureError`` where a process fails or outlives its time.
    """
    from cost_models.measure.fit import profile_from_records
    from cost_models.measure.spawn import run_ranks

    if ranks < 1:
        raise ProfileError(f"measuring needs at least one rank, got {ranks}")
    if device not in ("cpu", "cuda"):
        raise ProfileError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if budget_s < 5:
        raise ProfileError(f"measuring needs a budget of at least 5 s (starting the processes takes some), got {budget_s:g}")
    return profile_from_records(run_ranks(ranks, budget_s, device, progress), ranks, device)
