"""Everything a parallel module holds that training changes: parameters, buffers, and where each of them lies.

Parameters are split as the plan says; buffers are whole on every rank. What the loss does not use at all (a head that is not called)
is held whole by the first stage, so that no name of the model is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from planner.errors import InputError
from planner.graph import Spec
from planner.mesh import DATA, PIPE, TENSOR
from planner.sharding import R, Sharding
from planner.torch_ops import dtype_of, spec_of
from runtime.compat import all_gather_single
from runtime.groups import Ranks
from runtime.materialize import is_unset
from runtime.parameters import Held
from runtime.parts import Part, part_of, splitting_axes


@dataclass(frozen=True)
class Stored:
    """Where a parameter of the model lies, known on every rank."""

    spec: Spec
    sharding: Sharding
    fsdp: bool
    stages: tuple[int, ...]

    def part(self, ranks: Ranks, coordinates: Mapping[str, int]) -> Part:
        return part_of(self.spec.shape, self.sharding, ranks.mesh, coordinates, self.fsdp)


@dataclass
class State:
    ranks: Ranks
    held: dict[str, Held]
    """This rank's parameters by canonical name, in the model's order."""
    stored: dict[str, Stored]
    """All parameters of the model, in its order."""
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    keys: tuple[str, ...]
    """Keys of the model's own ``state_dict()``: its parameters and persistent buffers, every alias."""
    unset: dict[str, str] = field(default_factory=dict)
    """Parameters and buffers of a model on meta that no class initialised -> the class; the same on every rank."""

    def canonical(self, name: str) -> str:
        return self.aliases.get(name, name)

    def check_set(self) -> None:
        """Raises InputError, on every rank, naming a parameter or buffer that still has no value. Collective while there are any."""
        if not self.unset:
            return
        here = {name: one.local for name, one in self.held.items()} | self.buffers
        still = torch.tensor([int(n in here and is_unset(here[n])) for n in self.unset], device=self.ranks.device)
        if self.ranks.groups:
            dist.all_reduce(still, dist.ReduceOp.MAX, group=self.ranks.groups["world"])
        self.unset = {name: owner for (name, owner), flag in zip(self.unset.items(), still.tolist()) if flag}
        for name, owner in self.unset.items():
            raise InputError(
                f"{name!r} has no value: the model is on the meta device and {owner} does not say how to initialise it. Load a checkpoint "
                f"first, give the class a reset_parameters() that sets it, or build the model with memory"
            )

    # ------------------------------------------------------------ whole tensors

    def whole(self, name: str, local: Tensor | None) -> Tensor:
        """The whole tensor on every rank, from what each holder gives as ``local`` (this rank's part; None where it holds none).

        Collective over all ranks. ``name``: the parameter that says where the parts lie and what dtype they have.
        """
        stored, ranks = self.stored[name], self.ranks
        first = stored.stages[0]
        whole = torch.empty(stored.spec.shape, dtype=dtype_of(stored.spec.dtype) if local is None else local.dtype, device=ranks.device)
        if ranks.coordinates[PIPE] == first:
            assert local is not None
            self._join(stored, local.contiguous(), whole)
        if ranks.mesh.pipe > 1:
            dist.broadcast(whole, group=ranks.groups["pipe"], group_src=first)
        return whole

    def _join(self, stored: Stored, local: Tensor, whole: Tensor) -> None:
        ranks, at = self.ranks, self.ranks.coordinates
        split = splitting_axes(stored.sharding, ranks.mesh, stored.fsdp)
        if not split:
            whole.copy_(local.view(whole.shape))
            return
        group = "stage" if len(split) > 1 else next(iter(split))
        others = [ranks.mesh.coordinates(rank) for rank in ranks.along(group)]
        parts = [stored.part(ranks, {**at, DATA: o[DATA], TENSOR: o[TENSOR]}) for o in others]
        longest = max(torch.Size(part.shape).numel() for part in parts)
        mine = local.new_zeros(longest)
        mine[: local.numel()] = local.reshape(-1)
        gathered = local.new_empty(len(parts) * longest)
        all_gather_single(gathered, mine, group=ranks.groups[group])
        for part, flat in zip(parts, gathered.split(longest)):
            part.put(flat[: torch.Size(part.shape).numel()].view(part.shape), whole)

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, whole parameter), one at a time."""
        for name in self.stored:
            held = self.held.get(name)
            yield name, self.whole(name, held.local if held else None)

    def gather_state_dict(self) -> dict[str, Tensor]:
        self.check_set()
        found = dict(self.whole_parameters()) | {name: buffer.clone() for name, buffer in self.buffers.items()}
        return {key: found[self.canonical(key)] for key in self.keys if self.canonical(key) in found}

    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Every parameter's whole gradient, None where it has none, as in the plain model."""
        names = list(self.stored)
        have = torch.tensor([int(n in self.held and self.held[n].parameter.grad is not None) for n in names], device=self.ranks.device)
        if self.ranks.mesh.pipe > 1:
            dist.all_reduce(have, dist.ReduceOp.MAX, group=self.ranks.groups["pipe"])
        result: dict[str, Tensor | None] = {}
        for name, there in zip(names, have.tolist()):
            held = self.held.get(name)
            grad = held.local_grad if held else None
            if held and there and grad is None:
                grad = torch.zeros_like(held.local)
            result[name] = self.whole(name, grad) if there else None
        return result


# ---------------------------------------------------------------- making it


def unused_parameter(name: str, parameter: nn.Parameter, whole: Tensor, ranks: Ranks) -> Held:
    """A parameter that no stage reads, held whole by the first stage."""
    local: Tensor = whole.detach().clone().to(ranks.device)
    if ranks.device_mesh is not None:
        local = DTensor.from_local(local, ranks.device_mesh, [Replicate(), Replicate()], run_check=False)
    sharding = tuple(R for _ in ranks.mesh.axes)
    own = nn.Parameter(local, requires_grad=parameter.requires_grad)
    return Held(name, spec_of(parameter), sharding, False, (), (0,), own)


class Tree(nn.Module):
    """A module without a forward, in the place of a submodule of the model: keeps its dotted names."""


def register_tree(root: nn.Module, name: str, tensor: Tensor | nn.Parameter, persistent: bool = True) -> None:
    """Register under a dotted name, making the modules on the way. Works for names that are also methods of ``root``."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module._modules[part] = Tree()
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module._parameters[leaf] = tensor
    else:
        module._buffers[leaf] = tensor
        if not persistent:
            module._non_persistent_buffers_set.add(leaf)
