"""Tensors with given values in samples: offsets, permutations, targets that are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from law import T


@dataclass(frozen=True)
class Given(T):
    values: Any = None

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.tensor(self.values, dtype=self.dtype)


def given(*values: Any, dtype: torch.dtype = torch.int64) -> Given:
    """A tensor of these values; one value alone is a scalar or a nested list."""
    one = values[0] if len(values) == 1 else list(values)
    return Given(tuple(torch.tensor(one).shape), dtype, False, values=one)


def positive(x: torch.Tensor) -> torch.Tensor:
    return x.abs() + 0.3


def probabilities(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid() * 0.9 + 0.05
