"""From samples to a profile.

launch      seconds of a tiny op
efficiency  size / (seconds - launch) / peak, never above 1, where peak is the best size / seconds: over FLOPs for
            arithmetic, bytes for memory
collective  seconds over sizes; groups near and far of one size are averaged (geometric mean)
twice       of two passes the faster: what other processes do only adds
monotone    seconds never fall with size: noise that says so is averaged away (isotonic regression of log seconds)
residual    mean relative distance of the samples from the fitted seconds
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from cost_models.errors import MeasureError
from cost_models.figures import Curve, Figure, Provenance
from cost_models.links import COLLECTIVES, Group, MeshLink, steps, traffic
from cost_models.presets import preset
from cost_models.profile import Bandwidth, CollectiveTable, HardwareProfile, Rate, Samples

Points = list[tuple[float, float]]


def profile_from_records(records: Sequence[dict[str, Any]], ranks: int, device: str) -> HardwareProfile:
    """The profile that the records of ``run_ranks`` give. Raises ``MeasureError`` where the essential samples are missing."""
    best: dict[str, dict[float, float]] = defaultdict(dict)
    for record in records:
        sizes, size, seconds = best[record["series"]], float(record["size"]), float(record["seconds"])
        sizes[size] = min(seconds, sizes.get(size, seconds))
    points = {series: sorted(sizes.items()) for series, sizes in best.items()}
    missing = [name for name in ("launch/float32", "memory/float32", "matmul/float32") if name not in points]
    if missing:
        raise MeasureError(f"time ran out before {', '.join(missing)} was measured; give a larger budget")
    fit = _Fit(points, ranks, device)
    return HardwareProfile(
        name=fit.machine_name,
        description=f"{fit.source}, {ranks} ranks at work at the same time",
        gpus_per_node=ranks,
        ranks_measured=ranks,
        memory=fit.memory(),
        launch_overhead=Figure(value=fit.launch_s, unit="s", provenance=fit.measured),
        overlap=fit.overlap(),
        optimizer_bandwidth=fit.optimizer(),
        bandwidth=fit.bandwidth(),
        rates=fit.rates(),
        link_within=fit.link(),
        collectives=fit.tables(),
        samples=tuple(_samples(name, found) for name, found in sorted(points.items())),
    )


class _Fit:
    """The samples of one machine, and the parts of a profile that follow."""

    def __init__(self, points: dict[str, Points], ranks: int, device: str) -> None:
        from cost_models.measure.machine import describe

        self.points, self.ranks, self.device = points, ranks, device
        self.machine_name, self.source = describe(device)
        self.measured = Provenance(kind="measured", source=self.source, date=datetime.date.today().isoformat())
        self.launch_s = points["launch/float32"][0][1]

    def memory(self) -> Figure:
        from cost_models.measure.machine import memory_per_rank_bytes

        value, how = memory_per_rank_bytes(self.device, self.ranks)
        return Figure(value=value, unit="bytes", provenance=self.measured.model_copy(update={"source": how}))

    def efficiency(self, name: str) -> tuple[Figure, Curve]:
        """Peak per second and the share of it over sizes."""
        size, raw = _columns(self.points[name])
        seconds = monotone(raw)
        best = float((size / seconds).max())
        net = np.maximum(seconds - self.launch_s, size / best)
        peak = Figure(value=best, unit="per second", provenance=self.measured)
        return peak, self.curve(size, size / net / best, 0, residual(raw, net + self.launch_s))

    def curve(self, x: np.ndarray, y: np.ndarray, tail: Literal[0, 1], error: float | None) -> Curve:
        return Curve(x=tuple(x.tolist()), y=tuple(y.tolist()), tail=tail, provenance=self.measured, residual=error)

    def bandwidth(self) -> Bandwidth:
        peak, curve = self.efficiency("memory/float32")
        return Bandwidth(peak=peak.model_copy(update={"unit": "bytes/s"}), efficiency=curve)

    def rates(self) -> tuple[Rate, ...]:
        found = []
        for name in self.points:
            kind, _, dtype = name.partition("/")
            if kind in ("matmul", "attention", "conv"):
                peak, curve = self.efficiency(name)
                peak = peak.model_copy(update={"unit": "FLOPs/s"})
                found.append(Rate.model_validate({"kind": kind, "dtype": dtype, "peak": peak, "efficiency": curve}))
        return tuple(sorted(found, key=lambda rate: (rate.kind, rate.dtype)))

    def optimizer(self) -> Figure:
        """Bytes per second of the largest step that was timed; half the memory bandwidth where there was no time."""
        found = self.points.get("optimizer/float32")
        if found:
            size, seconds = max(found)
            return Figure(value=size / seconds, unit="bytes/s", provenance=self.measured)
        assumed = Provenance(kind="assumed", source="half of the measured memory bandwidth: time ran out")
        return Figure(value=self.bandwidth().peak.value / 2, unit="bytes/s", provenance=assumed)

    def overlap(self) -> Figure:
        found = self.points.get("overlap/float32")
        if found:
            return Figure(value=max(1.0, found[0][1]), unit="ratio", provenance=self.measured)
        why = "time ran out" if self.ranks > 1 else "one rank does not communicate"
        assumed = Provenance(kind="assumed", source=f"communication shares the cores: {why}")
        return Figure(value=preset("cpu").overlap.value if self.ranks > 1 else 1.0, unit="ratio", provenance=assumed)

    def tables(self) -> tuple[CollectiveTable, ...]:
        merged: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for name, found in self.points.items():
            what, _, shape = name.partition("/")
            if what in COLLECTIVES:
                for size, value in found:
                    merged[what, int(shape.partition("x")[0])][size].append(value)
        tables = []
        for (what, size), timed in sorted(merged.items()):
            if len(timed) < 2:  # latency alone says nothing about bandwidth: the nearest table or the link does better
                continue
            x, raw = _columns([(nbytes, float(np.exp(np.mean(np.log(values))))) for nbytes, values in timed.items()])
            y = monotone(raw)
            seconds = self.curve(x, y, 1, residual(raw, y))
            fields = {"collective": what, "ranks": size, "per_node": size, "seconds": seconds}
            tables.append(CollectiveTable.model_validate(fields))
        return tuple(tables)

    def link(self) -> MeshLink:
        """One step's latency from the smallest all_reduce of everybody, the bandwidth from the largest."""
        everybody = Group(self.ranks)
        found = self.points.get(f"all_reduce/{self.ranks}x1")
        if not found or len(found) < 2:
            return preset("cpu").link_within
        (_, floor_s), (size, seconds) = min(found), max(found)
        step_s = max(floor_s - self.launch_s, floor_s * 0.1) / steps("all_reduce", everybody)[0]
        rate = traffic("all_reduce", everybody)[0] * size / max(seconds - floor_s, seconds * 0.1)
        return MeshLink(
            name="loopback" if self.device == "cpu" else "between GPUs of this machine",
            bandwidth=Figure(value=rate, unit="bytes/s", provenance=self.measured),
            step_latency=Figure(value=step_s, unit="s", provenance=self.measured),
        )


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.array(sorted(pairs), dtype=np.float64).T
    return x, y


def monotone(seconds: np.ndarray) -> np.ndarray:
    """The non-decreasing sequence nearest to ``seconds`` in the mean square of logarithms (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in np.log(seconds):
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return np.exp(np.repeat([mean for mean, _ in pools], [count for _, count in pools]))


def residual(samples: np.ndarray, fitted: np.ndarray) -> float:
    """Mean relative distance of the samples from the fit."""
    return float(np.mean(np.abs(samples / fitted - 1)))


def _samples(name: str, found: Points) -> Samples:
    size, seconds = _columns(found)
    what = name.partition("/")[0]
    unit: Literal["FLOPs", "bytes", "ops"] = "FLOPs" if what in ("matmul", "attention", "conv") else "ops" if what == "launch" else "bytes"
    return Samples(what=name, unit=unit, sizes=tuple(size.tolist()), seconds=tuple(seconds.tolist()))
