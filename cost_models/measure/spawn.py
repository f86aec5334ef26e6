"""Start the measuring processes, watch them, collect what they wrote, leave none behind.

A plain subprocess of this interpreter that parts into the ranks: the user's own script is not imported again, and no state
is shared. The ranks meet through a file, and gloo listens on the loopback interface only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cost_models.errors import MeasureError
from cost_models.measure import Progress
from cost_models.measure.plan import FAILED, RECORDS, all_samples

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
    with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
        folder = Path(name)
        setup = {
            "ranks": ranks,
            "device": device,
            "folder": name,
            "deadline": begin + budget_s - ENDING_S,
            "hard_deadline": hard + 2.0,
        }
        with (folder / "stderr").open("wb") as log:
            process = subprocess.Popen(
                _command(setup),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
            try:
                while process.poll() is None and time.monotonic() < hard:
                    _raise_for_failure(process, ranks, folder)
                    if progress is not None:
                        lines = _read(folder)
                        what = str(lines[-1].get("series", "done")) if lines else "starting the processes"
                        progress(min(1.0, (time.monotonic() - begin) / budget_s), what)
                    time.sleep(0.05)
                _raise_for_failure(process, ranks, folder)
            finally:
                _end(process)
        found = [record for record in _read(folder) if "series" in record]
    if not found:
        raise MeasureError(
            f"{ranks} processes measured nothing in {budget_s:g} s ({len(all_samples(ranks, device))} samples planned); "
            f"give a larger budget or fewer ranks"
        )
    if progress is not None:
        progress(1.0, "done")
    return found


def _command(setup: dict[str, object]) -> list[str]:
    return [sys.executable, "-m", "cost_models.measure.worker", json.dumps(setup)]


def _environment() -> dict[str, str]:
    """One thread per rank, loopback only, and nothing of a launcher that this process may itself run under."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    package_folder = str(Path(__file__).parents[2])
    return {
        **{name: value for name, value in os.environ.items() if name not in launcher},
        "PYTHONPATH": os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }


def _raise_for_failure(process: subprocess.Popen[bytes], ranks: int, folder: Path) -> None:
    """The rank that failed first is the cause; the others then lose their connection."""
    failed = sorted(folder.glob(f"{FAILED}*"), key=lambda file: file.stat().st_mtime_ns)
    if not failed and process.poll() in (None, 0):
        return
    lines = _read(folder)
    last = lines[-1].get("series", "the end") if lines else "the start"
    if failed:
        rank = failed[0].name.removeprefix(FAILED)
        raise MeasureError(f"measuring rank {rank} of {ranks} failed after {last}: {failed[0].read_text()}")
    text = (folder / "stderr").read_text(errors="replace").strip().splitlines()
    raise MeasureError(f"the measuring processes ended with code {process.poll()} after {last}: {text[-1] if text else 'no message'}")


def _read(folder: Path) -> list[Record]:
    """The whole lines written so far."""
    file = folder / RECORDS
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole session of the measuring processes; their group is gone where they ended by themselves."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
