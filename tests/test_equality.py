"""The promise of the whole project: under any plan, loss, gradients and buffers are the plain model's.

Real gloo processes, float64, 1e-10, for every forced layout and for what the optimiser chooses; and random legal plans, which reach
strategies that no optimiser would choose.
"""

import pytest
from harness import captured_graph, run_equal
from models import bert_mlm, convnet, gpt2, llama, vit
from random_plans import random_plan

from planner import auto_parallelize
from planner.errors import BatchError
from planner.mesh import Mesh

MODELS = [gpt2, llama, bert_mlm, vit, convnet]
LAYOUTS = [
    dict(),
    dict(data=2),
    dict(data=4),
    dict(data=2, zero=3),
    dict(tensor=2),
    dict(tensor=4),
    dict(pipe=2, microbatches=1),
    dict(data=2, tensor=2),
    dict(data=2, pipe=2, microbatches=1),
    dict(tensor=2, pipe=2, microbatches=1, recompute="full"),
]
MICRO = [
    dict(pipe=2, microbatches=4),
    dict(pipe=4, microbatches=2),
    dict(data=2, tensor=2, pipe=2, microbatches=2),
    dict(data=2, pipe=2, microbatches=2, schedule="gpipe"),
    dict(data=2, zero=3, microbatches=2),
]


def ids(layout):
    return "-".join(f"{k}{v}" for k, v in layout.items()) or "one"


@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
@pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)
def test_every_layout(build, layout):
    plan = run_equal(build, layout)
    for axis in ("data", "tensor", "pipe"):
        assert getattr(plan.mesh, axis) == layout.get(axis, 1)


@pytest.mark.parametrize("layout", MICRO, ids=ids)
@pytest.mark.parametrize("build", [gpt2, llama, bert_mlm, vit], ids=lambda b: b.__name__)
def test_micro_batches(build, layout):
    plan = run_equal(build, layout, steps=2)
    assert plan.mesh.microbatches == layout["microbatches"]


def test_batch_norm_mixes_micro_batches():
    model, (args, kwargs), _ = convnet()
    with pytest.raises(BatchError, match="batch_norm"):
        auto_parallelize(model, 2, example_inputs=(args, kwargs), hardware="cpu", layout=dict(pipe=2, microbatches=2))


@pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)
def test_what_the_optimiser_chooses(build):
    run_equal(build, {}, gpus=4, steps=3)


RANDOM = [Mesh(tensor=2), Mesh(data=2, tensor=2), Mesh(pipe=2, tensor=2, microbatches=2), Mesh(tensor=4)]


@pytest.mark.parametrize("mesh", RANDOM, ids=str)
@pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)
def test_random_plans(build, mesh):
    if build is convnet:
        mesh = Mesh(mesh.pipe, mesh.data, mesh.tensor)
    run_equal(build, random_plan(captured_graph(build), mesh, seed=1))
