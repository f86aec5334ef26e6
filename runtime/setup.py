"""From a model and a plan that fit each other to this rank's state.

    1. groups along the axes, one seed, equal models on all ranks
    2. this rank's stage, lowered         (needs no process group)
    3. own parts of the parameters, as DTensors; buffers; fully_shard
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import PlanError
from planner.graph import PARAMETER, Graph, Spec
from planner.mesh import PIPE
from planner.plan import Plan
from planner.torch_ops import spec_of
from planner.trace import Captured
from runtime import compiled
from runtime.groups import Ranks, connect
from runtime.guests import invite
from runtime.lower import lower
from runtime.materialize import Source
from runtime.parameters import Held, held_parameters, install, shard_fully
from runtime.stage import Stage
from runtime.state import State, Stored, unused_parameter
from runtime.variants import Variants

Form = tuple[str, bool]
"""(mode, training) of a lowered stage."""
TRAIN, FORWARD = ("step", True), ("forward", True)


@dataclass
class Prepared:
    """Everything about one rank that ``ParallelModule`` works with."""

    plan: Plan
    captured: Captured
    ranks: Ranks
    state: State
    base: Form
    stages: dict[Form, Stage]
    """The base and, where parameters serve outputs only, the forward; others are lowered when they are first asked for."""
    variants: Variants
    seed: int


def prepare(
    model: nn.Module, plan: Plan, captured: Captured, device: torch.device, timeout_s: float, compile: bool = False
) -> Prepared:
    """Collective over all ranks of the plan."""
    ranks, graph = connect(plan.mesh.mesh(), timeout_s, device), captured.graph
    seed = agree_on_seed(ranks)
    take_first_ranks_values(model, ranks)
    source, specs = Source(model, seed), {name: spec_of(p) for name, p in model.named_parameters()}
    base = TRAIN if graph.loss is not None else FORWARD
    stage = lower(graph, plan, ranks.coordinates, mode=base[0], training=True, opaque=captured.opaque)
    stages = {base: stage}
    if compile:
        compiled.step_around(stage)
        compiled.compile_segments(stage)
    invite(stage, ranks)
    holders = across_stages(list(stage.parameters), ranks)
    install(stage, specs, source, ranks)
    install_buffers(stage, captured.constants, source, device)
    shard_fully(stage, ranks, plan.precision)
    held = held_parameters(stage, specs, holders)
    if base == TRAIN and any(node.target not in holders for node in graph.of(PARAMETER)):
        stages[FORWARD] = lower(graph, plan, ranks.coordinates, mode="forward", training=True, opaque=captured.opaque)
        held |= outputs_only(stages[FORWARD], specs, holders, source, ranks)
    held |= unused(model, holders, source, ranks)
    state = make_state(model, graph, stage, held, specs, source, ranks)
    state.unset = unset_anywhere(source, ranks)
    return Prepared(plan, captured, ranks, state, base, stages, Variants(stage), seed)


# ---------------------------------------------------------------- equal models


def agree_on_seed(ranks: Ranks) -> int:
    """The first rank's torch seed: what random ops, and models on meta, start from on all ranks."""
    seed = torch.tensor([torch.initial_seed() % 2**62], device=ranks.device)
    if ranks.groups:
        dist.broadcast(seed, group=ranks.groups["world"], group_src=0)
    return int(seed.item())


def unset_anywhere(source: Source, ranks: Ranks) -> dict[str, str]:
    """What any rank found without a value."""
    everyones: list[Any] = [source.unset]
    if ranks.groups:
        everyones = [None] * ranks.mesh.world_size
        dist.all_gather_object(everyones, source.unset, group=ranks.groups["world"])
    return {name: owner for one in everyones for name, owner in one.items()}


@torch.no_grad()
def take_first_ranks_values(model: nn.Module, ranks: Ranks) -> None:
    """Ranks that built the model from different random numbers take the first rank's, as in DistributedDataParallel."""
    tensors = [t.detach() for t in [*model.parameters(), *model.buffers()] if not t.is_meta and t.numel()]
    if not ranks.groups or not tensors:
        return
    digests = b"".join(_digest(t) for t in tensors)
    own = torch.frombuffer(bytearray(hashlib.sha256(digests).digest()), dtype=torch.uint8).to(ranks.device, torch.int64)
    first = own.clone()
    dist.broadcast(first, group=ranks.groups["world"], group_src=0)
    differs = (own != first).any().to(torch.int64)
    dist.all_reduce(differs, dist.ReduceOp.MAX, group=ranks.groups["world"])
    if not differs.item():
        return
    for tensor in tensors:
        moved = tensor.to(ranks.device).contiguous()
        as_bytes = moved.view(torch.uint8) if moved.dtype == torch.bool else moved
        dist.broadcast(as_bytes, group=ranks.groups["world"], group_src=0)
        tensor.copy_(moved)


def _digest(tensor: Tensor) -> bytes:
    """Of sums that change with any element; cheap next to moving the tensor."""
    x = tensor.to(torch.float64) if not tensor.is_complex() else torch.view_as_real(tensor).to(torch.float64)
    flat = x.reshape(-1)
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
    return f"{flat.sum().item()!r}/{torch.dot(flat, weights).item()!r}".encode()


# ---------------------------------------------------------------- parameters and buffers


def across_stages(names: list[str], ranks: Ranks) -> dict[str, tuple[int, ...]]:
    """Name -> the stages that have it."""
    lists: list[Any] = [names]
    if ranks.mesh.pipe > 1:
        lists = [None] * ranks.mesh.pipe
        dist.all_gather_object(lists, names, group=ranks.groups[PIPE])
    return {name: tuple(i for i, one in enumerate(lists) if name in one) for one in lists for name in one}


def outputs_only(
    stage: Stage, specs: Mapping[str, Spec], holders: dict[str, tuple[int, ...]], source: Source, ranks: Ranks
) -> dict[str, Held]:
    """Parameters that outputs need and the loss does not: held where the forward reads them. Adds to ``holders``."""
    extra = {name: dataclasses.replace(p, fsdp=False) for name, p in stage.parameters.items() if name not in holders}
    holders |= across_stages(list(extra), ranks)
    only = dataclasses.replace(stage, parameters=extra)
    install(only, specs, source, ranks)
    return held_parameters(only, specs, holders)


def unused(model: nn.Module, holders: dict[str, tuple[int, ...]], source: Source, ranks: Ranks) -> dict[str, Held]:
    """Parameters that nothing reads: whole, on the first stage. Adds to ``holders``."""
    names = [name for name, _ in model.named_parameters() if name not in holders]
    holders |= dict.fromkeys(names, (0,))
    parameters = dict(model.named_parameters())
    here = names if ranks.coordinates[PIPE] == 0 else []
    return {name: unused_parameter(name, parameters[name], source(name), ranks) for name in here}


def install_buffers(stage: Stage, constants: Mapping[str, Tensor], source: Source, device: torch.device) -> None:
    """Whole buffers and constants, of this rank's own. Raises PlanError for a constant without memory."""
    for table, value_of in ((stage.buffers, source), (stage.constants, constants.__getitem__)):
        for name, path in table.items():
            value = value_of(name)
            if value.is_meta:
                raise PlanError(f"constant {name!r} has no value (it is on the meta device): build the model with memory")
            put_buffer(stage.module, path, value.detach().clone().to(device))


def share_buffers(stage: Stage, constants: Mapping[str, Tensor], state: State, base: Stage) -> None:
    """Let a stage's prologue, or a further form and its prologue, read the buffers that the base reads."""
    values = {**constants, **state.buffers}
    if stage is not base:
        for name, path in [*stage.buffers.items(), *stage.constants.items()]:
            put_buffer(stage.module, path, values[name].to(state.ranks.device))
    if stage.prologue is not None:
        for name, path in stage.prologue_sources.items():
            put_buffer(stage.prologue, path, values[name].to(state.ranks.device))


def put_buffer(module: nn.Module, path: str, value: Tensor) -> None:
    owner, _, leaf = path.rpartition(".")
    module.get_submodule(owner)._buffers[leaf] = value


def make_state(
    model: nn.Module, graph: Graph, stage: Stage, held: Mapping[str, Held], specs: Mapping[str, Spec], source: Source, ranks: Ranks
) -> State:
    tables: list[Any] = [{name: (one.sharding, one.fsdp, one.stages) for name, one in held.items()}]
    if ranks.mesh.pipe > 1:
        mine, tables = tables[0], [None] * ranks.mesh.pipe
        dist.all_gather_object(tables, mine, group=ranks.groups[PIPE])
    layout = {name: entry for table in tables for name, entry in table.items()}
    stored = {name: Stored(spec, *layout[name]) for name, spec in specs.items()}
    read = {name: stage.module.get_buffer(path) for name, path in stage.buffers.items()}
    buffers = {n: read[n] if n in read else source(n).detach().clone().to(ranks.device) for n, _ in model.named_buffers()}
    in_order = {name: held[name] for name in specs if name in held}
    return State(ranks, in_order, stored, buffers, _aliases(model), tuple(model.state_dict().keys()))


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every further name of a shared parameter or buffer -> its first one."""
    first = {id(t): name for name, t in reversed([*model.named_parameters(), *model.named_buffers()])}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first[id(t)] for name, t in every if first[id(t)] != name}
