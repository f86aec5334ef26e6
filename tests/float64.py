"""Run a model in float64 even where its own code asks for float32 (norms and losses in transformers do).

Equality to 1e-10 can only be asked of a computation that is float64 throughout.
"""

import functools

import torch
from torch.overrides import TorchFunctionMode


class Double(TorchFunctionMode):
    """Every request for float32 becomes one for float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def doubled(model: torch.nn.Module) -> torch.nn.Module:
    """The model in float64, its forward under ``Double``; captured, it exports under it as well."""
    model.double()
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args, **kwargs):
        with Double():
            return plain(*args, **kwargs)

    model.forward = forward
    return model
