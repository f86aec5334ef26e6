"""Figures with their origin, and curves that are interpolated between points on log-log axes.

Units: bytes, seconds, FLOPs, bytes per second, FLOPs per second. 1 GB = 1e9 bytes.
"""

from __future__ import annotations

import functools
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

Array = NDArray[np.float64]
Positive = Annotated[FiniteFloat, Field(gt=0)]
Text = Annotated[str, Field(max_length=2000)]


class Model(BaseModel):
    """Base of everything that a profile file holds: strict, frozen, unknown fields refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Provenance(Model):
    """Where a figure comes from: ``measured`` here, ``published`` (source and date), or ``assumed``."""

    kind: Literal["measured", "published", "assumed"]
    source: Text = ""
    date: Annotated[str, Field(max_length=40)] = ""

    @model_validator(mode="after")
    def _published_has_a_source(self) -> Self:
        if self.kind == "published" and not (self.source and self.date):
            raise ValueError(f"a published figure needs source and date, got source={self.source!r} date={self.date!r}")
        return self

    def __str__(self) -> str:
        return " ".join(part for part in (self.kind, self.source, self.date and f"({self.date})") if part)


class Figure(Model):
    """One number with its unit and its origin."""

    value: Positive
    unit: Annotated[str, Field(min_length=1, max_length=40)]
    provenance: Provenance

    def __float__(self) -> float:
        return self.value


@functools.lru_cache(maxsize=1024)
def _logs(x: tuple[float, ...], y: tuple[float, ...], tail: int) -> tuple[Array, Array]:
    """Logarithms of the points; those of a time made non-decreasing."""
    values = np.asarray(y)
    return np.log(np.asarray(x)), np.log(np.maximum.accumulate(values) if tail else values)


class Curve(Model):
    """``y`` over ``x``, straight between points on log-log axes.

    Left of the first point ``y`` stays at its first value (the latency floor of a time, the worst efficiency). Right of the
    last point it goes on with slope ``tail``: 1 for a time (the last bandwidth holds), 0 for an efficiency. A time never falls
    with size: where a noisy table dips, the larger value before it holds.
    """

    x: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=4096)]
    y: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=4096)]
    tail: Literal[0, 1]
    provenance: Provenance
    residual: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Mean relative distance of the measured seconds from the fitted ones; None for a curve that was not measured."""

    @model_validator(mode="after")
    def _sorted(self) -> Self:
        if len(self.x) != len(self.y):
            raise ValueError(f"a curve needs as many y as x, got {len(self.y)} and {len(self.x)}")
        if any(b <= a for a, b in zip(self.x, self.x[1:])):
            raise ValueError("the x of a curve must grow strictly")
        return self

    def at(self, x: ArrayLike) -> Array:
        """The curve at ``x`` (any shape, >= 0), element by element."""
        log_x, log_y = _logs(self.x, self.y, self.tail)
        asked = np.log(np.maximum(np.asarray(x, dtype=np.float64), self.x[0]))
        beyond = np.maximum(asked - log_x[-1], 0.0)
        result: Array = np.exp(np.interp(asked, log_x, log_y) + self.tail * beyond)
        return result
