"""What a kernel is: a function that runs one op on local tensors where the plain op would be wrong or would need whole tensors.

A rule's extra strategy names its kernel; the lowering calls ``KERNELS[name](op, args, kwargs, info)``, with ``args`` and ``kwargs``
already local (tensors are this rank's parts, size arguments are localised). Kernels are differentiable: autograd sees either plain
torch ops and the typed collectives of ``runtime.collectives``, or an ``autograd.Function`` of the kernel's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Kernel = Callable[[Callable[..., Any], list[Any], dict[str, Any], "KernelInfo"], Any]
KERNELS: dict[str, Kernel] = {}


@dataclass(frozen=True)
class KernelInfo:
    """Where a rank stands in the op that it runs a part of."""

    op: str
    """Full name of the op, ``aten.mean.dim``."""
    axes: tuple[tuple[str, str], ...] = ()
    """(axis name, factor) of the axes whose strategy names the kernel, outermost first."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Factor -> global size, for every factor of the rule."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """Factor -> global index of this rank's first element, for every factor that an axis splits (0 for the others)."""
    groups: Mapping[str, Any] = field(default_factory=dict)
    """Axis name -> the group that ``runtime.collectives`` communicates over; empty for kernels without communication."""

    def start(self, factor: str) -> int:
        return self.starts.get(factor, 0)

    def split_by(self, factor: str) -> tuple[str, ...]:
        """Names of the kernel's axes that split ``factor``, outermost first."""
        return tuple(axis for axis, split in self.axes if split == factor)


def kernel(name: str) -> Callable[[Kernel], Kernel]:
    """Register a kernel under the name that strategies give (``Strategy.kernel``)."""

    def register(function: Kernel) -> Kernel:
        if name in KERNELS:
            raise ValueError(f"two kernels named {name!r}: {KERNELS[name]} and {function}")
        KERNELS[name] = function
        return function

    return register
