"""Passes over the whole list of nodes: what is alive, what carries gradient, final names."""

from __future__ import annotations

from dataclasses import replace

from planner.errors import CaptureError
from planner.graph import BUFFER, CONSTANT, INPUT, PARAMETER, Node, Value, map_values

NO_GRADIENT = {
    "detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full",
    "new_empty", "bernoulli", "histc", "valid_count", "nextafter", "heaviside_", "one_hot", "multinomial", "normal",
}  # fmt: skip
"""Ops whose float outputs carry no gradient although an input does."""


def live(nodes: list[Node], wanted: list[Value]) -> list[Node]:
    """The nodes that ``wanted`` needs, and every source that belongs to the model or the call (constants only where used)."""
    needed = {value.node for value in wanted}
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(value.node for value in node.inputs)
    return [node for node in nodes if node.name in needed or node.op in (PARAMETER, BUFFER, INPUT)]


def mark_gradients(nodes: list[Node]) -> list[Node]:
    """Set ``grad``: an output carries gradient where it is floating, differentiable, and depends on a trainable parameter."""
    carries: set[Value] = set()
    marked = []
    for node in nodes:
        if node.is_source:
            grad = node.grad or (False,)
        else:
            upstream = any(value in carries for value in node.inputs)
            grad = tuple(upstream and _differentiable(node, i) for i in range(len(node.outputs)))
        node = replace(node, grad=grad)
        carries.update(Value(node.name, i) for i, g in enumerate(grad) if g)
        marked.append(node)
    return marked


def _differentiable(node: Node, index: int) -> bool:
    name = node.op.split(".")[1]
    if not node.outputs[index].is_float or name in NO_GRADIENT or "no_grad" in node.context:
        return False
    return not (name in ("batch_norm", "instance_norm") and index > 0)


def drop_idle_detach(nodes: list[Node]) -> tuple[list[Node], dict[Value, Value]]:
    """A detach of a value without gradient does nothing."""
    carries = {Value(node.name, i) for node in nodes for i, g in enumerate(node.grad) if g}
    env: dict[Value, Value] = {}
    kept = []
    for node in nodes:
        node = substitute(node, env)
        if node.op == "aten.detach.default" and node.args[0] not in carries:
            env[Value(node.name)] = node.args[0]
        else:
            kept.append(node)
    return kept, env


def substitute(node: Node, env: dict[Value, Value]) -> Node:
    def new(value: Value) -> Value:
        return env.get(value, value)

    return replace(node, args=map_values(node.args, new), kwargs=tuple((k, map_values(a, new)) for k, a in node.kwargs))


def rename(nodes: list[Node]) -> tuple[list[Node], dict[Value, Value]]:
    """Names by op and order (``linear_3``), after sources named by their target: equal in every process."""
    taken: set[str] = set()
    counts: dict[str, int] = {}
    env: dict[Value, Value] = {}
    renamed = []
    for node in nodes:
        base = _source_name(node) if node.is_source else node.op.split(".")[1]
        name = base
        while name in taken:
            counts[base] = counts.get(base, 0) + 1
            name = f"{base}_{counts[base]}"
        taken.add(name)
        for i in range(len(node.outputs)):
            env[Value(node.name, i)] = Value(name, i)
        renamed.append(replace(substitute(node, env), name=name))
    return renamed, env


_PREFIX = {PARAMETER: "p", BUFFER: "b", INPUT: "x", CONSTANT: "c"}


def _source_name(node: Node) -> str:
    return f"{_PREFIX[node.op]}_" + "".join(c if c.isalnum() else "_" for c in node.target)


def check_static(nodes: list[Node], dynamic: dict[str, str]) -> None:
    """Raises CaptureError where a size that depends on data is left in the graph."""
    for node in nodes:
        if node.name in dynamic:
            raise CaptureError(
                f"{dynamic[node.name] or node.source or 'the model'} (module {node.module!r}): {node.op} has a size that depends on the "
                f"data, and a plan needs fixed shapes; use a form of fixed size (a mask instead of a selection), or name the submodule: "
                f"opaque=({node.module!r},)"
            )
