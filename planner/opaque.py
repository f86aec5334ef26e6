"""Submodules taken as one op."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn


@contextlib.contextmanager
def hide(model: nn.Module, opaque: Sequence[str]) -> Iterator[None]:
    yield
