"""The captured graph means what the model means: run op by op, it gives the model's loss, outputs, gradients and buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from interpreter import assert_same
from models import BUILDERS
from torch import nn
from torch.nn import functional as F

from planner.graph import BUFFER, PARAMETER
from planner.inputs import inputs_from_spec
from planner.rules.base import rule_of
from planner.trace import capture


@pytest.mark.parametrize("name", BUILDERS)
def test_graph_equals_model(name: str) -> None:
    model, inputs, loss = BUILDERS[name](dtype=torch.float64)
    assert_same(model, inputs, loss)


@pytest.mark.parametrize("name", BUILDERS)
def test_recapture_from_the_spec_gives_the_same_graph(name: str) -> None:
    model, inputs, loss = BUILDERS[name]()
    first = capture(model, inputs, loss).graph
    again = capture(copy.deepcopy(model), inputs_from_spec(first.in_spec), loss).graph
    on_meta = capture(_on_meta(model), inputs_from_spec(first.in_spec), loss).graph
    assert first.fingerprint() == again.fingerprint() == on_meta.fingerprint()
    assert first == again == on_meta


def _on_meta(model: nn.Module) -> nn.Module:
    if not hasattr(model, "config"):
        return copy.deepcopy(model).to("meta")
    with torch.device("meta"):  # not model.to("meta"), which unties the head
        return type(model)(model.config).train()


def test_another_model_has_another_fingerprint() -> None:
    model, inputs, _ = BUILDERS["gpt2"]()
    deeper, _, _ = BUILDERS["gpt2"](layers=3)
    assert capture(model, inputs).graph.fingerprint() != capture(deeper, inputs).graph.fingerprint()


def test_capture_leaves_the_model_alone() -> None:
    model, inputs, _ = BUILDERS["convnet"]()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    capture(model, inputs)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_cache_is_off_while_tracing_only() -> None:
    model, (_, kwargs), _ = BUILDERS["gpt2"]()
    model.config.use_cache = True
    captured = capture(model, kwargs)
    assert model.config.use_cache is True
    assert captured.graph.outputs[1].endswith("CausalLMOutputWithCrossAttentions")
    assert [key for key, _ in captured.graph.outputs[2]] == ["loss", "logits"]


def test_tied_parameters_are_one_source() -> None:
    model, inputs, _ = BUILDERS["gpt2"]()
    graph = capture(model, inputs).graph
    assert dict(graph.aliases) == {"lm_head.weight": "transformer.wte.weight"}
    assert [node.target for node in graph.of(PARAMETER)] == [name for name, _ in model.named_parameters()]
    assert len(graph.users[next(v for v in graph.users if v.node == "p_transformer_wte_weight")]) == 2


def test_batch_norm_returns_its_statistics() -> None:
    model, inputs, _ = BUILDERS["convnet"]()
    graph = capture(model, inputs).graph
    assert {name for name, _ in graph.mutations} == {node.target for node in graph.of(BUFFER)}
    assert [len(node.outputs) for node in graph.of("shard.batch_norm")] == [3, 3]
    model.eval()
    assert capture(model, inputs).graph.mutations == ()


def test_mean_over_valid_targets_is_a_sum_over_a_count() -> None:
    model, inputs, _ = BUILDERS["llama"]()
    graph = capture(model, inputs).graph
    loss = graph.by_name[graph.loss.node]
    assert loss.op == "aten.div.Tensor"
    total, count = (graph.by_name[value.node] for value in loss.inputs)
    assert (total.op, total.args[3], count.op) == ("aten.cross_entropy_loss.default", 2, "shard.valid_count")
    assert total.grad == (True,)
    assert count.grad == (False,)


class Weighted(nn.Module):
    def __init__(self, smoothing: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5).to(dtype)
        self.register_buffer("weights", torch.linspace(0.5, 2, 5, dtype=dtype))
        self.smoothing = smoothing

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.head(x)
        hard = F.cross_entropy(logits, y, self.weights, ignore_index=2, label_smoothing=self.smoothing)
        soft = F.cross_entropy(logits, F.one_hot(y.clamp(min=0), 5).to(logits) * 0.8 + 0.04)
        return hard + soft + F.nll_loss(F.log_softmax(logits, -1), y, self.weights, ignore_index=2)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_weights_smoothing_and_ignored_targets(smoothing: float) -> None:
    torch.manual_seed(0)
    model = Weighted(smoothing, torch.float64)
    assert_same(model, ((torch.randn(7, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 3, 4, 1])), {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_counts_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Weighted(0.0, dtype)
    graph = capture(model, ((torch.randn(7, 6, dtype=dtype), torch.randint(0, 5, (7,))), {})).graph
    assert {node.outputs[0].dtype for node in graph.of("shard.valid_count")} == {"float32"}
    assert graph.spec(graph.loss).dtype == str(dtype).removeprefix("torch.")


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
            with torch.autocast("cpu", enabled=False):
                inside = self.b(h.float())
        with torch.no_grad():
            target = self.b(x)
        loss = (inside - target).pow(2).mean() + self.frozen(h.float()).mean() + x.detach().mean()
        return {"loss": loss, "h": h, "none": None, "pair": (target, [1, "two"])}


def test_regions_constants_and_structure() -> None:
    torch.manual_seed(0)
    graph = assert_same(Regions(), ((torch.randn(4, 8),), {}), tolerance=1e-6)
    linears = graph.of("aten.linear.default")
    assert [node.context for node in linears] == ["autocast(cpu,bfloat16)", "autocast(cpu,off)", "no_grad", ""]
    assert [node.grad for node in linears] == [(True,), (True,), (False,), (True,)]
    assert [node.module for node in linears] == ["a", "b", "b", "frozen"]
    assert graph.frozen == {"frozen.weight", "frozen.bias"}
    assert not graph.of("aten.detach.default"), "a detach of what carries no gradient"


class Indexing(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0])
        picked = x[rows, at]
        pairs = mask[rows[:, None, None], torch.arange(mask.shape[1])[None, :, None], at[:1]]
        ends = mask[..., 0][rows[:, None, None, None], torch.arange(mask.shape[1])[None, None, :, None]]
        return picked.sum() + (pairs * 2.0).sum() + x[at, rows].sum() + mask[rows[:, None], at].sum() + ends.pow(2).sum()


def test_rows_that_run_along() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    graph = assert_same(Indexing(), ((x, torch.tensor([1, 0, 3, 2]), torch.randn(4, 6, 5, dtype=torch.float64)), {}))
    assert [node.args[2] for node in graph.of("shard.index")] == [((0, 0),), ((0, 0), (1, 1)), ((0, 0),), ((0, 0),)]


def test_text_names_the_line_and_the_module() -> None:
    model, inputs, loss = BUILDERS["mlp"]()
    graph = capture(model, inputs, loss).graph
    linear = graph.of("aten.linear.default")[1]
    assert linear.module == "layers.1"
    assert linear.source.startswith("tests/models.py:") or linear.source.startswith("modules/linear.py:")
    assert graph.of("aten.gelu.default")[0].source.startswith("tests/models.py:")


class Repeats(nn.Module):
    """As state-space models repeat their groups, and as masks are repeated flat."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).repeat_interleave(3, dim=1, output_size=3 * x.shape[1])
        return (y.square().mean(-1).repeat_interleave(2) * 0.5).sum()


def test_repeats_have_a_rule_in_every_form() -> None:
    graph = assert_same(Repeats().double(), (torch.randn(2, 3, 4, dtype=torch.float64),))
    repeats = graph.of("aten.repeat_interleave.self_int")
    assert len(repeats) == 2
    assert all(rule_of(node, [graph.spec(v) for v in node.inputs]) is not None for node in repeats)
