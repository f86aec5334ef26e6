"""The plan's file: canonical bytes out, nothing but a sound plan or a PlanError in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import sample_plans
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from planner import plan_io
from planner.errors import PlanError
from planner.plan import SCHEMA_VERSION, Plan
from planner.plan_io import load_plan

SHAPES = [{}, {"pipe": 1}, {"tensor": 1, "microbatches": 1}, {"pipe": 1, "data": 1, "tensor": 1, "microbatches": 1}]
TEXT = sample_plans.plan().to_json()


def changed(path: str, value: Any) -> str:
    """The sample plan's JSON with one field replaced; ``path`` as in an error message."""
    data = sample_plans.data()
    *parents, last = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", path)]
    place: Any = data
    for part in parents:
        place = place[part]
    place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize("sizes", SHAPES)
def test_round_trip(sizes: dict[str, int]) -> None:
    plan = sample_plans.plan(**sizes)
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text.encode()).to_json() == text


def test_input_shapes() -> None:
    assert sample_plans.plan().input_shapes() == {"tokens": (16, 32)}


def test_repr_is_one_line() -> None:
    shown = "<Plan of ToyTransformer on 8 x h100: pipe=2 data=2 tensor=2 microbatches=4, predicted step 0.1 s>"
    assert repr(sample_plans.plan()) == str(sample_plans.plan()) == shown


def test_canonical_form() -> None:
    assert TEXT.endswith("}\n") and TEXT.count("\n") == 1 and TEXT.isascii()
    assert json.dumps(json.loads(TEXT), sort_keys=True, separators=(",", ":")) + "\n" == TEXT
    assert Plan.from_json(json.dumps(json.loads(TEXT), indent=3)).to_json() == TEXT


def test_names_outside_ascii_round_trip() -> None:
    text = changed("model.name", "größe-✓-𝔸")
    plan = Plan.from_json(text)
    assert plan.model.name == "größe-✓-𝔸" and plan.to_json().isascii() and Plan.from_json(plan.to_json()) == plan


def test_same_bytes_in_processes_with_other_hash_seeds() -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; import sample_plans; sys.stdout.write(sample_plans.plan().to_json())"
    roots = [str(Path(plan_io.__file__).parent.parent), str(Path(__file__).parent)]
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code, *roots], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=60
        )
        assert run.stdout == TEXT, run.stderr


def test_what_is_carried_in_memory_only_makes_no_difference() -> None:
    """A plan that has just been made knows its loss callable and how long the solver took; its file does not."""
    plan, slower = sample_plans.plan(), sample_plans.plan()
    slower._loss = len
    slower = slower.model_copy(update={"solver": slower.solver.model_copy(update={"seconds": 9.0})})
    assert slower.to_json() == plan.to_json() and slower == plan and hash(slower) == hash(plan)
    assert "seconds" not in json.loads(plan.to_json())["solver"] and Plan.from_json(plan.to_json()).solver.seconds is None
    assert plan != sample_plans.plan(tensor=1) and plan != plan.to_json()


def test_infinite_values_are_not_written() -> None:
    plan = Plan.model_validate({**sample_plans.data(), "model": {**sample_plans.data()["model"], "inputs": {"value": float("inf")}}})
    with pytest.raises(PlanError, match=r"ToyTransformer.*only finite"):
        plan.to_json()


def test_save_and_load(tmp_path: Path) -> None:
    plan = sample_plans.plan()
    path = tmp_path / "plan.json"
    path.write_text("older")
    plan.save(path)
    assert load_plan(path) == plan and load_plan(str(path)) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    sample_plans.plan().save(path)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PlanError, match="No space left"):
        sample_plans.plan(tensor=1).save(path)
    assert load_plan(path) == sample_plans.plan()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"absent\.json.*No such file"):
        load_plan(tmp_path / "absent.json")
    with pytest.raises(PlanError, match=r"nowhere.*No such file"):
        sample_plans.plan().save(tmp_path / "nowhere" / "plan.json")


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text(TEXT[: len(TEXT) // 2])
    with pytest.raises(PlanError, match=r"cut\.json: not JSON.*cut short"):
        load_plan(path)


# ---------------------------------------------------------------- what is refused, field by field

REFUSED = [
    ("schema_version", 99, r"schema_version: the plan has 99, this release reads 1"),
    ("schema_version", 0, r"schema_version: the plan has 0, this release reads 1"),
    ("schema_version", "1", r"schema_version: '1', must be the integer 1"),
    ("schema_version", True, r"schema_version: True, must be the integer 1"),
    ("mesh.data", 0, r"mesh\.data: 0 is refused"),
    ("mesh.data", "2", r"mesh\.data: '2' is refused.*integer"),
    ("mesh.data", 2.0, r"mesh\.data: 2\.0 is refused.*integer"),
    ("mesh.data", 2**70, r"integer '1180591620717411303424' does not fit into 64 bits"),
    ("mesh.extra", 1, r"mesh\.extra: no such field in a plan, its value is 1"),
    ("schedule", "fastest", r"schedule: 'fastest' is refused.*1f1b"),
    ("schedule", "none", r"schedule: 'none' with pipe=2"),
    ("precision", "fp8", r"precision: 'fp8' is refused.*bf16-mixed"),
    ("model.fingerprint", "short", r"model\.fingerprint: 'short' is refused"),
    ("model.name", "x" * 600, r"model\.name: 'xxx.* at most 512"),
    ("model.name", "\ud800", r"half a surrogate"),
    ("model.parameters.embed.weight", "float32[]x", r"model\.parameters\['embed"),
    ("model.inputs", [], r"model\.inputs: '\[\]', must be an object of 'args'"),
    ("model.inputs.args", [{"import": "os"}], r"must be one of \{tensor, shape, dtype\}"),
    ("model.inputs.args", [{"value": [1]}], r"a value is null, a boolean"),
    ("model.inputs.args[0].dtype", "float7", r"one of the dtypes float64, float32"),
    ("model.inputs.args[0].shape", [-1], r"a shape of integers from 0"),
    ("model.batch_dims", {"words": 0}, r"model\.batch_dims: 'words' is no tensor of model\.inputs \('tokens'\)"),
    ("model.batch_dims", {"tokens": 2}, r"model\.batch_dims\['tokens'\]: dim 2, the tensor has 2 dims"),
    ("stages", [{"first": 0, "last": 6}], r"stages: there are 1, the mesh has pipe=2"),
    ("stages[1].first", 4, r"stages\[1\]: segments \[4, 6\), must start at 3"),
    ("stages[1].last", 5, r"stages\[1\]\.last: 5, but the plan has 6 segments"),
    ("segments[1].segments", [1, 2, 3, 3], r"segments\[1\]\.segments: 3 is also in segments\[1\]"),
    ("segments[1].segments", [1, 2, 3, 9], r"segments\[1\]\.segments: 9 is out of range, the plan has 6"),
    ("segments[1].recompute", "some", r"segments\[1\]\.recompute: 'some' is refused.*selective"),
    ("segments[0].ops[0]", "aten.embedding.default", r"segments\[0\]\.ops\[0\].*expected '<op>: <inputs> -> <outputs>'"),
    ("segments[0].ops[0]", "aten.relu.default: X,R,R -> R,R,R", r"segments\[0\]\.ops\[0\].*unknown sharding type 'X'"),
    ("segments[0].ops[0]", "aten.relu.default: R,R -> R,R", r"of 2 types, the mesh has 3 typed axes \(micro=4, data=2, tensor=2\)"),
    ("segments[0].ops[0]", "os; rm: R,R,R -> R,R,R", r"segments\[0\]\.ops\[0\].*expected"),
    ("parameters[0].sharding", "R,R", r"parameters\[0\] 'embed\.weight': sharding 'R,R' has 2 types"),
    ("parameters[0].sharding", "R,R,P", r"parameters\[0\] 'embed\.weight': P on tensor"),
    ("parameters[0].sharding", "S(0),R,R", r"parameters\[0\] 'embed\.weight': S\(0\) on micro"),
    ("parameters[0].sharding", "R,R,S(2)", r"S\(2\) of a tensor float32\[1000,64\], which has 2 dims"),
    ("parameters[2].sharding", "R,S(0),R", r"parameters\[2\].*fsdp with S\(0\) on data"),
    ("parameters[1].name", "embed.weight", r"parameters\[1\] 'embed\.weight': given twice"),
    ("predicted.step_time_s", -1.0, r"predicted\.step_time_s: -1\.0 is refused"),
    ("predicted.step_time_s", 0.2, r"predicted\.breakdown: sums to 0\.1 s, step_time_s is 0\.2 s"),
    ("predicted.peak_memory_bytes", [1], r"predicted\.peak_memory_bytes: 1 entries"),
    ("predicted.peak_memory_bytes[0]", 5, r"predicted\.memory\[0\]: sums to 2900000000 bytes, peak_memory_bytes\[0\] is 5"),
    ("solver.bound", 0.2, r"solver\.bound: 0\.2 s is above the objective of 0\.1 s"),
    ("solver.gap", 0.5, r"solver\.gap: 0\.5, but"),
    ("solver.status", "Optimal", r"solver\.status: 'Optimal' is refused"),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED, ids=[f"{path}={str(value)[:20]}" for path, value, _ in REFUSED])
def test_refused(path: str, value: Any, message: str) -> None:
    if path == "model.parameters.embed.weight":
        data = sample_plans.data()
        data["model"]["parameters"]["embed.weight"] = value
        text = json.dumps(data)
    else:
        text = changed(path, value)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[]", r"a plan is a JSON object, this is \[\]"),
        ("{}", "schema_version: missing"),
        ('{"a":1,"a":2}', "key 'a' is given twice"),
        ('{"schema_version":NaN}', "NaN is not a number"),
        ('{"schema_version":-Infinity}', "-Infinity is not a number"),
        ('{"a":1e999}', "number '1e999' is too large"),
        ('{"a":' + "9" * 5000 + "}", "does not fit into 64 bits"),
        ("[" * 100_000, "nested deeper than 64"),
        ('{"a":' * 70 + "1" + "}" * 70, "nested deeper than 64"),
        ('{"a":"' + "x" * 5000 + '"}', "a: a string of 5,000 characters"),
        (" " * (plan_io.MAX_BYTES + 1), "longer than 8,388,608 bytes"),
        (b"\xff\xfe{}", "not UTF-8: byte 0xff at position 0"),
    ],
    ids=lambda value: ascii(value)[:24],
)
def test_refused_text(text: str | bytes, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize("field", sorted(Plan.model_fields))
def test_a_missing_field_is_named(field: str) -> None:
    data = sample_plans.data()
    del data[field]
    if Plan.model_fields[field].is_required() or field == "schema_version":
        with pytest.raises(PlanError, match=f"^{field}: missing"):
            Plan.from_json(json.dumps(data))
    else:
        assert Plan.from_json(json.dumps(data)).model == sample_plans.plan().model


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(position=st.integers(0, len(TEXT) - 1), bit=st.integers(0, 7), cut=st.booleans())
@example(position=0, bit=0, cut=True)
def test_damaged_files_give_plan_errors_only(position: int, bit: int, cut: bool) -> None:
    data = bytearray(TEXT.encode())
    if cut:
        del data[position:]
    else:
        data[position] ^= 1 << bit
    try:
        read = Plan.from_json(bytes(data))
    except PlanError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert Plan.from_json(read.to_json()) == read


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(field=st.sampled_from(sorted(Plan.model_fields)), inner=st.integers(0, 20), value=JSON)
def test_foreign_values_give_plan_errors_only(field: str, inner: int, value: Any) -> None:
    data = sample_plans.data()
    place = data[field]
    if isinstance(place, dict) and inner < len(place):
        place[sorted(place)[inner]] = value
    elif isinstance(place, list) and inner < len(place):
        place[inner] = value
    else:
        data[field] = value
    try:
        Plan.from_json(json.dumps(data))
    except PlanError as error:
        assert str(error)


# ---------------------------------------------------------------- versions and schema


def test_migration_runs_one_version_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synthetic version -1 called the mesh ``grid``, version 0 had no micro-batches."""

    def from_minus_one(data: dict[str, Any]) -> dict[str, Any]:
        return {**{key: value for key, value in data.items() if key != "grid"}, "mesh": data["grid"]}

    def from_zero(data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "mesh": {**data["mesh"], "microbatches": 4}}

    old = sample_plans.data()
    old["schema_version"] = -1
    old["grid"] = {key: value for key, value in old.pop("mesh").items() if key != "microbatches"}
    text = json.dumps(old)
    with pytest.raises(PlanError, match="the plan has -1, this release reads 1"):
        Plan.from_json(text)
    monkeypatch.setattr(plan_io, "MIGRATIONS", {-1: from_minus_one, 0: from_zero})
    assert Plan.from_json(text) == sample_plans.plan()


def test_migrations_reach_the_present_version() -> None:
    assert all(version < SCHEMA_VERSION and version + 1 in {*plan_io.MIGRATIONS, SCHEMA_VERSION} for version in plan_io.MIGRATIONS)
    assert Plan.model_fields["schema_version"].default == SCHEMA_VERSION


def test_the_shipped_schema_is_current_and_accepts_plans() -> None:
    shipped = Path(plan_io.__file__).with_name("plan.schema.json").read_text(encoding="utf-8")
    assert shipped == plan_io.schema_json(), "run: python -c 'from planner.plan_io import schema_json; print(schema_json(), end=\"\")'"
    schema = json.loads(shipped)
    jsonschema.Draft202012Validator.check_schema(schema)
    for sizes in SHAPES:
        jsonschema.validate(json.loads(sample_plans.plan(**sizes).to_json()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(changed("mesh.extra", 1)), schema)
