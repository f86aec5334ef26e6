"""Process groups along the axes of the mesh, as ``runtime.collectives`` wants them.

    ranks = connect(mesh, timeout_s)      # every rank calls it
    with collectives.use(ranks.axes): ...

Every group has the same time limit, so no wait is endless; an error names the collective, the axis and this rank's place.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from planner.errors import PlanError, WorkerError
from planner.mesh import DATA, PIPE, TENSOR, Mesh
from runtime.collectives import Group
from runtime.compat import all_gather_single, reduce_scatter_single

RANKED = (PIPE, DATA, TENSOR)
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _named(method: _Method) -> _Method:
    """A failing collective says what it was: the backend's own text only names sockets."""

    @functools.wraps(method)
    def call(self: ProcessAxis, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            raise WorkerError(f"{method.__name__} over axis {self.name} ({self.size} ranks) failed at {self.place}: {error}") from error

    return call  # type: ignore[return-value]


class ProcessAxis:
    """The processes along one axis: a ``runtime.collectives.Group``. Uneven parts are padded to the largest for the transport."""

    def __init__(self, name: str, group: dist.ProcessGroup, place: str = "") -> None:
        self.name, self.group, self.place = name, group, place
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @_named
    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        y = _real(x.detach()).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, _OPS[op], group=self.group)
        return _as(y, x)

    @_named
    def all_gather(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        if sizes[self.rank] != x.shape[dim]:
            raise WorkerError(f"all_gather over {self.name}: own part is {x.shape[dim]} long along dim {dim}, expected {sizes[self.rank]}")
        mine = _padded(_real(x.detach()).movedim(dim, 0), max(sizes))
        whole = mine.new_empty(self.size * max(sizes), *mine.shape[1:])
        all_gather_single(whole, mine, group=self.group)
        if len(set(sizes)) > 1:
            whole = torch.cat([part[:n] for part, n in zip(whole.split(max(sizes)), sizes)])
        return _as(whole.movedim(0, dim).contiguous(), x)

    @_named
    def reduce_scatter(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        whole = _real(x.detach()).movedim(dim, 0)
        parts = torch.cat([_padded(part, max(sizes)) for part in whole.split(list(sizes))])
        mine = parts.new_empty(max(sizes), *parts.shape[1:])
        reduce_scatter_single(mine, parts, group=self.group)
        return _as(mine[: sizes[self.rank]].movedim(0, dim).contiguous(), x)

    @_named
    def all_to_all(self, x: Tensor, split_dim: int, split_sizes: tuple[int, ...], join_dim: int, join_sizes: tuple[int, ...]) -> Tensor:
        real = _real(x.detach())
        parts = real.split(list(split_sizes), split_dim)
        sent = torch.cat([part.reshape(-1) for part in parts])
        shapes = []
        for length in join_sizes:
            shape = list(real.shape)
            shape[join_dim], shape[split_dim] = length, split_sizes[self.rank]
            shapes.append(torch.Size(shape))
        counts = [shape.numel() for shape in shapes]
        got = sent.new_empty(sum(counts))
        dist.all_to_all_single(got, sent, counts, [part.numel() for part in parts], group=self.group)
        return _as(torch.cat([part.view(shape) for part, shape in zip(got.split(counts), shapes)], join_dim), x)


def _real(x: Tensor) -> Tensor:
    """What the transport carries: complex numbers as pairs, booleans as bytes. Dims keep their places."""
    if x.is_complex():
        return torch.view_as_real(x)
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _as(y: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(y.contiguous())
    return y.view(torch.bool) if like.dtype == torch.bool else y


def _padded(x: Tensor, length: int) -> Tensor:
    """``x`` with zeros after it along dim 0."""
    if x.shape[0] == length:
        return x.contiguous()
    y = x.new_zeros(length, *x.shape[1:])
    y[: x.shape[0]] = x
    return y


# ---------------------------------------------------------------- this rank among the others


@dataclass(frozen=True)
class Ranks:
    """Where this process stands, and the groups that it belongs to. One process without a process group has none of them."""

    mesh: Mesh
    rank: int
    device: torch.device
    timeout_s: float
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """"pipe", "data", "tensor": the ranks along an axis; "stage": all ranks of this rank's stage; "world": all."""
    device_mesh: DeviceMesh | None = None
    """(data, tensor) of this stage, what DTensor parameters lie on."""

    @functools.cached_property
    def coordinates(self) -> dict[str, int]:
        return self.mesh.coordinates(self.rank)

    @functools.cached_property
    def place(self) -> str:
        """For errors: ``rank 3 (pipe 1, data 0, tensor 1)``."""
        return f"rank {self.rank} ({', '.join(f'{axis} {at}' for axis, at in self.coordinates.items())})"

    @functools.cached_property
    def axes(self) -> dict[str, Group]:
        """For ``collectives.use``."""
        return {name: ProcessAxis(name, self.groups[name], self.place) for name in (DATA, TENSOR) if name in self.groups}

    def along(self, axis: str) -> list[int]:
        """Global ranks that differ from this one on ``axis`` only ("stage": on data and tensor)."""
        return lines(self.mesh, axis)[self.rank]

    def stage_group(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """The ranks at this rank's place in some stages; None on other stages. Collective over all ranks."""
        pipes = {tuple(line[stage] for stage in stages) for line in lines(self.mesh, PIPE).values()}
        return _own_group(sorted(pipes), self.rank, self.timeout_s)


def lines(mesh: Mesh, axis: str) -> dict[int, list[int]]:
    """Rank -> the ranks along ``axis`` through it ("stage": all of its stage; "world": all)."""
    fixed = {PIPE: (DATA, TENSOR), DATA: (PIPE, TENSOR), TENSOR: (PIPE, DATA), "stage": (PIPE,), "world": ()}[axis]
    places = {rank: tuple(mesh.coordinates(rank)[other] for other in fixed) for rank in range(mesh.world_size)}
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, place in places.items():
        members.setdefault(place, []).append(rank)
    return {rank: members[place] for rank, place in places.items()}


def connect(mesh: Mesh, timeout_s: float, device: torch.device) -> Ranks:
    """The groups of this rank; collective over all ranks, unless the mesh has one rank and no process group is up."""
    if not dist.is_initialized():
        return Ranks(mesh, 0, device, timeout_s)
    rank = dist.get_rank()
    alone = Ranks(mesh, rank, device, timeout_s)
    groups = {}
    for axis in (*RANKED, "stage", "world"):
        own = _own_group(sorted({tuple(line) for line in lines(mesh, axis).values()}), rank, timeout_s)
        assert own is not None
        groups[axis] = own
    layout = torch.tensor(alone.along("stage")).view(mesh.data, mesh.tensor)
    device_mesh = DeviceMesh.from_group([groups[DATA], groups[TENSOR]], device.type, layout, mesh_dim_names=(DATA, TENSOR))
    return Ranks(mesh, rank, device, timeout_s, groups, device_mesh)


def _own_group(families: Sequence[Sequence[int]], rank: int, timeout_s: float) -> dist.ProcessGroup | None:
    """Every rank makes every group, in the same order: torch numbers groups by how many a rank has made (with
    ``use_local_synchronization`` too, which hangs where members have made different numbers)."""
    own = None
    for ranks in families:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
        own = group if rank in ranks else own
    return own


def check_world(world_size: int) -> None:
    """Raises PlanError, on every rank and before any collective, where the plan was made for another number of processes."""
    running = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if running != world_size:
        raise PlanError(
            f"the plan was made for {world_size} process{'es' * (world_size != 1)}, {running} {'are' if running != 1 else 'is'} running: "
            f"start it with `torchrun --nproc-per-node={world_size} ...` or runtime.launch, or plan again with gpus={running}"
        )


def start_world(world_size: int, timeout_s: float, device: torch.device) -> None:
    """Start the process group that torchrun's environment describes, where none is up yet."""
    if not dist.is_initialized() and world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def check_same_plan(plan_json: str) -> None:
    """Raises PlanError, on every rank, where ranks were given different plans (each planned for itself, say): they would wait for
    each other for ever."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = hashlib.sha256(plan_json.encode()).hexdigest()[:12]
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if len(set(found)) > 1:
        other = next(rank for rank, digest in enumerate(found) if digest != found[0])
        raise PlanError(
            f"rank 0 was given plan {found[0]}, rank {other} plan {found[other]}: plan on one rank and give all ranks its plan "
            "(a plan file, or torch.distributed.broadcast_object_list)"
        )


def home_device(uses_cuda: bool) -> torch.device:
    """The device of this process: its own GPU where the group (or, alone, the model) uses CUDA, else the CPU."""
    if dist.is_initialized():
        uses_cuda = "nccl" in dist.get_backend() or "nccl" in str(dist.get_backend_config())
    elif "LOCAL_RANK" in os.environ:
        uses_cuda = torch.cuda.is_available() and torch.cuda.device_count() > int(os.environ["LOCAL_RANK"])
    if not uses_cuda:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
