"""Inputs: found for the literal call, described as data, bound to a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from models import BUILDERS
from torch import Tensor, nn

from planner.errors import InputError, PlanError
from planner.inputs import bind, describe, example_inputs_of, inputs_from_spec, normalise
from planner.outputs import find_loss
from planner.trace import capture


class Keywords(nn.Module):
    def forward(self, ids: Tensor, masks: Any = None, *, bias: Tensor, flag: bool = False, labels: Tensor | None = None) -> Tensor:
        total = ids.float().sum() + bias.sum()
        for mask in masks["all"]:
            total = total + mask.sum()
        return total if labels is None or flag else total + labels.sum()


IDS, BIAS, MASKS = torch.ones(4, 3, dtype=torch.int64), torch.ones(2), {"all": [torch.ones(3), torch.ones(5)]}


def spec_of_call() -> tuple[nn.Module, Any]:
    model = Keywords()
    return model, describe(model, (IDS, MASKS), {"bias": BIAS, "labels": None})[0]


def test_spec_is_json_and_names_follow_the_arguments() -> None:
    model, spec = spec_of_call()
    assert json.loads(json.dumps(spec)) == spec
    found = bind(spec, (IDS, MASKS), {"bias": BIAS, "labels": None})
    assert list(found) == ["ids", "masks_all_0", "masks_all_1", "bias"]
    args, kwargs = inputs_from_spec(spec)
    assert args[1]["all"][1].shape == (5,)
    assert args[0].is_meta
    assert kwargs["labels"] is None
    graph = capture(model, ((IDS, MASKS), {"bias": BIAS})).graph
    assert [node.target for node in graph.of("input")] == list(found)


def test_calls_in_another_form_bind_alike() -> None:
    model, spec = spec_of_call()
    by_keyword = bind(spec, (), {"labels": None, "bias": BIAS, "masks": MASKS, "ids": IDS}, model)
    assert [by_keyword[key] is value for key, value in (("ids", IDS), ("bias", BIAS))] == [True, True]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((IDS[:2], MASKS), {"bias": BIAS}, r"'ids' is int64\[2, 3\], the plan was made for int64\[4, 3\]"),
        ((IDS.float(), MASKS), {"bias": BIAS}, r"'ids' is float32\[4, 3\], the plan was made for int64"),
        ((IDS, MASKS), {}, "'bias' is missing"),
        ((IDS, MASKS), {"bias": BIAS, "labels": BIAS}, r"'labels' is a tensor float32\[2\], the plan was made for None"),
        ((IDS, MASKS), {"bias": BIAS, "flag": True}, r"\['flag'\] are not in the plan"),
        ((IDS, {"all": [BIAS]}), {"bias": BIAS}, r"'argument 1\.all' is 1 items, the plan was made for a list of 2"),
        ((IDS, {"some": []}), {"bias": BIAS}, r"\['some'\], the plan was made for a dict with keys \['all'\]"),
        ((IDS,), {"bias": BIAS}, "1 positional inputs, the plan was made for 2"),
        ((3, MASKS), {"bias": BIAS}, r"'ids' is a int, the plan was made for a tensor int64"),
    ],
)
def test_what_does_not_fit_is_named(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        bind(spec_of_call()[1], args, kwargs)


def test_normalise() -> None:
    assert normalise(IDS) == ((IDS,), {})
    assert normalise({"x": 1}) == ((), {"x": 1})
    assert normalise(((1, 2), {"x": 3})) == ((1, 2), {"x": 3})
    assert normalise((1, 2)) == ((1, 2), {})
    with pytest.raises(InputError, match="a str"):
        normalise("ids")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert_mlm", "vit"])
def test_the_literal_call_finds_inputs_with_a_loss(name: str) -> None:
    model, _, _ = BUILDERS[name]()
    inputs = example_inputs_of(model, 3)
    assert inputs[1][model.main_input_name].is_meta
    assert {tensor.shape[0] for tensor in inputs[1].values()} == {9}
    graph = capture(model, inputs).graph
    assert graph.loss is not None
    assert dict(graph.batch_dims) == dict.fromkeys(inputs[1], 0)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(7, 2), (8, 7)),
        (nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), (8, 128)),
        (nn.Sequential(nn.ReLU(), nn.Conv2d(4, 2, 3)), (8, 4, 224, 224)),
    ],
)
def test_a_first_layer_tells_the_shape(layer: nn.Module, shape: tuple[int, ...]) -> None:
    (x,), _ = example_inputs_of(layer, 4)
    assert x.shape == shape


def test_lightning_example() -> None:
    model = Keywords()
    model.example_input_array = (IDS, MASKS)  # type: ignore[assignment]
    assert example_inputs_of(model, 2) == ((IDS, MASKS), {})


def test_otherwise_the_error_says_what_to_pass() -> None:
    with pytest.raises(InputError, match=r"auto_parallelize\(model, gpus=4, example_inputs=dict\(ids=tensor, bias=tensor\)\)"):
        example_inputs_of(Keywords(), 4)


def test_which_output_is_the_loss() -> None:
    scalar, vector = torch.tensor(1.5), torch.ones(3)
    for output in (scalar, {"loss": scalar, "x": vector}, (scalar, vector), [scalar], {"total": scalar, "x": vector}):
        assert find_loss(output) is scalar
    for output in (vector, {"x": vector}, (vector, scalar), torch.tensor(1), None):
        assert find_loss(output) is None
