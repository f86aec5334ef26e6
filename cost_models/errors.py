"""Errors of the cost package. Each names the thing, the numbers and the next step."""

from __future__ import annotations


class CostError(Exception):
    """Base of the errors that the cost package raises on purpose."""


class ProfileError(CostError, ValueError):
    """A hardware specification, a profile file or a question to a profile is wrong."""


class UnknownCollectiveError(ProfileError):
    """A collective that no profile can price. Never priced as zero."""


class MeasureError(CostError, RuntimeError):
    """A measuring process failed or outlived its time limit; names the rank and what it last did."""
