"""Outputs beside the loss that mix the batch, under micro-batches: computed of the whole batch, whole or this rank's part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Pool
from torch import Tensor, nn

from planner import auto_parallelize
from planner.batch import infer_batch_dims
from planner.mesh import Mesh
from planner.plan import Plan
from planner.trace import capture
from runtime.api import parallelize


class Mixing(nn.Module):
    """A maximum over all rows, rows less their mean, and a further op on them; a row's own output for comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.body(x))
        y = self.head(h)
        centred = y - y.mean(0)
        return {"loss": y.pow(2).mean(), "top": h.amax(), "rows": y, "spread": (centred.pow(2).sum(1), x.cumsum(0) + centred[:, :1])}


def made() -> tuple[Mixing, Tensor]:
    torch.manual_seed(3)
    return Mixing(), torch.randn(8, 6)


def rows_of(mesh: Mesh, data: int) -> list[int]:
    """The rows of the batch that a data rank has, micro-batch after micro-batch."""
    each, own = 8 // mesh.microbatches, 8 // mesh.microbatches // mesh.data
    return [m * each + data * own + i for m in range(mesh.microbatches) for i in range(own)]


def forwards(plan: Plan) -> Any:
    model, x = made()
    whole = parallelize(model, plan)(x)
    part = parallelize(model, plan, outputs="local")
    return whole, part(x), torch.distributed.get_rank()


@pytest.mark.parametrize(
    "layout", [dict(pipe=2, microbatches=2), dict(data=2, microbatches=4), dict(pipe=2, data=2, microbatches=2)], ids=str
)
def test_whole_and_local(pool: Pool, layout: dict[str, int]) -> None:
    model, x = made()
    gpus = layout.get("pipe", 1) * layout.get("data", 1)
    plan = auto_parallelize(model, gpus, example_inputs=(x,), hardware="cpu", layout={"tensor": 1, **layout})
    mesh = plan.mesh.mesh()
    with torch.no_grad():
        want = model(x)
    for whole, part, rank in pool.run(forwards, gpus, plan):
        torch.testing.assert_close(whole, want)
        rows = rows_of(mesh, mesh.coordinates(rank)["data"])
        torch.testing.assert_close((part["loss"], part["top"]), (want["loss"], want["top"]))
        torch.testing.assert_close(part["rows"], want["rows"][rows])
        torch.testing.assert_close(part["spread"], tuple(t[rows] for t in want["spread"]))


def test_the_batch_is_known() -> None:
    model, x = made()
    assert dict(infer_batch_dims(capture(model, (x,)).graph).batch_dims) == {"x": 0}
