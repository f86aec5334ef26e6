"""Segments cover the graph in order, and equal blocks form one class."""

from __future__ import annotations

import pytest
import torch
from models import BUILDERS
from torch import Tensor, nn

from planner.blocks import classes, pattern, prefix, segments
from planner.graph import Graph
from planner.trace import capture


def graph_of(name: str, **options: int) -> Graph:
    model, inputs, loss = BUILDERS[name](**options)
    return capture(model, inputs, loss).graph


@pytest.mark.parametrize("name", BUILDERS)
def test_segments_cover_all_nodes_in_order(name: str) -> None:
    graph = graph_of(name)
    parts = segments(graph)
    assert [node for part in parts for node in part.nodes] == [node.name for node in graph.nodes if not node.is_source]
    assert [part.index for part in parts] == list(range(len(parts)))
    firsts = [part.class_id for part in parts]
    assert list(dict.fromkeys(firsts)) == list(range(len(set(firsts))))


@pytest.mark.parametrize(
    ("name", "block"),
    [("gpt2", "transformer.h.*"), ("llama", "model.layers.*"), ("bert_mlm", "bert.encoder.layer.*"), ("vit", "vit.layers.*")],
)
def test_layers_form_one_class(name: str, block: str) -> None:
    few, many = segments(graph_of(name, layers=2)), segments(graph_of(name, layers=5))
    layers = [part for part in many if part.name == block]
    assert len(layers) == 5
    assert len({part.class_id for part in layers}) == 1
    assert len(classes(many)) == len(classes(few))
    assert len(many) == len(few) + 3


def test_equal_segments_have_equal_nodes() -> None:
    graph = graph_of("llama", layers=3)
    for equal in classes(segments(graph)).values():
        ops = {tuple((graph.by_name[n].op, graph.by_name[n].outputs, graph.by_name[n].grad) for n in part.nodes) for part in equal}
        assert len(ops) == 1


class Stages(nn.Module):
    """Numbered stages of different widths, each of numbered equal blocks: the blocks are the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Residual(width) for _ in range(3)) for width in (4, 8))
        self.first, self.grow = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.stages[0]:
            x = block(x)
        x = self.grow(x)
        for block in self.stages[1]:
            x = block(x)
        return x.sum()


class Residual(nn.Module):
    def __init__(self, width: int, frozen: bool = False) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x))) * 0.5 + torch.tanh(self.linear(x)) * 0.25 - torch.sigmoid(x)


def test_blocks_inside_different_stages() -> None:
    parts = segments(capture(Stages(), (torch.randn(2, 4),)).graph)
    assert [part.name for part in parts] == ["first", *["stages.0.*"] * 3, "grow", *["stages.1.*"] * 3, ""]
    assert [part.class_id for part in parts] == [0, 1, 1, 1, 2, 3, 3, 3, 4]


def test_what_differs_is_no_equal() -> None:
    """A frozen block saves other things for its backward; a block that shares its weight with another one does not own it."""
    layers = nn.Sequential(*[Residual(4) for _ in range(2)], *[Residual(4, frozen=True) for _ in range(2)], Residual(4), Residual(4))
    layers[5].linear.weight = layers[4].linear.weight
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 4))
    model.add_module("layers", layers)
    graph = capture(model, (torch.randn(2, 4),), loss=torch.sum).graph
    ids = [part.class_id for part in segments(graph) if part.name == "layers.*"]
    assert ids[0] == ids[1]
    assert ids[2] == ids[3] != ids[0]
    assert len({ids[0], ids[4], ids[5]}) == 3


def test_pipeline_stages_can_end_inside_an_unnumbered_model() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.middle, self.up = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(torch.relu(self.middle(torch.relu(self.down(x))))).sum()

    assert [part.name for part in segments(capture(Named(), (torch.randn(2, 4),)).graph)] == ["down", "middle", "up"]


def test_paths() -> None:
    assert [prefix("a.0.b.1.c", depth) for depth in (1, 2, 3)] == ["a.0", "a.0.b.1", None]
    assert (pattern("a.0.b.1"), pattern("3")) == ("a.0.b.*", "*")


class OneModule(nn.Module):
    """Two layers whose parameters are all the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.a).tanh() @ self.b).square().mean()


def test_a_model_of_one_module_is_cut_where_its_parameters_are_read():
    parts = segments(capture(OneModule(), (torch.randn(2, 4),)).graph)
    assert [len(part.nodes) for part in parts] == [2, 3]
