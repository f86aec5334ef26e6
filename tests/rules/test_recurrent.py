"""Recurrent layers against the law: the batch splits, whichever place it has."""

import pytest
from law import SAMPLES, check, draw, f, ops_here, samples

BEFORE = set(SAMPLES)
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
HIDDEN = 6


def parameters(gates, width, layers, directions, bias):
    found = []
    for layer in range(layers):
        for _ in range(directions):
            found += [f(gates * HIDDEN, width if layer == 0 else directions * HIDDEN), f(gates * HIDDEN, HIDDEN)]
            found += [f(gates * HIDDEN), f(gates * HIDDEN)] if bias else []
    return found


for _name, _gates in GATES.items():
    for _first, _directions, _layers, _bias in ((True, 1, 2, True), (False, 2, 1, False)):
        _state = f(_layers * _directions, 4, HIDDEN)
        samples(
            f"aten.{_name}.input",
            (f(4, 3, 5) if _first else f(3, 4, 5), [_state, _state] if _name == "lstm" else _state,
             parameters(_gates, 5, _layers, _directions, _bias), _bias, _layers, 0.0, True, _directions == 2, _first),
        )  # fmt: skip
    _cell = (f(_gates * HIDDEN, 5), f(_gates * HIDDEN, HIDDEN), f(_gates * HIDDEN), f(_gates * HIDDEN))
    _state = f(4, HIDDEN)
    samples(f"aten.{_name}_cell.default", *((f(4, 5), [_state, _state] if _name == "lstm" else _state, *_cell[:n]) for n in (2, 4)))


@pytest.mark.parametrize("op", ops_here(BEFORE))
def test_law(op):
    check(op)


def test_flops():
    """2 multiply-adds per weight, step and row."""
    case = draw(SAMPLES["aten.gru.input"][1])
    assert case.rule.flops == pytest.approx(2 * 3 * 4 * 2 * (18 * 5 + 18 * 6))
