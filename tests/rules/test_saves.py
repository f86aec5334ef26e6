"""What rules say that autograd keeps is what it keeps, by bytes, for the ops that hold most of a model's activations."""

import math

import pytest
import torch
from given import given
from law import Sample, as_tuple, draw, f, ints

from planner.rules.base import one_axis
from runtime.local_op import local_call


def x(*shape):
    return f(*shape, dtype=torch.float32)


ROWS = ints(64, low=0, high=50)
CALLS = {
    "layer_norm": Sample("aten.layer_norm.default", (x(64, 32), [32], x(32), x(32))),
    "rms_norm": Sample("aten.rms_norm.default", (x(64, 32), [32])),  # with a weight, the CPU keeps a further product that GPUs do not
    "group_norm": Sample("aten.group_norm.default", (x(8, 16, 8, 8), 4, x(16), x(16))),
    "batch_norm": Sample("shard.batch_norm", (x(8, 16, 8, 8), x(16), x(16), None, None, True, 0.1, 1e-5)),
    "softmax": Sample("aten.softmax.int", (x(64, 32), -1)),
    "attention": Sample("aten.scaled_dot_product_attention.default", (x(4, 4, 32, 16), x(4, 4, 32, 16), x(4, 4, 32, 16), None, 0.0, True)),
    "embedding": Sample("aten.embedding.default", (x(50, 32), ROWS)),
    "cross_entropy": Sample("aten.cross_entropy_loss.default", (x(64, 50), ROWS, None, 2)),
    "mse_loss": Sample("aten.mse_loss.default", (x(64, 50), x(64, 50))),
    "conv2d": Sample("aten.conv2d.default", (x(8, 16, 8, 8), x(16, 16, 3, 3), x(16))),
    "max_pool2d": Sample("aten.max_pool2d.default", (x(8, 16, 8, 8), [2, 2])),
    "avg_pool2d": Sample("aten.avg_pool2d.default", (x(8, 16, 8, 8), [2, 2])),
    "gather": Sample("aten.gather.default", (x(64, 50), 1, ints(64, 3, low=0, high=50))),
    "topk": Sample("aten.topk.default", (x(64, 50), 8)),
    "index": Sample("aten.index.Tensor", (x(50, 32), [ROWS])),
    "index_add": Sample("aten.index_add.default", (x(50, 32), 0, ROWS, x(64, 32))),
    "grouped_mm": Sample("aten._grouped_mm.default", (x(64, 32), x(4, 32, 16), given(10, 20, 40, 64, dtype=torch.int32))),
}


def kept_bytes(case):
    """Bytes of the distinct tensors that autograd saves, running the whole op."""
    inputs = [t.detach().requires_grad_(t.requires_grad) for t in case.tensors]
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr(), t.storage_offset()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = as_tuple(local_call(case.node, None, None, (), ()).run(inputs))
    assert outputs
    return sum(kept.values())


def said_bytes(case):
    specs = {f"in{i}": t for i, t in enumerate(case.tensors)} | {f"out{i}": t for i, t in enumerate(case.outputs)}
    named = sum(specs[name].numel() * specs[name].element_size() for name in case.rule.saves)
    return named + case.rule.extra_saved_bytes_per_point * case.outputs[0].numel()


@pytest.mark.parametrize("name", CALLS)
def test_bytes_kept(name):
    case = draw(CALLS[name])
    assert math.isclose(said_bytes(case), kept_bytes(case), rel_tol=0.15), f"{said_bytes(case)} said, {kept_bytes(case)} kept"


def test_rules_name_tensors_that_exist():
    for sample in CALLS.values():
        case = draw(sample)
        known = {f"in{i}" for i in range(len(case.tensors))} | {f"out{i}" for i in range(len(case.outputs))}
        assert set(case.rule.saves) <= known and one_axis(case.rule, case.grad_in, case.node.grad, 2)
