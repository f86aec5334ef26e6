"""Where a profile comes from: a preset, a file, or this machine, measured once and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import warnings
from pathlib import Path

from cost_models.errors import ProfileError
from cost_models.measure import Progress, measure_profile
from cost_models.measure.machine import cpu_model, describe, usable_memory_bytes
from cost_models.presets import cluster
from cost_models.profile import HardwareProfile

MEASURE_BUDGET_S = 30.0
MAX_FILE_BYTES = 16 * 2**20


def load_profile(spec: str | Path | HardwareProfile | None, *, ranks: int, progress: Progress | bool | None = None) -> HardwareProfile:
    """The profile for ``ranks`` devices.

    ``spec``: a preset ("h100", "h100:4", "h100:16x8"), the path of a profile JSON (it ends in .json or holds a separator),
    a profile, or None for this machine: kept from before, or measured now for at most 30 seconds.
    ``progress``: None shows a bar on a terminal, False nothing, or a function told the share done.
    Raises ``ProfileError``.
    """
    if ranks < 1:
        raise ProfileError(f"a profile is loaded for at least one rank, got {ranks}")
    if isinstance(spec, HardwareProfile):
        return _with_room(spec, ranks, f"profile {spec.name!r}")
    if spec is None:
        return _this_machine(ranks, progress)
    if isinstance(spec, Path) or spec.endswith(".json") or os.sep in spec:
        return _with_room(read_profile(Path(spec)), ranks, f"profile {str(spec)!r}")
    return cluster(spec, ranks)


def read_profile(path: Path) -> HardwareProfile:
    """Read a profile file; ``ProfileError`` where it is missing, too large, or not a profile."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ProfileError(f"{path} has {path.stat().st_size} bytes; a profile has at most {MAX_FILE_BYTES}")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read the hardware profile {path}: {error}") from error
    return HardwareProfile.from_json(text, str(path))


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Write a profile beside its place, then move it there, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(profile.to_json(), "utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def cache_folder() -> Path:
    """``$SHARDWRIGHT_CACHE``, else ``$XDG_CACHE_HOME/shardwright``, else ``~/.cache/shardwright``."""
    if own := os.environ.get("SHARDWRIGHT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright"


def cache_path(ranks: int, device: str) -> Path:
    """The cache file of this machine, measured with so many ranks."""
    return cache_folder() / f"profile-{device}-{ranks}-{fingerprint(device)}.json"


def fingerprint(device: str) -> str:
    """Twelve hex digits for what decides the figures: processor, cores, memory, accelerator, torch."""
    # Memory to a quarter GiB: what the kernel keeps for itself differs a little from start to start.
    parts = [platform.machine(), cpu_model(), usable_memory_bytes() >> 28, describe(device)]
    if device == "cuda":
        import torch

        parts += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _with_room(profile: HardwareProfile, ranks: int, what: str) -> HardwareProfile:
    if profile.ranks < ranks:
        raise ProfileError(
            f"{what} describes {profile.nodes} nodes of {profile.gpus_per_node}, {ranks} devices were asked for; "
            f"ask for at most {profile.ranks}, or measure with as many ranks"
        )
    return profile


def _this_machine(ranks: int, progress: Progress | bool | None) -> HardwareProfile:
    device = _device(ranks)
    path = cache_path(ranks, device)
    if path.exists():
        try:
            return _belongs_here(read_profile(path), ranks, device)
        except ProfileError as error:
            why = str(error).splitlines()[0]
            warnings.warn(f"the kept hardware profile {path} cannot be used, measuring anew: {why}", stacklevel=3)
    profile = _measure_shown(ranks, device, progress)
    try:
        write_profile(profile, path)
    except OSError as error:
        warnings.warn(f"the hardware profile could not be kept in {path}: {error}", stacklevel=3)
    return profile


def _device(ranks: int) -> str:
    """What ``ranks`` processes run on here: GPUs where there are any, else CPU cores."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < count < ranks:
        raise ProfileError(
            f"this machine has {count} GPUs, {ranks} were asked for; name the hardware to plan for (as in hardware='h100'), "
            f"hardware='cpu' for CPU processes, or ask for at most {count}"
        )
    return "cuda" if count else "cpu"


def _belongs_here(kept: HardwareProfile, ranks: int, device: str) -> HardwareProfile:
    """Refuse a kept profile that was measured elsewhere or with other ranks."""
    if kept.ranks_measured != ranks:
        raise ProfileError(f"it was measured with {kept.ranks_measured} ranks, not {ranks}")
    if not kept.description.startswith(describe(device)[1]):
        raise ProfileError(f"it was measured on another machine ({kept.description})")
    return kept


def _measure_shown(ranks: int, device: str, progress: Progress | bool | None) -> HardwareProfile:
    """Measure with a progress bar on a terminal, in silence elsewhere."""
    if callable(progress):
        return measure_profile(ranks, MEASURE_BUDGET_S, device, progress)
    if progress is False or not sys.stderr.isatty():
        return measure_profile(ranks, MEASURE_BUDGET_S, device)
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"measuring this machine with {ranks} ranks", total=1.0)
        return measure_profile(ranks, MEASURE_BUDGET_S, device, lambda share, what: bar.update(task, completed=share, description=what))
