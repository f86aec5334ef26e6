"""The measuring processes: ``python -m cost_models.measure.worker '{json}'``. Rank 0 writes one JSON line per sample.

All ranks run the same plan in step: every decision (how often, stop, skip) follows from figures that all ranks share.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from cost_models.links import COLLECTIVES
from cost_models.measure.kernels import Kernel, build_collective, build_compute
from cost_models.measure.plan import FAILED, RECORDS, Sample, Series, all_samples, all_series

REPEATS = 3
PASSES = 2
# Longer than a time slice of the scheduler: ranks that share a core must share it within a repetition.
MIN_REPEAT_S = 0.010
MAX_CALLS = 500
OVERLAP_S = 1.0


@dataclass
class Rank:
    """What one measuring process knows."""

    rank: int
    ranks: int
    device: torch.device
    deadline: float
    now: float  # the latest clock of all ranks when they last agreed on it
    groups: dict[tuple[int, int], dist.ProcessGroup | None] = field(default_factory=dict)
    last_s: dict[Series, tuple[int, float]] = field(default_factory=dict)

    def slowest(self, *values: float) -> list[float]:
        """The largest of each value over all ranks."""
        if self.ranks == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return [float(value) for value in shared.cpu()]

    def start_together(self) -> None:
        """Wait for the device and for the other ranks."""
        self.wait()
        if self.ranks > 1:
            dist.barrier()

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, kernel: Kernel, calls: int) -> float:
        """Seconds of one piece of work, over ``calls`` calls, all ranks started together."""
        self.start_together()
        begin = time.perf_counter()
        for _ in range(calls):
            kernel.run()
        self.wait()
        return (time.perf_counter() - begin) / calls / kernel.per_call

    def kernel(self, sample: Sample) -> Kernel:
        """Build the kernel of a sample."""
        series = sample.series
        if series.what in COLLECTIVES:
            return build_collective(sample, self.groups.get((series.ranks, series.stride)), self.device)
        return build_compute(sample, self.device)

    def time(self, sample: Sample) -> dict[str, object] | None:
        """Median over repetitions of the slowest rank; None where the time left is too short."""
        if self.now + REPEATS * self.expected_s(sample) > self.deadline:
            return None
        kernel = self.kernel(sample)
        kernel.run()
        once, self.now = self.slowest(self.seconds(kernel, 1), time.monotonic())
        call_s = once * kernel.per_call
        calls = max(1, min(MAX_CALLS, int(MIN_REPEAT_S / max(call_s, 1e-9))))
        repeats = max(1, min(REPEATS, int((self.deadline - self.now) / max(calls * call_s, 1e-9))))
        times = [self.seconds(kernel, calls) for _ in range(repeats)]
        *times, self.now = self.slowest(*times, time.monotonic())
        seconds = statistics.median(times)
        self.last_s[sample.series] = (sample.step, seconds * kernel.per_call)
        return {"series": sample.series.name, "size": kernel.size, "seconds": seconds, "repeats": repeats}

    def expected_s(self, sample: Sample) -> float:
        """Seconds of one call, from the last one of the series; a collective at small sizes is mostly latency."""
        step, seconds = self.last_s.get(sample.series, (sample.step, 0.0))
        what = sample.series.what
        power = 3.0 if what == "matmul" else 2.0 if what in ("attention", "conv") else 0.5 if what in COLLECTIVES else 1.0
        return seconds * (sample.step / step) ** power


def time_overlap(me: Rank) -> dict[str, object]:
    """How many times slower matmuls run while an all_reduce is in flight, all ranks at once.

    The matmuls fill about half of the time that the all_reduce takes, so that it is in flight all along.
    """
    side, nbytes = (4096, 2**28) if me.device.type == "cuda" else (128, 2**23)
    matmul = build_compute(Sample(Series("matmul"), side), me.device)
    message = torch.zeros(nbytes // 4, device=me.device)
    reduce = Kernel(lambda: dist.all_reduce(message), nbytes)
    matmul_s, reduce_s = me.slowest(me.seconds(matmul, 20), me.seconds(reduce, 2))
    calls = max(1, int(reduce_s / 2 / matmul_s))
    alone, together = [], []
    for _ in range(REPEATS):
        alone.append(_matmuls_s(me, matmul, calls))
        me.start_together()
        work = dist.all_reduce(message, async_op=True)
        together.append(_matmuls_s(me, matmul, calls, wait=False))
        work.wait()
    *shared, me.now = me.slowest(*alone, *together, time.monotonic())
    ratio = statistics.median(shared[REPEATS:]) / statistics.median(shared[:REPEATS])
    return {"series": "overlap/float32", "size": nbytes, "seconds": ratio, "repeats": REPEATS}


def _matmuls_s(me: Rank, matmul: Kernel, calls: int, wait: bool = True) -> float:
    """Seconds until ``calls`` matmuls are done; communication on another stream is not waited for."""
    if wait:
        me.start_together()
    begin = time.perf_counter()
    for _ in range(calls):
        matmul.run()
    if me.device.type == "cuda":
        torch.cuda.current_stream(me.device).synchronize()
    return time.perf_counter() - begin


def make_groups(me: Rank) -> None:
    """One process group for each shape of the plan; every rank creates all of them, in the same order."""
    for series in all_series(me.ranks, me.device.type):
        shape = (series.ranks, series.stride)
        if series.what not in COLLECTIVES or series.what == "send" or shape in me.groups:
            continue
        if series.ranks == me.ranks:
            me.groups[shape] = None
            continue
        span = series.ranks * series.stride
        for start in (block + offset for block in range(0, me.ranks, span) for offset in range(series.stride)):
            members = [start + i * series.stride for i in range(series.ranks)]
            group = dist.new_group(members)
            if me.rank in members:
                me.groups[shape] = group


def run(me: Rank, out: TextIO | None) -> None:
    """Take the samples in order until the deadline, then once more: a disturbance seldom comes twice at the same place."""

    def write(record: dict[str, object]) -> None:
        if out is not None:
            out.write(json.dumps(record) + "\n")
            out.flush()

    for sample in all_samples(me.ranks, me.device.type) * PASSES:
        if sample.series.what == "overlap":
            record = time_overlap(me) if me.now + OVERLAP_S < me.deadline else None
        else:
            record = me.time(sample)
        if record is not None:
            write(record)
    write({"done": True})


def measure(setup: dict[str, Any], rank: int) -> None:
    """Join the other ranks and measure; ends by itself at the hard deadline, wherever it then is."""
    faulthandler.dump_traceback_later(max(1.0, setup["hard_deadline"] - time.monotonic()), exit=True)
    cuda, ranks = setup["device"] == "cuda", setup["ranks"]
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if ranks > 1:
        store = dist.FileStore(str(Path(setup["folder"]) / "store"), ranks)
        limit = timedelta(seconds=max(1.0, setup["hard_deadline"] - time.monotonic()))
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    me = Rank(rank, ranks, device, setup["deadline"], time.monotonic())
    (me.now,) = me.slowest(me.now)
    with torch.no_grad():
        make_groups(me)
        if rank == 0:
            with (Path(setup["folder"]) / RECORDS).open("w") as out:
                run(me, out)
        else:
            run(me, None)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def guarded(setup: dict[str, Any], rank: int) -> int:
    """Exit code of one rank; what went wrong is written to a file of its own."""
    try:
        measure(setup, rank)
        return 0
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        (Path(setup["folder"]) / f"{FAILED}{rank}").write_text(text)
        return 1


def main(argument: str) -> None:
    """Import once, then part into the ranks: on few cores starting that many interpreters would eat the budget."""
    setup = json.loads(argument)
    torch.set_num_threads(1)
    # The first optimizer imports a good part of torch.
    build_compute(Sample(Series("optimizer"), 1024), torch.device("cpu")).run()
    children = []
    for rank in range(1, setup["ranks"]):
        child = os.fork()
        if child == 0:
            os._exit(guarded(setup, rank))
        children.append(child)
    code = guarded(setup, 0)
    for child in children:
        os.waitpid(child, 0)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
