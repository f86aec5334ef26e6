"""One line of a plan's op list, as a value: ``aten.linear.default: S(0),R | R,S(0) -> S(0),S(2) @kernel``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.errors import PlanError, ReshardError
from planner.rules.base import parse_mesh_strategy, show_mesh_strategy
from planner.sharding import Sharding, Type

_LINE = re.compile(r"([A-Za-z_][\w.]*): (.*?)(?: @([A-Za-z_]\w*))?")


@dataclass(frozen=True)
class OpLine:
    """An op, the sharding of each input and output (one type per typed axis of the mesh), and its kernel ("" for the op itself)."""

    op: str
    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    kernel: str = ""

    @staticmethod
    def parse(text: str) -> OpLine:
        """Raises PlanError for a line of another form or with an unknown type in it."""
        match = _LINE.fullmatch(text)
        if not match or match[2].count("->") != 1:
            raise PlanError("expected '<op>: <inputs> -> <outputs>', such as 'aten.relu.default: S(0) -> S(0)'")
        try:
            inputs, outputs = parse_mesh_strategy(match[2])
        except ReshardError as error:
            raise PlanError(str(error)) from None
        return OpLine(match[1], inputs, outputs, match[3] or "")

    def __str__(self) -> str:
        return f"{self.op}: {show_mesh_strategy(self.inputs, self.outputs)}" + (f" @{self.kernel}" if self.kernel else "")

    @property
    def name(self) -> str:
        """The op without namespace and overload: ``linear``."""
        parts = self.op.split(".")
        return parts[1] if len(parts) > 1 else parts[0]

    def on_axis(self, axis: int) -> tuple[tuple[Type, ...], tuple[Type, ...]]:
        """Types of inputs and outputs on one axis, by its position among the typed axes."""
        return tuple(s[axis] for s in self.inputs), tuple(s[axis] for s in self.outputs)
