"""What all tests share: one thread per process, and real worker processes on the loopback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


class Pool:
    """``pool.run(fn, n, *args)``: call ``fn(*args)`` on n gloo ranks, results in rank order. Forked, so a case starts in milliseconds."""

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0) -> list[Any]:
        from runtime.launch import run_processes

        return run_processes(fn, world_size, args, timeout_s=timeout_s, start="fork")


@pytest.fixture(scope="session")
def pool() -> Pool:
    # loaded once here and inherited by every worker
    import runtime.api  # noqa: F401

    return Pool()
