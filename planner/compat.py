"""The one place where this package touches torch modules with a leading underscore."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

# torch._subclasses.fake_tensor.FakeTensorMode: tried on torch 2.13.
# Without it, models on the meta device are traced on meta.
try:
    from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
except ImportError:  # pragma: no cover
    _FakeTensorMode = None  # type: ignore[assignment, misc]


@contextlib.contextmanager
def fake_cpu() -> Iterator[str]:
    """Tensors made inside take no memory; yields the device they should be made on."""
    if _FakeTensorMode is None:  # pragma: no cover
        yield "meta"
        return
    mode: Any = _FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        yield "cpu"
