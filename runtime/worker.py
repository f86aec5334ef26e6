"""What runs inside one process of ``runtime.launch``: joins the process group, calls the function, writes down what came of it.

    job file (cloudpickle): {"fn", "args"}         read once at the start
    rank-<r>.result (cloudpickle): ("ok", value)   or ("error", exception or None, type name, traceback text)

Every file is written and read by processes of one launch only, in a private folder.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """Where one worker stands."""

    rank: int
    world_size: int
    port: int
    folder: str
    timeout_s: float
    cuda: bool


def loopback_name() -> str:
    """Name of the loopback interface (``lo``, ``lo0``), the only one that local workers talk over."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def run_worker(place: Place, fn: Callable[..., Any] | None = None, args: tuple[Any, ...] = ()) -> None:
    """Join, call, write the result. Without ``fn`` the call is read from the job file (a process that was not forked)."""
    folder = Path(place.folder)
    log = open(folder / f"rank-{place.rank}.stack", "w")  # noqa: SIM115 - kept open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    _end_with_parent(os.getppid())
    try:
        if fn is None:
            fn, args = cloudpickle.loads((folder / "job").read_bytes())
        result = ("ok", _call(place, fn, args))
        _write(folder, place.rank, cloudpickle.dumps(result))
    except BaseException as error:
        _write(folder, place.rank, _failure(error))
        sys.stderr.flush()
        # no clean-up: the other ranks may be waiting for this one, and the parent ends them all
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _call(place: Place, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(place.rank), LOCAL_RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_WORLD_SIZE=str(place.world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(place.port), GLOO_SOCKET_IFNAME=loopback_name(),
    )  # fmt: skip
    if place.cuda:
        torch.cuda.set_device(place.rank)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback_name())
    limit = datetime.timedelta(seconds=place.timeout_s)
    store = dist.TCPStore("127.0.0.1", place.port, is_master=False, timeout=limit)
    backend = "cpu:gloo,cuda:nccl" if place.cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit)
    value = fn(*args)
    # a rank that is done must not tear connections down under one that is not
    dist.barrier()
    return value


def _failure(error: BaseException) -> bytes:
    text = traceback.format_exc()
    name = type(error).__name__
    try:
        dumped = cloudpickle.dumps(("error", error, name, text))
        cloudpickle.loads(dumped)
        return dumped
    except Exception:
        return cloudpickle.dumps(("error", None, name, text))


def _write(folder: Path, rank: int, data: bytes) -> None:
    aside = folder / f"rank-{rank}.part"
    aside.write_bytes(data)
    aside.rename(folder / f"rank-{rank}.result")


def _end_with_parent(parent: int) -> None:
    """A launcher that dies takes its workers along."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


if __name__ == "__main__":
    rank, world_size, port = map(int, sys.argv[1:4])
    run_worker(Place(rank, world_size, port, sys.argv[4], float(sys.argv[5]), sys.argv[6] == "1"))
