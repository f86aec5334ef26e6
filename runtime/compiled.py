"""``torch.compile`` for lowered segments: the ops between two collectives become one compiled piece.

Conversions, kernels that communicate and random ops stay as they are (the compiler is told to step around them): a collective inside a
compiled graph would be a graph of its own kind. Segments that are recomputed in the backward run uncompiled.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from runtime.stage import Stage


def step_around(stage: Stage) -> None:
    """Mark in every segment's graph what the compiler must not look into. Before hooks or other forms get hold of the forward."""
    for segment in plain_segments(stage):
        for node in segment.graph.nodes:
            module = getattr(node.target, "__module__", None) or ""
            if node.op == "call_function" and module.split(".")[0] == "runtime":
                node.target = torch.compiler.disable(node.target)
        segment.recompile()


def compile_segments(stage: Stage) -> None:
    for segment in plain_segments(stage):
        segment.compile()


def plain_segments(stage: Stage) -> Iterator[fx.GraphModule]:
    for name in stage.segment_names:
        segment = getattr(stage.module, name, None)
        # a forward of the segment's own is that of recomputation
        if isinstance(segment, fx.GraphModule) and "forward" not in segment.__dict__:
            yield segment
