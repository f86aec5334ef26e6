"""What all tests share: one thread per process, and real worker processes on the loopback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# for tests/test_properties.py; here because --hypothesis-profile is read before any test module
SLOW = dict(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.register_profile("short", max_examples=30, derandomize=True, database=None, **SLOW)  # type: ignore[arg-type]
settings.register_profile("long", max_examples=400, **SLOW)  # type: ignore[arg-type]


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
