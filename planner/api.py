"""``auto_parallelize``: capture, search, assemble."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from cost_models import HardwareProfile, load_profile
from planner.assemble import LossKind, assemble
from planner.attempt import Request
from planner.candidates import Pins
from planner.costs import COMPUTE_DTYPE, Precision
from planner.errors import InputError, ReplicatedOpWarning
from planner.inputs import example_inputs_of
from planner.memory import Optimizer
from planner.plan import Plan
from planner.search import search
from planner.trace import capture

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def auto_parallelize(
    model: nn.Module,
    gpus: int = 4,
    *,
    example_inputs: Any = None,
    hardware: str | Path | HardwareProfile | None = None,
    memory_per_gpu: int | str | None = None,
    optimizer: str | int = "adamw",
    precision: str = "fp32",
    layout: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    time_limit: float = 60.0,
    opaque: Sequence[str] = (),
    batch_dims: Mapping[str, int | None] | None = None,
) -> Plan:
    """The fastest plan for ``model`` on ``gpus`` GPUs that fits into memory, with a bound on how much faster any other could be.

    ``example_inputs``: ONE GLOBAL batch, tuple, dict or (args, kwargs), real or meta tensors; None: told from the model, where it can be.
    ``hardware``: preset name ("h100", "h100:16x8"), path of a profile JSON or a HardwareProfile; None: this machine, measured once.
    ``memory_per_gpu``: bytes or "70GiB"; None: the profile's.
    ``optimizer``: "adamw", "sgd", "sgd-momentum", "none" (inference), or bytes of state per parameter element.
    ``precision``: "fp32", "bf16-mixed", "fp16-mixed".
    ``layout``: what to force, the rest is searched: data, tensor, pipe, microbatches (per step and data rank), schedule, recompute, zero.
    ``loss``: called on the model's output; None: a scalar output (or ``.loss``) is the loss.
    ``time_limit``: seconds for the solver. ``opaque``: submodules to take as one op.
    ``batch_dims``: input name -> its batch dim, where the graph does not tell.

    Raises InputError for wrong arguments, CaptureError where the model cannot be captured, BatchError where the batch cannot be cut as
    asked, InfeasibleError where nothing fits.
    """
    _check(gpus, precision, time_limit)
    chosen, pins = Optimizer.of(optimizer), Pins.of(layout, gpus)
    given = _bytes(memory_per_gpu)
    with _progress() as say:
        if example_inputs is None:
            example_inputs = example_inputs_of(model, gpus)
        say("capturing the model")
        captured = capture(model, example_inputs, loss=loss, opaque=opaque, batch_dims=batch_dims)
        graph = captured.graph if chosen.trains else captured.graph.without_gradients()
        if chosen.trains and graph.loss is None:
            raise InputError(
                f"{type(model).__name__}'s output has no loss to differentiate (a scalar, .loss, ['loss'], or a scalar first element): "
                "pass loss=, or optimizer='none' to plan inference"
            )
        profile = load_profile(hardware, ranks=gpus, progress=lambda share, what: say(f"measuring this machine, {share:.0%}: {what}"))
        limit = float(given if given is not None else profile.memory_bytes)
        request = Request(gpus, limit, chosen, Precision(precision), pins, time_limit)
        result = search(graph, profile, request, say)
    kind: LossKind = "callable" if loss is not None else "output" if graph.loss is not None else "none"
    plan = assemble(result, graph, request, profile, type(model).__name__, kind)
    plan._loss = loss
    if hardware is None and not torch.cuda.is_available():
        _note(f"no GPU here: planned for {gpus} local CPU process{'es' if gpus > 1 else ''} over gloo")
    for text in plan.warnings:
        warnings.warn(text, ReplicatedOpWarning, stacklevel=2)
    return plan


def _check(gpus: int, precision: str, time_limit: float) -> None:
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise InputError(f"gpus={gpus!r}, must be a whole number of at least 1")
    if precision != "fp32" and precision not in COMPUTE_DTYPE:
        raise InputError(f"precision={precision!r}; there are 'fp32', {', '.join(map(repr, COMPUTE_DTYPE))}")
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)) or not 0 < time_limit < math.inf:
        raise InputError(f"time_limit={time_limit!r}, must be a number of seconds above 0")


def _bytes(amount: int | str | None) -> int | None:
    """``70GiB`` -> bytes. Raises InputError."""
    if amount is None:
        return None
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", amount)
        if not match or match[2].lower() not in UNITS:
            raise InputError(f"memory_per_gpu={amount!r}; expected bytes or a text such as '70GiB' (units: {', '.join(list(UNITS)[2:])})")
        amount = int(float(match[1]) * UNITS[match[2].lower()])
    if isinstance(amount, bool) or not isinstance(amount, int) or amount < 1:
        raise InputError(f"memory_per_gpu={amount!r}, must be at least 1 byte")
    return amount


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A status line on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("planning") as status:
        yield lambda text: status.update(f"planning: {text}")


def _note(text: str) -> None:
    print(text, file=sys.stderr)
