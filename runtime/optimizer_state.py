"""An optimizer's state, by the names of parameters instead of their numbers: what makes it loadable in any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from runtime.errors import CheckpointError
from runtime.parameters import Held, local_of
from runtime.parts import Part
from runtime.state import State


@dataclass
class OptimizerState:
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Parameter name -> field -> this rank's part, shaped as its part of the parameter (``exp_avg``)."""
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parameter name -> field -> number (``step``)."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Options of each parameter group."""


def optimizer_state(state: State, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Raises CheckpointError for an optimizer that keeps something else than numbers and tensors of the parameters' shapes."""
    found = OptimizerState(groups=[{k: _plain(k, v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    members = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for name, held in state.held.items():
        if id(held.parameter) not in members:
            continue
        values: dict[str, Any] = {"group": members[id(held.parameter)]}
        for key, value in optimizer.state.get(held.parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() == 0 and held.parameter.dim() > 0:
                values[key] = {"number": local_of(value).item(), "dtype": str(value.dtype).removeprefix("torch.")}
            elif isinstance(value, Tensor) and tuple(local_of(value).shape) == tuple(held.local.shape):
                found.tensors.setdefault(name, {})[key] = local_of(value)
            elif value is None or isinstance(value, (bool, int, float)):
                values[key] = value
            else:
                kind = f"{type(optimizer).__name__} keeps {key!r} of {name} as {type(value).__name__}"
                raise CheckpointError(f"{kind}, which no checkpoint can hold")
        found.values[name] = values
    return found


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(key, item) for item in value]
    raise CheckpointError(f"option {key!r} of the optimizer is a {type(value).__name__}, which no checkpoint can hold")


def load_optimizer(
    state: State,
    optimizer: torch.optim.Optimizer,
    values: Mapping[str, Mapping[str, Any]],
    groups: list[dict[str, Any]],
    fields_of: Callable[[str, Part], dict[str, Tensor]],
) -> None:
    """Options of the groups, and every parameter's state in this rank's layout."""
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(f"the optimizer has {len(optimizer.param_groups)} parameter groups, the checkpoint {len(groups)}")
    for mine, saved in zip(optimizer.param_groups, groups):
        for key, value in saved.items():
            if key in mine:
                mine[key] = tuple(value) if isinstance(mine[key], tuple) else value
    for name, held in state.held.items():
        if name not in values:
            continue
        entry: dict[str, Any] = {}
        for key, value in values[name].items():
            if key != "group":
                entry[key] = _number(value)
        for key, local in fields_of(name, held.part(state.ranks)).items():
            entry[key] = _like(local.to(state.ranks.device), held)
        if entry:
            optimizer.state[held.parameter] = entry


def _number(value: Any) -> Any:
    if isinstance(value, Mapping):
        return torch.tensor(value["number"], dtype=getattr(torch, str(value["dtype"])))
    return value


def _like(local: Tensor, held: Held) -> Tensor:
    """The part as the parameter's own kind of tensor."""
    data = held.parameter.detach()
    if not isinstance(data, DTensor):
        return local
    return DTensor.from_local(local, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride())
