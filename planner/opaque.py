"""Submodules taken as one op: what cannot be captured (Python that depends on data, a backward of its own) runs as it is.

In the graph such a call is ``shard.opaque(key, tensors, states)``: ``tensors`` are those among its arguments, ``states`` its parameters
and buffers, and ``OpaqueCall`` runs it. No rule splits it, so every rank does all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import CaptureError, InputError
from planner.graph import Arg, Spec, Value
from planner.inputs import build, describe
from planner.outputs import encode, map_outputs, rebuild
from planner.torch_ops import dtype_of, spec_of

OP = "shardwright.opaque.default"
"""Name of the torch op that stands for a call while tracing."""

_specs: dict[str, tuple[Spec, ...]] = {}
"""Key of a call that is being traced -> what it returns."""

_library = torch.library.Library("shardwright", "DEF")
_library.define("opaque(str key, Tensor[] tensors, Tensor[] states) -> Tensor[]")


@torch.library.register_fake("shardwright::opaque")
def _fake(key: str, tensors: list[Tensor], states: list[Tensor]) -> list[Tensor]:
    device = next((t.device for t in (*tensors, *states)), torch.device("cpu"))
    return [torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=device) for spec in _specs[key]]


@dataclass(frozen=True)
class OpaqueCall:
    """One call of an opaque submodule, to be run on other tensors of the same shapes."""

    module: nn.Module
    in_spec: Any
    states: tuple[str, ...]
    """Names of its parameters and buffers, in the order of ``shard.opaque``'s last argument."""

    def __call__(self, tensors: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
        given = iter(tensors)
        args, kwargs = build(self.in_spec, lambda leaf: next(given))
        found: list[Tensor] = []
        encode(torch.func.functional_call(self.module, dict(zip(self.states, states)), args, kwargs), found.append, {})
        return found


@dataclass
class Hidden:
    """The opaque submodules of one capture."""

    calls: dict[str, OpaqueCall] = field(default_factory=dict)
    running: int = 0
    """How many of them are running right now: what they do inside is their own affair."""
    recorded: dict[str, Any] = field(default_factory=dict)
    """Key -> what a real run returned, on the meta device; empty where there was none."""


@contextlib.contextmanager
def hide(model: nn.Module, paths: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Hidden]:
    """Inside, each call of the submodules at ``paths`` is traced as one op.

    What they return is told by running them on fake tensors, or, where the model and its inputs are real, by one real run of the model.
    Raises InputError for a path that does not exist.
    """
    hidden = Hidden()
    modules = {path: _submodule(model, path) for path in paths}
    if modules and _real(model, args, kwargs):
        _record(model, modules, args, kwargs, hidden)
    own = {path: module.__dict__["forward"] for path, module in modules.items() if "forward" in module.__dict__}
    try:
        for path, module in modules.items():
            module.forward = _stand_in(path, module, module.forward, hidden)
        yield hidden
    finally:
        for path, module in modules.items():
            module.__dict__.pop("forward", None)
            if path in own:
                module.forward = own[path]
        for key in hidden.calls:
            _specs.pop(key, None)


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise InputError(f"opaque names {path!r}, and the model has no such submodule; it has {_children(model)}") from error


def _children(model: nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _stand_in(path: str, module: nn.Module, forward: Any, hidden: Hidden) -> Any:
    count = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if hidden.running:
            return forward(*args, **kwargs)
        key = f"{path}#{count}"
        count += 1
        in_spec, tensors = describe(module, args, kwargs)
        states = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        output = hidden.recorded.get(key)
        if output is None:
            output = _run(path, module, states, args, kwargs, hidden)
        flat: list[Tensor] = []
        types: dict[str, type] = {}
        encoding = encode(output, lambda t: _leaf(t, flat), types)
        _specs[key] = tuple(spec_of(t) for t in flat)
        hidden.calls[key] = OpaqueCall(module, in_spec, tuple(states))
        results = torch.ops.shardwright.opaque(key, list(tensors.values()), list(states.values()))
        return _rebuild(encoding, results, types)

    return call


def _leaf(tensor: Tensor, flat: list[Tensor]) -> Value:
    flat.append(tensor)
    return Value("output", len(flat) - 1)


def _rebuild(encoding: Arg, results: Sequence[Tensor], types: Mapping[str, type]) -> Any:
    values: dict[Value, Tensor] = {}
    map_outputs(encoding, lambda v: values.setdefault(v, results[v.index]))
    return rebuild(encoding, values, types)


def _run(path: str, module: nn.Module, states: Mapping[str, Tensor], args: Any, kwargs: Any, hidden: Hidden) -> Any:
    """What the submodule returns, from a run whose own ops nothing uses."""
    copies = {name: state.detach().clone() for name, state in states.items()}
    versions = {name: copy._version for name, copy in copies.items()}
    hidden.running += 1
    try:
        output = torch.func.functional_call(module, copies, args, kwargs)
    finally:
        hidden.running -= 1
    written = [name for name, copy in copies.items() if copy._version != versions[name]]
    if written:
        raise CaptureError(f"opaque submodule {path!r} writes to its {written[0]!r} in forward; an opaque op returns tensors only")
    return output


def _real(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    tensors = [*model.parameters(), *model.buffers(), *describe(model, args, kwargs)[1].values()]
    return not any(tensor.is_meta for tensor in tensors)


def _record(model: nn.Module, modules: Mapping[str, nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Hidden) -> None:
    """One real run, for what opaque submodules return. Buffers and random numbers are put back."""
    counts = dict.fromkeys(modules, 0)
    handles = []

    def hook(path: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            flat: list[Tensor] = []
            types: dict[str, type] = {}
            encoding = encode(output, lambda t: _leaf(t, flat), types)
            hidden.recorded[f"{path}#{counts[path]}"] = _rebuild(encoding, [t.detach().to("meta") for t in flat], types)
            counts[path] += 1

        return keep

    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        handles = [module.register_forward_hook(hook(path)) for path, module in modules.items()]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
