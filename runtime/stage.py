"""What lowering produces: one stage, ready to run, with everything the runtime has to know about it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from planner.graph import Spec, Value
from planner.sharding import Sharding, Type


@dataclass(frozen=True)
class Crossing:
    """An activation that crosses a stage border: local shape and dtype, and whether a gradient comes back."""

    value: Value
    spec: Spec
    grad: bool


@dataclass(frozen=True)
class StageParameter:
    """A parameter that the stage reads. ``path``: attribute path in the stage's module (``seg_3.p_0``), to be installed."""

    path: str
    sharding: Sharding
    """One type per typed axis; on micro always R."""
    fsdp: bool
    sync_axes: tuple[str, ...]
    """Ranked axes over which the gradient is a pending sum, all-reduced once per step (not those that fully_shard serves)."""
    local_shape: tuple[int, ...]
    """After the tensor and data splits that the types say; fully_shard splits further."""
    trainable: bool


@dataclass(frozen=True)
class OutputPart:
    """A tensor leaf of the model's output, or what one is made of (``runtime.epilogue``): whole on every ranked axis.
    ``micro`` says how micro-batches join (S: cat, P: sum, R: any)."""

    value: Value
    micro: Type


@dataclass
class Stage:
    """``module(*received, *inputs, *prologue, micro)`` -> ``(*sends, *results, *mutations)``, all local tensors.

    ``results``: the loss alone (mode "step", last stage), or the output parts (mode "forward", last stage), else nothing.
    ``prologue(*prologue_inputs, micro)`` -> tensors to be summed over all micro-batches before the first one runs; the sums are then
    arguments of every call (denominators of means over uneven micro-batches).
    """

    index: int
    count: int
    module: torch.fx.GraphModule
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]
    inputs: tuple[str, ...]
    prologue: torch.fx.GraphModule | None
    prologue_inputs: tuple[str, ...]
    has_loss: bool
    outputs: tuple[OutputPart, ...]
    mutations: tuple[str, ...]
    parameters: dict[str, StageParameter] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    prologue_sources: dict[str, str] = field(default_factory=dict)
    """Buffers and constants that the prologue reads: name -> attribute path on ``prologue``."""
    segment_names: tuple[str, ...] = ()
    """Attribute names of the segments in order, ``seg_0``, ..."""
