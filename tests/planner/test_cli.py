"""The command line: what it prints, what it writes, its exit codes, and errors in one line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sample_plans
from rich.console import Console
from typer.testing import CliRunner

from planner import plan_io
from planner.cli import app, scaling_table, torchrun_command
from planner.cli_parts import EXITS, exit_code, load_target, parse_counts, parse_layout
from planner.errors import BatchError, CaptureError, InfeasibleError, InputError, PlanError, WorkerError
from planner.plan import Plan
from planner.plan_io import load_plan

MODULE = """
import torch
def model(): return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
def with_loss(): return model(), (torch.randn(8, 8),), lambda out: out.sum()
def number(): return 3
def broken(): raise RuntimeError("no\\ndata")
def big(): return torch.nn.Sequential(torch.nn.Linear(2**18, 2**18)), (torch.zeros(8, 2**18),), torch.sum
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two plans and a module of targets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sample_plans.plan().save("a.json")
    sample_plans.plan(tensor=1).save("b.json")
    (tmp_path / "cut.json").write_text(sample_plans.plan().to_json()[:300])
    (tmp_path / "cli_targets.py").write_text(MODULE)
    return tmp_path


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def refused(code: int, *arguments: str) -> str:
    """Run a command that must fail with ``code``; returns its one line on stderr."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and "Traceback" not in result.output
    return result.stderr


def test_validate(folder: Path) -> None:
    result = call("validate", "a.json")
    assert result.exit_code == 0
    assert "a.json: valid; ToyTransformer on 8 × h100, pipe=2 data=2 tensor=2 microbatches=4, 12 ops in 3 segment classes" in result.stdout
    assert "cut.json: not JSON" in refused(4, "validate", "cut.json")
    assert "absent.json" in refused(4, "validate", "absent.json")


PLANNING = ("--gpus", "2", "--hardware", "h100", "--time-limit", "20")


def test_plan_writes_and_shows(folder: Path) -> None:
    result = call("plan", "cli_targets:with_loss", *PLANNING, "--optimizer", "sgd", "--layout", "data=2,tensor=1,pipe=1", "-o", "new.json")
    assert result.exit_code == 0, result.output
    assert "Sequential on 2 × h100: pipe 1 × data 2 × tensor 1" in result.stdout and "wrote new.json" in result.stdout
    plan = load_plan("new.json")
    assert (plan.mesh.data, plan.optimizer, plan.model.loss, plan.input_shapes()) == (2, "sgd", "callable", {"input": (8, 8)})
    assert call("validate", "new.json").exit_code == 0 and call("show", "new.json").exit_code == 0


def test_plan_to_stdout_is_json_and_nothing_else(folder: Path) -> None:
    """As a process: what a native library prints past Python counts too."""
    command = [sys.executable, "-m", "planner", "plan", "cli_targets:with_loss", *PLANNING, "-o", "-"]
    root = str(Path(plan_io.__file__).parent.parent)
    done = subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": root})
    assert done.returncode == 0, done.stderr
    assert Plan.from_json(done.stdout).world_size == 2


def test_plan_refusals_have_their_exit_codes(folder: Path) -> None:
    assert "the largest parameter is '0.weight'" in refused(3, "plan", "cli_targets:big", "--meta", *PLANNING)
    assert "gpus=0" in refused(2, "plan", "cli_targets:with_loss", "--gpus", "0")
    assert "loss" in refused(2, "plan", "cli_targets:model", *PLANNING)
    assert "nothing" not in refused(3, "simulate", "cli_targets:big", "--meta", "--gpus", "1", "--hardware", "h100")


def test_simulate_prints_a_row_per_number_of_gpus(folder: Path) -> None:
    result = call("simulate", "cli_targets:with_loss", "--gpus", "1,2", "--hardware", "h100")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0][:4] == ["gpus", "mesh", "micro", "step"]
    assert [(row[0], row[1].count("×")) for row in rows[1:3]] == [("1", 2), ("2", 2)] and rows[1][5] == "1.00×"


def test_explain_and_diff(folder: Path) -> None:
    assert call("explain", "a.json").stdout == load_plan("a.json").explain()
    assert "tensor: 2 => 1" in call("diff", "a.json", "b.json").stdout
    assert call("diff", "a.json", "a.json").stdout == "no differences\n"
    assert "cut.json" in refused(4, "diff", "a.json", "cut.json")


def test_show_and_trace(folder: Path) -> None:
    result = call("show", "a.json")
    assert result.exit_code == 0 and "ToyTransformer" in result.stdout and "wrote a.html" in result.stdout
    assert (folder / "a.html").read_text().startswith("<!doctype html>")
    assert call("show", "a.json", "--html", "other.html").exit_code == 0 and (folder / "other.html").exists()
    assert call("trace", "a.json").exit_code == 0
    assert json.loads((folder / "a.trace.json").read_text())["traceEvents"]


def test_usage_errors(folder: Path) -> None:
    assert call("nonsense").exit_code == 2
    assert call("plan").exit_code == 2
    assert "expected 'module:function'" in refused(2, "plan", "cli_targets")
    assert "cannot import 'no_such_module'" in refused(2, "plan", "no_such_module:model")
    assert "has no 'absent'" in refused(2, "plan", "cli_targets:absent")
    assert "RuntimeError: no data" in refused(2, "plan", "cli_targets:broken")
    assert "returned (int)" in refused(2, "plan", "cli_targets:number")
    assert "layout 'data=x'" in refused(2, "plan", "cli_targets:model", "--layout", "data=x")
    assert "gpus '1,zero'" in refused(2, "simulate", "cli_targets:model", "--gpus", "1,zero")
    assert "unknown" in refused(2, "profile", "abacus").lower()


def test_profile_of_a_preset(folder: Path) -> None:
    result = call("profile", "h100", "--ranks", "8", "--out", "h100.json", "--html", "h100.html", "--show")
    assert result.exit_code == 0 and "memory bandwidth" in result.stdout
    assert json.loads((folder / "h100.json").read_text())["name"] == "h100"
    assert "<svg" in (folder / "h100.html").read_text()


def test_run_starts_every_rank(folder: Path) -> None:
    sample_plans.plan(pipe=1, tensor=1, microbatches=1).save("two.json")
    script = folder / "script.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "e = os.environ\n"
        "pathlib.Path('rank' + e['RANK']).write_text(e['WORLD_SIZE'] + ' '.join(sys.argv[1:]) + e['SHARDWRIGHT_PLAN'])\n"
        "sys.exit(3 if 'fail' in sys.argv else 0)\n"
    )
    command = [sys.executable, "-m", "planner", "run", "two.json", "script.py", "--flag"]
    root = str(Path(plan_io.__file__).parent.parent)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": root})
    assert done.returncode == 0, done.stderr
    assert [(folder / f"rank{r}").read_text() for r in (0, 1)] == [f"2--flag{folder / 'two.json'}"] * 2
    failed = subprocess.run([*command, "fail"], capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": root})
    assert failed.returncode == 5
    assert failed.stderr.splitlines()[-1].startswith("error: a worker of 'script.py' failed")


def test_run_refuses_before_starting(folder: Path) -> None:
    assert "script 'absent.py' does not exist" in refused(2, "run", "a.json", "absent.py")
    assert "cut.json" in refused(4, "run", "cut.json", "cli_targets.py")
    assert "nnodes=3: the plan's 8 ranks" in refused(2, "run", "--nnodes", "3", "a.json", "cli_targets.py")
    assert "--master host:port" in refused(2, "run", "--nnodes", "2", "a.json", "cli_targets.py")


def test_torchrun_stays_on_the_loopback_on_one_node() -> None:
    plan = sample_plans.plan()
    one = torchrun_command(plan, Path("s.py"), ["-x"], 1, 0, "")
    loopback = ["--standalone", "--local-addr=127.0.0.1"]
    assert one[1:] == ["-m", "torch.distributed.run", "--nproc-per-node=8", "--nnodes=1", *loopback, "s.py", "-x"]
    two = torchrun_command(plan, Path("s.py"), [], 2, 1, "node0:29500")
    assert "--nproc-per-node=4" in two and "--node-rank=1" in two and "--master-addr=node0" in two and "--master-port=29500" in two


def test_scaling_table() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(scaling_table([(1, InfeasibleError("needs 9 GiB")), (4, sample_plans.plan(tensor=1)), (8, sample_plans.plan())]))
    text = console.export_text()
    assert "needs 9 GiB" in text and "2×2×2" in text and "1.00×" in text and "50.0 %" in text


def test_exit_codes() -> None:
    wanted = {InputError: 2, CaptureError: 2, BatchError: 2, InfeasibleError: 3, PlanError: 4, WorkerError: 5}
    assert {kind: exit_code(kind("x")) for kind in wanted} == wanted
    assert {code for _, code in EXITS} == {2, 3, 4, 5}


def test_layouts_and_counts() -> None:
    assert parse_layout("data=2, tensor=4,schedule=1f1b") == {"data": 2, "tensor": 4, "schedule": "1f1b"}
    assert parse_layout(None) is None and parse_layout("") is None
    for text in ("data", "data=-1", "date=2", "zero=²"):
        with pytest.raises(InputError, match="expected some of"):
            parse_layout(text)
    assert parse_counts("1, 2,8") == [1, 2, 8]
    for text in ("", "0", "1;2", "-1"):
        with pytest.raises(InputError, match="expected numbers"):
            parse_counts(text)


def test_targets(folder: Path) -> None:
    made = load_target("cli_targets:with_loss")
    assert made.example_inputs[0].shape == (8, 8) and made.loss is not None
    assert load_target("cli_targets:big", meta=True).model[0].weight.is_meta
