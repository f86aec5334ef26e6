"""Convolutions against the law: batch, channels in and out, groups."""

import pytest
from law import SAMPLES, Sample, check, draw, f, ops_here, samples

from planner.rules.base import one_axis

BEFORE = set(SAMPLES)

for _n in (1, 2, 3):
    _space, _window = (5, 4, 6)[:_n], (3, 2, 3)[:_n]
    samples(
        f"aten.conv{_n}d.default",
        (f(4, 6, *_space), f(8, 6, *_window), f(8)),
        (f(4, 6, *_space), f(9, 2, *_window), f(9), [1], [1], [1], 3),
        (f(4, 5, *_space), f(5, 1, *_window), None, [1], [1], [1], 5),
        (f(4, 8, *_space), f(8, 2, *_window), f(8), [2], [1], [1], 4),
        (f(6, *_space), f(8, 6, *_window)),
    )
    samples(f"aten.conv{_n}d.padding", (f(4, 6, *_space), f(8, 6, *(3,) * _n), f(8), [1], "same"))
    samples(
        f"aten.conv_transpose{_n}d.{'default' if _n == 1 else 'input'}",
        (f(4, 6, *_space), f(6, 8, *_window), f(8)),
        (f(4, 6, *_space), f(6, 4, *_window), f(8), [2], [1], [1], 2),
        (f(4, 5, *_space), f(5, 1, *_window), None, [1], [0], [0], 5),
    )
samples("aten.conv2d.default", (f(4, 4, 5, 5), f(8, 4, 3, 3), f(8)), mesh=True)
_general = [(f(4, 6, 5, 5), f(6, 3, 3, 3), f(6), [1, 1], [1, 1], [1, 1], transposed, [0, 0], 2) for transposed in (False, True)]
samples("aten.convolution.default", *_general)
samples("aten._convolution.default", *((*call, False, False, False, False) for call in _general))
samples("aten.im2col.default", (f(4, 6, 5, 5), [3, 3], [1, 1], [1, 1], [2, 2]), (f(6, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1]))
samples("aten.col2im.default", (f(4, 54, 9), [5, 5], [3, 3], [1, 1], [1, 1], [2, 2]))


@pytest.mark.parametrize("op", ops_here(BEFORE))
def test_law(op):
    check(op)


def test_depthwise_splits_by_groups():
    case = draw(Sample("aten.conv1d.default", (f(4, 6, 5), f(6, 1, 3), f(6), [1], [1], [1], 6)))
    assert "S(1),S(0),S(0) -> S(1)" in {str(s) for s in one_axis(case.rule, case.grad_in, case.node.grad, 2)}


@pytest.mark.parametrize("groups", [1, 2])
def test_flops(groups):
    """2 N O Y C K over the channels of a group; transposed, the space of the input takes the place of the output's."""
    plain = draw(Sample("aten.conv2d.default", (f(4, 6, 5, 5), f(8, 6 // groups, 3, 3), None, [1], [0], [1], groups)))
    assert plain.rule.flops == pytest.approx(2 * 4 * 8 * (3 * 3) * (6 // groups) * (3 * 3))
    transposed = draw(Sample("aten.conv_transpose2d.input", (f(4, 6, 5, 5), f(6, 8 // groups, 3, 3), None, [1], [0], [0], groups)))
    assert transposed.rule.flops == pytest.approx(2 * 4 * 6 * (5 * 5) * (8 // groups) * (3 * 3))
