"""Checkpoints: any layout to any layout, with the optimizer; damage is found; the last good one survives a failure."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import builds
import pytest
import torch
import torch.distributed as dist
from builds import plan_of
from conftest import Pool
from harness import built

from planner.errors import WorkerError
from planner.plan import Plan
from runtime.api import ParallelModule, parallelize
from runtime.errors import CheckpointError


def optimizer_of(parallel: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parallel.parameters(), lr=1e-2)


def train(parallel: ParallelModule, optimizer: torch.optim.Optimizer, args: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(parallel.step(*args).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def made(plan: Plan, build: Any) -> tuple[ParallelModule, torch.optim.Optimizer, Any]:
    model, args, _, _ = built(build, torch.float64)
    parallel = parallelize(model, plan)
    return parallel, optimizer_of(parallel), args


def save_after(plan: Plan, build: Any, folder: str, steps: int) -> Any:
    parallel, optimizer, args = made(plan, build)
    train(parallel, optimizer, args, steps)
    parallel.save(folder, optimizer)
    return parallel.gather_state_dict()


def load_and_go_on(plan: Plan, build: Any, folder: str, steps: int) -> Any:
    parallel, optimizer, args = made(plan, build)
    train(parallel, optimizer, args, 1)
    optimizer.param_groups[0]["lr"] = 123.0
    parallel.load(folder, optimizer)
    loaded = parallel.gather_state_dict()
    train(parallel, optimizer, args, steps)
    return loaded, parallel.gather_state_dict()


def plain_training(build: Any, steps: int) -> dict[str, torch.Tensor]:
    model, args, _, _ = built(build, torch.float64)
    optimizer = optimizer_of(model)
    for _ in range(steps):
        output = model(*args)
        (output["loss"] if isinstance(output, dict) else output).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


LAYOUTS: list[tuple[dict[str, int], Any]] = [
    ({"data": 2, "tensor": 2}, ["a.weight", "e.weight"]),
    ({"pipe": 2, "microbatches": 2}, ()),
    ({}, ()),
    ({"data": 3}, True),
]


@pytest.mark.parametrize("at", range(len(LAYOUTS)))
def test_any_layout_to_any_layout(pool: Pool, tmp_path: Path, at: int) -> None:
    """Two steps, saved in one layout; two more in the next one: the same as four steps of the plain model."""
    (first, fsdp), (second, later) = LAYOUTS[at], LAYOUTS[(at + 1) % len(LAYOUTS)]
    build, folder = builds.tied, str(tmp_path / "saved")
    plans = [plan_of(build, fsdp=fsdp, seed=at, **first), plan_of(build, fsdp=later, seed=at + 9, **second)]
    saved = pool.run(save_after, plans[0].world_size, plans[0], build, folder, 2)[0]
    torch.testing.assert_close(saved, plain_training(build, 2))
    want = plain_training(build, 4)
    for loaded, final in pool.run(load_and_go_on, plans[1].world_size, plans[1], build, folder, 2):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        torch.testing.assert_close(final, want)


def test_buffers_are_saved(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    plans = [plan_of(builds.buffers, data=2), plan_of(builds.buffers, pipe=2)]
    pool.run(save_after, 2, plans[0], builds.buffers, folder, 2)
    loaded, _ = pool.run(load_and_go_on, 2, plans[1], builds.buffers, folder, 1)[0]
    torch.testing.assert_close(loaded, plain_training(builds.buffers, 2))


# ---------------------------------------------------------------- alone: damage and crashes


@pytest.fixture
def saved(tmp_path: Path) -> tuple[ParallelModule, Path]:
    parallel, optimizer, args = made(plan_of(builds.plain), builds.plain)
    train(parallel, optimizer, args, 1)
    parallel.save(tmp_path / "c", optimizer)
    return parallel, tmp_path / "c"


def data_file(folder: Path) -> Path:
    (found,) = folder.glob("data-*/*.safetensors")
    return found


def test_a_flipped_bit_is_found_and_nothing_changes(saved: Any) -> None:
    parallel, folder = saved
    before = parallel.gather_state_dict()
    content = bytearray(data_file(folder).read_bytes())
    content[-3] ^= 1
    data_file(folder).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"safetensors is damaged: SHA-256"):
        parallel.load(folder)
    assert all(torch.equal(value, before[name]) for name, value in parallel.gather_state_dict().items())


@pytest.mark.parametrize("damage", ["truncate", "flip", "nonsense", "deep"])
def test_a_damaged_manifest_is_found(saved: Any, damage: str) -> None:
    parallel, folder = saved
    text = (folder / "manifest.json").read_text()
    changed = {
        "truncate": text[: len(text) // 2],
        "flip": text.replace('"shape": [16, 8]', '"shape": [8, 16]', 1),
        "nonsense": "[]",
        "deep": "[" * 100_000,
    }[damage]
    assert changed != text
    (folder / "manifest.json").write_text(changed)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        parallel.load(folder)


def test_a_missing_file_an_empty_folder_and_a_foreign_file(saved: Any, tmp_path: Path) -> None:
    parallel, folder = saved
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        parallel.load(tmp_path / "nowhere")
    rewrite(folder, lambda m: m["files"].update({"../../etc/passwd": "0"}))
    with pytest.raises(CheckpointError, match="names a file outside"):
        parallel.load(folder)
    rewrite(folder, lambda m: m["files"].pop("../../etc/passwd"))
    data_file(folder).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        parallel.load(folder)


def rewrite(folder: Path, change: Any) -> None:
    """Change the manifest and make its own hash right again."""
    import hashlib

    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    change(manifest)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"sha256": digest, "manifest": manifest}))


def test_another_model_is_refused_by_name(saved: Any) -> None:
    _, folder = saved
    other, _, _ = made(plan_of(builds.dropping), builds.dropping)
    with pytest.raises(CheckpointError, match=r"'a.weight' is float64\[32, 8\], the checkpoint in .* has float64\[16, 8\]"):
        other.load(folder)


def test_an_incomplete_tensor_is_found(saved: Any) -> None:
    parallel, folder = saved
    rewrite(folder, lambda m: m["tensors"]["model/a.weight"].update(pieces=[]))
    with pytest.raises(CheckpointError, match="not whole: 128 of 128 elements"):
        parallel.load(folder)


def test_a_crash_while_saving_leaves_the_last_one(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel, folder = saved
    before = parallel.gather_state_dict()
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.add_(1.0)

    def crash(*_: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(CheckpointError, match="could not publish a checkpoint: the disk is gone"):
            parallel.save(folder)
    parallel.load(folder)
    assert all(torch.equal(value, before[name]) for name, value in parallel.gather_state_dict().items())
    parallel.save(folder)
    assert len(list(folder.glob("data-*"))) == 1


def test_without_an_optimizer(saved: Any) -> None:
    parallel, folder = saved
    parallel.save(folder)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        parallel.load(folder, optimizer_of(parallel))


def one_rank_cannot_write(plan: Plan, folder: str) -> None:
    parallel, _, _ = made(plan, builds.tied)
    parallel.save(folder)
    if dist.get_rank() == 1:
        import runtime.checkpoint as module

        def full(*_: Any, **__: Any) -> None:
            raise OSError("no space left")

        module.save_file = full
    try:
        parallel.save(folder)
    except CheckpointError as error:
        assert "rank 1" in str(error) and "no space left" in str(error)
        parallel.load(folder)
        return
    raise AssertionError("no error")


def test_all_ranks_hear_of_the_one_that_could_not_write(pool: Pool, tmp_path: Path) -> None:
    pool.run(one_rank_cannot_write, 2, plan_of(builds.tied, tensor=2), str(tmp_path / "c"))


def damaged_for_all(plan: Plan, folder: str) -> None:
    parallel, _, _ = made(plan, builds.tied)
    parallel.save(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        path = sorted(Path(folder).glob("data-*/*"))[-1]
        path.write_bytes(path.read_bytes()[:-8])
    dist.barrier()
    parallel.load(folder)


def test_damage_that_one_rank_finds_stops_all(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="is damaged: SHA-256"):
        pool.run(damaged_for_all, 2, plan_of(builds.tied, tensor=2), str(tmp_path / "c"), timeout_s=60)
