"""Any model made of the ops that have rules, any shapes, any legal plan: loss, gradients and outputs are the plain run's, in float64.

``pytest tests/test_properties.py --hypothesis-profile=long`` searches for about ten minutes; the profile that CI runs is short and the
same each time.
"""

from __future__ import annotations

import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from programs import VOCABULARY, Program
from random_plans import random_plan
from simulated_run import run

from planner.blocks import segments
from planner.errors import BatchError
from planner.inputs import bind
from planner.mesh import Mesh
from planner.trace import Captured, capture

# registered in conftest.py; any other profile is left to other tests
PROFILE = settings.get_profile("long" if settings.get_current_profile_name() == "long" else "short")

MESHES = [Mesh(tensor=2), Mesh(data=2), Mesh(tensor=3), Mesh(data=2, tensor=2), Mesh(tensor=4), Mesh(pipe=2), Mesh(microbatches=2),
          Mesh(pipe=2, tensor=2, microbatches=2), Mesh(data=2, microbatches=2), Mesh(data=3, tensor=2)]  # fmt: skip
SIZE = st.integers(1, 7)
numbers = st.integers(0, 1000)
instructions = st.lists(st.tuples(*[numbers] * 7), min_size=3, max_size=10)
shapes = st.lists(SIZE, min_size=1, max_size=3)


def batch(size: int, shape: list[int], length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(0, VOCABULARY, (size,), generator=generator)
    y[1::3] = -100
    return {
        "x": torch.randn(size, *shape, dtype=torch.float64, generator=generator),
        "ids": torch.randint(0, VOCABULARY, (size, length), generator=generator),
        "y": y,
    }


def compare(got: torch.Tensor, want: torch.Tensor, scale: float, what: str) -> None:
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    off = float((got - want).norm())
    assert off <= 1e-10 * max(float(want.norm()), 1e-4 * scale, 1e-6), f"{what} is off by {off:.2g} of {float(want.norm()):.2g}"


def check(model: Program, inputs: dict[str, torch.Tensor], captured: Captured, mesh: Mesh, seed: int, forward: bool) -> None:
    """One random plan against the plain run: a step, and where ``forward`` the outputs too."""
    graph = captured.graph
    model.zero_grad(set_to_none=True)
    loss, last = model(**inputs)
    loss.backward()
    plan = random_plan(graph, mesh, seed)
    bound = bind(graph.in_spec, (), inputs)
    losses, gradients, _, _ = run(graph, captured.constants, plan, model, bound)
    for rank, found in enumerate(losses):
        compare(found, loss.detach(), 1.0, f"loss on rank {rank}")
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    scale = max((float(g.norm()) for g in want.values()), default=1.0)
    for name, gradient in want.items():
        compare(gradients.get(name, torch.zeros_like(gradient)), gradient, scale, f"gradient of {name}")
    if forward:
        _, _, _, outputs = run(graph, captured.constants, plan, model, bound, mode="forward")
        compare(outputs[graph.outputs[1][1]], last.detach(), 1.0, "output")


@settings(parent=PROFILE)
@given(instructions, st.sampled_from([4, 6, 2, 3, 1]), shapes, SIZE, st.lists(st.integers(0, 999), min_size=3, max_size=6))
def test_any_plan_of_any_program(program, size, shape, length, plans):
    inputs = batch(size, shape, length)
    model = Program(program, inputs)
    loss = model(**inputs)[0].detach()
    assume(len(model.steps) and loss.isfinite() and abs(float(loss)) < 1e6)
    captured = capture(model, ((), inputs), batch_dims=dict.fromkeys(inputs, 0))
    parts = len(segments(captured.graph))
    fitting = [mesh for mesh in MESHES if size % (mesh.data * mesh.microbatches) == 0 and mesh.pipe <= parts]
    for i, number in enumerate(plans):
        mesh = fitting[number % len(fitting)]
        try:
            check(model, inputs, captured, mesh, seed=number, forward=i == 0)
            event(f"equal on {mesh}")
        except BatchError as refusal:
            assert "mixes the batch" in str(refusal)
            event("refused: mixes micro-batches")
