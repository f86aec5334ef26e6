"""What kernels say that they exchange is what they exchange."""

import pytest
import torch
from law import SAMPLES, apart, as_tuple, backward, draw, dual

import test_attention  # noqa: F401
import test_embedding  # noqa: F401
import test_indexing  # noqa: F401
import test_losses  # noqa: F401
import test_moe  # noqa: F401
import test_normalization  # noqa: F401
import test_softmax  # noqa: F401
from planner.mesh import Axis
from planner.rules.base import Comm, one_axis, over_mesh
from runtime.kernels import KERNELS
from runtime.local_op import local_call
from runtime.simulate import SimulatedGroup, simulate

AXES = (Axis("tensor", 2),)


def exchanged(case, strategy, monkeypatch):
    """Collectives of each of two ranks, in order, running forward and backward."""
    inputs = [apart(x.detach(), sharding, (2,)) for x, sharding in zip(case.tensors, strategy.inputs)]
    grads = [apart(g, dual(s), (2,)) if g is not None else [None, None] for g, s in zip(case.grads, strategy.outputs)]
    phase, seen = ["forward", "forward"], ([], [])
    plain = SimulatedGroup.all_reduce

    def all_reduce(self, x, op="sum"):
        seen[self.rank].append(Comm("all_reduce", x.numel() * x.element_size(), phase[self.rank]))
        return plain(self, x, op)

    def rank(at):
        number = at["tensor"]
        own = [parts[number].detach().requires_grad_(x.requires_grad) for parts, x in zip(inputs, case.tensors)]
        outputs = as_tuple(local_call(case.node, case.rule, strategy, AXES, (number,)).run(own))
        phase[number] = "backward"
        backward(outputs, [parts[number] for parts in grads], own)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedGroup, "all_reduce", all_reduce)
        simulate({"tensor": 2}, rank)
    return seen


def kernel_strategies(op):
    for sample in SAMPLES[op]:
        case = draw(sample)
        for strategy in one_axis(case.rule, case.grad_in, case.node.grad, 2):
            if strategy.kernel:
                yield case, strategy


@pytest.mark.parametrize("op", sorted(set(SAMPLES)))
def test_exchanges_what_its_strategy_says(op, monkeypatch):
    for case, strategy in kernel_strategies(op):
        (joined,) = over_mesh(case.rule, [[strategy]], [2])
        for seen in exchanged(case, joined, monkeypatch):
            assert seen == list(strategy.comm), f"{case.sample}: {strategy}"


def test_every_kernel_of_a_rule_exists():
    named = {s.kernel for ops in SAMPLES.values() for sample in ops for s in draw(sample).rule.extra if s.kernel}
    assert named <= set(KERNELS)


def test_half_precision_statistics_are_summed_in_float32():
    from runtime.kernels.exchange import wide

    assert wide(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
