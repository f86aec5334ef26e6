"""The plan: everything the runtime needs, as pure data.

A plan holds shardings, sizes and names; nothing in it names importable code, a file or a URL. It is small: ops and parameters are
written once per block class. The JSON form is canonical (sorted keys, fixed separators, finite numbers), so equal plans are equal bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from planner.mesh import Mesh

if TYPE_CHECKING:
    from planner.diff import PlanDiff

SCHEMA_VERSION = 1

Name = Annotated[str, Field(max_length=512)]
Text = Annotated[str, Field(max_length=4096)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Bytes = Annotated[int, Field(ge=0, le=10**18)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Schedule = Literal["none", "gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"]
Recompute = Literal["none", "selective", "full"]


class Part(BaseModel):
    """Base of all parts of a plan: strict, frozen, unknown fields refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", ser_json_inf_nan="strings")


class MeshPlan(Part):
    pipe: Annotated[int, Field(ge=1, le=2**20)]
    data: Annotated[int, Field(ge=1, le=2**20)]
    tensor: Annotated[int, Field(ge=1, le=2**20)]
    microbatches: Annotated[int, Field(ge=1, le=2**20)]

    def mesh(self) -> Mesh:
        return Mesh(self.pipe, self.data, self.tensor, self.microbatches)


class ModelPlan(Part):
    """What identifies the model: refused before any process group work where it differs."""

    name: Name
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    torch: Name
    loss: Literal["output", "callable", "none"]
    parameters: Annotated[dict[Name, Name], Field(max_length=200_000)]
    """Parameter name, with ``*`` for the index of an equal block, -> dtype and shape, ``float32[64,64]``."""
    inputs: Any
    """How tensors sit in (args, kwargs), with shapes and dtypes: the ``in_spec`` of ``planner.inputs``."""
    batch_dims: dict[Name, Annotated[int, Field(ge=0, le=64)]]


class SegmentPlan(Part):
    """A class of equal segments (a transformer layer), or a single stretch of the graph between them."""

    name: Name
    """Module path with ``*`` for the index, ``transformer.h.*``."""
    segments: list[Count]
    """Which segments of the graph, in execution order, are of this class."""
    ops: list[Text]
    """One line per op in execution order: ``aten.linear.default: S(0),R | R,S(0) -> S(0),S(2)``; ``@kernel`` where it has one."""
    recompute: Recompute = "none"


class ParameterPlan(Part):
    """Storage of one parameter (or, with ``*``, of the equal parameters of equal blocks)."""

    name: Name
    sharding: Name
    """One type per typed axis of the mesh (micro included, always R there): I or R is stored whole, S(d) split along d.
    R: the gradient is a pending sum, all-reduced over the axis once per step."""
    fsdp: bool = False
    """Stored split over the data axis by fully_shard and gathered for use (the type on data is R)."""


class StagePlan(Part):
    """The consecutive segments that one pipe coordinate holds: [first, last)."""

    first: Count
    last: Count


class Predicted(Part):
    step_time_s: Seconds
    peak_memory_bytes: list[Bytes]
    """Per stage, per GPU."""
    breakdown: dict[Name, Seconds]
    """Seconds by kind: compute, communication, bubble, optimizer, ...; sums to step_time_s."""
    memory: list[dict[Name, Bytes]]
    """Per stage: bytes by kind: parameters, gradients, optimizer, activations, transient; sums to the peak."""
    replicated_time_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the compute time spent in ops that run whole on every rank for want of a rule."""


class SolverReport(Part):
    status: Literal["optimal", "feasible", "forced"]
    objective: Seconds
    bound: Seconds
    gap: Annotated[float, Field(ge=0)]
    """(objective - bound) / objective."""
    seconds: Annotated[Seconds | None, Field(exclude=True)] = None
    """How long it took; None for a plan from a file: the same plan found faster is the same bytes."""
    scope: Text
    """What the bound speaks about: which meshes, micro-batch counts and cuts were searched or pruned by a bound."""
    candidates: Count = 0
    """How many (mesh, micro-batches) were considered, pruned ones included."""


class Alternative(Part):
    """A runner-up, for ``explain``."""

    what: Text
    step_time_s: Seconds | None
    """None where it does not fit or has no legal strategy."""
    why: Text = ""


class Plan(Part):
    schema_version: Literal[1] = 1
    model: ModelPlan
    mesh: MeshPlan
    schedule: Schedule
    stages: list[StagePlan]
    segments: list[SegmentPlan]
    parameters: list[ParameterPlan]
    optimizer: Name
    precision: Literal["fp32", "bf16-mixed", "fp16-mixed"]
    hardware: Name
    hardware_id: Name
    memory_per_gpu: Bytes
    predicted: Predicted
    solver: SolverReport
    alternatives: list[Alternative] = []
    warnings: list[Text] = []

    _loss: Callable[..., Any] | None = PrivateAttr(default=None)
    """The loss callable of ``auto_parallelize``, carried in memory only; a plan from a file needs ``parallelize(..., loss=...)``."""

    @property
    def world_size(self) -> int:
        return self.mesh.pipe * self.mesh.data * self.mesh.tensor

    def __eq__(self, other: object) -> bool:
        """Plans are equal where their files are; what is carried in memory only makes no difference."""
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        """One line; ``to_json`` is the form that parses back."""
        step = self.predicted.step_time_s
        return f"<Plan of {self.model.name} on {self.world_size} x {self.hardware}: {self.mesh.mesh()}, predicted step {step:.3g} s>"

    __str__ = __repr__

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the global batch that the plan was made for."""
        from planner.plan_check import input_tensors

        return input_tensors(self)

    def to_json(self) -> str:
        """Canonical JSON: equal plans are equal bytes."""
        from planner.plan_io import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Raises PlanError naming the field, its value and what is allowed there."""
        from planner.plan_io import from_json

        return from_json(text)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan aside, then rename it to ``path``."""
        from planner.plan_io import save

        return save(self, path)

    def explain(self) -> str:
        """Why each choice was made, what the runners-up would cost, what binds."""
        from planner.explain import explain

        return explain(self)

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to ``other``; prints readably, false where nothing does."""
        from planner.diff import diff

        return diff(self, other)

    def show(self, html: str | os.PathLike[str] | None = None) -> None:
        """Draw the plan in the terminal, or write it as one self-contained page to the path ``html``."""
        from planner.show import show

        show(self, html)

    def _repr_html_(self) -> str:
        from planner.show import fragment

        return fragment(self)
