"""Explaining and comparing plans, and the words both use."""

from __future__ import annotations

import json

import pytest
import sample_plans

from planner.errors import PlanError
from planner.oplines import OpLine
from planner.plan import Alternative, Plan, SegmentPlan
from planner.show import units
from planner.show.words import describe, runner_up, storage, summary


def one_op(text: str, following: str | None = None, axis: str = "tensor") -> str:
    """The words for one op on a mesh with a single axis of 2."""
    plan = sample_plans.plan(pipe=1, data=2 if axis == "data" else 1, tensor=2 if axis == "tensor" else 1, microbatches=1)
    segment = SegmentPlan(name="s", segments=[0], ops=[text] + ([following] if following else []))
    return describe(plan, segment)[0][1][0].text


@pytest.mark.parametrize(
    "text",
    [
        "aten.linear.default: S(0),R | R,S(0) -> S(0),S(2)",
        "aten.embedding.default: S(0) | R -> P @vocab_embedding",
        "aten.arange.default:  -> R,R",
        "aten.relu.default:  -> ",
        "aten.split.Tensor: S(0:3) -> S(0) | S(0) | S(0)",
    ],
)
def test_op_lines_print_as_they_parse(text: str) -> None:
    assert str(OpLine.parse(text)) == text


@pytest.mark.parametrize("text", ["", "aten.relu.default", "relu: R", "a b: R -> R", "aten.relu.default: R -> R -> R", "a: R -> R @k x"])
def test_other_lines_are_refused(text: str) -> None:
    with pytest.raises(PlanError):
        OpLine.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("aten.linear.default: R | S(0) -> S(2)", "column-parallel"),
        ("aten.linear.default: S(2) | S(1) -> P", "row-parallel: pending sum"),
        ("aten.linear.default: S(1) | R -> S(1)", "rows split along dim 1"),
        ("aten.addmm.default: S(0) | R | S(1) -> S(1)", "column-parallel"),
        ("aten.mm.default: S(1) | S(0) -> P", "row-parallel: pending sum"),
        ("aten.bmm.default: S(2) | S(1) -> P", "contraction split: pending sum"),
        ("aten.embedding.default: S(0) | R -> P @vocab_embedding", "vocabulary split: pending sum"),
        ("aten.embedding.default: S(1) | R -> S(2)", "hidden dim split"),
        ("aten.scaled_dot_product_attention.default: S(1) | S(1) | S(1) -> S(1)", "split by heads"),
        ("aten.cross_entropy_loss.default: S(1) | R -> R @vocab_cross_entropy", "vocabulary split"),
        ("aten.gelu.default: S(2) -> S(2)", "split along dim 2"),
        ("aten.mul.Tensor: P | R -> P", "linear: passes the pending sum"),
        ("aten.sum.default: S(0) -> P", "pending sum over the split part"),
        ("aten.linear.default: I | I -> I", "whole, same work on every rank"),
        ("aten.linear.default: R | R -> R", "whole on every rank"),
        ("aten.new_ones.default: S(2) -> R", "whole result on every rank"),
        ("aten.unheard_of.default: I -> I", "replicated: no rule"),
    ],
)
def test_words_on_the_tensor_axis(text: str, words: str) -> None:
    assert one_op(text) == words


def test_words_on_the_data_axis() -> None:
    assert one_op("aten.linear.default: S(0) | R -> S(0)", axis="data") == "batch split"
    assert one_op("aten.cross_entropy_loss.default: S(0) | S(0) -> P", axis="data") == "batch split: pending sum"


@pytest.mark.parametrize(
    ("following", "collective"),
    [
        ("aten.add.Tensor: I | I -> I", ", then all-reduce"),
        ("aten.add.Tensor: R | R -> R", ", then all-reduce (both ways)"),
        ("aten.add.Tensor: S(1) | S(1) -> S(1)", ", then reduce-scatter"),
        ("aten.add.Tensor: P | P -> P", ", kept pending by the next op"),
        ("aten.add.Tensor: P | R -> P", ""),
        ("shard.valid_count.default: S(0) -> P", ""),
    ],
)
def test_what_follows_a_pending_sum(following: str, collective: str) -> None:
    assert one_op("aten.linear.default: S(2) | S(1) -> P", following) == "row-parallel: pending sum" + collective


def test_storage_words() -> None:
    plan = sample_plans.plan()
    told = {parameter.name: storage(plan, parameter) for parameter in plan.parameters}
    fused = told["layers.*.qkv.weight"]
    assert fused.startswith("FSDP over data") and fused.endswith("split along dim 0 over tensor")
    assert told["layers.*.norm.weight"] == "whole over data, gradient all-reduced once per step; whole over tensor"
    alone = sample_plans.plan(pipe=1, data=1, tensor=1, microbatches=1)
    assert storage(alone, alone.parameters[0]) == "whole"


def test_summary_counts_every_op_once_per_axis() -> None:
    plan = sample_plans.plan()
    told = summary(plan, plan.segments[1])
    assert told["data"] == ["9 ops batch split"]
    assert "linear column-parallel (×2)" in told["tensor"] and "scaled_dot_product_attention split by heads" in told["tensor"]


def test_explain_says_what_binds_and_what_the_others_cost() -> None:
    text = sample_plans.plan().explain()
    assert "memory: 2.70 GiB (stage 0, mostly activations) of 3.73 GiB, 72.5 %" in text
    assert "pipe=1 data=8 tensor=1 microbatches=1: 125 ms, +25.0 % (communication 0.05 s)" in text
    assert "pipe=1 data=1 tensor=8 microbatches=1: does not go (needs 5.1 GB of 4.0 GB)" in text
    assert "proven optimal" in text and "no rule" in text and "layers.* ×2" in text
    data = sample_plans.data()
    data |= {"memory_per_gpu": 3_000_000_000, "solver": {**data["solver"], "status": "feasible", "bound": 0.08, "gap": 0.2}}
    tight = Plan.from_json(json.dumps(data)).explain()
    assert "limit is tight" in tight and "no plan is more than 20.0 % faster" in tight


def test_a_runner_up_that_was_only_bounded_says_so() -> None:
    plan = sample_plans.plan()
    told = runner_up(plan, Alternative(what="x", step_time_s=0.12, why="at least this long: cannot be faster"))
    assert (told.time, told.against, told.why) == ("≥ 120 ms", "≥ +20.0 %", "cannot be faster")


def test_explain_of_one_gpu() -> None:
    assert "nothing to choose" in sample_plans.plan(pipe=1, data=1, tensor=1, microbatches=1).explain()


def test_diff_of_equal_plans_is_empty() -> None:
    difference = sample_plans.plan().diff(sample_plans.plan())
    assert not difference and str(difference) == "no differences"


def test_diff_finds_each_change() -> None:
    before, data = sample_plans.plan(), sample_plans.data()
    data["segments"][1]["ops"][6] = "aten.relu.default: S(0),S(0),S(2) -> S(0),S(0),S(2)"
    data["segments"][1]["ops"][8] = data["segments"][1]["ops"][4]
    data["parameters"][2]["fsdp"] = False
    data["stages"] = [{"first": 0, "last": 2}, {"first": 2, "last": 6}]
    data["predicted"] |= {"step_time_s": 0.11, "breakdown": {**data["predicted"]["breakdown"], "backward": 0.05}}
    data |= {"optimizer": "sgd"}
    difference = before.diff(Plan.from_json(json.dumps(data)))
    assert [(c.section, c.what, c.after) for c in difference.changes] == [
        ("settings", "optimizer", "sgd"),
        ("stages", "stage 0, segments", "[0, 2)"),
        ("stages", "stage 1, segments", "[2, 6)"),
        ("ops", "layers.* op 6 aten.gelu.default", "aten.relu.default: S(0),S(0),S(2) -> S(0),S(0),S(2)"),
        ("ops", "layers.* op 8 aten.add.Tensor", "S(0),S(0),I | S(0),S(0),I -> S(0),S(0),I"),
        ("parameters", "layers.*.qkv.weight", "R,R,S(0)"),
        ("predicted", "step time", "110 ms"),
        ("predicted", "backward", "50.0 ms"),
    ]
    assert "step time: 100 ms => 110 ms (+10.0 %)" in str(difference)


def test_diff_over_other_axes_speaks_in_words() -> None:
    difference = sample_plans.plan().diff(sample_plans.plan(tensor=1))
    assert [(c.what, c.before, c.after) for c in difference.of("mesh")] == [("tensor", "2", "1")]
    assert any(c.what == "layers.* on tensor" and c.after == "(absent)" for c in difference.of("ops"))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 s"), (1.5, "1.50 s"), (0.0125, "12.5 ms"), (2.5e-4, "250 us"), (3e-9, "3.00 ns"), (1234.5, "1,234 s")]
)
def test_seconds(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2_900_000_000, "2.70 GiB"), (2**50, "1,024 TiB")]
)
def test_nbytes(value: int, text: str) -> None:
    assert units.nbytes(value) == text


def test_a_small_share_is_not_zero() -> None:
    assert units.share(1e-6) == "<0.05 %" and units.share(0) == "0.00 %" and units.share(0.125) == "12.5 %"
