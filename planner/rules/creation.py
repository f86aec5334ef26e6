"""Tensors from nothing. A constant tensor can be made in parts (its size argument says how much); one whose elements depend on their
place is made whole on every rank, and a part of it is a slice that costs nothing.
"""

from __future__ import annotations

from planner.rules.base import Call, Rule, dims_rule, rule
from planner.rules.dims import numbered

CONSTANT = ("zeros.default", "ones.default", "empty.memory_format", "full.default")
NEW = ("new_zeros.default", "new_ones.default", "new_empty.default", "new_full.default")


@rule(*(f"aten.{name}" for name in CONSTANT))
def constant(call: Call) -> Rule:
    out = numbered(call.out)
    return dims_rule(call, [], [out], makes=frozenset(dim[0] for dim in out if dim), local_args=((0, "shape"),))


@rule(*(f"aten.{name}" for name in NEW))
def constant_like(call: Call) -> Rule:
    """Of the tensor only the dtype is read (``new_full`` takes a tensor as its value too: that one stays whole)."""
    out = numbered(call.out)
    read = [numbered(spec.shape, f"x{i}_") for i, spec in enumerate(call.specs)]
    return dims_rule(
        call, read, [out], makes=frozenset(dim[0] for dim in out if dim), local_args=((1, "shape"),), ignored=frozenset({0}), sums=False,
        whole={dim[0] for dims in read for dim in dims if dim},
    )  # fmt: skip


@rule(
    "aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.linspace.default", "aten.logspace.default",
    "aten.eye.default", "aten.eye.m", "aten.tril_indices.default", "aten.triu_indices.default", "aten.scalar_tensor.default",
    "aten.hann_window.default", "aten.hann_window.periodic", "aten.hamming_window.default", "aten.hamming_window.periodic",
    "aten.blackman_window.default", "aten.blackman_window.periodic", "aten.bartlett_window.default", "aten.kaiser_window.default",
    "aten.fft_fftfreq.default", "aten.fft_rfftfreq.default",
)  # fmt: skip
def by_place(call: Call) -> Rule:
    out = numbered(call.out)
    return dims_rule(call, [], [out], whole={dim[0] for dim in out if dim})
