"""Runs a Graph on real tensors, one op after another: the reference that says what a captured graph means."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from planner.graph import BUFFER, CONSTANT, INPUT, PARAMETER, Graph, Node, Value
from planner.inputs import bind, normalise
from planner.outputs import find_loss, rebuild
from planner.torch_ops import concrete, dtype_of, overload
from planner.trace import capture
from runtime.ops import OPS


@contextlib.contextmanager
def region(context: str) -> Any:
    with contextlib.ExitStack() as stack:
        for part in filter(None, context.split(";")):
            if part == "no_grad":
                stack.enter_context(torch.no_grad())
            elif match := re.fullmatch(r"autocast\((\w+),(\w+)\)", part):
                dtype = None if match[2] == "off" else dtype_of(match[2])
                stack.enter_context(torch.autocast(match[1], dtype=dtype, enabled=dtype is not None))
            else:
                raise ValueError(part)
        yield


def run(
    graph: Graph,
    state: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    check: bool = True,
    opaque: Mapping[str, Any] | None = None,
) -> dict[Value, torch.Tensor]:
    """Every value of the graph. ``check``: shapes, dtypes and grad flags are compared with what the nodes say."""
    values: dict[Value, torch.Tensor] = {}
    for node in graph.nodes:
        if node.op in (PARAMETER, BUFFER):
            outs: tuple[Any, ...] = (state[node.target],)
        elif node.op == INPUT:
            outs = (inputs[node.target],)
        elif node.op == CONSTANT:
            outs = (constants[node.target],)
        else:
            outs = _call(node, values, opaque or {})
        if check:
            compare(node, outs)
        for i, out in enumerate(outs):
            values[Value(node.name, i)] = out
    return values


def _call(node: Node, values: Mapping[Value, torch.Tensor], opaque: Mapping[str, Any]) -> tuple[Any, ...]:
    function = (lambda key, *rest: opaque[key](*rest)) if node.op == "shard.opaque" else OPS.get(node.op) or overload(node.op)
    args = [concrete(arg, values.__getitem__) for arg in node.args]
    kwargs = {key: concrete(arg, values.__getitem__) for key, arg in node.kwargs}
    with region(node.context):
        out = function(*args, **kwargs)
    items = out if isinstance(out, (tuple, list)) else (out,)
    flat = [x for item in items for x in (item if isinstance(item, (tuple, list)) else (item,))]
    return tuple(item for item in flat if isinstance(item, torch.Tensor))


def compare(node: Node, outs: tuple[Any, ...]) -> None:
    assert len(outs) == len(node.outputs), f"{node}: {len(outs)} outputs"
    for i, (out, spec) in enumerate(zip(outs, node.outputs)):
        assert tuple(out.shape) == spec.shape, f"{node}: output {i} has shape {tuple(out.shape)}"
        assert str(out.dtype) == f"torch.{spec.dtype}", f"{node}: output {i} is {out.dtype}"
        if "no_grad" in node.context:
            continue  # views of a leaf report requires_grad there, though no gradient flows
        assert out.requires_grad == node.grad[i], f"{node}: output {i} requires_grad={out.requires_grad}, the graph says {node.grad[i]}"


def assert_same(
    model: torch.nn.Module,
    inputs: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    tolerance: float = 1e-12,
    opaque: Sequence[str] = (),
) -> Graph:
    """Capture ``model`` and compare loss, outputs, gradients and buffers of graph and model. Returns the graph."""
    twin = copy.deepcopy(model)
    args, kwargs = normalise(inputs)
    captured = capture(twin, inputs, loss, opaque=opaque)
    graph = captured.graph
    output = model(*args, **kwargs)
    expected = loss(output) if loss is not None else find_loss(output)
    state = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    values = run(graph, state, bind(graph.in_spec, args, kwargs), captured.constants, opaque=captured.opaque)

    def close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)

    if expected is not None:
        assert graph.loss is not None
        close(values[graph.loss], expected)
        if expected.requires_grad:
            expected.backward()
            values[graph.loss].backward()
    rebuilt = rebuild(graph.outputs, values, captured.output_types)
    assert type(rebuilt) is type(output)
    torch.testing.assert_close(_plain(rebuilt), _plain(output), rtol=tolerance, atol=tolerance)
    for (name, mine), theirs in zip(twin.named_parameters(), model.parameters()):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            close(mine.grad, theirs.grad)
    changed = dict(graph.mutations)
    for name, buffer in model.named_buffers():
        close(values[changed[name]] if name in changed else state[name], buffer)
    return graph


def _plain(item: Any) -> Any:
    """Objects and mappings as lists of (key, value), so that they compare field by field."""
    if hasattr(item, "items"):
        return [_plain(value) for _, value in item.items()]
    if isinstance(item, (tuple, list)):
        return [_plain(value) for value in item]
    return item.detach() if isinstance(item, torch.Tensor) else torch.tensor(hash(item) % 2**31)
