"""Softmax against the law, also over a split softmax dim."""

import pytest
import torch
from law import SAMPLES, check, f, ops_here, samples

BEFORE = set(SAMPLES)

for _op in ("aten.softmax.int", "aten.log_softmax.int"):
    samples(_op, (f(4, 5, 7), -1), (f(3), 0), (f(4, 5), 1, torch.float64), (f(), 0))
    samples(_op, (f(4, 8), 0), mesh=True)
    samples(_op, (f(4, 6), 1), dtype=torch.float64)
for _op in ("aten._softmax.default", "aten._log_softmax.default"):
    samples(_op, (f(4, 5, 7), 1, False))
samples("aten._safe_softmax.default", (f(4, 5, 7), 1))


@pytest.mark.parametrize("op", ops_here(BEFORE))
def test_law(op):
    check(op)


@pytest.mark.parametrize("log", [False, True])
def test_masked_scores(log):
    """A part that is all -inf on one rank is no NaN."""
    from runtime.kernels import KERNELS, KernelInfo
    from runtime.simulate import simulate

    x = torch.randn(3, 6, dtype=torch.float64)
    x[1, :3] = -torch.inf
    name = "log_softmax" if log else "softmax"
    info = KernelInfo(f"aten.{name}.int", (("tensor", "d1"),), {"d0": 3, "d1": 6})
    parts = simulate({"tensor": 2}, lambda at: KERNELS["softmax"](torch.softmax, [x[:, 3 * at["tensor"] :][:, :3], 1], {}, info))
    torch.testing.assert_close(torch.cat(parts, 1), getattr(torch, name)(x, 1))
