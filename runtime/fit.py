"""Does a plan belong to this model, its shapes and its loss? Answered before any process group work, naming both sides."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import PlanError, PlanWarning
from planner.inputs import inputs_from_spec
from planner.plan import Plan
from planner.torch_ops import spec_of
from planner.trace import Captured, capture

Loss = Callable[[Any], Tensor]


def recapture(model: nn.Module, plan: Plan, loss: Loss | None, opaque: Sequence[str] = ()) -> Captured:
    """Capture the model on the planned shapes. Raises PlanError where the plan was made for another model, naming both fingerprints."""
    loss = loss or plan._loss
    if plan.model.loss == "callable" and loss is None:
        raise PlanError("the plan was made with a loss function, which a plan file does not hold: pass parallelize(..., loss=...)")
    real = bool(opaque) and not any(p.is_meta for p in model.parameters())
    # what an opaque submodule returns may only be known by running it
    inputs = inputs_from_spec(plan.model.inputs, "cpu" if real else "meta")
    dims = {name: plan.model.batch_dims.get(name) for name in tensor_shapes(plan.model.inputs)}
    used = loss if plan.model.loss == "callable" else None
    check_parameters(model, plan)
    captured = capture(model, inputs, loss=used, opaque=opaque, batch_dims=dims)
    if captured.graph.fingerprint() != plan.model.fingerprint and not model.training:
        # plans are made for training; in eval() the graph of the same model lacks its dropouts
        model.train()
        try:
            captured = capture(model, inputs, loss=used, opaque=opaque, batch_dims=dims)
        finally:
            model.eval()
    if (found := captured.graph.fingerprint()) != plan.model.fingerprint:
        raise PlanError(
            f"the plan was made for {plan.model.name} with fingerprint {plan.model.fingerprint[:12]}, this {type(model).__name__} has "
            f"{found[:12]}: another model, loss, input shape or version of its code. Plan again with auto_parallelize"
        )
    return captured


def tensor_shapes(in_spec: Any) -> dict[str, list[int]]:
    """Input name -> shape, of all tensors of an in_spec."""
    if isinstance(in_spec, list):
        return {name: shape for item in in_spec for name, shape in tensor_shapes(item).items()}
    if not isinstance(in_spec, Mapping):
        return {}
    if isinstance(in_spec.get("tensor"), str) and "shape" in in_spec:
        return {in_spec["tensor"]: list(in_spec["shape"])}
    return {name: shape for item in in_spec.values() for name, shape in tensor_shapes(item).items()}


def check_parameters(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError naming the first parameter whose shape or dtype is not the planned one."""
    for name, parameter in model.named_parameters():
        planned = planned_spec(name, plan.model.parameters)
        have = str(spec_of(parameter))
        if planned is not None and planned != have:
            raise PlanError(f"parameter {name!r} is {have}, the plan was made for {planned}")


def planned_spec(name: str, table: Mapping[str, str]) -> str | None:
    """The plan's entry for a parameter, which may have ``*`` in the place of an index."""
    if name in table:
        return table[name]
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and (text := table.get(".".join([*parts[:i], "*", *parts[i + 1 :]]))):
            return text
    return None


def warn_of_differences(plan: Plan, device: torch.device, rank: int) -> None:
    if rank:
        return
    if plan.model.torch != torch.__version__:
        warnings.warn(f"the plan was made with torch {plan.model.torch}, this is {torch.__version__}", PlanWarning, stacklevel=4)
    if device.type == "cpu" and not plan.hardware.startswith("cpu"):
        text = f"a plan for {plan.hardware} runs on the CPU: it computes the same, its predicted times and memory do not hold"
        warnings.warn(text, PlanWarning, stacklevel=4)
