"""Shardwright's runtime: runs a plan with torch.distributed.

    from runtime import parallelize, launch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.api import ParallelModule, parallelize
    from runtime.errors import CheckpointError
    from runtime.launch import launch

__all__ = ["CheckpointError", "ParallelModule", "launch", "parallelize"]

_HOME = {"parallelize": "api", "ParallelModule": "api", "launch": "launch", "CheckpointError": "errors"}


def __getattr__(name: str) -> Any:
    """Imported when first used: the parts of this package that need no process group load without the rest."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"runtime.{_HOME[name]}"), name)
