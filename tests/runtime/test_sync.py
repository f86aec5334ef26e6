"""Gradient buckets: what travels together, in which order, and that starting early or late makes no difference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Pool
from torch import nn

from planner.errors import InputError
from planner.graph import Spec
from planner.mesh import Mesh
from planner.sharding import R
from runtime.clip import clip_gradients, gradient_norm
from runtime.groups import Ranks, connect
from runtime.parameters import Held
from runtime.sync import GradientSync, buckets_of

CPU = torch.device("cpu")


def held(name: str, numel: int, axes: tuple[str, ...] = ("data",), dtype: torch.dtype = torch.float64, fsdp: bool = False) -> Held:
    parameter = nn.Parameter(torch.ones(numel, dtype=dtype))
    return Held(name, Spec((numel,), str(dtype).removeprefix("torch.")), (R,) * len(axes), fsdp, axes, (0,), parameter)


def names(buckets: Any) -> list[tuple[str, list[str]]]:
    return [(bucket.group, [one.name for one in bucket.held]) for bucket in buckets]


def test_buckets_fill_from_the_last_parameter_up_to_their_size() -> None:
    parameters = [held("a", 4), held("b", 2), held("c", 2), held("d", 100), held("e", 1)]
    assert names(buckets_of(parameters, 40)) == [("data", ["e"]), ("data", ["d"]), ("data", ["c", "b"]), ("data", ["a"])]


def test_buckets_part_by_group_and_dtype() -> None:
    parameters = [
        held("a", 1),
        held("b", 1, ("data", "tensor")),
        held("c", 1, dtype=torch.float32),
        held("d", 1, ()),
        held("e", 1, ("tensor",), fsdp=True),
    ]
    assert names(buckets_of(parameters)) == [("tensor", ["e"]), ("data", ["c"]), ("stage", ["b"]), ("data", ["a"])]


def sums(limit: int, missing: str) -> dict[str, Any]:
    ranks = connect(Mesh(data=2), 20.0, CPU)
    parameters = {name: held(name, 3) for name in "abcd"}
    sync = GradientSync(parameters, ranks, limit_bytes=limit)
    me, found = dist.get_rank() + 1.0, []
    for _ in range(2):
        sync.begin()
        for last in (False, True):
            if last:
                sync.arm()
            # the order on this rank must not matter
            order = "abcd" if dist.get_rank() else "dcba"
            sum((parameters[n].parameter * me).sum() for n in order if n != missing).backward()  # type: ignore[union-attr]
        sync.finish()
        sync.restore()
        found.append({n: None if p.parameter.grad is None else p.parameter.grad.tolist() for n, p in parameters.items()})
    return {"found": found, "started": [bucket.group for bucket in sync.buckets]}


@pytest.mark.parametrize("limit", [1, 60, 10**6])
@pytest.mark.parametrize("missing", ["", "b"])
def test_sums_and_accumulation_over_steps(pool: Pool, limit: int, missing: str) -> None:
    """Each step adds (1 + 2) of each of two micro-batches; what an earlier step left is not summed again."""
    for result in pool.run(sums, 2, limit, missing):
        for step, found in enumerate(result["found"], 1):
            for name, grad in found.items():
                assert grad is None if name == missing else grad == [6.0 * step] * 3


def test_norms_of_one_process() -> None:
    ranks = Ranks(Mesh(), 0, CPU, 1.0)
    parameters = [held("a", 3), held("b", 2, dtype=torch.float32), held("c", 5)]
    parameters[0].parameter.grad = torch.tensor([1.0, -2.0, 2.0], dtype=torch.float64)
    parameters[1].parameter.grad = torch.tensor([0.0, 4.0])
    assert gradient_norm(parameters, ranks).item() == 5.0
    assert gradient_norm(parameters, ranks, math.inf).item() == 4.0
    assert gradient_norm(parameters, ranks, 1.0).item() == 9.0
    assert clip_gradients(parameters, ranks, 1.0).item() == 5.0
    assert gradient_norm(parameters, ranks).item() == pytest.approx(1.0, rel=1e-5)
    assert gradient_norm([], ranks).item() == 0.0


def test_senseless_norms() -> None:
    ranks = Ranks(Mesh(), 0, CPU, 1.0)
    one = held("a", 1)
    one.parameter.grad = torch.full((1,), math.nan, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"norm of order 2.0 of the gradients is nan"):
        clip_gradients([one], ranks, 1.0, error_if_nonfinite=True)
    with pytest.raises(InputError, match="norm_type=0"):
        gradient_norm([one], ranks, 0)
