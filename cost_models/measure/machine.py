"""Facts of this machine: processor, cores and memory that a process may use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def cpu_model() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory_bytes() -> int:
    """Physical memory, or the limit of the control group where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_control_group_limits()])


def _control_group_limits() -> list[int]:
    """Memory limits of this process's control group and those above it (version 2), and of version 1's root."""
    files = [Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory.max")]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                folder = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
                files += [part / "memory.max" for part in (folder, *folder.parents) if part.is_relative_to("/sys/fs/cgroup")]
    except OSError:
        pass
    limits = []
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return limits


def describe(device: str) -> tuple[str, str]:
    """(short name, one line) of what is measured."""
    version = importlib.metadata.version("torch")
    if device == "cuda":
        import torch

        gpu = torch.cuda.get_device_name(0)
        return gpu.lower().replace(" ", "-")[:80], f"{gpu}, torch {version}, nccl"
    return "cpu", f"{cpu_model()}, {usable_cores()} cores, torch {version}, gloo"


def memory_per_rank_bytes(device: str, ranks: int) -> tuple[float, str]:
    """(usable bytes per rank, how they were found)."""
    if device == "cuda":
        import torch

        total = min(torch.cuda.get_device_properties(i).total_memory for i in range(ranks))
        return float(max(total - 2 * 2**30, total // 2)), "memory of the device less 2 GiB for context and buffers"
    share = usable_memory_bytes() * 0.8 / ranks
    return float(int(share)), f"0.8 of the memory that processes may use, over {ranks} ranks"
