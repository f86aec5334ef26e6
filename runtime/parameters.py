"""Parameters of one rank: this rank's part of each, as DTensors, put where the lowered stage reads them.

    every parameter         a DTensor on this stage's (data, tensor) mesh: Replicate or Shard as the plan says
    the plan says fsdp      a DTensor on (tensor), which ``fully_shard`` then splits over (data) as well
    one process, no group   a plain tensor

fully_shard serves one segment at a time: its parameters are gathered for the segment's forward and its backward, its gradients are
summed (not averaged: the loss already is the mean over the global batch) and scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate

from planner.errors import PlanError
from planner.graph import Spec
from planner.mesh import DATA, PIPE, TENSOR
from planner.sharding import R, Sharding, Type
from runtime.compat import split_placement
from runtime.groups import Ranks
from runtime.parts import Part, part_of, splitting_axes
from runtime.stage import Stage, StageParameter


@dataclass(frozen=True)
class Held:
    """A parameter as this rank holds it. ``spec``: of the whole parameter. ``stages``: all pipe coordinates that hold it."""

    name: str
    spec: Spec
    sharding: Sharding
    fsdp: bool
    sync_axes: tuple[str, ...]
    stages: tuple[int, ...]
    parameter: nn.Parameter

    @property
    def local(self) -> Tensor:
        return local_of(self.parameter.detach())

    @property
    def local_grad(self) -> Tensor | None:
        """This rank's part of the gradient, sharing memory with ``parameter.grad``."""
        grad = self.parameter.grad
        return None if grad is None else local_of(grad)

    def part(self, ranks: Ranks, coordinates: Mapping[str, int] | None = None) -> Part:
        return part_of(self.spec.shape, self.sharding, ranks.mesh, coordinates or ranks.coordinates, self.fsdp)

    def counts_here(self, ranks: Ranks) -> bool:
        """True on exactly one of the ranks that hold equal copies."""
        at = ranks.coordinates
        split = splitting_axes(self.sharding, ranks.mesh, self.fsdp)
        return at[PIPE] == self.stages[0] and all(at[axis] == 0 for axis in (DATA, TENSOR) if axis not in split)


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def type_on(axis: str, sharding: Sharding, ranks: Ranks) -> Type:
    """The type on a ranked axis; R where its size is 1."""
    index = ranks.mesh.index(axis)
    return R if index is None else sharding[index]


def install(stage: Stage, specs: Mapping[str, Spec], source: Callable[[str], Tensor], ranks: Ranks) -> None:
    """Put this rank's parts into the stage's module. ``source(name)``: the whole parameter, only read.

    Raises PlanError naming a parameter whose shape or dtype is not the planned one.
    """
    for name, planned in stage.parameters.items():
        whole, spec = source(name).detach(), specs[name]
        have = f"{str(whole.dtype).removeprefix('torch.')}{list(whole.shape)}"
        if have != f"{spec.dtype}{list(spec.shape)}":
            raise PlanError(f"parameter {name!r} is {have}, the plan was made for {spec.dtype}{list(spec.shape)}")
        part = part_of(spec.shape, planned.sharding, ranks.mesh, ranks.coordinates)
        if part.shape != planned.local_shape:
            expected = list(planned.local_shape)
            raise PlanError(f"parameter {name!r}: this rank's part is {list(part.shape)}, the lowered stage expects {expected}")
        local = part.take(whole).to(ranks.device)
        put_parameter(stage.module, planned.path, nn.Parameter(_placed(local, spec, planned, ranks), requires_grad=planned.trainable))


def _placed(local: Tensor, spec: Spec, planned: StageParameter, ranks: Ranks) -> Tensor:
    """The local tensor as a DTensor of the whole one's shape."""
    if ranks.device_mesh is None:
        return local
    axes = (TENSOR,) if planned.fsdp else (DATA, TENSOR)
    mesh = ranks.device_mesh[TENSOR] if planned.fsdp else ranks.device_mesh
    placements = [_placement(type_on(axis, planned.sharding, ranks)) for axis in axes]
    stride = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(spec.shape), stride=stride)


def _placement(type_: Type) -> Placement:
    return split_placement(type_.dim, type_.groups) if type_.is_split else Replicate()


def put_parameter(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    owner, _, name = path.rpartition(".")
    module.get_submodule(owner).register_parameter(name, parameter)


def get_parameter(module: nn.Module, path: str) -> nn.Parameter:
    return module.get_parameter(path)


# ---------------------------------------------------------------- fully_shard


def shard_fully(stage: Stage, ranks: Ranks, precision: str) -> None:
    """Apply ``fully_shard`` over the data axis to every segment that has such parameters, then to the root for the rest."""
    if ranks.device_mesh is None or not any(p.fsdp for p in stage.parameters.values()):
        return
    ignored = {get_parameter(stage.module, p.path) for p in stage.parameters.values() if not p.fsdp}
    mesh = ranks.device_mesh[DATA]
    policy = mixed_precision(precision)
    owners = {p.path.rpartition(".")[0] for p in stage.parameters.values() if p.fsdp}
    for owner in sorted(owners - {""}):
        fully_shard(stage.module.get_submodule(owner), mesh=mesh, ignored_params=ignored, mp_policy=policy)
    fully_shard(stage.module, mesh=mesh, ignored_params=ignored, mp_policy=policy)
    for module in sharded_modules(stage.module):
        module.set_gradient_divide_factor(1.0)
        # otherwise the backend is asked for a scaled or averaged sum, which gloo does not have
        module.set_force_sum_reduction_for_comms(True)


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """Gathers in the compute dtype, sums of gradients in float32."""
    compute = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision)
    if compute is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)


def sharded_modules(module: nn.Module) -> Iterator[FSDPModule]:
    return (m for m in module.modules() if isinstance(m, FSDPModule))


def held_parameters(stage: Stage, specs: Mapping[str, Spec], holders: Mapping[str, tuple[int, ...]]) -> dict[str, Held]:
    """After ``install`` and ``shard_fully``: name -> parameter as optimizers see it."""
    return {
        name: Held(name, specs[name], p.sharding, p.fsdp, p.sync_axes, holders[name], get_parameter(stage.module, p.path))
        for name, p in stage.parameters.items()
    }
