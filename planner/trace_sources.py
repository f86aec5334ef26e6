"""Sources of a graph: the tensors of the model, under their own names, and what an exported program calls them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from planner.errors import CaptureError, InputError
from planner.graph import BUFFER, CONSTANT, PARAMETER, Node
from planner.torch_ops import spec_of
from planner.trace_read import ROOT


@dataclass
class Sources:
    """The parameters and buffers of a model, one node per tensor, under their first name."""

    nodes: list[Node] = field(default_factory=list)
    by_name: dict[str, str] = field(default_factory=dict)
    """Every name -> name of the node."""
    aliases: dict[str, str] = field(default_factory=dict)

    def canonical(self, name: str) -> str:
        return self.aliases.get(name, name)


def model_sources(model: nn.Module) -> Sources:
    found = Sources()
    first: dict[int, Node] = {}
    named: list[tuple[str, str, torch.Tensor]] = [(PARAMETER, n, p) for n, p in model.named_parameters(remove_duplicate=False)]
    named += [(BUFFER, n, b) for n, b in model.named_buffers(remove_duplicate=False)]
    for kind, name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(f"parameter {name!r} has no shape yet; call the model once on real inputs to initialise its lazy modules")
        if id(tensor) in first:
            found.aliases[name] = first[id(tensor)].target
        else:
            trains = kind == PARAMETER and tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
            first[id(tensor)] = Node(f"{kind}.{name}", kind, outputs=(spec_of(tensor),), grad=(trains,), target=name)
            found.nodes.append(first[id(tensor)])
        found.by_name[name] = first[id(tensor)].name
    return found


def placeholders_of(program: Any, sources: Sources, inputs: list[Node]) -> tuple[dict[str, torch.Tensor], dict[str, str], list[Node]]:
    """(values of constants, placeholder -> source node, nodes of constants) from the signature of an exported program."""
    constants: dict[str, torch.Tensor] = {}
    table: dict[str, str] = {}
    extra: list[Node] = []
    remaining = iter(inputs)
    for item in program.graph_signature.input_specs:
        placeholder, target = item.arg.name, (item.target or "")
        name = target.removeprefix(ROOT + ".")
        if item.kind.name == "USER_INPUT":
            table[placeholder] = next(remaining).name
        elif target.startswith(ROOT + ".") and name in sources.by_name:
            table[placeholder] = sources.by_name[name]
        else:
            value = program.constants[target] if target in program.constants else program.state_dict[target]
            if isinstance(value, nn.Parameter) and value.requires_grad:
                raise InputError(f"the loss has a trainable parameter {target!r}; make it a parameter of the model")
            key = f"constant_{len(extra)}"
            constants[key] = value.detach()
            extra.append(Node(f"constant.{key}", CONSTANT, outputs=(spec_of(value),), grad=(False,), target=key))
            table[placeholder] = extra[-1].name
    return constants, table, extra
