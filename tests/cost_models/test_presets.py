"""Shipped profiles, cluster specifications, profile files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cost_models import Group, HardwareProfile, ProfileError, load_profile
from cost_models.presets import preset, preset_names
from cost_models.show import charts, tables, to_html, to_text

NAMES = ("a100-80g", "b200", "cpu", "h100", "h200", "l4", "l40s", "mi300x", "rtx4090")


def figures(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every figure and curve of a profile's JSON with its path."""
    if isinstance(value, dict):
        if "value" in value or ("x" in value and "y" in value):
            yield path, value
        for key, inner in value.items():
            yield from figures(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from figures(inner, f"{path}[{number}]")


def test_all_presets_are_there() -> None:
    assert tuple(preset_names()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    found = list(figures(preset(name).model_dump(mode="json")))
    assert len(found) > 10
    for path, figure in found:
        origin = figure["provenance"]
        assert origin["source"], path
        if origin["kind"] == "published":
            assert origin["date"] and "assumed" not in origin["source"], f"{path}: what is partly assumed is not published"
        else:
            assert origin["kind"] == "assumed", f"{path}: a shipped profile was not measured here"


@pytest.mark.parametrize("name", NAMES)
def test_json_is_byte_stable(name: str) -> None:
    profile = preset(name)
    text = profile.to_json()
    again = HardwareProfile.from_json(text)
    assert again == profile and again.to_json() == text and again.id == profile.id
    shipped = Path(preset.__wrapped__.__code__.co_filename).with_name(f"{name}.json").read_text("utf-8")
    assert shipped == text, "the shipped file is canonical"


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_shown(name: str) -> None:
    profile = load_profile(name, ranks=8)
    text = to_text(profile)
    assert profile.id in text and all(table.title in text for table in tables(profile))
    page = to_html(profile)
    assert page.count("<svg") == len(charts(profile)) and "<script" not in page and "http" not in page


@pytest.mark.parametrize(
    "spec, ranks, shape",
    [
        ("h100", 1, (1, 8)),
        ("h100", 8, (1, 8)),
        ("h100", 20, (3, 8)),
        ("h100:4", 4, (1, 4)),
        ("h100:4", 2, (1, 4)),
        ("h100:16x8", 128, (16, 8)),
        ("A100-80G:2x4", 8, (2, 4)),
    ],
)
def test_a_cluster_specification(spec: str, ranks: int, shape: tuple[int, int]) -> None:
    profile = load_profile(spec, ranks=ranks)
    assert (profile.nodes, profile.gpus_per_node) == shape and profile.ranks == shape[0] * shape[1]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("h100:0x8", "0 nodes of 8"),
        ("h100:0", "1 nodes of 0"),
        ("h100:8x", "h100:16x8"),
        ("h100:", "h100:16x8"),
        ("h100:4", "4 devices, 8 were asked for"),
        ("v100", "presets are a100-80g, b200, cpu, h100, h200, l4, l40s, mi300x, rtx4090"),
        ("", "h100:4"),
    ],
)
def test_a_wrong_specification_says_what_is_right(spec: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(spec, ranks=8)


def test_shape_and_id() -> None:
    profile = load_profile("h100", ranks=16)
    assert profile.id != preset("h100").id, "another cluster, another id"
    larger = profile.model_copy(update={"name": "h100-renamed"})
    assert larger.id != profile.id, "a copy has its own id"
    assert profile.group(8, 2) == Group(8, 4)
    assert profile.memory_bytes == 77 * 2**30 and profile.overlap_slowdown >= 1
    with pytest.raises(ProfileError, match="at least one rank"):
        load_profile("h100", ranks=0)


def test_a_profile_that_knows_no_network_says_so() -> None:
    lonely = preset("h100").model_copy(update={"link_between": None, "collectives": ()})
    assert float(lonely.collective_time_s("all_reduce", 1e6, Group(8))) > 0
    with pytest.raises(ProfileError, match=r"no link between nodes.*16 ranks"):
        lonely.collective_time_s("all_reduce", 1e6, Group(16, 8))


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(preset("l4").to_json())
    assert load_profile(file, ranks=8) == load_profile(str(file), ranks=8) == preset("l4")
    assert load_profile(preset("l4"), ranks=8) is preset("l4")
    with pytest.raises(ProfileError, match="1 nodes of 8, 9 devices"):
        load_profile(file, ranks=9)
    with pytest.raises(ProfileError, match=r"gone\.json"):
        load_profile(tmp_path / "gone.json", ranks=1)


@pytest.mark.parametrize(
    "old, new, where",
    [
        ('"nodes": 1', '"nodes": 1, "script": "x"', "script"),
        ('"nodes": 1', '"nodes": "1"', "nodes"),
        ('"nodes": 1', '"nodes": 0', "nodes"),
        ('"schema_version": 1', '"schema_version": 99', "schema_version"),
        ('"kind": "assumed"', '"kind": "guessed"', "kind"),
        ("{", "", "the whole file"),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path: Path, old: str, new: str, where: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(preset("l4").to_json().replace(old, new, 1))
    with pytest.raises(ProfileError, match=where):
        load_profile(file, ranks=1)
