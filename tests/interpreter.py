"""Runs a Graph on real tensors, one op after another: the reference that says what a captured graph means."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import torch

from planner.graph import BUFFER, CONSTANT, INPUT, PARAMETER, Graph, Node, Value
from planner.torch_ops import concrete, dtype_of, overload


def valid_count(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype) -> torch.Tensor:
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(dtype)
    return torch.where(valid, weight[torch.where(valid, target, 0)], torch.zeros((), dtype=weight.dtype)).sum().to(dtype)


def batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> tuple[Any, Any, Any]:
    new_mean = mean.clone() if mean is not None else x.new_zeros(x.shape[1])
    new_var = var.clone() if var is not None else x.new_ones(x.shape[1])
    stats = (new_mean, new_var) if mean is not None else (None, None)
    y = torch.nn.functional.batch_norm(x, *stats, weight, bias, training, momentum, eps)
    return y, new_mean, new_var


OPS = {"shard.valid_count": valid_count, "shard.batch_norm": batch_norm}


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
            outs = _call(node, values)
        if check:
            compare(node, outs)
        for i, out in enumerate(outs):
            values[Value(node.name, i)] = out
    return values


def _call(node: Node, values: Mapping[Value, torch.Tensor]) -> tuple[Any, ...]:
    function = OPS.get(node.op) or overload(node.op)
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
