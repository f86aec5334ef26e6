"""What a model returns, as data: the structure of its outputs, apart from the tensors.

Encoding: a Value; ``("const", x)``; ``("tuple", (items...))``; ``("list", (items...))``; ``("dict", ((key, item), ...))``;
``("object", "qualified.ClassName", ((field, item), ...))`` for dataclasses, named tuples, Hugging Face ``ModelOutput`` and other mappings.
The types behind the class names come from tracing in this process, never from a file.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from planner.errors import CaptureError, PlanError
from planner.graph import Arg, Value

TAGS = ("const", "tuple", "list", "dict", "object")


def encode(output: Any, leaf: Callable[[torch.Tensor], Any], types: dict[str, type]) -> Arg:
    """Encode ``output``; ``leaf`` gives what stands for a tensor, ``types`` collects the classes met.

    Raises CaptureError for an object that cannot be taken apart, naming its class.
    """
    if isinstance(output, torch.Tensor):
        return leaf(output)
    if output is None or isinstance(output, (bool, int, float, str)):
        return ("const", output)
    fields = _fields(output)
    if fields is not None:
        cls = type(output)
        name = f"{cls.__module__}.{cls.__qualname__}"
        types[name] = cls
        return ("object", name, tuple((key, encode(item, leaf, types)) for key, item in fields))
    if isinstance(output, dict):
        return ("dict", tuple((key, encode(item, leaf, types)) for key, item in output.items()))
    if isinstance(output, (tuple, list)):
        return ("list" if isinstance(output, list) else "tuple", tuple(encode(item, leaf, types) for item in output))
    raise CaptureError(
        f"the model returns an object of type {type(output).__module__}.{type(output).__qualname__}; return tensors in tuples, lists, "
        f"dicts or dataclasses (for a cache: switch it off, use_cache=False)"
    )


def _fields(output: Any) -> list[tuple[str, Any]] | None:
    """(name, value) of an object that its class can make again from keyword arguments; None for plain containers."""
    if isinstance(output, Mapping) and type(output) not in (dict, OrderedDict):
        return list(output.items())
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return [(name, getattr(output, name)) for name in output._fields]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [(f.name, getattr(output, f.name)) for f in dataclasses.fields(output)]
    return None


def is_encoded(item: Arg) -> bool:
    return isinstance(item, tuple) and len(item) >= 2 and item[0] in TAGS


def map_outputs(encoding: Arg, fn: Callable[[Value], Any]) -> Arg:
    """Replace every Value of an encoding."""
    if isinstance(encoding, Value):
        return fn(encoding)
    if encoding is None:
        return None
    tag, rest = encoding[0], encoding[1:]
    if tag == "const":
        return encoding
    if tag in ("tuple", "list"):
        return (tag, tuple(map_outputs(item, fn) for item in rest[0]))
    return (*encoding[:-1], tuple((key, map_outputs(item, fn)) for key, item in rest[-1]))


def output_values(encoding: Arg) -> list[Value]:
    """The tensor leaves, in order."""
    found: list[Value] = []
    map_outputs(encoding, lambda v: found.append(v))
    return found


def rebuild(encoding: Arg, values: Mapping[Value, Any], types: Mapping[str, type]) -> Any:
    """The model's own structure around ``values``. Raises PlanError where the class of an object was not met while tracing."""
    if isinstance(encoding, Value):
        return values[encoding]
    tag, rest = encoding[0], encoding[1:]
    if tag == "const":
        return rest[0]
    if tag == "object":
        cls = types.get(rest[0])
        if cls is None:
            raise PlanError(f"outputs hold a {rest[0]}, but this model returned only {sorted(types)}; plan again for this model")
        return cls(**{key: rebuild(item, values, types) for key, item in rest[1]})
    if tag == "dict":
        return {key: rebuild(item, values, types) for key, item in rest[0]}
    items = [rebuild(item, values, types) for item in rest[0]]
    return items if tag == "list" else tuple(items)


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss by convention: a scalar output, ``.loss``, ``["loss"]``, or a scalar first element. None where there is none."""

    def scalar(item: Any) -> torch.Tensor | None:
        return item if isinstance(item, torch.Tensor) and item.dim() == 0 and item.is_floating_point() else None

    if isinstance(output, torch.Tensor):
        return scalar(output)
    if isinstance(output, Mapping):
        named = scalar(output.get("loss"))
        first = next(iter(output.values()), None)
        return named if named is not None else scalar(first)
    named = scalar(getattr(output, "loss", None))
    if named is None and isinstance(output, (tuple, list)) and output:
        named = scalar(output[0])
    return named
