"""Shipped profiles: one JSON file per device, found by name, and the text form of a cluster.

h100        one node of 8 (more nodes where more ranks are asked for)
h100:4      one node of 4
h100:16x8   16 nodes of 8
"""

from __future__ import annotations

import functools
import re
from importlib import resources

from cost_models.errors import ProfileError
from cost_models.profile import HardwareProfile

_SPEC = re.compile(r"(?P<name>[a-z0-9-]+)(?::(?:(?P<nodes>\d{1,6})x)?(?P<gpus>\d{1,6}))?")


def preset_names() -> list[str]:
    """The names of the shipped profiles, sorted."""
    files = resources.files("cost_models.presets").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


@functools.lru_cache(maxsize=32)
def preset(name: str) -> HardwareProfile:
    """The shipped profile of this name, one node; ``ProfileError`` lists the names there are."""
    if name not in preset_names():
        raise ProfileError(
            f"unknown hardware {name!r}; presets are {', '.join(preset_names())} (as in 'h100', 'h100:4', 'h100:16x8'), "
            f"or give the path of a profile JSON, or None for this machine"
        )
    text = resources.files("cost_models.presets").joinpath(f"{name}.json").read_text("utf-8")
    return HardwareProfile.from_json(text, f"preset {name}")


def cluster(spec: str, ranks: int) -> HardwareProfile:
    """The cluster that ``spec`` describes, with room for ``ranks``; a bare name gets as many nodes as they need.

    Raises ``ProfileError``: the name is unknown, a count is zero or missing, or the cluster is smaller than ``ranks``.
    """
    match = _SPEC.fullmatch(spec.strip().lower())
    if match is None:
        raise ProfileError(f"cannot read hardware {spec!r}; write a preset as 'h100', 'h100:4' or 'h100:16x8'")
    profile = preset(match["name"])
    if match["gpus"] is None:
        return profile.shaped(-(-ranks // profile.gpus_per_node), profile.gpus_per_node)
    nodes, gpus = int(match["nodes"] or 1), int(match["gpus"])
    if nodes < 1 or gpus < 1:
        raise ProfileError(f"{spec!r} has {nodes} nodes of {gpus}; both must be at least 1")
    if nodes * gpus < ranks:
        raise ProfileError(f"{spec!r} has {nodes * gpus} devices, {ranks} were asked for; ask for fewer or name more nodes")
    return profile.shaped(nodes, gpus)
