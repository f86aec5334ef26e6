"""Batch dims follow from the graph, and with them what every op does with micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import BUILDERS
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import BatchError, InputError
from planner.graph import Graph
from planner.micro import propagate, propagate_micro
from planner.sharding import P, R, S
from planner.trace import capture


class Body(nn.Module):
    """A function of two layers, an embedding and its inputs."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.a, self.b = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = body

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.body(self, **inputs)


def graph_of(body: Callable[..., Tensor], batch_dims: Any = None, **inputs: Tensor) -> Graph:
    return capture(Body(body), inputs, batch_dims=batch_dims).graph


IDS = torch.randint(0, 11, (4, 4))
FLOATS = torch.randn(4, 4)


def attends(m: Any, ids: Tensor, bias: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    h = m.table(ids) + m.table(positions)
    h = h + F.scaled_dot_product_attention(m.a(h), h, m.b(h), attn_mask=bias)
    return F.cross_entropy(h.flatten(0, 1), labels.flatten() % 4)


def time_major(m: Any, ids: Tensor, labels: Tensor) -> Tensor:
    h = m.table(ids).transpose(0, 1)
    h = F.scaled_dot_product_attention(m.a(h), h, h).transpose(0, 1)
    return F.cross_entropy(h.reshape(-1, 4), labels.reshape(-1) % 4)


def towers(m: Any, left: Tensor, right: Tensor) -> Tensor:
    scores = m.a(left) @ m.b(right).t()
    return F.cross_entropy(scores, torch.arange(4))


def regresses(m: Any, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return F.mse_loss(m.b(torch.tanh(m.a(x))) * scale, y)


@pytest.mark.parametrize("name", BUILDERS)
def test_batch_of_the_shared_models(name: str) -> None:
    model, inputs, loss = BUILDERS[name]()
    graph = capture(model, inputs, loss).graph
    assert dict(graph.batch_dims) == {node.target: 0 for node in graph.of("input")}


def test_sizes_that_match_are_not_the_batch() -> None:
    graph = graph_of(attends, ids=IDS, bias=FLOATS, positions=torch.arange(4)[None], labels=IDS)
    assert dict(graph.batch_dims) == {"ids": 0, "labels": 0}


def test_the_batch_may_be_the_second_dim() -> None:
    """The labels stay whole: flattened time first, their batch has no place of its own."""
    assert dict(graph_of(time_major, ids=IDS, labels=IDS).batch_dims) == {"ids": 1}


def test_inputs_that_meet_in_the_loss_only() -> None:
    assert dict(graph_of(towers, left=FLOATS, right=FLOATS).batch_dims) == {"left": 0, "right": 0}


def test_features_are_not_the_batch() -> None:
    graph = graph_of(regresses, x=FLOATS, y=FLOATS, scale=torch.ones(4))
    assert dict(graph.batch_dims) == {"x": 0, "y": 0}


def test_given_dims_override() -> None:
    graph = graph_of(regresses, {"y": None, "x": -1}, x=FLOATS, y=FLOATS, scale=torch.ones(4))
    assert dict(graph.batch_dims) == {"x": 1}
    with pytest.raises(InputError, match=r"batch_dims names 'z'; the inputs are \['scale', 'x', 'y'\]"):
        graph_of(regresses, {"z": 0}, x=FLOATS, y=FLOATS, scale=torch.ones(4))
    with pytest.raises(InputError, match=r"x=2, but x has the shape \(4, 4\)"):
        graph_of(regresses, {"x": 2}, x=FLOATS, y=FLOATS, scale=torch.ones(4))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert_mlm", "vit", "mlp"])
def test_micro_batches_of_the_shared_models(name: str) -> None:
    model, inputs, loss = BUILDERS[name]()
    graph = capture(model, inputs, loss).graph
    natural = propagate_micro(graph, 4)
    assert natural.produced(graph.loss) == P
    assert {type_ for source, type_ in natural.sources.items() if source.startswith("p_")} == {R}
    split = [node for node in graph.nodes if not node.is_source and node.grad[0] and natural.strategies[node.name].outputs[0] == S(0)]
    assert len(split) > len([node for node in graph.nodes if not node.is_source and node.grad[0]]) / 2
    assert all(not strategy.comm for strategy in natural.strategies.values())


def test_the_count_of_valid_targets_is_made_whole() -> None:
    graph = graph_of(attends, ids=IDS, bias=FLOATS, positions=torch.arange(4)[None], labels=IDS)
    natural = propagate_micro(graph, 2)
    (count,) = graph.of("shard.valid_count")
    assert natural.strategies[count.name].outputs == (P,)
    assert natural.strategies[graph.loss.node].inputs == (P, R)


def test_a_term_without_the_batch_counts_once() -> None:
    def regularised(m: Any, x: Tensor) -> Tensor:
        return m.a(x).pow(2).sum() + m.a.weight.abs().sum()

    natural = propagate_micro(graph := graph_of(regularised, x=FLOATS), 2)
    assert natural.strategies[graph.loss.node].inputs == (P, P)


def test_a_number_added_to_the_loss_counts_once() -> None:
    def shifted(m: Any, x: Tensor) -> Tensor:
        return torch.sub(m.a(x).pow(2).sum() + 10, 3, alpha=2)

    graph = graph_of(shifted, x=FLOATS)
    assert [node.args[1] for node in graph.of("aten.full.default")] == [10.0, -6.0]
    assert propagate_micro(graph, 2).produced(graph.loss) == P


def test_a_loss_taken_from_a_number_counts_it_once() -> None:
    def similarity(m: Any, x: Tensor) -> Tensor:
        return 2 - 2 * m.a(x).sigmoid().mean()

    graph = graph_of(similarity, x=FLOATS)
    assert [node.args[1] for node in graph.of("aten.full.default")] == [2.0]
    assert propagate_micro(graph, 2).produced(graph.loss) == P


def test_what_no_step_needs_may_mix_the_batch() -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x)
            return h.pow(2).sum(), h.detach().amax()

    graph = capture(Logs(), (FLOATS,)).graph
    natural = propagate_micro(graph, 2)
    assert natural.produced(graph.loss) == P
    assert natural.strategies[graph.of("aten.amax.default")[0].name].outputs == (R,)


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(BatchError, match=r"batch of 4 \(input 'x', dim 0\) does not divide into 3 micro-batches"):
        propagate_micro(graph_of(regresses, x=FLOATS, y=FLOATS, scale=torch.ones(4)), 3)


def test_what_mixes_the_batch_is_named() -> None:
    with pytest.raises(BatchError, match=r"aten\.matmul\.default in module .*test_batch\.py:\d+\) mixes the batch"):
        propagate_micro(graph_of(towers, left=FLOATS, right=FLOATS), 2)

    def normed(m: Any, x: Tensor) -> Tensor:
        return m.norm(m.a(x)).pow(2).sum()

    graph = graph_of(normed, x=FLOATS)
    with pytest.raises(BatchError, match=r"shard\.batch_norm in module 'norm' .*mixes the batch"):
        propagate_micro(graph, 2)
    along_data = propagate(graph, 2)
    (norm,) = graph.of("shard.batch_norm")
    assert along_data.strategies[norm.name].kernel == "batch_norm"


def test_no_batch_at_all() -> None:
    def alone(m: Any, x: Tensor) -> Tensor:
        return (m.a.weight * x).sum()

    with pytest.raises(BatchError, match="no input has a batch dim"):
        propagate_micro(graph_of(alone, {"x": None}, x=FLOATS), 2)


def test_a_total_of_totals_is_made_of_totals() -> None:
    """A mean of the inputs that scales them: sum and count are totalled, not their quotient, which another total would wait for."""

    def scaled(m: Any, x: Tensor) -> Tensor:
        mean = x.abs().sum(0) / (x > 0).sum(0).clamp(min=1)
        return (m.a(x / mean.sum())).pow(2).sum()

    graph = graph_of(scaled, x=FLOATS)
    natural = propagate_micro(graph, 2)
    (quotient,) = [node for node in graph.of("aten.div.Tensor") if node.outputs[0].shape == FLOATS.shape[1:]]
    assert natural.strategies[quotient.name].outputs == (R,)


def test_a_total_that_waits_for_a_total_is_refused() -> None:
    def whitened(m: Any, x: Tensor) -> Tensor:
        spread = (x - x.mean(0)).pow(2).sum(0)
        return m.a(x / (spread + 1)).pow(2).sum()

    with pytest.raises(BatchError, match=r"mixes the batch"):
        propagate_micro(graph_of(whitened, x=FLOATS), 2)
