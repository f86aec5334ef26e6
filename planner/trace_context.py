"""What holds while a model is exported, and is put back afterwards."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributions
from torch import nn

from planner.opaque import Hidden
from planner.trace_read import is_library, short


@contextlib.contextmanager
def moved(model: nn.Module, device: str) -> Iterator[None]:
    """Parameters and buffers replaced by stand-ins on ``device`` (fake: no memory), ties kept."""
    saved: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                saved.append((table, name, tensor))
                if id(tensor) not in made:
                    stand_in = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(stand_in, tensor.requires_grad) if is_parameter else stand_in
                table[name] = made[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in saved:
            table[name] = tensor


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Hugging Face configs with ``use_cache`` switched off: key-value caches are for generation."""
    changed: list[Any] = []
    try:
        for config in {id(c): c for c in _configs(model)}.values():
            if getattr(config, "use_cache", False) is True:
                config.use_cache = False
                changed.append(config)
        yield
    finally:
        for config in changed:
            config.use_cache = True


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            yield config
            yield from (sub for sub in vars(config).values() if hasattr(sub, "to_dict") and hasattr(sub, "use_cache"))


@contextlib.contextmanager
def watch_functions(found: dict[type, str], hidden: Hidden) -> Iterator[None]:
    """Note every custom ``autograd.Function`` that differentiates something: export traces its forward and loses its backward."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        floats = any(isinstance(a, torch.Tensor) and (a.is_floating_point() or a.is_complex()) for a in args)
        if floats and not hidden.running and torch.is_grad_enabled() and cls.__module__.split(".")[0] != "torch":
            found.setdefault(cls, _calling_line())
        return original.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log of torch's about a failure that CaptureError reports; no value checks of torch.distributions, which stop export; and
    ``module.to(dtype)`` inside forward, where nothing changes, does nothing (export cannot swap parameters)."""
    to = nn.Module.to

    def to_or_nothing(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        same = len(args) == 1 and not kwargs and all(args[0] in (p.dtype, p.device) for p in self.parameters())
        return self if same else to(self, *args, **kwargs)

    validates = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    level = logging.getLogger("torch").level
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    nn.Module.to = to_or_nothing  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.to = to  # type: ignore[method-assign]
        logging.getLogger("torch").setLevel(level)
        torch.distributions.Distribution.set_default_validate_args(validates)


def _calling_line() -> str:
    frame = sys._getframe(2)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "the model"
