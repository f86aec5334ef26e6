"""The device mesh: named, sized axes, each tied to the link it crosses.

Ranks are laid out row-major over (pipe, data, tensor), so tensor ranks are neighbours. ``micro`` is an axis of *time*: its
"ranks" are the micro-batches that one process runs one after another. It carries the same four types as the others, and
conversions that would need communication along it do not exist. It lies outermost, so that a micro-batch is a contiguous part
of the global batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import InputError

MICRO, PIPE, DATA, TENSOR = "micro", "pipe", "data", "tensor"


@dataclass(frozen=True)
class Axis:
    name: str
    size: int

    @property
    def is_time(self) -> bool:
        return self.name == MICRO

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@dataclass(frozen=True)
class Mesh:
    """``pipe`` stages times the product of the ranked ``axes``. Axes of size 1 do not appear among the typed axes."""

    pipe: int = 1
    data: int = 1
    tensor: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name in ("pipe", "data", "tensor", "microbatches"):
            if getattr(self, name) < 1:
                raise InputError(f"mesh: {name}={getattr(self, name)}, must be at least 1")

    def __str__(self) -> str:
        return f"pipe={self.pipe} data={self.data} tensor={self.tensor} microbatches={self.microbatches}"

    @staticmethod
    def parse(text: str) -> Mesh:
        try:
            return Mesh(**{name: int(size) for name, size in (part.split("=") for part in text.split())})
        except (ValueError, TypeError) as error:
            raise InputError(f"mesh: cannot read {text!r}, expected 'pipe=1 data=2 tensor=2 microbatches=1'") from error

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Typed axes, outermost first: what a Sharding has one type for each of."""
        all_axes = (Axis(MICRO, self.microbatches), Axis(DATA, self.data), Axis(TENSOR, self.tensor))
        return tuple(axis for axis in all_axes if axis.size > 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def world_size(self) -> int:
        return self.pipe * self.data * self.tensor

    def index(self, name: str) -> int | None:
        """Position of the axis in a Sharding, None where its size is 1."""
        return next((i for i, axis in enumerate(self.axes) if axis.name == name), None)

    def stride(self, name: str) -> int:
        """Distance in ranks between neighbours along a ranked axis."""
        return {TENSOR: 1, DATA: self.tensor, PIPE: self.tensor * self.data}[name]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a global rank on pipe, data and tensor."""
        pipe, rest = divmod(rank, self.data * self.tensor)
        data, tensor = divmod(rest, self.tensor)
        return {PIPE: pipe, DATA: data, TENSOR: tensor}

    def rank(self, pipe: int, data: int, tensor: int) -> int:
        return (pipe * self.data + data) * self.tensor + tensor


def factorisations(gpus: int) -> Iterator[tuple[int, int, int]]:
    """All (pipe, data, tensor) whose product is ``gpus``."""
    divisors = [d for d in range(1, gpus + 1) if gpus % d == 0]
    for pipe, tensor in itertools.product(divisors, divisors):
        if gpus % (pipe * tensor) == 0:
            yield pipe, gpus // (pipe * tensor), tensor


def is_power_of_two(n: int) -> bool:
    return n > 0 and math.log2(n).is_integer()
