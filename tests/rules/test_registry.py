"""Every rule has samples, names an op that exists, and says what it costs in known words."""

import importlib
import pathlib

import pytest
from law import SAMPLES, draw

from planner.rules import REGISTRY
from planner.rules.base import one_axis
from runtime.kernels import KERNELS
from runtime.local_op import resolve

HERE = pathlib.Path(__file__)
for _file in sorted(HERE.parent.glob("test_*.py")):
    if _file != HERE:
        importlib.import_module(_file.stem)

KINDS = {"memory", "matmul", "attention", "conv", "view"}


def test_every_rule_has_samples():
    missing = sorted(set(REGISTRY) - set(SAMPLES))
    assert not missing, f"{len(missing)} registered ops without samples: {missing}"


def test_every_sample_has_a_rule():
    assert set(SAMPLES) <= set(REGISTRY)


@pytest.mark.parametrize("op", sorted(op for op in REGISTRY if not op.startswith("transformers.")))
def test_op_exists(op):
    assert callable(resolve(op))


def test_costs_are_told_in_known_words():
    for op, calls in SAMPLES.items():
        case = draw(calls[0])
        assert case.rule.kind in KINDS, op
        known = {f"in{i}" for i in range(len(case.tensors))} | {f"out{i}" for i in range(len(case.outputs))}
        assert set(case.rule.saves) <= known, op
        assert case.rule.flops >= 0, op
        if case.rule.kind == "view":
            assert not case.rule.saves and not case.rule.flops, op


def test_kernels_of_strategies_exist():
    for calls in SAMPLES.values():
        for sample in calls:
            case = draw(sample)
            for strategy in one_axis(case.rule, case.grad_in, case.node.grad, 2):
                assert not strategy.kernel or strategy.kernel in KERNELS
