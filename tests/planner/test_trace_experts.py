"""Experts that sort their rows and undo it: the captured graph works in the order of the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 (defines transformers.grouped_mm_fallback)
from interpreter import assert_same
from torch import Tensor, nn

from planner.errors import BatchError
from planner.micro import propagate_micro
from planner.sharding import S

grouped = torch.ops.transformers.grouped_mm_fallback


class Experts(nn.Module):
    """Top-2 of 4, as transformers does it. ``undo``: how the order of the batch comes back."""

    def __init__(self, undo: str = "index_put", descending: bool = False, leak: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.undo, self.descending, self.leak = undo, descending, leak
        self.router = nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 8) * 0.3), nn.Parameter(torch.randn(4, 4, 8) * 0.3)
        self.bias = nn.Parameter(torch.randn(4, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        top, chosen = self.router(x).softmax(-1).topk(2, -1)
        expert = chosen.reshape(-1)
        by_expert, perm = torch.sort(expert, descending=self.descending)
        ends = torch.histc(by_expert.float(), bins=4, min=0, max=3).cumsum(0).to(torch.int32)
        rows = x[perm // 2]
        gate, value = (grouped(rows, self.up, ends) + self.bias[by_expert]).chunk(2, -1)
        y = grouped(F.silu(gate) * value, self.down, ends) * top.reshape(-1)[perm][:, None]
        if self.leak:
            return y.square().mean() + y[0].sum()
        if self.undo == "index_put":
            inverse = torch.empty_like(perm)
            inverse[perm] = torch.arange(perm.shape[0])
        else:
            inverse = perm.argsort()
        if self.undo == "index_add":
            return torch.zeros_like(x).index_add(0, perm // 2, y).square().mean()
        return y[inverse].view(-1, 2, 8).sum(1).square().mean()


def graph_of(model: nn.Module):
    return assert_same(model, (torch.randn(6, 8, generator=torch.Generator().manual_seed(1)),), tolerance=1e-5)


@pytest.mark.parametrize("undo", ["index_put", "argsort", "index_add"])
def test_the_sort_is_gone_and_nothing_else_changes(undo):
    graph = graph_of(Experts(undo))
    ops = [node.op for node in graph.nodes]
    assert ops.count("shard.expert_mm") == 2 and "aten.sort.default" not in ops and "aten._grouped_mm.default" not in ops


def test_micro_batches_go_through():
    graph = graph_of(Experts())
    natural = propagate_micro(graph, 2)
    for node in graph.of("shard.expert_mm"):
        assert natural.strategies[node.name].outputs == (S(0),)


@pytest.mark.parametrize("model", [Experts(leak=True), Experts(descending=True)], ids=["leak", "descending"])
def test_an_order_that_is_read_otherwise_stays(model):
    """The first row of the sorted ones; groups in another order than their ends."""
    graph = graph_of(model)
    assert len(graph.of("aten.sort.default")) == 1 and not graph.of("shard.expert_mm")
    with pytest.raises(BatchError, match=r"aten.sort.default .* mixes the batch"):
        propagate_micro(graph, 2)
