"""What a training run of a case gives, recorded in the same way for the plain model and for a plan on every rank, and compared.

want = plain(case)                                   # one process, the unmodified model
for got in planned(case, plan):                      # real gloo processes; one record per rank
    assert not differences(got, want, case)
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner import auto_parallelize
from planner.plan import Plan
from runtime.api import parallelize
from runtime.launch import run_processes

AXES = {"dp": "data", "tp": "tensor", "pp": "pipe"}
Case = Any
"""A module of this folder: build(**options) -> (model, args, kwargs), maybe loss(output), EXPECT."""


@functools.cache
def case(number: int) -> Case:
    """The case with this number."""
    (path,) = Path(__file__).parent.glob(f"{number:02d}_*.py")
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers() -> list[int]:
    return sorted(int(path.name[:2]) for path in Path(__file__).parent.glob("[0-9][0-9]_*.py"))


def layout_of(layout: Mapping[str, int]) -> dict[str, int]:
    """A case's ``dict(dp=2, microbatches=4)`` in the planner's words; axes that are not named have size 1."""
    return dict.fromkeys(AXES.values(), 1) | {AXES.get(key, key): value for key, value in layout.items()}


def gpus_of(layout: Mapping[str, int]) -> int:
    sizes = layout_of(layout)
    return sizes["data"] * sizes["tensor"] * sizes["pipe"]


def loss_of(one: Case) -> Callable[[Any], Tensor] | None:
    return getattr(one, "loss", None)


def make_plan(one: Case, layout: Mapping[str, int], build: Mapping[str, Any] | None = None, **options: Any) -> Plan:
    model, args, kwargs = one.build(**build or {})
    forward_only = one.EXPECT.get("forward_only", False)
    options = {"hardware": "cpu", "optimizer": "none" if forward_only else "adamw", "layout": layout_of(layout), **options}
    plan = auto_parallelize(model, gpus_of(layout), example_inputs=(args, kwargs), loss=loss_of(one), **options)
    # what runs is what a file of the plan says
    return Plan.from_json(plan.to_json())


# ---------------------------------------------------------------- recording


@dataclass
class Record:
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    output: Any = None
    """Of a forward in the model's own mode, after training."""
    held: dict[str, Held] = field(default_factory=dict)
    """This rank's parameters after the last step, before the optimizer's."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """This rank's parts of the parameters and its buffers, in the end."""


@dataclass
class Held:
    placements: tuple[str, ...]
    grad: Tensor | None
    trainable: bool

    @property
    def is_whole(self) -> bool:
        return all(placement == "Replicate()" for placement in self.placements)


class Plain(nn.Module):
    """The unmodified model behind the surface of a ParallelModule."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor] | None) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        output = self.model(*args, **kwargs)
        loss = self.loss(output) if self.loss else output
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def gather_gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.model.named_parameters()}

    def gather_state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def record(module: Any, one: Case, args: Any, kwargs: Any, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Record:
    """Steps with an optimizer, then a forward; a case that is forward only has no steps."""
    found = Record()
    steps = 0 if one.EXPECT.get("forward_only") else one.EXPECT.get("steps", 1)
    optimizer = make_optimizer(module) if steps else None
    for _ in range(steps):
        found.losses.append(module.step(*args, **kwargs))
        found.gradients.append(module.gather_gradients())
        found.held = {name: hold(parameter) for name, parameter in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    found.output = module(*args, **kwargs)
    found.state = module.gather_state_dict()
    found.values = {name: local(tensor).clone() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    return found


def hold(parameter: nn.Parameter) -> Held:
    placements = tuple(map(repr, parameter.placements)) if isinstance(parameter, DTensor) else ()
    return Held(placements, None if parameter.grad is None else local(parameter.grad).clone(), parameter.requires_grad)


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain(one: Case, build: Mapping[str, Any] | None = None, make_optimizer: Any = sgd) -> Record:
    model, args, kwargs = one.build(**build or {})
    return record(Plain(model, loss_of(one)), one, args, kwargs, make_optimizer)


def on_a_rank(number: int, plan: Plan, build: Mapping[str, Any], make_optimizer: Any) -> Record:
    one = case(number)
    model, args, kwargs = one.build(**build)
    parallel = parallelize(model, plan, loss=loss_of(one), timeout_s=60.0)
    return record(parallel, one, args, dict(reversed(kwargs.items())), make_optimizer)


def planned(one: Case, plan: Plan, build: Mapping[str, Any] | None = None, make_optimizer: Any = sgd) -> list[Record]:
    """By rank. Inputs given by name come in another order than they were planned with."""
    number = int(one.__doc__.split()[0])
    args = (number, plan, dict(build or {}), make_optimizer)
    return run_processes(on_a_rank, plan.world_size, args, timeout_s=one.EXPECT.get("timeout_s", 60), start="fork")


# ---------------------------------------------------------------- comparing


def differences(got: Record, want: Record, one: Case) -> list[str]:
    """Everything in which a record is not the plain model's, within the case's tolerance."""
    tolerance = one.EXPECT["tol"]
    found = list(differ("losses", got.losses, want.losses, tolerance))
    found += differ("gradients", got.gradients, want.gradients, one.EXPECT.get("grad_tol", tolerance))
    found += differ("output", got.output, want.output, tolerance)
    found += differ("state", got.state, want.state, tolerance)
    return found


def differ(where: str, got: Any, want: Any, tolerance: float) -> Iterator[str]:
    """Same types, keys in the same order, shapes and dtypes; whole numbers exactly, others within ``tolerance`` relative in norm."""
    if isinstance(want, Tensor):
        yield from _tensors_differ(where, got, want, tolerance)
    elif type(got) is not type(want):
        yield f"{where}: {type(got).__name__}, not {type(want).__name__}"
    elif isinstance(want, Mapping):
        if list(got) != list(want):
            yield f"{where}: keys {list(got)}, not {list(want)}"
        for key in want:
            if key in got:
                yield from differ(f"{where}[{key!r}]", got[key], want[key], tolerance)
    elif isinstance(want, (list, tuple)):
        if len(got) != len(want):
            yield f"{where}: {len(got)} items, not {len(want)}"
        for i, (a, b) in enumerate(zip(got, want)):
            yield from differ(f"{where}[{i}]", a, b, tolerance)
    elif got != want:
        yield f"{where}: {got!r}, not {want!r}"


def _tensors_differ(where: str, got: Any, want: Tensor, tolerance: float) -> Iterator[str]:
    if not isinstance(got, Tensor) or isinstance(got, DTensor):
        yield f"{where}: {type(got).__name__}, not a tensor"
    elif (got.shape, got.dtype) != (want.shape, want.dtype):
        yield f"{where}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    elif not want.is_floating_point():
        if not torch.equal(got, want):
            yield f"{where}: {got.tolist()}, not {want.tolist()}"
    else:
        off = torch.where(got == want, 0.0, got.double() - want.double())  # infinities are equal or far off
        error = float(off.norm() / want.double().nan_to_num(posinf=1.0, neginf=1.0).norm().clamp_min(1e-3))
        if not error <= tolerance:
            yield f"{where}: off by {error:.3g} of its norm"
