"""What is timed: a list of samples, ordered so that stopping by time leaves no gap.

First the smallest size of everything (latency), then one at two thirds of the ladder (bandwidth), then the rest, growing.
Groups of far neighbours, which on most machines cost what near ones do, come last.

Equal on every rank: it follows from the ranks and the device alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.links import COLLECTIVES

# Files through which the measuring processes report: samples of rank 0, and what went wrong on a rank.
RECORDS, FAILED = "records.jsonl", "failed-"


@dataclass(frozen=True)
class Series:
    """One thing timed over sizes. ``what`` is matmul, attention, conv, memory, launch, optimizer, overlap or a collective.

    ``ranks`` and ``stride`` describe the groups of a collective: all groups ``r, r+stride, ...`` work at the same time.
    """

    what: str
    dtype: str = "float32"
    ranks: int = 1
    stride: int = 1

    @property
    def name(self) -> str:
        """Text form, as ``matmul/bfloat16`` or ``all_reduce/2x1`` (ranks x stride)."""
        return f"{self.what}/{self.ranks}x{self.stride}" if self.what in COLLECTIVES else f"{self.what}/{self.dtype}"


@dataclass(frozen=True)
class Sample:
    """One size of a series: ``step`` is what the kernel is built from (a side length, a count of bytes)."""

    series: Series
    step: int


def steps_of(series: Series, device: str) -> list[int]:
    """The sizes of a series, growing: sides of a square matmul, sequence lengths, channels, bytes."""
    large = device == "cuda"
    table: dict[str, list[int]] = {
        "launch": [1],
        "overlap": [1],
        "matmul": [256, 512, 1024, 2048, 4096, 8192] if large else [32, 64, 128, 256, 512, 768],
        "attention": [256, 1024, 2048, 4096] if large else [32, 64, 128, 256],
        "conv": [32, 64, 128, 256] if large else [8, 16, 32, 64],
        "memory": [2**e for e in ((14, 18, 20, 22, 24, 26, 28, 30) if large else (12, 15, 18, 20, 22, 24, 26))],
        "optimizer": [2**e for e in ((20, 24, 28) if large else (18, 21, 24))],
    }
    collective = [2**e for e in ((12, 16, 18, 20, 22, 24, 26, 28) if large else (12, 14, 16, 18, 20, 22, 24))]
    return table.get(series.what, collective)


def group_shapes(ranks: int) -> list[tuple[int, int]]:
    """(size, stride) of the groups that are timed: everybody, then each divisor with near and far neighbours."""
    shapes = [(ranks, 1)] if ranks > 1 else []
    for size in range(2, ranks):
        if ranks % size == 0:
            shapes += [(size, 1), (size, ranks // size)]
    return shapes


def all_series(ranks: int, device: str) -> list[Series]:
    """Everything that is timed, the most needed first."""
    dtypes = ["float32", "bfloat16", "float64"] + (["float16"] if device == "cuda" else [])
    series = [Series("launch"), Series("memory")]
    series += [Series("matmul", dtype) for dtype in dtypes]
    shapes = sorted(group_shapes(ranks), key=lambda shape: (shape[1] > 1, shape[0] != ranks))
    for size, stride in shapes:
        series += [Series(what, "float32", size, stride) for what in (*COLLECTIVES[:4], "broadcast")]
    series += [Series("send", "float32", 2, 1), Series("overlap")] if ranks > 1 else []
    series += [Series("optimizer"), Series("attention"), Series("conv")]
    return series + [Series("attention", dtype) for dtype in dtypes[1:]]


def all_samples(ranks: int, device: str) -> list[Sample]:
    """All samples in the order in which they are taken."""
    near = [series for series in all_series(ranks, device) if series.stride == 1]
    far = [series for series in all_series(ranks, device) if series.stride > 1]
    return _in_rounds(near, device) + _in_rounds(far, device)


def _in_rounds(group: list[Series], device: str) -> list[Sample]:
    ladders = [(series, _first_the_ends(steps_of(series, device))) for series in group]
    longest = max((len(steps) for _, steps in ladders), default=0)
    return [Sample(series, steps[i]) for i in range(longest) for series, steps in ladders if i < len(steps)]


def _first_the_ends(steps: list[int]) -> list[int]:
    high = steps[len(steps) * 2 // 3]
    return list(dict.fromkeys([steps[0], high, *steps]))
