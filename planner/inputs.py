"""A model's inputs: found by themselves where possible, normalised, and described as data.

``in_spec`` is a JSON-able tree: ``{"args": [...], "kwargs": pairs}`` with leaves ``{"tensor": name, "shape": [...], "dtype": "..."}``,
``{"value": None | bool | int | float | str}``, and inner nodes ``{"list": [...]}``, ``{"tuple": [...]}``, ``{"dict": pairs}``, where
``pairs`` are ``[[key, node], ...]``: their order is the model's to use, and JSON objects have none.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from planner.errors import InputError, PlanError
from planner.torch_ops import dtype_name, dtype_of

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def normalise(example_inputs: Any) -> Inputs:
    """(args, kwargs) of a tensor, a tuple or list of arguments, a dict of keyword arguments, or a pair (args, kwargs)."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        pair = len(example_inputs) == 2
        if pair and isinstance(example_inputs[0], (tuple, list)) and isinstance(example_inputs[1], Mapping):
            return tuple(example_inputs[0]), dict(example_inputs[1])
        return tuple(example_inputs), {}
    raise InputError(
        f"example_inputs is a {type(example_inputs).__name__}; pass a tuple of arguments, a dict of keyword arguments, or (args, kwargs)"
    )


def describe(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(in_spec, name -> tensor). Names are the arguments' own (``input_ids``), with the path inside containers (``masks_0``)."""
    found: dict[str, torch.Tensor] = {}
    names = _argument_names(model, len(args))
    spec = {
        "args": [_describe(arg, name, found) for arg, name in zip(args, names)],
        "kwargs": [[key, _describe(arg, key, found)] for key, arg in kwargs.items()],
    }
    return spec, found


def _argument_names(model: nn.Module, count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    star = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "arg")
    return names[:count] + [f"{star}_{i}" for i in range(count - len(names))]


def _describe(item: Any, name: str, found: dict[str, torch.Tensor]) -> dict[str, Any]:
    if isinstance(item, torch.Tensor):
        unique, count = name, 0
        while unique in found:
            count += 1
            unique = f"{name}_{count}"
        found[unique] = item
        return {"tensor": unique, "shape": [int(size) for size in item.shape], "dtype": dtype_name(item.dtype)}
    if item is None or isinstance(item, (bool, int, float, str)):
        return {"value": item}
    if isinstance(item, Mapping):
        if not all(isinstance(key, str) for key in item):
            raise InputError(f"input {name!r}: a dict with keys that are no strings: {list(item)[:3]}")
        return {"dict": [[key, _describe(value, f"{name}_{key}", found)] for key, value in item.items()]}
    if isinstance(item, (list, tuple)):
        container = "list" if isinstance(item, list) else "tuple"
        return {container: [_describe(value, f"{name}_{i}", found) for i, value in enumerate(item)]}
    raise InputError(
        f"input {name!r} is a {type(item).__module__}.{type(item).__qualname__}; inputs are tensors, numbers, strings, None, "
        f"and lists, tuples or dicts of these"
    )


def build(in_spec: Mapping[str, Any], leaf: Callable[[Mapping[str, Any]], Any]) -> Inputs:
    """(args, kwargs) of an in_spec, with ``leaf`` making each tensor from its leaf entry."""

    def make(item: Mapping[str, Any]) -> Any:
        if "tensor" in item:
            return leaf(item)
        if "value" in item:
            return item["value"]
        if "dict" in item:
            return {key: make(value) for key, value in item["dict"]}
        if "list" in item:
            return [make(value) for value in item["list"]]
        if "tuple" in item:
            return tuple(make(value) for value in item["tuple"])
        raise PlanError(f"inputs of the plan hold an unknown entry {sorted(item)}; expected tensor, value, list, tuple or dict")

    return tuple(make(item) for item in in_spec["args"]), {key: make(item) for key, item in in_spec["kwargs"]}


def inputs_from_spec(in_spec: Mapping[str, Any], device: str = "meta") -> Inputs:
    """Zeros of the planned shapes (valid numbers and indices alike); on the meta device they take no memory."""
    return build(in_spec, lambda leaf: torch.zeros(leaf["shape"], dtype=dtype_of(leaf["dtype"]), device=device))


def bind(
    in_spec: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], model: nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """Name -> tensor of a call. Keyword arguments come in any order; with ``model``, an argument planned by position may come by
    keyword and the other way round.

    Raises PlanError where a shape, dtype, constant or structure is not the planned one, naming both.
    """
    found: dict[str, torch.Tensor] = {}
    args, kwargs = _as_planned(in_spec, args, dict(kwargs), model)
    if len(args) != len(in_spec["args"]):
        raise PlanError(f"{len(args)} positional inputs, the plan was made for {len(in_spec['args'])}")
    for i, (item, spec) in enumerate(zip(args, in_spec["args"])):
        _bind(item, spec, spec.get("tensor", f"argument {i}"), found)
    planned = dict(in_spec["kwargs"])
    if unknown := sorted(set(kwargs) - set(planned)):
        unexpected = [key for key in unknown if kwargs[key] is not None]
        if unexpected:
            raise PlanError(f"inputs {unexpected} are not in the plan, which was made for {sorted(planned)}; plan again with them")
    for key, spec in planned.items():
        if key not in kwargs and "value" not in spec:
            raise PlanError(f"input {key!r} is missing; the plan was made for {sorted(planned)}")
        if key in kwargs:
            _bind(kwargs[key], spec, key, found)
    return found


def _as_planned(in_spec: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module | None) -> Inputs:
    wanted = len(in_spec["args"])
    if model is None or len(args) == wanted:
        return args, kwargs
    names = _argument_names(model, max(len(args), wanted))
    by_name = dict(zip(names, args)) | kwargs
    positional = names[:wanted]
    if any(name not in by_name for name in positional):
        return args, kwargs
    return tuple(by_name.pop(name) for name in positional), by_name


def _bind(item: Any, spec: Mapping[str, Any], name: str, found: dict[str, torch.Tensor]) -> None:
    if "tensor" in spec:
        want = f"{spec['dtype']}{list(spec['shape'])}"
        if not isinstance(item, torch.Tensor):
            raise PlanError(f"input {name!r} is a {type(item).__name__}, the plan was made for a tensor {want}")
        have = f"{dtype_name(item.dtype)}{list(item.shape)}"
        if have != want:
            raise PlanError(f"input {name!r} is {have}, the plan was made for {want}; give the planned shape, or plan again with this one")
        found[spec["tensor"]] = item
        return
    if "value" in spec:
        if isinstance(item, torch.Tensor) or item != spec["value"] or type(item) is not type(spec["value"]):
            shown = f"a tensor {dtype_name(item.dtype)}{list(item.shape)}" if isinstance(item, torch.Tensor) else repr(item)
            raise PlanError(f"input {name!r} is {shown}, the plan was made for {spec['value']!r}; plan again with the other value")
        return
    kind = next(iter(spec))
    inner = dict(spec[kind]) if kind == "dict" else spec[kind]
    if kind == "dict":
        if not isinstance(item, Mapping) or set(item) != set(inner):
            keys = sorted(item) if isinstance(item, Mapping) else type(item).__name__
            raise PlanError(f"input {name!r} is {keys}, the plan was made for a dict with keys {sorted(inner)}")
        for key, value in inner.items():
            _bind(item[key], value, f"{name}.{key}", found)
        return
    if not isinstance(item, (list, tuple)) or len(item) != len(inner):
        have = f"{len(item)} items" if isinstance(item, (list, tuple)) else type(item).__name__
        raise PlanError(f"input {name!r} is {have}, the plan was made for a {kind} of {len(inner)}")
    for i, (value, below) in enumerate(zip(item, inner)):
        _bind(value, below, f"{name}[{i}]", found)


# ---------------------------------------------------------------- example inputs for the literal call


def example_inputs_of(model: nn.Module, gpus: int) -> Inputs:
    """One global batch on the meta device for ``auto_parallelize(model, gpus=...)``.

    Tried in this order: ``example_input_array`` (Lightning), a Hugging Face config, the first layer. Raises InputError saying what
    to pass.
    """
    batch = gpus * max(2, math.ceil(8 / gpus))
    lightning = getattr(model, "example_input_array", None)
    if lightning is not None:
        return normalise(lightning)
    for find in (_from_config, _from_dummy, _from_first_layer):
        found = find(model, batch)
        if found is not None:
            return found
    names = _required(model)
    shown = "dict(" + ", ".join(f"{name}=tensor" for name in names) + ")" if names else "(args, kwargs)"
    raise InputError(
        f"{type(model).__name__}: example inputs cannot be told from the model; pass one global batch (real or meta tensors): "
        f"auto_parallelize(model, gpus={gpus}, example_inputs={shown})"
    )


def _required(model: nn.Module) -> list[str]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _accepts(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _config_value(config: Any, *names: str, default: Any = None) -> Any:
    for source in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for name in names:
            value = getattr(source, name, None)
            if value is not None:
                return value
    return default


def _from_config(model: nn.Module, batch: int) -> Inputs | None:
    """Hugging Face: ids, pixels or waveforms by the model's main input, with labels where its class has a loss for them."""
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or main is None:
        return None
    floats = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    kwargs: dict[str, torch.Tensor] = {}
    if main == "input_ids":
        length = _sequence_length(config)
        kwargs["input_ids"] = _ids(batch, length)
        if getattr(config, "is_encoder_decoder", False) and not _accepts(model, "labels"):
            kwargs["decoder_input_ids"] = _ids(batch, length)
    elif main == "pixel_values":
        height, width = _image_size(config)
        channels = _config_value(config, "num_channels", default=3)
        kwargs["pixel_values"] = torch.empty(batch, channels, height, width, dtype=floats, device="meta")
    elif main == "input_values":
        kwargs["input_values"] = torch.empty(batch, 16000, dtype=floats, device="meta")
    elif main == "input_features":
        bins, frames = _config_value(config, "num_mel_bins", default=80), _config_value(config, "max_source_positions", default=1500)
        kwargs["input_features"] = torch.empty(batch, bins, 2 * frames, dtype=floats, device="meta")
    else:
        return None
    labels = _labels(model, batch, kwargs[main])
    if labels is not None:
        kwargs["labels"] = labels
    return (), kwargs


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int64, device="meta")


def _sequence_length(config: Any) -> int:
    longest = _config_value(config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=512)
    return max(1, min(512, int(longest) - 2 if int(longest) in (130, 514, 4098) else int(longest)))


def _image_size(config: Any) -> tuple[int, int]:
    size = _config_value(config, "image_size", default=224)
    return (int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else (int(size), int(size))


_TOKEN_LABELS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForConditionalGeneration",
    "ForTokenClassification",
    "ForPreTraining",
    "ForCTC",
)
_CLASS_LABELS = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def _labels(model: nn.Module, batch: int, main: torch.Tensor) -> torch.Tensor | None:
    if not _accepts(model, "labels"):
        return None
    name = type(model).__name__
    if name.endswith(_CLASS_LABELS):
        return _ids(batch)
    if name.endswith(_TOKEN_LABELS):
        return _ids(*main.shape) if main.dtype == torch.int64 else _ids(batch, 32)
    return None


def _from_dummy(model: nn.Module, batch: int) -> Inputs | None:
    """``dummy_inputs`` of a Hugging Face model, its rows repeated to the batch."""
    try:
        dummy = getattr(model, "dummy_inputs", None)
    except (AttributeError, NotImplementedError, TypeError):
        return None
    if not isinstance(dummy, Mapping):
        return None
    return (), {key: t.new_empty((batch, *t.shape[1:]), device="meta") if torch.is_tensor(t) and t.dim() else t for key, t in dummy.items()}


def _from_first_layer(model: nn.Module, batch: int) -> Inputs | None:
    """A single input that goes straight into the first layer, whose type tells its shape."""
    if len(_required(model)) > 1:
        return None
    first = next((m for m in model.modules() if not list(m.children()) and list(m.parameters(recurse=False))), None)
    if first is None:
        return None
    dtype = next(first.parameters()).dtype
    if isinstance(first, nn.Linear):
        return (torch.empty(batch, first.in_features, dtype=dtype, device="meta"),), {}
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        return (_ids(batch, 128),), {}
    if isinstance(first, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        extent = {1: 1024, 2: 224, 3: 32}[len(first.kernel_size)]
        return (torch.empty(batch, first.in_channels, *[extent] * len(first.kernel_size), dtype=dtype, device="meta"),), {}
    return None
