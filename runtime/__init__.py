"""Shardwright's runtime: runs a plan with torch.distributed.

    from runtime import parallelize, launch
"""

from runtime.api import ParallelModule, parallelize
from runtime.errors import CheckpointError
from runtime.launch import launch

__all__ = ["CheckpointError", "ParallelModule", "launch", "parallelize"]
