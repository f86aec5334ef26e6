"""Does a plan compute what the plain model computes? Run in real processes and compared on every rank.

    run_equal(build, dict(data=2, tensor=2))             # plans with auto_parallelize, raises AssertionError with the worst figures
    run_equal(build, plan, steps=3, batch="local")       # or a plan of one's own

``build()`` -> (model, (args, kwargs), loss or None), seeded, the same in every process.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from float64 import doubled
from torch import Tensor, nn

from planner.outputs import find_loss
from planner.plan import Plan
from planner.trace import capture
from runtime.api import parallelize
from runtime.launch import run_processes

Build = Callable[[], tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]], Callable[..., Tensor] | None]]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LEARNING_RATE = 0.05


@dataclasses.dataclass
class Reference:
    """What the plain model gives, step by step."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    state: dict[str, Tensor]


def tree(item: Any, leaf: Callable[[Tensor], Any]) -> Any:
    if isinstance(item, Tensor):
        return leaf(item)
    if isinstance(item, Mapping):
        return {key: tree(value, leaf) for key, value in item.items()}
    return type(item)(tree(value, leaf) for value in item) if isinstance(item, (list, tuple)) else item


def built(build: Build, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Tensor] | None]:
    model, (args, kwargs), loss = build()
    args, kwargs = tree((args, kwargs), lambda t: t.to(dtype) if t.is_floating_point() else t)
    return doubled(model) if dtype == torch.float64 else model.to(dtype), args, kwargs, loss


def reference(build: Build, dtype: torch.dtype, steps: int) -> Reference:
    """Plain training with SGD on the same batch."""
    model, args, kwargs, loss_fn = built(build, dtype)
    found = Reference([], [], {})
    for _ in range(steps):
        output = model(*args, **kwargs)
        loss = loss_fn(output) if loss_fn is not None else find_loss(output)
        assert loss is not None
        loss.backward()
        found.losses.append(loss.detach())
        found.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        descend(model)
    found.state = copy.deepcopy(model.state_dict())
    return found


def descend(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    optimizer.step()
    optimizer.zero_grad()


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is right (or over 1e-3, where that is larger)."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    difference, scale = (got.to(torch.float64) - want.to(torch.float64)).norm(), want.to(torch.float64).norm()
    return float(difference / max(float(scale), 1e-3))


def figures(build: Build, plan: Plan, dtype: torch.dtype, want: Reference, options: dict[str, Any]) -> dict[str, float]:
    """On one rank: name of what was compared -> relative error."""
    model, args, kwargs, loss_fn = built(build, dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parallel = parallelize(model, plan, loss=loss_fn, **options)
    found: dict[str, float] = {}
    if options.get("batch") == "local":
        args, kwargs = own_share(args, kwargs, plan)
    for i, (loss, gradients) in enumerate(zip(want.losses, want.gradients)):
        found[f"loss {i}"] = relative(parallel.step(*args, **kwargs), loss)
        got = parallel.gather_gradients()
        if list(got) != list(gradients):
            found[f"names of gradients {i}"] = float("inf")
        for name, grad in gradients.items():
            mine = got.get(name)
            same_none = (mine is None) == (grad is None)
            found[f"gradient {name} {i}"] = (0.0 if grad is None else relative(mine, grad)) if same_none else float("inf")  # type: ignore[arg-type]
        descend(parallel)
    state = parallel.gather_state_dict()
    if list(state) != list(want.state):
        found["names of state"] = float("inf")
    found |= {f"state {name}": relative(state[name], tensor) for name, tensor in want.state.items() if name in state}
    # the user's own model is only read
    found |= {f"untouched {name}": relative(tensor, before[name]) for name, tensor in model.state_dict().items()}
    return found


def own_share(args: Any, kwargs: Any, plan: Plan) -> Any:
    """What batch="local" is given: this rank's rows of every micro-batch."""
    import torch.distributed as dist

    from planner.inputs import bind
    from runtime.batching import part_sizes, part_starts

    mesh, dims = plan.mesh.mesh(), plan.model.batch_dims
    data = mesh.coordinates(dist.get_rank() if dist.is_initialized() else 0)["data"]
    names = {id(tensor): name for name, tensor in bind(plan.model.inputs, args, kwargs).items()}

    def share(tensor: Tensor) -> Tensor:
        dim = dims.get(names.get(id(tensor), ""))
        if dim is None:
            return tensor
        size = tensor.shape[dim]
        parts = zip(part_starts(size, mesh, data), part_sizes(size, mesh, data))
        return torch.cat([tensor.narrow(dim, start, length) for start, length in parts], dim)

    return tree((args, kwargs), share)


def run_equal(
    build: Build, layout: Plan | Mapping[str, Any], dtype: torch.dtype = torch.float64, steps: int = 1, timeout_s: float = 90.0,
    tolerance: float | None = None, gpus: int | None = None, plan_options: Mapping[str, Any] | None = None, **options: Any,
) -> Plan:  # fmt: skip
    """Raises AssertionError listing the worst figures where any loss, gradient, parameter or buffer differs on any rank.

    ``layout``: a plan, or what ``auto_parallelize`` is forced to; ``options`` go to ``parallelize``. Returns the plan that ran.
    """
    plan = layout if isinstance(layout, Plan) else make_plan(build, layout, dtype, dict(plan_options or {}), gpus)
    want = reference(build, dtype, steps)
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    results = run_processes(figures, plan.world_size, (build, plan, dtype, want, options), timeout_s=timeout_s, start="fork")
    worst = sorted(((error, what, rank) for rank, found in enumerate(results) for what, error in found.items()), reverse=True)
    bad = [f"rank {rank}: {what}: {error:.3g}" for error, what, rank in worst if not error <= limit]
    assert not bad, f"{plan.mesh.mesh()}: {len(bad)} of {len(worst)} figures above {limit:g}:\n" + "\n".join(bad[:12])
    return plan


def make_plan(build: Build, layout: Mapping[str, Any], dtype: torch.dtype, options: dict[str, Any], gpus: int | None = None) -> Plan:
    from planner import auto_parallelize

    model, args, kwargs, loss_fn = built(build, dtype)
    if gpus is None:
        gpus = math.prod(int(layout.get(axis, 1)) for axis in ("pipe", "data", "tensor"))
    options = {"hardware": "cpu", **options}
    plan = auto_parallelize(model, gpus=gpus, example_inputs=(args, kwargs), layout=dict(layout), loss=loss_fn, **options)
    assert isinstance(plan, Plan)
    return plan


def captured_graph(build: Build, dtype: torch.dtype = torch.float64) -> Any:
    """The graph of a build, for tests that make plans by hand."""
    model, args, kwargs, loss_fn = built(build, dtype)
    return capture(model, (args, kwargs), loss=loss_fn).graph
