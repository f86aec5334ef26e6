"""Checkpoints that any layout can load: parts in safetensors files, what they are in a JSON manifest. Nothing is ever unpickled.

    directory/
      manifest.json                    {"format": 1, "tensors": {key: {...}}, "files": {name: sha256}, ...}
      data-<token>/rank-00000.safetensors, ...

Every rank writes what it alone holds (of equal copies, one). The manifest is renamed into place last, so the directory holds the old
checkpoint or the new one, whole, at any moment; files that no manifest names are removed afterwards.

A tensor's entry: dtype and shape of the whole, and its pieces, each with the file, the key in it, and the runs of indices held along
every dim (``runtime.parts``).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from planner.torch_ops import dtype_name, dtype_of
from runtime.errors import CheckpointError
from runtime.local_op import RANDOM
from runtime.optimizer_state import OptimizerState, load_optimizer, optimizer_state
from runtime.parts import Part, block, common, shifted, whole_part
from runtime.state import State

FORMAT = 1
MANIFEST = "manifest.json"
LEFT_OUT = "left-out"
"""Prefix of the buffers that are no part of the model's own state_dict."""
_LIMIT_BYTES = 256 * 2**20


def save(state: State, directory: Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Collective. Raises CheckpointError on every rank where any rank could not write; the checkpoint before it is then still whole."""
    state.check_set()
    token = _agree(state, lambda: secrets.token_hex(8))
    folder, rank = directory / f"data-{token}", state.ranks.rank
    name = f"{folder.name}/rank-{rank:05d}.safetensors"
    saved = optimizer_state(state, optimizer) if optimizer is not None else None

    def write() -> dict[str, Any]:
        tensors, entries = {}, {}
        for key, shape, dtype, part, tensor in _own_pieces(state, saved):
            tensors[key] = tensor.detach().contiguous().cpu()
            entries[key] = {"dtype": dtype, "shape": list(shape), "pieces": [{"file": name, "runs": _runs_out(part)}]}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / name)
        _sync(directory / name)
        return {"tensors": entries, "files": {name: _sha256(directory / name)}, "values": saved.values if saved else {}}

    reports = _everywhere(state, write, "write a checkpoint")
    _everywhere(state, lambda: _publish(directory, folder, reports, saved) if rank == 0 else None, "publish a checkpoint")


def _own_pieces(state: State, saved: OptimizerState | None) -> Iterator[tuple[str, tuple[int, ...], str, Part, Tensor]]:
    """(key, whole shape, dtype, part, tensor) of everything that this rank writes."""
    for name, held in state.held.items():
        part = held.part(state.ranks)
        if not held.counts_here(state.ranks) or part.is_empty:
            continue
        yield f"model/{name}", held.spec.shape, held.spec.dtype, part, held.local
        for field, tensor in (saved.tensors.get(name, {}) if saved else {}).items():
            yield f"optimizer/{name}/{field}", held.spec.shape, dtype_name(tensor.dtype), part, tensor
    if state.ranks.rank == 0:
        saved_by_the_model = {state.canonical(key) for key in state.keys}
        for name, buffer in state.buffers.items():
            # buffers that the model's own state_dict leaves out are for models on meta, which cannot compute them
            key = f"model/{name}" if name in saved_by_the_model else f"{LEFT_OUT}/{name}"
            yield key, tuple(buffer.shape), dtype_name(buffer.dtype), whole_part(buffer.shape), buffer


def _publish(directory: Path, folder: Path, reports: list[dict[str, Any]], saved: OptimizerState | None) -> None:
    tensors: dict[str, Any] = {}
    for report in reports:
        for key, entry in report["tensors"].items():
            tensors.setdefault(key, {**entry, "pieces": []})["pieces"] += entry["pieces"]
    manifest = {
        "format": FORMAT,
        "tensors": tensors,
        "files": {name: digest for report in reports for name, digest in report["files"].items()},
        "optimizer": {name: value for report in reports for name, value in report["values"].items()} if saved else None,
        "groups": saved.groups if saved else None,
        "random": {"seed": RANDOM.seed, "step": RANDOM.step},
    }
    body = json.dumps(manifest, sort_keys=True, allow_nan=False)
    text = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": manifest}, sort_keys=True, allow_nan=False)
    aside = directory / f"{MANIFEST}.{folder.name}"
    aside.write_text(text, encoding="utf-8")
    _sync(aside)
    os.replace(aside, directory / MANIFEST)
    _sync(directory)
    for old in directory.glob("data-*"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


# ---------------------------------------------------------------- loading


def load(state: State, directory: Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Collective. Raises CheckpointError on every rank, before anything is changed, where the checkpoint is damaged or does not fit."""

    saved_by_the_model = {state.canonical(key) for key in state.keys}

    def key_of(buffer: str) -> str:
        """A buffer that the model's own state_dict leaves out is read only where the model could not compute it."""
        return f"{LEFT_OUT}/{buffer}" if buffer in state.unset and buffer not in saved_by_the_model else f"model/{buffer}"

    def read() -> Checkpoint:
        found = Checkpoint(directory)
        for name, stored in state.stored.items():
            found.expect(f"model/{name}", stored.spec.shape, stored.spec.dtype)
        for name, buffer in state.buffers.items():
            if key_of(name) in found.manifest["tensors"]:
                found.expect(key_of(name), tuple(buffer.shape), dtype_name(buffer.dtype))
        if optimizer is not None and found.manifest["optimizer"] is None:
            raise CheckpointError(f"{directory} was saved without an optimizer: load it without one, or use save(directory, optimizer)")
        found.verify(state.ranks.rank, state.ranks.mesh.world_size)
        return found

    found = _local_everywhere(state, read, f"load {directory}")
    with torch.no_grad():
        for name, held in state.held.items():
            held.local.copy_(found.read(f"model/{name}", held.part(state.ranks)))
        for name, buffer in state.buffers.items():
            if key_of(name) in found.manifest["tensors"]:
                buffer.copy_(found.read(key_of(name), whole_part(buffer.shape)))
        if optimizer is not None:
            load_optimizer(state, optimizer, found.manifest["optimizer"], found.manifest["groups"], found.read_fields)
    RANDOM.seed, RANDOM.step = found.manifest["random"]["seed"], found.manifest["random"]["step"]


class Checkpoint:
    """A checkpoint on disk, read piece by piece."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / MANIFEST
        try:
            if path.stat().st_size > _LIMIT_BYTES:
                raise CheckpointError(f"{path} is {path.stat().st_size} bytes, more than any manifest")
            outer = json.loads(path.read_text(encoding="utf-8"))
            self.manifest: dict[str, Any] = outer["manifest"]
            body = json.dumps(self.manifest, sort_keys=True, allow_nan=False)
            if hashlib.sha256(body.encode()).hexdigest() != outer["sha256"]:
                raise CheckpointError(f"{path} is damaged: its content does not match its SHA-256")
        except FileNotFoundError as error:
            raise CheckpointError(f"{directory} holds no checkpoint ({MANIFEST} is missing)") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if self.manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {self.manifest.get('format')}, this version reads {FORMAT}")

    def expect(self, key: str, shape: tuple[int, ...], dtype: str) -> None:
        entry = self.manifest["tensors"].get(key)
        name = key.partition("/")[2]
        if entry is None:
            raise CheckpointError(f"{self.directory} has no {name!r}: it was saved from another model")
        if list(shape) != entry["shape"] or dtype != entry["dtype"]:
            saved = f"{entry['dtype']}{entry['shape']}"
            raise CheckpointError(f"{name!r} is {dtype}{list(shape)}, the checkpoint in {self.directory} has {saved}")

    def verify(self, rank: int, world_size: int) -> None:
        """Check this rank's share of the files against their SHA-256: together the ranks check all of them."""
        for name, digest in sorted(self.manifest["files"].items())[rank::world_size]:
            path = self._path(name)
            if not path.exists():
                raise CheckpointError(f"{path} is missing")
            if (found := _sha256(path)) != digest:
                raise CheckpointError(f"{path} is damaged: SHA-256 {found[:12]}..., the manifest says {digest[:12]}...")

    def _path(self, name: str) -> Path:
        folder, _, file = name.partition("/")
        if not folder.startswith("data-") or "/" in file or ".." in name or "\\" in name:
            raise CheckpointError(f"the manifest in {self.directory} names a file outside of it: {name!r}")
        return self.directory / folder / file

    def read(self, key: str, part: Part) -> Tensor:
        """A part of the whole tensor, from the pieces that overlap it."""
        entry = self.manifest["tensors"][key]
        local = torch.empty(part.shape, dtype=dtype_of(entry["dtype"]))
        missing = local.numel()
        for piece in entry["pieces"]:
            held = Part(tuple(tuple((a, n) for a, n in dim) for dim in piece["runs"]))
            pairs = [(h, p, c) for h in held.boxes() for p in part.boxes() if (c := common(h[0], p[0])) is not None]
            if not pairs:
                continue
            try:
                with safe_open(self._path(piece["file"]), framework="pt") as file:
                    view = file.get_slice(key)
                    for (there, in_file), (wanted, here), shared in pairs:
                        place = shifted(shared, there, in_file)
                        values = view[tuple(slice(a, a + n) for a, n in place)] if place else file.get_tensor(key)
                        block(local, shifted(shared, wanted, here)).copy_(values)
                        missing -= values.numel()
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self._path(piece['file'])} cannot be read: {error}") from error
        if missing:
            raise CheckpointError(f"{key!r} in {self.directory} is not whole: {missing} of {local.numel()} elements are in no piece")
        return local

    def read_fields(self, name: str, part: Part) -> dict[str, Tensor]:
        """The optimizer's tensors for a parameter."""
        prefix = f"optimizer/{name}/"
        return {key[len(prefix) :]: self.read(key, part) for key in self.manifest["tensors"] if key.startswith(prefix)}


# ---------------------------------------------------------------- together


def _everywhere(state: State, action: Callable[[], Any], what: str) -> list[Any]:
    """Run on every rank; all ranks get all results, or all of them the first rank's error."""
    result, problem = None, None
    try:
        result = action()
    except (OSError, SafetensorError, CheckpointError) as error:
        problem = f"{state.ranks.place} could not {what}: {error}"
    outcomes: list[Any] = [(result, problem)]
    if state.ranks.groups:
        outcomes = [None] * state.ranks.mesh.world_size
        dist.all_gather_object(outcomes, (result, problem), group=state.ranks.groups["world"])
    for _, problem in outcomes:
        if problem is not None:
            raise CheckpointError(problem)
    return [result for result, _ in outcomes]


def _local_everywhere(state: State, action: Callable[[], Checkpoint], what: str) -> Checkpoint:
    """The same, for results that stay on their rank."""
    kept: list[Checkpoint] = []
    _everywhere(state, lambda: kept.append(action()), what)
    return kept[0]


def _agree(state: State, choose: Callable[[], str]) -> str:
    return _everywhere(state, choose, "agree on a name")[0]


def _runs_out(part: Part) -> list[list[list[int]]]:
    return [[list(run) for run in dim] for dim in part.runs]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Down to the disk, so that the rename never comes before the data."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


