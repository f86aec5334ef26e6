"""Measuring with real processes, the kept profile, and the fit on samples whose truth is known."""

from __future__ import annotations

import os
import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from cost_models import COLLECTIVES, Group, HardwareProfile, MeasureError, ProfileError, load_profile, measure_profile
from cost_models import store as profile_store
from cost_models.measure import spawn
from cost_models.measure.fit import monotone, profile_from_records
from cost_models.measure.plan import all_samples, all_series, group_shapes
from cost_models.presets import preset

BUDGET_S = 12.0


def children() -> list[str]:
    """Command lines of the living children of this process."""
    found = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "cost_models.measure" in line]


@pytest.fixture(scope="module")
def measured() -> HardwareProfile:
    begin = time.monotonic()
    profile = measure_profile(2, BUDGET_S)
    assert time.monotonic() - begin < BUDGET_S + 0.5
    assert children() == []
    return profile


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


def test_a_failing_process_is_named_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    start = spawn._start

    def broken(setup: dict[str, object], log: object) -> subprocess.Popen[bytes]:
        return start({**setup, "device": "nonsense", "ranks": "x"} if setup["rank"] == 1 else setup, log)

    monkeypatch.setattr(spawn, "_start", broken)
    begin = time.monotonic()
    with pytest.raises(MeasureError, match="rank 1 of 2 ended with code 1"):
        measure_profile(2, 20.0)
    assert time.monotonic() - begin < 19 and children() == []


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
    first = samples[: len(all_series(4, "cpu"))]
    assert {sample.series for sample in first} == set(all_series(4, "cpu")), "the first size of everything comes first"
    assert len(samples) == len(set(samples))


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


def test_too_few_samples_is_an_error() -> None:
    with pytest.raises(MeasureError, match=r"matmul/float32.*larger budget"):
        profile_from_records([{"series": "launch/float32", "size": 1, "seconds": 1e-6}], 2, "cpu")
