"""ATen ops by name, and the shapes and dtypes that they give: run on meta tensors, so nothing is computed or allocated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from planner.errors import CaptureError
from planner.graph import Arg, Spec, Symbol, Value


@functools.cache
def overload(op: str) -> Any:
    """The ``torch.ops`` overload called ``aten.add.Tensor``. Raises CaptureError where this torch does not have it."""
    try:
        found: Any = torch.ops
        for part in op.split("."):
            found = getattr(found, part)
        return found
    except AttributeError as error:
        raise CaptureError(f"op {op} does not exist in torch {torch.__version__}; import the package that registers it") from error


def has_overload(op: str) -> bool:
    try:
        overload(op)
    except CaptureError:
        return False
    return True


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CaptureError(f"torch {torch.__version__} has no dtype {name!r}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spec_of(tensor: torch.Tensor) -> Spec:
    return Spec(tuple(int(size) for size in tensor.shape), dtype_name(tensor.dtype))


def concrete(arg: Arg, tensor: Callable[[Value], Any]) -> Any:
    """A graph argument as torch takes it: Symbols become torch constants, Values what ``tensor`` gives for them."""
    if isinstance(arg, Value):
        return tensor(arg)
    if isinstance(arg, tuple):
        return [concrete(item, tensor) for item in arg]
    if isinstance(arg, Symbol):
        return torch.device(arg.value) if arg.kind == "device" else getattr(torch, arg.value)
    return arg


def infer(op: str, args: tuple[Arg, ...], kwargs: Mapping[str, Arg], spec: Callable[[Value], Spec]) -> tuple[Spec, ...]:
    """Specs of the outputs of an ATen op on inputs of the given specs."""

    def meta(value: Value) -> torch.Tensor:
        return torch.empty(spec(value).shape, dtype=dtype_of(spec(value).dtype), device="meta")

    with torch.no_grad():
        out = overload(op)(*[concrete(arg, meta) for arg in args], **{key: concrete(arg, meta) for key, arg in kwargs.items()})
    return tuple(spec_of(item) for item in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(item, torch.Tensor))


@functools.cache
def written_arguments(op: str) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an op writes to: ``aten.add_.Tensor`` -> ((0, "self"),)."""
    if not op.startswith(("aten.", "prims.")) and not has_overload(op):
        return ()
    schema = overload(op)._schema
    return tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)


def without_out(op: str) -> str | None:
    """The overload that takes the same arguments but ``out``: ``aten.div.out`` -> ``aten.div.Tensor``."""
    packet = overload(op.rpartition(".")[0])
    wanted = [(a.name, str(a.type)) for a in overload(op)._schema.arguments if a.name != "out"]
    for name in packet.overloads():
        if [(a.name, str(a.type)) for a in getattr(packet, name)._schema.arguments] == wanted:
            return f"{op.rpartition('.')[0]}.{name}"
    return None
