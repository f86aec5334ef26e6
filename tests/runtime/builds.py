"""Small seeded models for tests of the runtime: each says what it is there for. And plans for them with random legal choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from harness import Build, captured_graph
from random_plans import random_plan
from torch import Tensor, nn
from torch.nn import functional as F

from planner.blocks import segments
from planner.mesh import Mesh
from planner.micro import propagate, propagate_micro
from planner.plan import Plan
from planner.rules.base import MeshStrategy

Made = tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]], Callable[..., Tensor] | None]


class Plain(nn.Module):
    """A head that nothing uses, a class that is ignored: what a mean over valid targets has to count."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.unused = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.c(torch.tanh(self.b(torch.relu(self.a(x))))), y)


class Tied(nn.Module):
    """An embedding that is the head as well, layers that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.b, self.n = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.e.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        h = self.e(ids)
        for _ in range(2):
            h = h + self.b(torch.relu(self.a(self.n(h))))
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits.view(-1, 12), ids.view(-1)), "logits": logits}


class Buffers(nn.Module):
    """Batch norm (statistics over the global batch), a buffer of its own, one that is not saved."""

    counts: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.register_buffer("counts", torch.zeros(()))
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.counts.add_(1)
        h = torch.relu(self.norm(self.conv(x))).mean((2, 3)) * self.scale
        return F.cross_entropy(self.out(h), y)


class Dropping(nn.Module):
    """Dropout, and a frozen first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.5)
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.relu(self.a(x)))).pow(2).mean()


class Auxiliary(nn.Module):
    """A head that serves an output only: it has no gradient, but its values are wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.side = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, None]]:
        h = torch.tanh(self.a(x))
        return self.b(h).square().mean(), self.side(h), (h > 0, None)


def seeded(cls: type[nn.Module], *inputs: Callable[[], Tensor]) -> Build:
    def build() -> Made:
        torch.manual_seed(3)
        model = cls()
        return model, (tuple(make() for make in inputs), {}), None

    return build


def labels() -> Tensor:
    y = torch.randint(0, 4, (8,))
    y[0] = y[5] = -100
    return y


plain = seeded(Plain, lambda: torch.randn(8, 8), labels)
tied = seeded(Tied, lambda: torch.randint(0, 12, (8, 4)))
buffers = seeded(Buffers, lambda: torch.randn(8, 3, 4, 4), lambda: torch.randint(0, 4, (8,)))
dropping = seeded(Dropping, lambda: torch.randn(8, 8))
auxiliary = seeded(Auxiliary, lambda: torch.randn(8, 8))


def plan_of(build: Build, seed: int = 0, dtype: torch.dtype = torch.float64, fsdp: Iterable[str] | bool = (), **mesh: int) -> Plan:
    """A plan with random legal choices; ``fsdp``: names of parameters (or True, all) to be split over data by fully_shard."""
    plan = random_plan(captured_graph(build, dtype), Mesh(**mesh), seed)
    axis = plan.mesh.mesh().index("data")
    if axis is None or not fsdp:
        return plan
    changed = []
    for parameter in plan.parameters:
        if fsdp is True or parameter.name in fsdp:  # type: ignore[operator]
            types = parameter.sharding.split(",")
            types[axis] = "R"
            parameter = parameter.model_copy(update={"sharding": ",".join(types), "fsdp": True})
        changed.append(parameter)
    return plan.model_copy(update={"parameters": changed})


def natural_plan(build: Build, data: int, microbatches: int = 1, dtype: torch.dtype = torch.float64) -> Plan:
    """Plain data parallelism: the batch split everywhere, parameters whole."""
    graph, mesh = captured_graph(build, dtype), Mesh(data=data, microbatches=microbatches)
    plan = random_plan(graph, mesh, 0)
    along = {"micro": propagate_micro(graph, microbatches).strategies, "data": propagate(graph, data).strategies}
    lines = {}
    for segment in segments(graph):
        for name in segment.nodes:
            strategy = MeshStrategy(tuple(along[axis.name][name] for axis in mesh.axes))
            lines[name] = f"{graph.by_name[name].op}: {strategy}" + (f" @{strategy.kernel}" if strategy.kernel else "")
    parts = [
        part.model_copy(update={"ops": [lines[n] for n in segment.nodes]}) for part, segment in zip(plan.segments, segments(graph))
    ]
    whole = ",".join("R" for _ in mesh.axes) or "-"
    parameters = [parameter.model_copy(update={"sharding": whole}) for parameter in plan.parameters]
    return plan.model_copy(update={"segments": parts, "parameters": parameters})
