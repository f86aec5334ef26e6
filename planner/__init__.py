"""Shardwright: a parallelism planner for PyTorch. ``auto_parallelize(model, gpus=4)`` makes a plan, ``load_plan`` reads one back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api import auto_parallelize
    from planner.plan import Plan
    from planner.plan_io import load_plan

__all__ = ["auto_parallelize", "load_plan", "Plan"]

_HOME = {"auto_parallelize": "planner.api", "load_plan": "planner.plan_io", "Plan": "planner.plan"}


def __getattr__(name: str) -> Any:
    """Import what is asked for on first use: reading a plan does not need torch.export or a solver."""
    if name not in _HOME:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
