"""Splits inside groups: fused projections, and a batch that stays split where a model flattens (time batch) into one dim."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from planner.graph import Graph
from planner.grouping import groupings
from planner.micro import propagate, propagate_micro
from planner.sharding import S
from planner.trace import capture


class TimeMajor(nn.Module):
    """What ``nn.MultiheadAttention`` does around its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        time, batch, width = x.shape
        return self.out(x.reshape(time * batch, width)).view(time, batch, width).tanh().square().mean()


def captured(model: nn.Module, x: Tensor) -> Graph:
    return capture(model, (x,), batch_dims={"x": 1}).graph


def test_a_batch_behind_time_stays_split():
    graph = captured(TimeMajor(), torch.randn(5, 4, 6))
    for natural in (propagate(graph, 2), propagate_micro(graph, 2)):
        linear = next(n.name for n in graph.nodes if n.op == "aten.linear.default")
        assert natural.strategies[linear].inputs[0] == S(0, 5) and natural.strategies[linear].outputs[0] == S(0, 5)
        assert all(s.factor for s in natural.strategies.values() if s.outputs[0].is_split)


def test_the_optimiser_is_offered_it():
    graph = captured(TimeMajor(), torch.randn(5, 4, 6))
    linear = next(n for n in graph.nodes if n.op == "aten.linear.default")
    assert any(5 in counts for counts in groupings(graph)[linear.name].values())


def test_attention_of_torch_moves_no_activation():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    graph = capture(layer, (torch.randn(4, 6, 8),), loss=lambda y: y.square().mean()).graph
    for natural in (propagate(graph, 2), propagate_micro(graph, 2)):
        for node in graph.nodes:
            if not node.is_source:
                made = [natural.produced(value) for value in node.inputs]
                moved = [m for m, wanted in zip(made, natural.strategies[node.name].inputs) if m.is_split and m != wanted]
                assert not moved, f"{node.op} has {made}, wants {natural.strategies[node.name]}"
