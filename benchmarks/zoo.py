"""Every model of a zoo, planned and run under every layout, against the plain model.

    python benchmarks/zoo.py [FOLDER] [NAME ...] [--layouts "data=2" "tensor=2"] [--simulate] [--jobs 2] [--out zoo.json] [--again]

FOLDER: a folder with a module ``zoo`` (see tests/zoo_check.py); without it, the environment's SHARDWRIGHT_ZOO, or tests/zoo.
Ranks are gloo processes, or threads with --simulate (random plans always are). Every entry runs in a process of its own, and every cell
has a time limit, so no crash or hang stops the run. What is done is in --out and is not done again; --again repeats what failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing as mp
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

import torch  # noqa: E402
from zoo_check import LAYOUTS, Outcome, outcomes  # noqa: E402

Results = dict[str, dict[str, dict[str, Any]]]
DONE = ("equal", "refused", "random")


@dataclass
class Job:
    """One entry in a process of its own, with the layouts that are still to come."""

    name: str
    layouts: list[str]
    process: Any
    pipe: Connection
    deadline: float

    def kill(self) -> None:
        # the process leads a group of its own: its ranks go with it
        for end in (os.killpg, os.kill):
            try:
                end(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.join()


def work(zoo: Any, name: str, layouts: list[str], simulate: bool, limit_s: float, pipe: Connection) -> None:
    os.setpgrp()
    torch.set_num_threads(1)
    for layout, outcome in outcomes(zoo.get(name), zoo.loss_of, layouts, simulate=simulate, timeout_s=limit_s * 0.8):
        pipe.send((layout, asdict(outcome)))


class Benchmark:
    def __init__(self, zoo: Any, options: argparse.Namespace) -> None:
        self.zoo, self.options = zoo, options
        self.results: Results = json.loads(options.out.read_text()) if options.out.exists() else {}
        self.running: list[Job] = []

    def left(self, name: str) -> list[str]:
        done = self.results.get(name, {})
        again = self.options.again
        return [c for c in self.options.layouts if c not in done or (again and done[c]["status"] not in DONE)]

    def start(self, name: str, layouts: list[str]) -> None:
        context = mp.get_context("fork")
        mine, theirs = context.Pipe(duplex=False)
        arguments = (self.zoo, name, layouts, self.options.simulate, self.options.limit, theirs)
        process = context.Process(target=work, args=arguments)
        process.start()  # type: ignore[attr-defined]
        theirs.close()
        # the first cell includes building and capturing the model
        self.running.append(Job(name, layouts, process, mine, time.monotonic() + 2 * self.options.limit))

    def run(self, names: list[str]) -> None:
        waiting = [(name, layouts) for name in names if (layouts := self.left(name))]
        waiting.reverse()
        while waiting or self.running:
            while waiting and len(self.running) < self.options.jobs:
                self.start(*waiting.pop())
            ready = wait([job.pipe for job in self.running], timeout=1.0)
            for job in list(self.running):
                ended = self.read(job) if job.pipe in ready else self.overdue(job)
                if ended:
                    self.running.remove(job)
                    if job.layouts:
                        waiting.append((job.name, job.layouts))

    def read(self, job: Job) -> bool:
        """Take one result. True when the process has ended."""
        try:
            layout, outcome = job.pipe.recv()
        except EOFError:
            job.kill()
            if job.layouts:
                self.record(job, job.layouts[0], asdict(Outcome("FAILED", f"the process ended with code {job.process.exitcode}")))
            return True
        self.record(job, layout, outcome)
        job.deadline = time.monotonic() + self.options.limit
        return False

    def overdue(self, job: Job) -> bool:
        if time.monotonic() < job.deadline:
            return False
        job.kill()
        self.record(job, job.layouts[0], asdict(Outcome("FAILED", f"no result within {self.options.limit:.0f} s")))
        return True

    def record(self, job: Job, layout: str, outcome: dict[str, Any]) -> None:
        job.layouts = [other for other in job.layouts if other != layout]
        self.results.setdefault(job.name, {})[layout] = outcome
        aside = self.options.out.with_suffix(".part")
        aside.write_text(json.dumps(self.results, indent=1))
        aside.replace(self.options.out)
        print(row(job.name, layout, outcome), flush=True)


def row(name: str, layout: str, outcome: dict[str, Any]) -> str:
    share, planning = outcome["replicated"], outcome["planning_s"]
    shown = ["" if share is None else f"{share:.0%}", "" if planning is None else f"{planning:.1f} s"]
    detail = " ".join(outcome["detail"].split())[:200]
    return f"{name:28} {layout:23} {outcome['status']:8} {shown[0]:>5} {shown[1]:>8}  {outcome['dtype']:8} {detail}"


def totals(results: Results, layouts: list[str]) -> Iterator[str]:
    statuses = ("equal", "random", "refused", "FAILED")
    yield f"{'layout':23} " + " ".join(f"{s:>8}" for s in statuses)
    for layout in layouts:
        count = Counter(cells[layout]["status"] for cells in results.values() if layout in cells)
        yield f"{layout:23} " + " ".join(f"{count[s]:8}" for s in statuses)
    good = sum(all(c["status"] in DONE for c in cells.values()) for cells in results.values())
    run = sum(any(c["status"] == "equal" for c in cells.values()) for cells in results.values())
    yield f"{len(results)} models: {run} equal in at least one layout, {good} without a failure"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(os.environ.get("SHARDWRIGHT_ZOO", HERE.parent / "tests" / "zoo")))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--simulate", action="store_true", help="ranks are threads, not processes")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one layout of one model")
    parser.add_argument("--out", type=Path, default=Path("zoo.json"))
    parser.add_argument("--again", action="store_true", help="repeat what failed")
    options = parser.parse_args()
    if not (options.folder / "zoo.py").is_file():
        parser.error(f"{options.folder} has no zoo.py; pass the folder of a zoo, or set SHARDWRIGHT_ZOO")
    sys.path.insert(0, str(options.folder))
    zoo = importlib.import_module("zoo")
    if unknown := set(options.names) - set(zoo.names()):
        parser.error(f"no model {', '.join(sorted(unknown))} in {options.folder}")
    command = " ".join(["python", *sys.argv])
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}: {command}", flush=True)
    benchmark = Benchmark(zoo, options)
    benchmark.run(options.names or zoo.names())
    print("\n".join(totals(benchmark.results, options.layouts)))
    failed = any(cell["status"] == "FAILED" for cells in benchmark.results.values() for cell in cells.values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
