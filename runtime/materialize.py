"""Whole parameters and buffers of a model, by name: its own where it has memory, initialised one module at a time where it is on meta.

A module on the meta device is initialised as its classes do it: ``reset_parameters``, then (Hugging Face) the ``_init_weights`` of the
model around it. Every rank draws the same numbers from one seed per module, whatever it needs of the model. What no class initialises
is *unset* until a checkpoint is loaded (or a value is written to it); nothing is computed or saved before.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import InputError


class Source:
    """``source(name)`` -> the whole tensor. At most one meta module has memory at a time.

    ``unset``: names asked for that no class initialises -> the class; their values are NaN, or the least integer.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.seed = model, seed
        self.unset: dict[str, str] = {}
        self._path: str | None = None
        self._found: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        own = module._parameters.get(leaf) if leaf in module._parameters else module._buffers.get(leaf)
        if own is None:
            raise InputError(f"the model has no parameter or buffer {name!r}")
        if not own.is_meta:
            return own
        if path != self._path:
            self._found, self._path = self._initialise(module, path), path
        value = self._found[leaf]
        if is_unset(value):
            self.unset[name] = type(module).__name__
        return value

    def _initialise(self, module: nn.Module, path: str) -> dict[str, Tensor]:
        fresh = copy.copy(module)
        fresh._parameters = {k: None if p is None else nn.Parameter(_unset(p), p.requires_grad) for k, p in module._parameters.items()}
        fresh._buffers = {k: None if b is None else _unset(b) for k, b in module._buffers.items()}
        number = int.from_bytes(hashlib.blake2b(f"{self.seed}/{path}".encode(), digest_size=7).digest(), "big")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(number)
            for method in ("reset_parameters", "_reset_parameters"):
                if callable(reset := getattr(fresh, method, None)):
                    reset()
                    break
            if (around := self._hugging_face(path)) is not None:
                around._init_weights(fresh)
        found = {**fresh._parameters, **fresh._buffers}
        return {k: v.detach() for k, v in found.items() if v is not None}

    def _hugging_face(self, path: str) -> Any:
        """The innermost module around ``path`` that initialises others."""
        parts = path.split(".") if path else []
        for depth in range(len(parts), -1, -1):
            module = self.model.get_submodule(".".join(parts[:depth]))
            if callable(getattr(module, "_init_weights", None)):
                return module
        return None


def _unset(like: Tensor) -> Tensor:
    """Memory filled with what no initialisation sets: NaN, or the least integer."""
    value: float = float("nan") if like.is_floating_point() or like.is_complex() else 0
    if not (like.is_floating_point() or like.is_complex() or like.dtype == torch.bool):
        value = torch.iinfo(like.dtype).min
    return torch.full(like.shape, value, dtype=like.dtype)


def is_unset(value: Tensor) -> bool:
    """True if a part of a tensor holds what ``_unset`` fills it with (which bytes and booleans cannot show)."""
    if not value.numel() or value.dtype == torch.bool:
        return False
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    return value.dtype != torch.uint8 and bool((value == torch.iinfo(value.dtype).min).any())
