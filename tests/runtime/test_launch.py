"""Local processes: results by rank, failures named, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from planner.errors import InputError, WorkerError
from runtime.launch import run_processes


def total(offset: int) -> tuple[int, float, int]:
    x = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(x)
    return dist.get_rank(), x.item(), os.getpid()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_results_come_back_in_rank_order(start: str) -> None:
    results = run_processes(total, 2, (10,), timeout_s=60, start=start)
    assert [r[:2] for r in results] == [(0, 21.0), (1, 21.0)]
    assert all(ends(pid) for *_, pid in results)


def test_functions_of_a_cell_work_in_new_interpreters() -> None:
    factor = 3
    results = run_processes(lambda: factor * (dist.get_rank() + 1), 2, timeout_s=60, start="spawn")
    assert results == [3, 6]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_failing_rank_is_named_with_its_traceback(rank: int, tmp_path: Path) -> None:
    def fail() -> None:
        (tmp_path / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
        if dist.get_rank() == rank:
            raise KeyError("the cause")
        dist.barrier()

    started = time.monotonic()
    with pytest.raises(WorkerError, match=f"rank {rank} of 2 \\(stage x\\) failed: KeyError") as caught:
        run_processes(fail, 2, timeout_s=30, start="fork", describe=lambda r: "stage x")
    assert time.monotonic() - started < 10
    assert "the cause" in str(caught.value) and "in fail" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    assert all(ends(int(path.read_text())) for path in tmp_path.iterdir())


def test_a_killed_worker_is_named_by_its_signal() -> None:
    def die() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    with pytest.raises(WorkerError, match="rank 1 of 2 failed: the process ended with signal SIGKILL"):
        run_processes(die, 2, timeout_s=30, start="fork")


def test_the_time_limit_ends_everything_and_says_where_it_was(tmp_path: Path) -> None:
    def stuck_here() -> None:
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / f"{dist.get_rank()}.pid").write_text(str(child.pid))
        if dist.get_rank() == 1:
            time.sleep(60)

    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"2 of 2 processes were not done after 2 s") as caught:
        run_processes(stuck_here, 2, timeout_s=2, start="fork")
    assert time.monotonic() - started < 10
    assert "in stuck_here" in str(caught.value)
    assert all(ends(int(path.read_text())) for path in tmp_path.iterdir())


def test_workers_listen_on_the_loopback_only() -> None:
    def listeners() -> list[str]:
        dist.barrier()
        inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
        found = []
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                    found.append(words[1].split(":")[0])
        return found

    results = run_processes(listeners, 2, timeout_s=30, start="fork")
    assert {address for found in results for address in found} <= {"0100007F"}


def test_senseless_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="0 processes"):
        run_processes(total, 0, (1,))


def ends(pid: int, within_s: float = 5.0) -> bool:
    """True once the process is gone (or only waits to be reaped)."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False
