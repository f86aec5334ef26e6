"""Grouped products against the law, also with the experts split."""

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 (defines transformers.grouped_mm_fallback)
from given import given
from law import SAMPLES, Sample, check, draw, f, ops_here, samples

BEFORE = set(SAMPLES)


def ends(*values):
    return given(*values, dtype=torch.int32)


def single(*shape):
    return f(*shape, dtype=torch.float32)


samples(
    "transformers.grouped_mm_fallback.default",
    (f(12, 5), f(6, 5, 8), ends(2, 2, 5, 9, 10, 12)),
    (f(12, 5), f(5, 5, 8), ends(0, 2, 5, 9, 10)),
)
samples("transformers.grouped_mm_fallback.default", (f(12, 6), f(4, 6, 8), ends(2, 2, 9, 12)), mesh=True)
samples("aten._grouped_mm.default", (single(16, 16), single(6, 16, 16), ends(2, 2, 5, 9, 10, 16)), mesh=True)
samples("shard.expert_mm", (f(7, 5), f(6, 5, 4), given(0, 5, 2, 2, 0, 4, 5)), (f(8, 5), f(5, 5, 6), given(4, 4, 0, 1, 1, 1, 3, 0)))
samples("shard.expert_mm", (f(8, 6), f(4, 6, 8), given(3, 0, 1, 1, 0, 3, 3, 1)), mesh=True)
samples("shard.expert_mm", (single(12, 5), single(4, 5, 6), given(3, 0, 1, 1, 0, 3, 3, 1, 0, 0, 3, 1)))


@pytest.mark.parametrize("op", ops_here(BEFORE))
def test_law(op):
    check(op)


def test_flops_do_not_grow_with_the_experts():
    case = draw(Sample("transformers.grouped_mm_fallback.default", (f(12, 5), f(6, 5, 8), ends(2, 2, 5, 9, 10, 12))))
    assert case.rule.flops == pytest.approx(2 * 12 * 5 * 8)
