"""Start the measuring processes, watch them, collect what they wrote, leave none behind.

Plain subprocesses of this interpreter: the user's own script is not imported again, and no state is shared. They meet
through a file, and gloo listens on the loopback interface only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cost_models.errors import MeasureError
from cost_models.measure import Progress
from cost_models.measure.plan import all_samples

# Time kept back from the budget for leaving the process groups and for the fit, and for a forced end.
ENDING_S = 2.0
FORCED_S = 0.7
Record = dict[str, Any]


def run_ranks(ranks: int, budget_s: float, device: str, progress: Progress | None) -> list[Record]:
    """The records of ``ranks`` measuring processes, within ``budget_s`` seconds from now.

    Raises ``MeasureError`` where a process fails, or where time ran out before anything was measured.
    """
    begin = time.monotonic()
    hard = begin + budget_s - FORCED_S
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        records = Path(folder) / "records.jsonl"
        setup = {
            "ranks": ranks,
            "device": device,
            "store": str(Path(folder) / "store"),
            "records": str(records),
            "deadline": begin + budget_s - ENDING_S,
            "hard_deadline": hard + 2.0,
        }
        logs = [(Path(folder) / f"stderr-{rank}").open("w+b") for rank in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                processes.append(_start({**setup, "rank": rank}, logs[rank]))
            while any(process.poll() is None for process in processes) and time.monotonic() < hard:
                _raise_for_failure(processes, Path(folder), records)
                if progress is not None:
                    lines = _read(records)
                    share = min(1.0, (time.monotonic() - begin) / budget_s)
                    progress(share, str(lines[-1].get("series", "done")) if lines else "starting the processes")
                time.sleep(0.05)
            _raise_for_failure(processes, Path(folder), records)
        finally:
            _end(processes)
            for log in logs:
                log.close()
        found = [record for record in _read(records) if "series" in record]
    if not found:
        raise MeasureError(
            f"{ranks} processes measured nothing in {budget_s:g} s ({len(all_samples(ranks, device))} samples planned); "
            f"give a larger budget or fewer ranks"
        )
    if progress is not None:
        progress(1.0, "done")
    return found


def _start(setup: dict[str, object], log: Any) -> subprocess.Popen[bytes]:
    package_folder = str(Path(__file__).parents[2])
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }
    # A launcher's own variables would make the process group look for that launcher.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "cost_models.measure.worker", json.dumps(setup)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)


def _raise_for_failure(processes: Sequence[subprocess.Popen[bytes]], folder: Path, records: Path) -> None:
    for rank, process in enumerate(processes):
        code = process.poll()
        if code not in (None, 0):
            lines = _read(records)
            last = lines[-1].get("series", "the end") if lines else "the start"
            text = (folder / f"stderr-{rank}").read_text(errors="replace").strip().splitlines()
            raise MeasureError(
                f"measuring rank {rank} of {len(processes)} ended with code {code} after {last}: {text[-1] if text else 'no message'}"
            )


def _read(records: Path) -> list[Record]:
    """The whole lines written so far."""
    if not records.exists():
        return []
    return [json.loads(line) for line in records.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait(timeout=10)
