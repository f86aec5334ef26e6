"""Ranks as threads of one process: collectives without processes, for proving rules and lowered stages.

results = simulate({"data": 2, "tensor": 2}, lambda coordinates: ...)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.collectives import use_in_thread


class _Meeting:
    """Where the ranks of one group exchange values."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class SimulatedGroup:
    """A ``runtime.collectives.Group`` over threads. Sums run in rank order, so they are the same on every rank."""

    def __init__(self, meeting: _Meeting, size: int, rank: int) -> None:
        self.meeting, self.size, self.rank = meeting, size, rank

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        parts = self.meeting.exchange(self.rank, x.detach())
        stacked = torch.stack(parts)
        return stacked.sum(0).to(x.dtype) if op == "sum" else stacked.amax(0)

    def all_gather(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        parts = self.meeting.exchange(self.rank, x.detach())
        if tuple(part.shape[dim] for part in parts) != sizes:
            raise RuntimeError(f"all_gather: parts {[tuple(p.shape) for p in parts]} along dim {dim}, expected lengths {sizes}")
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        total = torch.stack(self.meeting.exchange(self.rank, x.detach())).sum(0)
        return total.split(list(sizes), dim)[self.rank].clone()

    def all_to_all(self, x: Tensor, split_dim: int, split_sizes: tuple[int, ...], join_dim: int, join_sizes: tuple[int, ...]) -> Tensor:
        sent = self.meeting.exchange(self.rank, [part.detach() for part in x.split(list(split_sizes), split_dim)])
        return torch.cat([parts[self.rank] for parts in sent], join_dim)


def simulate(axes: Mapping[str, int], body: Callable[[dict[str, int]], Any], timeout_s: float = 60.0) -> list[Any]:
    """Run ``body(coordinates)`` on every rank of the mesh ``axes`` (outermost first), each in its thread; results in rank order.

    Raises the first rank's error; a rank that waits longer than ``timeout_s`` in a collective fails with BrokenBarrierError.
    """
    names, sizes = list(axes), list(axes.values())
    ranks = list(itertools.product(*(range(n) for n in sizes)))
    meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
    results: list[Any] = [None] * len(ranks)
    errors: list[tuple[int, BaseException]] = []

    def groups_at(coords: tuple[int, ...]) -> dict[str, SimulatedGroup]:
        groups = {}
        for i, name in enumerate(names):
            others = (*coords[:i], -1, *coords[i + 1 :])
            meeting = meetings.setdefault((name, others), _Meeting(sizes[i], timeout_s))
            groups[name] = SimulatedGroup(meeting, sizes[i], coords[i])
        return groups

    def run(number: int, coords: tuple[int, ...], groups: dict[str, SimulatedGroup]) -> None:
        try:
            with use_in_thread(groups):
                results[number] = body(dict(zip(names, coords)))
        except BaseException as error:
            errors.append((number, error))
            for meeting in meetings.values():
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(n, c, groups_at(c)), daemon=True) for n, c in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s * 4)
    if errors:
        real = [e for _, e in errors if not isinstance(e, threading.BrokenBarrierError)]
        raise (real or [e for _, e in errors])[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a simulated rank did not finish within {timeout_s * 4} s")
    return results
