"""What kernels say that they exchange is what they exchange."""

import pytest
import test_attention  # noqa: F401
import test_embedding  # noqa: F401
import test_indexing  # noqa: F401
import test_losses  # noqa: F401
import test_moe  # noqa: F401
import test_normalization  # noqa: F401
import test_softmax  # noqa: F401
import torch
from law import SAMPLES, apart, as_tuple, backward, draw, dual

from planner.mesh import Axis
from planner.rules.base import Comm, one_axis, over_mesh
from runtime.kernels import KERNELS, KernelInfo
from runtime.local_op import local_call, resolve
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


AUTOCAST = [
    ("softmax", "aten.softmax.int", "d1", (1,)),
    ("softmax", "aten.log_softmax.int", "d1", (1,)),
    ("norm", "aten.layer_norm.default", "n0", ([8],)),
    ("norm", "aten.rms_norm.default", "n0", ([8],)),
    ("vocab_cross_entropy", "aten.cross_entropy_loss.default", "c", (torch.tensor([1, 0, 7]), None, 2)),
    ("vocab_nll_loss", "aten.nll_loss.default", "c", (torch.tensor([1, 0, 7]), None, 2)),
]


@pytest.mark.parametrize(("name", "op", "factor", "rest"), AUTOCAST, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "autocast"])
def test_dtype_of_half_precision_is_that_of_the_op(name, op, factor, rest, enabled):
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    plain = resolve(op)
    info = KernelInfo(op, (("tensor", factor),), {factor: 8, "rows": 3})

    def rank(at):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return KERNELS[name](plain, [x, *rest], {}, info)

    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        expected = plain(x, *rest)
    (actual,) = simulate({"tensor": 1}, rank)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
