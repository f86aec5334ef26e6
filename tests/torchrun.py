"""Scripts under torchrun, for tests: with time limits, and with nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = "SHARDWRIGHT_TEST_RUN"
"""In the environment of everything that a test starts: how its processes are found again (torchrun gives workers sessions of their own)."""


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


@contextlib.contextmanager
def marked(**more: str) -> Iterator[dict[str, str]]:
    """An environment; whatever still runs with it at the end is killed."""
    mark = uuid.uuid4().hex
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "tests"))
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=paths, HF_HUB_OFFLINE="1") | {MARK: mark} | more
    try:
        yield environment
    finally:
        for pid in running(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def running(mark: str) -> list[int]:
    """Processes with this mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def gone(mark: str, within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while running(mark) and time.monotonic() < until:
        time.sleep(0.1)
    return not running(mark)


def run(commands: Sequence[Sequence[str]], environment: Mapping[str, str], folder: Path, timeout_s: float) -> list[str]:
    """Run commands side by side; their outputs. Raises AssertionError with the outputs where one fails, or has not ended in time."""
    logs = [folder / f"out-{i}.txt" for i in range(len(commands))]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(log, "w")) for log in logs]
        both = dict(stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=dict(environment), cwd=folder)
        started = [subprocess.Popen(words, stdout=file, **both) for words, file in zip(commands, files)]  # type: ignore[call-overload]
        until, late = time.monotonic() + timeout_s, ""
        for process in started:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = f"not done after {timeout_s:g} s: "
                break
        if late:
            for pid in running(environment[MARK]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        codes = [process.wait() for process in started]
    outputs = [log.read_text() for log in logs]
    assert not any(codes), f"{late}exit codes {codes}\n" + "\n----\n".join(shortened(text) for text in outputs)
    return outputs


def shortened(text: str, start: int = 5000, end: int = 2500) -> str:
    """The workers' own words come first, torchrun's summary last."""
    return text if len(text) <= start + end else f"{text[:start]}\n[...]\n{text[-end:]}"
