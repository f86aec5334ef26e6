"""What the commands share: targets, layouts, and errors as one line with an exit code."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import typer

from cost_models.errors import CostError, MeasureError
from planner.errors import InfeasibleError, InputError, PlanError, ShardwrightError, WorkerError

OK, USAGE, INFEASIBLE, INVALID_PLAN, WORKER_FAILED = 0, 2, 3, 4, 5
EXITS: tuple[tuple[type[Exception], int], ...] = (
    (InfeasibleError, INFEASIBLE),
    (PlanError, INVALID_PLAN),
    (WorkerError, WORKER_FAILED),
    (MeasureError, WORKER_FAILED),
    (ShardwrightError, USAGE),
    (CostError, USAGE),
)
LAYOUT_NUMBERS = ("data", "tensor", "pipe", "microbatches", "zero")
LAYOUT_WORDS = ("schedule", "recompute")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def exit_code(error: Exception) -> int:
    return next(code for kind, code in EXITS if isinstance(error, kind))


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def guarded(command: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Turn the project's errors into one line on stderr and their exit code; warnings into one line as well."""

    @functools.wraps(command)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return command(*args, **kwargs)
            except (ShardwrightError, CostError) as error:
                typer.echo(f"error: {one_line(error)}", err=True)
                raise typer.Exit(exit_code(error)) from None

    return wrapped


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    typer.echo(f"warning: {' '.join(str(message).split())}", err=True)


@contextlib.contextmanager
def stdout_for_json() -> Iterator[None]:
    """Whatever native code prints meanwhile (HiGHS its banner, past Python's own stdout) goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@dataclass(frozen=True)
class Target:
    """What a target function returned."""

    model: Any
    example_inputs: Any = None
    loss: Callable[..., Any] | None = None


def load_target(text: str, meta: bool = False) -> Target:
    """Call ``module:function`` (from the command line only) that returns a model, (model, example_inputs) or (model, example_inputs,
    loss). ``meta``: on the meta device, so that no memory is allocated. Raises InputError."""
    module_name, colon, function_name = text.partition(":")
    if not colon or not module_name or not function_name.isidentifier():
        raise InputError(f"target {text!r}: expected 'module:function', such as 'my_models:build'")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except AttributeError:
        raise InputError(f"target {text!r}: module {module_name!r} has no {function_name!r}") from None
    except Exception as error:
        raise InputError(f"target {text!r}: cannot import {module_name!r}: {type(error).__name__}: {one_line(error)}") from None
    return _unpack(text, _call(text, function, meta))


def _call(text: str, function: Callable[[], Any], meta: bool) -> Any:
    import torch

    with torch.device("meta") if meta else contextlib.nullcontext():
        try:
            return function()
        except Exception as error:
            raise InputError(f"target {text!r}: calling it raised {type(error).__name__}: {one_line(error)}") from None


def _unpack(text: str, made: Any) -> Target:
    import torch

    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], torch.nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise InputError(f"target {text!r} returned ({kinds}); expected a model, (model, example_inputs) or (model, example_inputs, loss)")
    return Target(*parts)


def parse_layout(text: str | None) -> dict[str, Any] | None:
    """``data=2,tensor=2,schedule=1f1b`` -> dict. Which values go together is for the planner to say."""
    if not text:
        return None
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in LAYOUT_WORDS and equals:
            found[key] = value
        elif key in LAYOUT_NUMBERS and value.isascii() and value.isdigit():
            found[key] = int(value)
        else:
            known = ", ".join([f"{name}=<number>" for name in LAYOUT_NUMBERS] + [f"{name}=<word>" for name in LAYOUT_WORDS])
            raise InputError(f"layout {part.strip()!r}: expected some of {known}, separated by commas")
    return found


def parse_counts(text: str) -> list[int]:
    """``1,2,4,8`` -> numbers of GPUs."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 2**20 for part in parts):
        raise InputError(f"gpus {text!r}: expected numbers from 1 separated by commas, such as 1,2,4,8")
    return [int(part) for part in parts]
