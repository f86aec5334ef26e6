"""Errors of running, beside those in ``planner.errors``."""

from planner.errors import ShardwrightError


class CheckpointError(ShardwrightError, RuntimeError):
    """A checkpoint could not be written or read, is damaged, or belongs to another model; names file, tensor and both values."""
