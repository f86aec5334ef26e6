"""A stage without anything to train is given a copy of a trainable parameter of another stage.

No optimizer takes an empty list of parameters, so the loop that trains a model on one device would fail on such a stage (a frozen body
with one trained layer). The copy is treated as every parameter that several stages hold: its gradient is the sum over the stages, so
it stays equal to the original, and of equal copies one is counted and saved.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch.distributed as dist
from torch import nn

from planner.mesh import PIPE
from runtime.groups import Ranks
from runtime.stage import Stage, StageParameter

GUEST = "guest"
"""Submodule of the stage that holds the copy."""


def invite(stage: Stage, ranks: Ranks) -> None:
    """Add the guest to ``stage.parameters`` where it is needed. Collective over the stages."""
    if ranks.mesh.pipe == 1:
        return
    mine = {name: parameter for name, parameter in stage.parameters.items() if parameter.trainable}
    everyones: list[Any] = [None] * ranks.mesh.pipe
    dist.all_gather_object(everyones, mine, group=ranks.groups[PIPE])
    trainable: dict[str, StageParameter] = {name: parameter for one in everyones for name, parameter in one.items()}
    if mine or not trainable:
        return
    name = min(trainable, key=lambda n: (trainable[n].fsdp, math.prod(trainable[n].local_shape), n))
    stage.module.add_module(GUEST, nn.Module())
    stage.parameters[name] = dataclasses.replace(trainable[name], path=f"{GUEST}.p_0", sync_axes=())
