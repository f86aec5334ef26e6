"""Curves, groups and the times of a profile: monotone, in the right units, never a silent zero."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cost_models import COLLECTIVES, Curve, Figure, Group, ProfileError, Provenance, UnknownCollectiveError, load_profile
from cost_models.links import steps, strided_group, traffic
from cost_models.presets import preset_names

ASSUMED = Provenance(kind="assumed")
sizes = st.lists(st.floats(1, 1e12), min_size=2, max_size=12, unique=True).map(sorted)


def test_a_curve_is_straight_on_log_log_axes() -> None:
    line = Curve(x=(1e3, 1e5), y=(1e-5, 1e-3), tail=1, provenance=ASSUMED)
    assert line.at([1e3, 1e4, 1e5]) == pytest.approx([1e-5, 1e-4, 1e-3])
    assert line.at(0.0) == pytest.approx(1e-5), "the latency floor"
    assert line.at(1e7) == pytest.approx(1e-1), "the last bandwidth goes on"
    level = Curve(x=(1e3, 1e5), y=(0.1, 0.5), tail=0, provenance=ASSUMED)
    assert level.at([1.0, 1e9]) == pytest.approx([0.1, 0.5])


@given(x=sizes, data=st.data())
def test_a_time_never_falls_with_size(x: list[float], data: st.DataObject) -> None:
    y = data.draw(st.lists(st.floats(1e-6, 1e3), min_size=len(x), max_size=len(x)))
    curve = Curve(x=tuple(x), y=tuple(y), tail=1, provenance=ASSUMED)
    asked = np.geomspace(0.1, 1e14, 200)
    assert (np.diff(np.log(curve.at(asked))) >= -1e-9).all()


@pytest.mark.parametrize("x, y", [((1.0, 1.0), (1.0, 2.0)), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 2.0), (1.0,)), ((1.0,), (0.0,))])
def test_a_crooked_curve_is_refused(x: tuple[float, ...], y: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError):
        Curve(x=x, y=y, tail=1, provenance=ASSUMED)


def test_a_published_figure_needs_its_source() -> None:
    with pytest.raises(ValidationError, match="source and date"):
        Provenance(kind="published", source="a data sheet")
    with pytest.raises(ValidationError):
        Figure(value=math.inf, unit="s", provenance=ASSUMED)


@pytest.mark.parametrize(
    "size, stride, per_node, expected",
    [
        (8, 1, 8, "8"),  # a whole node
        (4, 2, 8, "4"),  # every second GPU of it
        (16, 1, 8, "16/8"),
        (4, 8, 8, "4/1"),  # the same GPU of four nodes
        (8, 4, 8, "8/2"),
        (3, 1, 4, "3/1"),  # ranks 2, 3 | 4: some groups cross, the slowest counts
        (6, 1, 4, "6/3"),
        (1, 5, 4, "1"),
    ],
)
def test_how_an_axis_lies_over_nodes(size: int, stride: int, per_node: int, expected: str) -> None:
    group = strided_group(size, stride, per_node)
    assert str(group) == expected and Group.parse(expected) == group


@given(size=st.integers(1, 24), stride=st.integers(1, 12), per_node=st.integers(1, 16))
def test_a_group_touches_as_many_nodes_as_its_worst_placement(size: int, stride: int, per_node: int) -> None:
    blocks = math.lcm(size * stride, per_node) // (size * stride)
    starts = [block * size * stride + offset for block in range(blocks) for offset in range(stride)]
    worst = max(len({(start + i * stride) // per_node for i in range(size)}) for start in starts)
    assert strided_group(size, stride, per_node).nodes >= worst


def test_a_bad_group_is_refused() -> None:
    for size, per_node in ((0, 1), (4, 5), (4, -1)):
        with pytest.raises(ProfileError, match=f"size={size}"):
            Group(size, per_node)
    with pytest.raises(ProfileError, match="'x'"):
        Group.parse("x")


def test_bytes_and_steps_of_collectives() -> None:
    node, two = Group(8), Group(16, 8)
    assert traffic("all_reduce", node) == pytest.approx((2 * 7 / 8, 0))
    assert traffic("all_gather", node) == pytest.approx((7 / 8, 0))
    assert traffic("all_reduce", two)[1] == pytest.approx(2 * 0.5 / 8), "8 ports share one half sent and one received"
    assert traffic("all_to_all", Group(4, 1)) == pytest.approx((0, 3 / 4))
    assert steps("all_gather", two) == (14, 1) and steps("all_reduce", two) == (14, 2)


@pytest.mark.parametrize("name", preset_names())
def test_times_grow_with_size_and_work(name: str) -> None:
    profile = load_profile(name, ranks=16)
    nbytes = np.geomspace(1, 1e11, 100)
    for group in (profile.group(2, 1), profile.group(8, 1), profile.group(16, 1), Group(64, 1)):
        for collective in COLLECTIVES:
            times = profile.collective_time_s(collective, nbytes, group)
            assert (np.diff(times) >= -1e-12).all() and times[0] > 0 and np.isfinite(times).all()
    for kind in ("matmul", "attention", "conv", "memory"):
        times = profile.compute_time_s(kind, "float32", np.geomspace(1, 1e15, 100), 0)
        assert (np.diff(times) >= -1e-12).all() and times[0] > 0
        assert (np.diff(profile.compute_time_s(kind, "float32", 0, nbytes)) >= -1e-12).all()


@pytest.mark.parametrize("name", preset_names())
def test_no_link_or_arithmetic_is_faster_than_its_peak(name: str) -> None:
    """A big matmul stays under the peak; a rank that crosses nodes alone is held by its port."""
    profile = load_profile(name, ranks=16)
    for rate in profile.rates:
        assert float(profile.compute_time_s(rate.kind, rate.dtype, 1e15, 0)) > 1e15 / rate.peak.value
    assert profile.link_between is not None
    port = profile.link_between.bandwidth.value
    assert float(profile.collective_time_s("all_gather", 1e9, Group(8, 1))) > 7 / 8 * 1e9 / port


def test_compute_time_broadcasts_and_reads_dtypes() -> None:
    profile = load_profile("h100", ranks=8)
    assert profile.compute_time_s("matmul", "bfloat16", np.ones((3, 1)) * 1e12, np.ones(4) * 1e6).shape == (3, 4)
    assert profile.compute_time_s("matmul", "torch.bfloat16", 1e12, 0) == profile.compute_time_s("matmul", "bfloat16", 1e12, 0)
    by_bytes = profile.compute_time_s("matmul", "int64", 1e15, 1e6)
    assert by_bytes == profile.compute_time_s("memory", "int64", 0, 1e6), "integers are priced by bytes"
    assert float(profile.compute_time_s("matmul", "float32", 1e13, 0)) > 3 * float(profile.compute_time_s("matmul", "bfloat16", 1e13, 0))
    assert float(profile.compute_time_s("matmul", "bfloat16", 0, 0)) == profile.launch_overhead.value


def test_units_against_known_figures() -> None:
    """An H100 node: 1e13 FLOPs in bfloat16 in 10 to 20 ms, 1 GB all-reduced in 3 to 5 ms, 3.35 GB of memory moved in 1 to 1.3 ms."""
    profile = load_profile("h100", ranks=8)
    assert 0.010 < float(profile.compute_time_s("matmul", "bfloat16", 1e13, 0)) < 0.020
    assert 0.003 < float(profile.collective_time_s("all_reduce", 1e9, Group(8))) < 0.005
    assert 0.001 < float(profile.compute_time_s("memory", "bfloat16", 0, 3.35e9)) < 0.0013
    assert 0.5 < profile.optimizer_time_s(1e12) < 1.0


def test_published_times_come_back() -> None:
    """B200, 8 ranks, all_gather of 1 GiB: 1486.06 us in the published sweep; all_reduce of 64 MiB: 277.18 us."""
    profile = load_profile("b200", ranks=8)
    assert float(profile.collective_time_s("all_gather", 2**30, Group(8))) == pytest.approx(1486.06e-6, rel=1e-4)
    assert float(profile.collective_time_s("all_reduce", 2**26, Group(8))) == pytest.approx(277.18e-6, rel=1e-4)


def test_one_rank_is_free_and_the_unknown_is_an_error() -> None:
    profile = load_profile("h100", ranks=8)
    assert profile.collective_time_s("all_reduce", [1.0, 1e9], Group(1)).tolist() == [0.0, 0.0]
    for group in (Group(1), Group(8)):
        with pytest.raises(UnknownCollectiveError, match=r"gossip.*all_reduce"):
            profile.collective_time_s("gossip", 1e6, group)
    with pytest.raises(ProfileError, match="einsum"):
        profile.compute_time_s("einsum", "float32", 1, 1)
    with pytest.raises(ProfileError, match=r"float4.*bfloat16"):
        profile.compute_time_s("matmul", "float4", 1, 1)
    with pytest.raises(ProfileError, match=">= 0"):
        profile.compute_time_s("matmul", "float32", -1, 1)
    with pytest.raises(ProfileError, match=">= 0"):
        profile.collective_time_s("all_reduce", -1, Group(8))
