"""How a run starts: under torchrun, from ``launch`` with a plan, and again after an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import builds
import pytest
import torch
import torch.distributed as dist
from builds import plan_of
from harness import built

from planner.errors import WorkerError
from planner.plan import Plan
from runtime import launch, parallelize

SCRIPT = """
import sys
import torch
sys.path[:0] = {paths!r}
import builds
from harness import built
from planner import load_plan
from runtime import parallelize
model, args, kwargs, _ = built(builds.tied, torch.float64)
parallel = parallelize(model, load_plan({plan!r}))
loss = parallel.step(*args, **kwargs)
if torch.distributed.get_rank() == 0:
    print("loss", loss.item())
"""


def test_under_torchrun(tmp_path: Path) -> None:
    plan = plan_of(builds.tied, data=2, fsdp=["a.weight"])
    figures = plan.predicted.model_copy(update={"peak_memory_bytes": [0], "memory": [{}]})
    plan = plan.model_copy(update={"predicted": figures})
    plan.save(tmp_path / "plan.json")
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), str(here.parent.parent)]
    (tmp_path / "train.py").write_text(SCRIPT.format(paths=paths, plan=str(tmp_path / "plan.json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run([*command, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    model, args, kwargs, _ = built(builds.tied, torch.float64)
    assert float(done.stdout.split()[-1]) == pytest.approx(model(*args, **kwargs)["loss"].item())


def one_step(plan: Plan, scale: float) -> float:
    model, args, _, _ = built(builds.tied, torch.float64)
    return scale * parallelize(model, plan).step(*args).item()


def test_launch_gives_the_plan_and_takes_all_results() -> None:
    plan = plan_of(builds.tied, pipe=2)
    model, args, _, _ = built(builds.tied, torch.float64)
    assert launch(one_step, plan, 2.0, timeout_s=60, start="fork") == pytest.approx([2 * model(*args)["loss"].item()] * 2)


def test_errors_name_the_place_on_the_mesh() -> None:
    def fail(plan: Plan) -> None:
        if dist.get_rank() == 1:
            raise ValueError("here")
        dist.barrier()

    with pytest.raises(WorkerError, match=r"rank 1 of 2 \(pipe 1, data 0, tensor 0\) failed: ValueError"):
        launch(fail, plan_of(builds.tied, pipe=2), timeout_s=60, start="fork")


def interrupted(plan: Plan) -> Any:
    """All ranks fail in the middle of a backward, then go on."""
    model, args, _, _ = built(builds.tied, torch.float64)
    parallel = parallelize(model, plan)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("in the middle")

    hook = next(p for n, p in parallel.named_parameters() if n == "b.bias").register_post_accumulate_grad_hook(fail)
    with pytest.raises(WorkerError, match=r"rank \d \(pipe 0, data \d, tensor 0\), backward of micro-batch 0: RuntimeError: in the middle"):
        parallel.step(*args)
    hook.remove()
    assert all(parameter.grad is None for parameter in parallel.parameters())
    return parallel.step(*args).item(), parallel.gather_gradients()


def test_a_step_after_an_error_starts_clean() -> None:
    plan = plan_of(builds.tied, data=2, fsdp=["a.weight", "e.weight", "n.weight"])
    model, args, _, _ = built(builds.tied, torch.float64)
    want = model(*args)["loss"]
    want.backward()
    for loss, gradients in launch(interrupted, plan, timeout_s=60, start="fork"):
        assert loss == pytest.approx(want.item())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)
