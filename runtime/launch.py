"""Local worker processes, for notebooks, examples and tests: one per rank of a plan, on this machine, over the loopback only.

    results = launch(fn, plan, *args)        # fn(plan, *args) on every rank; the list of what they returned, by rank

Nothing outlives the call: on success, on the first failure and at the time limit every process is ended before it returns.

Workers are forked where that is safe (no CUDA context, no process group, no other Python thread in this process); otherwise they
are new interpreters that get the function by value (cloudpickle), so functions defined in a notebook cell work as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import torch
import torch.distributed as dist

from planner.errors import InputError, WorkerError
from planner.plan import Plan
from runtime.worker import Place, run_worker

Start = Literal["fork", "spawn"]
_GRACE_S = 2.0
"""After a first failure: how long the other ranks have to report theirs, so that the cause can be told from what followed."""
_FOLLOWING = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "failed to connect", "recv, 0 bytes")
"""What ranks report when another one went away."""


def launch(fn: Callable[..., Any], plan: Plan, *args: Any, timeout_s: float = 600.0, start: Start | None = None) -> list[Any]:
    """Call ``fn(plan, *args)`` in one local process per rank of ``plan``; returns their results, a list in rank order.

    Each process has a process group (NCCL where this machine has a GPU per rank, else gloo on the CPU, one thread each).
    Raises WorkerError naming the rank, its stage and its own traceback when one fails (its exception is the ``__cause__``), and
    when ``timeout_s`` passes; all processes are ended first. ``start``: force "fork" or "spawn".
    """
    mesh = plan.mesh.mesh()

    def place_of(rank: int) -> str:
        return ", ".join(f"{axis} {at}" for axis, at in mesh.coordinates(rank).items())

    return run_processes(fn, plan.world_size, (plan, *args), timeout_s=timeout_s, start=start, describe=place_of)


def run_processes(
    fn: Callable[..., Any], world_size: int, args: Sequence[Any] = (), *, timeout_s: float = 600.0, start: Start | None = None,
    describe: Callable[[int], str] = lambda rank: "",
) -> list[Any]:  # fmt: skip
    """``fn(*args)`` on ``world_size`` local ranks; the same promises as ``launch``. ``describe(rank)``: added to its name in errors."""
    if world_size < 1 or timeout_s <= 0:
        raise InputError(f"launch: {world_size} processes within {timeout_s} s, both must be above 0")
    how = start or _safest_start()
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder, _listening() as (listener, port):
        if how == "spawn":
            (Path(folder) / "job").write_bytes(cloudpickle.dumps((fn, tuple(args))))
        places = [Place(rank, world_size, port, folder, timeout_s, cuda) for rank in range(world_size)]
        workers: list[_Process] = []
        try:
            for place in places:
                workers.append(_Forked(place, fn, tuple(args)) if how == "fork" else _Spawned(place))
            # the listening socket is bound since before the start, so early workers queue until the store answers
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
                timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
            results = _collect(workers, Path(folder), time.monotonic() + timeout_s, timeout_s, describe)
            del store
            return results
        finally:
            for worker in workers:
                worker.end()


def _safest_start() -> Start:
    quiet = threading.active_count() == 1 and not torch.cuda.is_initialized()
    quiet = quiet and not (dist.is_available() and dist.is_initialized())
    return "fork" if quiet and hasattr(os, "fork") and sys.platform == "linux" else "spawn"


@contextlib.contextmanager
def _listening() -> Iterator[tuple[socket.socket, int]]:
    """A socket on a free port of the loopback, bound and listening: handed to the store, so that nobody can take the port between."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield listener, listener.getsockname()[1]


# ---------------------------------------------------------------- one process


class _Process:
    """A worker that leads a process group of its own, so that what it starts ends with it. Only ``end`` reaps it."""

    pid: int
    ended = False

    def poll(self) -> int | None:
        """Exit code, or minus the signal's number; None while it runs."""
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def end(self) -> None:
        if self.ended:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.reap()
        self.ended = True

    def reap(self) -> None:
        os.waitpid(self.pid, 0)


class _Forked(_Process):
    """A copy of this process."""

    def __init__(self, place: Place, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0)
            run_worker(place, fn, args)
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)


class _Spawned(_Process):
    """A new interpreter."""

    def __init__(self, place: Place) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(part or os.getcwd() for part in sys.path))
        words = [place.rank, place.world_size, place.port, place.folder, place.timeout_s, int(place.cuda)]
        command = [sys.executable, "-m", "runtime.worker", *map(str, words)]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        self.pid = self.process.pid

    def reap(self) -> None:
        self.process.wait()


# ---------------------------------------------------------------- what came of them


@dataclass(frozen=True)
class _Failure:
    rank: int
    error: BaseException | None
    kind: str
    text: str

    @property
    def follows(self) -> bool:
        """True for what a rank reports because another one went away."""
        return any(sign in self.text for sign in _FOLLOWING)


def _collect(
    workers: Sequence[_Process], folder: Path, deadline: float, timeout_s: float, describe: Callable[[int], str]
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, _Failure] = {}
    until = deadline
    while len(results) + len(failures) < len(workers):
        for rank, worker in enumerate(workers):
            if rank not in results and rank not in failures and (code := worker.poll()) is not None:
                _read(folder, rank, code, results, failures)
        if failures:
            until = min(until, time.monotonic() + _GRACE_S)
            if any(not failure.follows for failure in failures.values()):
                break
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    if failures:
        first = min(failures.values(), key=lambda failure: (failure.follows, failure.rank))
        name = _name(first.rank, len(workers), describe)
        raise WorkerError(f"{name} failed: {first.kind}\n{first.text.rstrip()}") from first.error
    if len(results) < len(workers):
        missing = [rank for rank in range(len(workers)) if rank not in results]
        raise WorkerError(_late(workers, folder, missing, timeout_s, describe))
    return [results[rank] for rank in range(len(workers))]


def _read(folder: Path, rank: int, code: int, results: dict[int, Any], failures: dict[int, _Failure]) -> None:
    path = folder / f"rank-{rank}.result"
    if not path.exists():
        why = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        failures[rank] = _Failure(rank, None, f"the process ended with {why}", "(it left no traceback)")
        return
    outcome = cloudpickle.loads(path.read_bytes())
    if outcome[0] == "ok":
        results[rank] = outcome[1]
    else:
        failures[rank] = _Failure(rank, *outcome[1:])


def _late(workers: Sequence[_Process], folder: Path, missing: list[int], timeout_s: float, describe: Callable[[int], str]) -> str:
    """Says which ranks did not finish, and where each of them is: they are asked for their stacks."""
    for rank in missing:
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)
    lines = [f"{len(missing)} of {len(workers)} processes were not done after {timeout_s:g} s and were ended; they were at:"]
    for rank in missing:
        path = folder / f"rank-{rank}.stack"
        stack = path.read_text() if path.exists() else ""
        lines.append(f"{_name(rank, len(workers), describe)}:\n{_innermost(stack) or '  (still starting)'}")
    return "\n".join(lines)


def _innermost(stack: str, frames: int = 6) -> str:
    """The innermost frames of the main thread (the last one that faulthandler lists)."""
    threads = [part for part in stack.split("\n\n") if part.strip()]
    lines = threads[-1].splitlines()[1:] if threads else []
    own = [line for line in lines if "/runtime/launch.py" not in line and "/runtime/worker.py" not in line]
    return "\n".join(own[:frames])


def _name(rank: int, count: int, describe: Callable[[int], str]) -> str:
    where = describe(rank)
    return f"rank {rank} of {count}" + (f" ({where})" if where else "")
