"""Writing rules by the names of an op's arguments: optional tensors and lists of tensors come and go without changing the rule.

    args = Arguments(call, "input weight bias")
    args.rule({"input": "b k", "weight": "n k", "bias": "n"}, "b n", linear=("input weight", "bias"))

An argument that is absent is left out of the rule; ``Node.inputs`` decides the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.graph import Value, values_of
from planner.rules.base import Call, Comm, Rule, Strategy, make_rule
from planner.sharding import R, Type

Dims = str | Sequence[str]
"""Dims of one argument: ``"b k"``; of a list of tensors, one text for each tensor that is there."""


class Arguments:
    """The tensor inputs of a call by the names of the op's schema, in the order of ``Node.inputs``."""

    def __init__(self, call: Call, schema: str) -> None:
        self.call = call
        names = schema.split()
        self.names: list[str] = []
        self.lists: set[str] = set()
        for name, arg in [*zip(names, call.node.args), *call.node.kwargs]:
            found = list(values_of(arg))
            self.names += [name] * len(found)
            if not isinstance(arg, Value):
                self.lists.add(name)

    def has(self, name: str) -> bool:
        return name in self.names

    def at(self, name: str) -> int:
        """Input position of a tensor argument (the first, of a list)."""
        return self.names.index(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.call.shape(self.at(name))

    def dims(self, dims: Mapping[str, Dims]) -> list[str]:
        """One dims text per tensor input, in order."""
        pending = {name: iter(dims[name]) for name in self.lists if name in dims}
        return [next(pending[name]) if name in pending else str(dims[name]) for name in self.names]

    def types(self, types: Mapping[str, Type], default: Type = R) -> tuple[Type, ...]:
        return tuple(types.get(name, default) for name in self.names)

    def extra(self, inputs: Mapping[str, Type], outputs: Sequence[Type], factor: str, kernel: str, comm: Sequence[Comm] = ()) -> Strategy:
        """A further strategy: the named inputs as given, R for the others."""
        return Strategy(self.types(inputs), tuple(outputs), factor=factor, kernel=kernel, comm=tuple(comm))

    def rule(self, dims: Mapping[str, Dims], out: str, linear: Sequence[str] = (), saves: Sequence[str] = (), **fields: Any) -> Rule:
        """The rule of this call. ``linear``: terms as names; ``saves``: names of arguments, and ``out0`` and the like."""
        terms = [[self.at(name) for name in term.split() if self.has(name)] for term in linear]
        kept = [name for name in saves if name.startswith("out")]
        kept = [f"in{i}" for i, name in enumerate(self.names) if name in saves] + kept
        text = ", ".join(text or "." for text in self.dims(dims)) + " -> " + out
        return make_rule(text, self.call, linear=[term for term in terms if term], saves=tuple(kept), **fields)


def lead(prefix: str, count: int) -> list[str]:
    """Names of ``count`` factors: b0, b1, ..."""
    return [f"{prefix}{i}" for i in range(count)]


def text(*parts: str | Sequence[str]) -> str:
    """Dims text of names and lists of names; ``.`` for a tensor without dims."""
    names = [name for part in parts for name in ([part] if isinstance(part, str) else part)]
    return " ".join(names) or "."


def broadcast(shape: Sequence[int], factors: Sequence[str], sizes: Sequence[int]) -> str:
    """Dims of a tensor that is broadcast to ``sizes``, whose dims are ``factors``."""
    skip = len(sizes) - len(shape)
    return text([factor if size == whole else "1" for size, factor, whole in zip(shape, factors[skip:], sizes[skip:])])


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that these are broadcast to (they are known to fit)."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((size for size in column if size != 1), 1) for column in zip(*padded))


def all_reduces(nbytes: int, forward: int = 0, backward: int = 0) -> tuple[Comm, ...]:
    """``forward`` and ``backward`` all-reduces of ``nbytes`` each."""
    return (Comm("all_reduce", nbytes),) * forward + (Comm("all_reduce", nbytes, "backward"),) * backward


def accumulate_bytes(dtype: str) -> int:
    """Bytes per element of a statistic over a tensor of ``dtype``: halves are summed in float32."""
    return 8 if dtype == "float64" else 4
