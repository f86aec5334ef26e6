"""The captured model: a list of nodes in execution order, plain data without torch objects.

Text form of a node::

    %linear_3: float32[4,32,192] = aten.linear.default(%ln_1, %p_w, %p_b)  # transformer.h.0.attn
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

PARAMETER, BUFFER, INPUT, CONSTANT = "parameter", "buffer", "input", "constant"
SOURCES = (PARAMETER, BUFFER, INPUT, CONSTANT)

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16, "int64": 8, "int32": 4,
    "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """Shape and dtype (torch's name without the prefix) of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, order=True)
class Value:
    """Output ``index`` of the node called ``node``."""

    node: str
    index: int = 0

    def __str__(self) -> str:
        return f"%{self.node}" + (f":{self.index}" if self.index else "")

    __repr__ = __str__


@dataclass(frozen=True)
class Symbol:
    """A torch constant in an argument list: kind is "dtype", "device", "layout" or "memory_format"."""

    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"

    __repr__ = __str__


Arg = Any
"""None, bool, int, float, str, Symbol, Value, or a tuple of these (nested)."""


def map_values(arg: Arg, fn: Callable[[Value], Any]) -> Arg:
    """Replace every Value inside a nested argument."""
    if isinstance(arg, Value):
        return fn(arg)
    if isinstance(arg, tuple):
        return tuple(map_values(item, fn) for item in arg)
    return arg


def values_of(arg: Arg) -> Iterator[Value]:
    if isinstance(arg, Value):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from values_of(item)


@dataclass(frozen=True)
class Node:
    """One op, or a source (parameter, buffer, input, constant).

    ``op``: "aten.linear.default" and the like, "shard.<name>" for the project's own ops, or one of SOURCES.
    ``target``: for a source its name in the model (``transformer.wte.weight``), the input's name, or the constant's key.
    ``grad``: per output, whether a gradient flows back through it (it depends on a trainable parameter and is differentiable).
    ``context``: "" or the regions that the op runs in, such as ``autocast(cpu,bfloat16)`` and ``no_grad``, joined by ";".
    ``module``: dotted path of the module that called the op; ``source``: the user's own line, ``file:line``.
    """

    name: str
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[Spec, ...] = ()
    grad: tuple[bool, ...] = ()
    module: str = ""
    source: str = ""
    target: str = ""
    context: str = ""

    @property
    def is_source(self) -> bool:
        return self.op in SOURCES

    @functools.cached_property
    def inputs(self) -> tuple[Value, ...]:
        """Tensor inputs in order of appearance in args, then kwargs. Rules speak of inputs by this position."""
        return tuple(values_of(self.args)) + tuple(v for _, arg in self.kwargs for v in values_of(arg))

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """The argument at a position or by keyword, as the op's schema names it."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def __str__(self) -> str:
        parts = [_show(arg) for arg in self.args] + [f"{key}={_show(arg)}" for key, arg in self.kwargs]
        if self.target:
            parts.append(repr(self.target))
        outs = ", ".join(map(str, self.outputs))
        return f"%{self.name}: {outs} = {self.op}({', '.join(parts)})" + (f"  # {self.module}" if self.module else "")


def _show(arg: Arg) -> str:
    if isinstance(arg, tuple):
        return "[" + ", ".join(map(_show, arg)) + "]"
    return repr(arg) if isinstance(arg, str) else str(arg)


@dataclass(frozen=True)
class Graph:
    """A model on one global batch.

    ``outputs``: what forward returns, as nested tuples/("dict", ((key, item), ...))/leaves, where a tensor leaf is a Value; see
    ``planner.trace`` for the exact encoding. ``loss``: the scalar that is differentiated, None for inference graphs.
    ``mutations``: buffer (or parameter) name -> the Value it holds after the step.
    ``aliases``: every further name of a tied parameter or shared buffer -> the canonical name that the source node carries.
    ``batch_dims``: input name -> its batch dim; inputs that carry no batch are absent.
    ``in_spec``: how the tensor inputs sit in (args, kwargs), JSON-able; see ``planner.trace``.
    """

    nodes: tuple[Node, ...]
    outputs: Arg = None
    loss: Value | None = None
    mutations: tuple[tuple[str, Value], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    batch_dims: tuple[tuple[str, int], ...] = ()
    in_spec: Any = field(default=None, hash=False)
    frozen: frozenset[str] = frozenset()
    """Names of parameters that do not require a gradient."""

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.nodes, self.outputs, self.loss, self.mutations))

    @functools.cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def spec(self, value: Value) -> Spec:
        return self.by_name[value.node].outputs[value.index]

    def has_grad(self, value: Value) -> bool:
        return self.by_name[value.node].grad[value.index]

    def of(self, op: str) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.op == op)

    @functools.cached_property
    def users(self) -> dict[Value, tuple[tuple[Node, int], ...]]:
        """Value -> (node, input position) of everything that reads it."""
        table: dict[Value, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for position, value in enumerate(node.inputs):
                table.setdefault(value, []).append((node, position))
        return {value: tuple(uses) for value, uses in table.items()}

    @functools.cached_property
    def parameter_dependent(self) -> frozenset[str]:
        """Names of nodes whose value depends on a parameter, or on a buffer that the step changes."""
        found: set[str] = set()
        mutated = {name for name, _ in self.mutations}
        for node in self.nodes:
            changes = node.op == PARAMETER or (node.op == BUFFER and node.target in mutated)
            if changes or any(value.node in found for value in node.inputs):
                found.add(node.name)
        return frozenset(found)

    @functools.cached_property
    def input_dependent(self) -> frozenset[str]:
        """Names of nodes whose value depends on an input."""
        found: set[str] = set()
        for node in self.nodes:
            if node.op == INPUT or any(value.node in found for value in node.inputs):
                found.add(node.name)
        return frozenset(found)

    def without_gradients(self) -> Graph:
        """The same graph for inference: nothing carries a gradient, so no tensor makes a difference between I and R."""
        return replace(self, nodes=tuple(replace(node, grad=(False,) * len(node.outputs)) for node in self.nodes))

    def fingerprint(self) -> str:
        """SHA-256 over ops, shapes, wiring and names of parameters: equal graphs, equal fingerprints, in any process."""
        digest = hashlib.sha256()
        numbers = {node.name: str(i) for i, node in enumerate(self.nodes)}
        for node in self.nodes:
            args = map_values((node.args, node.kwargs), lambda v: f"%{numbers[v.node]}:{v.index}")
            digest.update(repr((node.op, args, [str(s) for s in node.outputs], node.target, node.context)).encode())
        digest.update(repr(sorted(self.aliases)).encode())
        return digest.hexdigest()

    def __str__(self) -> str:
        return "\n".join(map(str, self.nodes))
