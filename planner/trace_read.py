"""Read an exported fx graph into nodes: sources first, sub-graphs of autocast and no_grad regions inlined, ``getitem`` resolved.

The nodes that come out may still contain in-place ops and views; ``Raw.parent`` says which value is a view of which.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.errors import CaptureError
from planner.graph import Arg, Node, Spec, Symbol, Value, values_of
from planner.opaque import OP as OPAQUE
from planner.torch_ops import dtype_name, spec_of

ROOT = "model"
"""The name of the user's model inside the wrapper that is exported; stripped from every module path."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_INLINED = {"checkpoint", "tag_activation_checkpoint", "invoke_subgraph", "wrap", "wrap_activation_checkpoint"}


@dataclass(frozen=True)
class Unknown:
    """A number that is known only when the model runs (``.item()``, a size that depends on data). ``where``: the user's line."""

    where: str


@dataclass
class Raw:
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Arg] = field(default_factory=list)
    parent: dict[Value, Value] = field(default_factory=dict)
    """Value -> the value whose memory it shares."""
    dynamic: dict[str, str] = field(default_factory=dict)
    """Node -> the user's line, for nodes with a size that depends on data."""

    def spec(self, value: Value) -> Spec:
        return self._by_name[value.node].outputs[value.index]

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self._by_name[node.name] = node

    _by_name: dict[str, Node] = field(default_factory=dict)


def user_line(stack_trace: str | None) -> str:
    """``file:line`` of the innermost frame outside torch and this package."""
    best = ""
    for path, line in _FRAME.findall(stack_trace or ""):
        if not is_library(path):
            best = f"{short(path)}:{line}"
    return best


def is_library(path: str) -> bool:
    return "/torch/" in path or "/planner/trace" in path or path.startswith("<")


def short(path: str) -> str:
    """The last two parts of a path: enough to find the file, and the same on every machine."""
    return "/".join(path.replace("\\", "/").split("/")[-2:])


def module_path(stack: Mapping[str, tuple[str, Any]] | None) -> str:
    """The innermost module, by its path in the user's model; "" for the model itself and what lies outside it (the loss)."""
    paths = [re.sub(r"@\d+$", "", path) for path, _ in (stack or {}).values()]
    if not paths or paths[-1] == ROOT:
        return ""
    if paths[-1].startswith(ROOT + "."):
        return paths[-1].removeprefix(ROOT + ".")
    # a model whose instance has a forward of its own: export names what that calls from the model on, not from the root
    return paths[-1] if ROOT in paths else ""


class Reader:
    """Walks one exported graph. ``placeholders``: name of a placeholder -> name of the source node that it stands for."""

    def __init__(self, sources: Iterable[Node], placeholders: Mapping[str, str]) -> None:
        self.raw = Raw()
        self._placeholders = placeholders
        self._lines: dict[str, str] = {}
        for node in sources:
            self.raw.add(node)

    def read(self, graph_module: Any) -> Raw:
        bound: dict[Any, Any] = {}
        for fx_node in graph_module.graph.nodes:
            if fx_node.op == "placeholder":
                bound[fx_node] = Value(self._placeholders[fx_node.name])
        self.raw.outputs = list(self._walk(graph_module, bound, "", ""))
        return self.raw

    def _walk(self, graph_module: Any, env: dict[Any, Any], context: str, module: str) -> tuple[Any, ...]:
        for fx_node in graph_module.graph.nodes:
            if fx_node.op == "placeholder":
                continue
            if fx_node.op == "output":
                return tuple(self._arg(item, env) for item in fx_node.args[0])
            if fx_node.op == "get_attr":
                env[fx_node] = _attribute(graph_module, fx_node.target)
            else:
                env[fx_node] = self._call(fx_node, env, context, module)
        raise CaptureError("the exported graph has no output")

    def _call(self, fx_node: Any, env: dict[Any, Any], context: str, module: str) -> Any:
        target, args = fx_node.target, fx_node.args
        if target is operator.getitem:
            return _item(self._arg(args[0], env), args[1])
        if not hasattr(target, "_schema"):
            return self._call_other(fx_node, env, context, module)
        values = fx_node.meta.get("val")
        if values is None and not target._schema.returns:
            return None
        op = "shard.opaque" if str(target) == OPAQUE else str(target)
        return self._op(fx_node, op, values, env, context, module)

    def _call_other(self, fx_node: Any, env: dict[Any, Any], context: str, module: str) -> Any:
        """Higher-order ops, and Python arithmetic on sizes."""
        name = getattr(fx_node.target, "__name__", str(fx_node.target))
        inner_module = module_path(fx_node.meta.get("nn_module_stack")) or module
        args = fx_node.args
        if name == "wrap_with_set_grad_enabled":
            return self._inline(args[1], args[2:], env, enter(context, grad=bool(args[0])), inner_module)
        if name == "wrap_with_autocast":
            device, dtype, enabled = args[0], args[1], args[2]
            region = (device, dtype_name(dtype) if isinstance(dtype, torch.dtype) else None) if enabled else (device, "off")
            return self._inline(args[4], args[5:], env, enter(context, autocast=region), inner_module)
        if name in _INLINED:
            position = next(i for i, a in enumerate(args) if isinstance(env.get(a) if hasattr(a, "op") else None, torch.nn.Module))
            rest = [a for a in args[position + 1 :] if not isinstance(a, str)]
            return self._inline(args[position], rest, env, context, inner_module)
        value = fx_node.meta.get("val")
        if isinstance(value, (int, float, bool)) and not _is_symbolic(value):
            return value
        if value is None or _is_symbolic(value):
            return Unknown(self._line(fx_node))
        raise CaptureError(
            f"{self._line(fx_node) or 'the model'}: the control-flow op {name!r} in module {inner_module or 'the model'!r} cannot be "
            f"planned; write it without {name}, or name the submodule: opaque=({inner_module!r},)"
        )

    def _inline(self, body: Any, args: Iterable[Any], env: dict[Any, Any], context: str, module: str) -> tuple[Any, ...]:
        graph_module = env[body]
        inner: dict[Any, Any] = {}
        placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        for placeholder, arg in zip(placeholders, args, strict=True):
            inner[placeholder] = self._arg(arg, env)
        return self._walk(graph_module, inner, context, module)

    def _op(self, fx_node: Any, op: str, values: Any, env: dict[Any, Any], context: str, module: str) -> Any:
        name = f"n{len(self.raw.nodes)}"
        flat = list(_flat(values))
        where = self._line(fx_node)
        args, kwargs = self._arg(fx_node.args, env), tuple((k, self._arg(v, env)) for k, v in fx_node.kwargs.items())
        tensors = [item for item in flat if isinstance(item, torch.Tensor)]
        if not tensors and flat:
            return Unknown(where) if _is_symbolic(flat[0]) else flat[0]
        if any(_is_symbolic(size) for t in tensors for size in t.shape) or _unknowns(args) or _unknowns(kwargs):
            self.raw.dynamic[name] = where
            args, kwargs = _without_unknowns(args), _without_unknowns(kwargs)
        node = Node(
            name=name,
            op=op,
            args=args,
            kwargs=kwargs,
            outputs=tuple(_spec(item) for item in tensors),
            module=module_path(fx_node.meta.get("nn_module_stack")) or module,
            source=where,
            context=context,
        )
        self.raw.add(node)
        self._note_views(fx_node, node, tensors, env)
        index = 0
        out: list[Any] = []
        for item in flat:
            out.append(Value(name, index) if isinstance(item, torch.Tensor) else item)
            index += isinstance(item, torch.Tensor)
        return out[0] if isinstance(values, torch.Tensor) else tuple(out)

    def _note_views(self, fx_node: Any, node: Node, outs: list[torch.Tensor], env: dict[Any, Any]) -> None:
        owners: dict[Any, Value] = {}
        for source in fx_node.all_input_nodes:
            for value, item in zip(values_of(env.get(source)), _flat(source.meta.get("val"))):
                if isinstance(item, torch.Tensor):
                    owners.setdefault(_storage(item), value)
        for i, item in enumerate(outs):
            owner = owners.get(_storage(item))
            if owner is not None:
                self.raw.parent[Value(node.name, i)] = owner

    def _arg(self, arg: Any, env: dict[Any, Any]) -> Arg:
        if hasattr(arg, "op") and hasattr(arg, "graph"):
            return env[arg]
        if isinstance(arg, (tuple, list)):
            return tuple(self._arg(item, env) for item in arg)
        if isinstance(arg, torch.dtype):
            return Symbol("dtype", dtype_name(arg))
        if isinstance(arg, torch.device):
            return Symbol("device", arg.type)
        if isinstance(arg, torch.layout):
            return Symbol("layout", str(arg).removeprefix("torch."))
        if isinstance(arg, torch.memory_format):
            return Symbol("memory_format", str(arg).removeprefix("torch."))
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        if _is_symbolic(arg):
            return Unknown("")
        if isinstance(arg, complex):
            return arg
        raise CaptureError(f"an argument of type {type(arg).__name__} ({arg!r}) has no form in the graph")

    def _line(self, fx_node: Any) -> str:
        trace = fx_node.meta.get("stack_trace") or ""
        if trace not in self._lines:
            self._lines[trace] = user_line(trace)
        return self._lines[trace]


def enter(context: str, grad: bool | None = None, autocast: tuple[str, str | None] | None = None) -> str:
    """The context inside a region: the innermost autocast per device, and ``no_grad``."""
    parts = [part for part in context.split(";") if part]
    if grad is not None:
        parts = [part for part in parts if part != "no_grad"] + ([] if grad else ["no_grad"])
    if autocast is not None:
        device, dtype = autocast
        parts = [part for part in parts if not part.startswith(f"autocast({device},")]
        parts.append(f"autocast({device},{dtype or ('bfloat16' if device == 'cpu' else 'float16')})")
    return ";".join(sorted(parts))


def _attribute(module: Any, target: str) -> Any:
    for part in target.split("."):
        module = getattr(module, part)
    return module


def _item(container: Any, index: int) -> Any:
    if isinstance(container, Unknown):
        return container
    return container[index]


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, (tuple, list)):
        for item in values:
            yield from _flat(item)
    else:
        yield values


def _spec(tensor: torch.Tensor) -> Spec:
    if any(_is_symbolic(size) for size in tensor.shape):
        return Spec(tuple(0 if _is_symbolic(size) else int(size) for size in tensor.shape), dtype_name(tensor.dtype))
    return spec_of(tensor)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _unknowns(arg: Any) -> bool:
    return isinstance(arg, Unknown) or (isinstance(arg, tuple) and any(map(_unknowns, arg)))


def _without_unknowns(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(map(_without_unknowns, arg))
    return None if isinstance(arg, Unknown) else arg
