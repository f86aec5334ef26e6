"""Tensors from nothing against the law: constants in parts, the others whole."""

import pytest
import torch
from law import SAMPLES, check, draw, f, ints, ops_here, samples

from planner.rules.base import one_axis

BEFORE = set(SAMPLES)

samples("aten.zeros.default", ((8, 7),), dtype=torch.float64)
samples("aten.ones.default", ((8, 7),), ((),))
samples("aten.full.default", ((8, 7), 2.5))
samples("aten.empty.memory_format", ((8, 7),), values=False)
samples("aten.new_zeros.default", (f(8, 7), (4, 7, 2)), (ints(6), (6,)))
samples("aten.new_ones.default", (ints(8, 7), (8, 7)), dtype=torch.bool)
samples("aten.new_full.default", (f(8), (7, 6), 1.5))
samples("aten.new_empty.default", (f(8), (7, 6)), values=False)
samples("aten.arange.default", (8,))
samples("aten.arange.start", (2, 9))
samples("aten.arange.start_step", (0, 16, 2))
samples("aten.linspace.default", (0.0, 1.0, 8))
samples("aten.logspace.default", (0.0, 1.0, 8))
samples("aten.eye.default", (8,))
samples("aten.eye.m", (8, 7))
samples("aten.tril_indices.default", (4, 4))
samples("aten.triu_indices.default", (4, 4, 1))
samples("aten.scalar_tensor.default", (2.0,))
for _name in ("hann_window.default", "hamming_window.default", "blackman_window.default"):
    samples(f"aten.{_name}", (8,))
for _name in ("hann", "hamming", "blackman"):
    samples(f"aten.{_name}_window.periodic", (8, False))
samples("aten.bartlett_window.default", (8,))
samples("aten.kaiser_window.default", (8,))
samples("aten.fft_fftfreq.default", (8,))
samples("aten.fft_rfftfreq.default", (8,))

OPS = ops_here(BEFORE)


@pytest.mark.parametrize("op", OPS)
def test_law(op):
    check(op)


def test_constants_are_made_in_parts_and_ranges_whole():
    def found(op):
        case = draw(SAMPLES[op][0])
        return {str(s) for s in one_axis(case.rule, case.grad_in, (False,), 2)}

    assert found("aten.zeros.default") == {"- -> R", "- -> S(0)", "- -> S(1)"}
    assert found("aten.arange.default") == {"- -> R"}
    assert {"S(0) -> S(1)", "P -> R", "R -> S(0)"} <= found("aten.new_zeros.default")
