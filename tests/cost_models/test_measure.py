"""Measuring with real processes, the kept profile, and the fit on samples whose truth is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cost_models import COLLECTIVES, Group, HardwareProfile, MeasureError, ProfileError, load_profile, measure_profile
from cost_models import store as profile_store
from cost_models.measure import spawn
from cost_models.measure.fit import monotone, profile_from_records
from cost_models.measure.plan import all_samples, all_series, group_shapes
from cost_models.presets import preset

BUDGET_S = 30.0


def left_over(folder: Path) -> list[str]:
    """Living processes whose command line names ``folder``."""
    found = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(folder) in line and not line.startswith("Z")]


def run_changed(monkeypatch: pytest.MonkeyPatch, folder: Path, change: str) -> None:
    """Let the measuring processes run ``change`` (it sees the worker as ``w``) first, and work in ``folder``."""
    program = f"import sys, time, cost_models.measure.worker as w; real = w.measure; {change}; w.main(sys.argv[1])"
    monkeypatch.setattr(spawn, "_command", lambda setup: [sys.executable, "-c", program, json.dumps(setup)])
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HardwareProfile]:
    folder = tmp_path_factory.mktemp("measured")
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        run_changed(patch, folder, "w.PASSES, w.MIN_REPEAT_S = 1, 0.001")
        profile = measure_profile(2, BUDGET_S)
    assert time.monotonic() - begin < BUDGET_S
    assert left_over(folder) == [] and list(folder.iterdir()) == []
    yield profile


def test_measuring_gives_a_whole_profile(measured: HardwareProfile) -> None:
    assert measured.ranks_measured == 2 and measured.ranks == 2
    assert HardwareProfile.from_json(measured.to_json()) == measured
    assert {table.collective for table in measured.collectives} == set(COLLECTIVES)
    assert {rate.dtype for rate in measured.rates if rate.kind == "matmul"} >= {"float32", "float64", "bfloat16"}
    assert 1e6 < measured.memory_bytes * 2 < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert measured.launch_overhead.provenance.kind == "measured" and measured.launch_overhead.provenance.date


def test_the_samples_come_back_from_the_curves(measured: HardwareProfile) -> None:
    """Predicted against sampled seconds of matmuls and all-reduces: within the deviation that the fit itself admits."""
    samples = {sample.what: sample for sample in measured.samples}
    matmul = samples["matmul/float32"]
    predicted = measured.compute_time_s("matmul", "float32", matmul.sizes, 0)
    deviation = np.mean(np.abs(np.array(matmul.seconds) / predicted - 1))
    admitted = measured.rate("matmul", "float32").efficiency.residual
    assert admitted is not None and deviation == pytest.approx(admitted, abs=1e-6)
    largest = samples["all_reduce/2x1"].sizes[-1]
    times = measured.collective_time_s("all_reduce", [4096, largest], Group(2))
    assert 0 < times[0] <= times[1] < 10


def test_a_measured_profile_is_kept_and_found(measured: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    calls: list[int] = []

    def fake(ranks: int, budget_s: float, device: str, progress: object = None) -> HardwareProfile:
        calls.append(ranks)
        assert budget_s <= 30 and device == "cpu"
        return measured

    monkeypatch.setattr(profile_store, "measure_profile", fake)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = load_profile(None, ranks=2)
        assert load_profile(None, ranks=2) == first == measured
    assert calls == [2], "the second time it was found"
    (kept,) = tmp_path.iterdir()

    foreign = measured.model_copy(update={"description": "another machine"}).to_json()
    other_ranks = measured.model_copy(update={"ranks_measured": 4}).to_json()
    cut = measured.to_json()[:1000]
    for number, text in enumerate((cut, "", "\x00\xff", preset("l4").to_json(), foreign, other_ranks)):
        kept.write_text(text)
        with pytest.warns(UserWarning, match="measuring anew") as caught:
            assert load_profile(None, ranks=2) == measured
        assert len(caught) == 1 and "\n" not in str(caught[0].message)
        assert len(calls) == number + 2 and kept.read_text() == measured.to_json(), "measured anew and kept"


def test_a_folder_that_cannot_be_written_is_a_warning(measured: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(profile_store, "measure_profile", lambda *_, **__: measured)
    with pytest.warns(UserWarning, match="could not be kept"):
        assert load_profile(None, ranks=2) == measured


def test_a_failing_process_is_named_and_none_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_changed(monkeypatch, tmp_path, "w.measure = lambda setup, rank: 1 / 0 if rank == 1 else real(setup, rank)")
    begin = time.monotonic()
    with pytest.raises(MeasureError, match="rank 1 of 2 failed after the start: ZeroDivisionError"):
        measure_profile(2, BUDGET_S)
    assert time.monotonic() - begin < BUDGET_S - 1 and left_over(tmp_path) == []


def test_a_process_that_hangs_is_ended_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_changed(monkeypatch, tmp_path, "w.measure = lambda setup, rank: time.sleep(60) if rank else real(setup, rank)")
    begin = time.monotonic()
    with pytest.raises(MeasureError, match="2 processes measured nothing in 5 s"):
        measure_profile(2, 5.0)
    assert time.monotonic() - begin < 6 and left_over(tmp_path) == []


def test_a_program_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_changed(monkeypatch, tmp_path, "raise SystemExit('no torch here')")
    with pytest.raises(MeasureError, match="ended with code 1 after the start: no torch here"):
        measure_profile(2, BUDGET_S)


@pytest.mark.parametrize(
    "ranks, budget_s, device, message",
    [(0, 30, "cpu", "at least one rank"), (2, 1, "cpu", "at least 5 s"), (2, 30, "tpu", "'cpu' or 'cuda'")],
)
def test_wrong_arguments(ranks: int, budget_s: float, device: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        measure_profile(ranks, budget_s, device)


def test_the_plan_is_breadth_first_and_covers_the_divisors() -> None:
    assert group_shapes(1) == [] and group_shapes(3) == [(3, 1)]
    assert group_shapes(4) == [(4, 1), (2, 1), (2, 2)]
    assert group_shapes(12) == [(12, 1), (2, 1), (2, 6), (3, 1), (3, 4), (4, 1), (4, 3), (6, 1), (6, 2)]
    samples = all_samples(4, "cpu")
    near = {series for series in all_series(4, "cpu") if series.stride == 1}
    assert {sample.series for sample in samples[: len(near)]} == near, "the first size of everything comes first"
    assert len(samples) == len(set(samples)) and {sample.series for sample in samples} == set(all_series(4, "cpu"))
    steps = [sample.step for sample in samples if sample.series.name == "all_reduce/4x1"]
    assert steps[:2] == [4096, 2**20] and steps[2:] == sorted(steps[2:]), "latency, bandwidth, then what lies between"


def records(launch_s: float, rate: float, bandwidth: float, noise: np.ndarray) -> list[dict[str, object]]:
    """What a machine of known figures would have been timed at."""
    found: list[dict[str, object]] = [{"series": "launch/float32", "size": 1, "seconds": launch_s}]
    for flops in (1e6, 1e7, 1e8, 1e9):
        found.append({"series": "matmul/float32", "size": flops, "seconds": launch_s + flops / rate})
    for nbytes in (1e5, 1e6, 1e7):
        found.append({"series": "memory/float32", "size": nbytes, "seconds": launch_s + nbytes / bandwidth})
    for nbytes, factor in zip((2**12, 2**16, 2**20, 2**24), noise):
        seconds = (1e-4 + nbytes / 1e9) * factor
        found.append({"series": "all_reduce/2x1", "size": nbytes, "seconds": seconds})
        found.append({"series": "all_reduce/2x1", "size": nbytes, "seconds": 3 * seconds})  # a disturbed second pass
    return found


def test_the_fit_finds_the_truth_behind_exact_samples() -> None:
    profile = profile_from_records(records(1e-5, 50e9, 8e9, np.ones(4)), 2, "cpu")
    # The best rate that is ever seen contains the launch: 1e9 FLOPs at 50 GFLOPs/s are 20 ms, and 10 us of launch.
    assert profile.compute_time_s("matmul", "float32", 1e9, 0) == pytest.approx(1e-5 + 0.02, rel=2e-3)
    assert profile.compute_time_s("memory", "float32", 0, 1e7) == pytest.approx(1e-5 + 1e7 / 8e9, rel=1e-2)
    assert profile.collective_time_s("all_reduce", 2**20, Group(2)) == pytest.approx(1e-4 + 2**20 / 1e9)
    assert profile.overlap.provenance.kind == "assumed" and "time ran out" in profile.overlap.provenance.source


def test_noise_that_falls_with_size_is_averaged() -> None:
    assert monotone(np.array([1.0, 4.0, 1.0, 8.0])) == pytest.approx([1.0, 2.0, 2.0, 8.0])
    profile = profile_from_records(records(1e-5, 50e9, 8e9, np.array([3.0, 1.0, 1.0, 1.0])), 2, "cpu")
    (table,) = profile.collectives
    assert table.seconds.residual and np.all(np.diff(table.seconds.y) >= 0)
    assert profile_from_records(records(1e-5, 50e9, 8e9, np.ones(4)), 2, "cpu").collectives[0].seconds.residual == 0


def test_latency_alone_is_no_bandwidth() -> None:
    """Time ran out after the smallest size: no table is made of it, and a large message is not priced from a small one."""
    few = [record for record in records(1e-5, 50e9, 8e9, np.ones(4)) if "all_reduce" not in str(record["series"])]
    few.append({"series": "all_reduce/2x1", "size": 4096, "seconds": 0.01})
    profile = profile_from_records(few, 2, "cpu")
    assert profile.collectives == () and profile.link_within.bandwidth.provenance.kind == "assumed"
    assert 0 < float(profile.collective_time_s("all_reduce", 2**20, Group(2))) < 0.1


def test_too_few_samples_is_an_error() -> None:
    with pytest.raises(MeasureError, match=r"matmul/float32.*larger budget"):
        profile_from_records([{"series": "launch/float32", "size": 1, "seconds": 1e-6}], 2, "cpu")
