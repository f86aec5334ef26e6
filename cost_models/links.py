"""Links, groups of ranks, and what one collective needs of a link.

Sizes follow nccl-tests: all_reduce the tensor, all_gather the gathered output, reduce_scatter the whole input, all_to_all the
buffer of one rank, send and broadcast the message.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from cost_models.errors import ProfileError, UnknownCollectiveError
from cost_models.figures import Figure, Model

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")


def check_collective(collective: str) -> None:
    """Refuse a collective that has no price."""
    if collective not in COLLECTIVES:
        raise UnknownCollectiveError(f"unknown collective {collective!r}; a profile prices {', '.join(COLLECTIVES)}")


@dataclass(frozen=True)
class Group:
    """The ranks of one collective: ``size`` of them, ``per_node`` of which share a node (default: all).

    Text form: ``8`` within one node, ``16/8`` for 16 ranks over nodes of 8.
    """

    size: int
    per_node: int = 0

    def __post_init__(self) -> None:
        if self.per_node == 0:
            object.__setattr__(self, "per_node", self.size)
        if self.size < 1 or not 1 <= self.per_node <= self.size:
            raise ProfileError(f"a group needs 1 <= per_node <= size, got size={self.size} per_node={self.per_node}")

    @property
    def nodes(self) -> int:
        """How many nodes the group touches."""
        return math.ceil(self.size / self.per_node)

    def __str__(self) -> str:
        return f"{self.size}" if self.per_node == self.size else f"{self.size}/{self.per_node}"

    @classmethod
    def parse(cls, text: str) -> Group:
        """Read the text form back."""
        size, _, per_node = text.partition("/")
        try:
            return cls(int(size), int(per_node) if per_node else 0)
        except ValueError as error:
            raise ProfileError(f"a group is written '8' or '16/8', got {text!r}") from error


class MeshLink(Model):
    """The link that an axis of the mesh crosses, as one rank sees it: bandwidth each way, and the time of one step."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    bandwidth: Figure
    step_latency: Figure


@functools.lru_cache(maxsize=4096)
def strided_group(size: int, stride: int, gpus_per_node: int) -> Group:
    """The group ``r, r+stride, ...`` (``size`` ranks) of a mesh axis, over nodes of ``gpus_per_node`` ranks.

    Where the groups of an axis lie differently over the nodes, the one that touches most nodes is meant: it is the slowest.
    """
    if size < 1 or stride < 1:
        raise ProfileError(f"a group needs size >= 1 and stride >= 1, got size={size} stride={stride}")
    span = size * stride
    blocks = gpus_per_node // math.gcd(span, gpus_per_node)
    starts = np.arange(min(blocks, 64))[:, None] * span + np.arange(stride)[None, :]
    nodes = (starts.reshape(-1, 1) + np.arange(size) * stride) // gpus_per_node
    most = int(max((len(np.unique(row)) for row in np.unique(nodes - nodes[:, :1], axis=0)), default=1))
    return Group(size, max(1, size // most))


def steps(collective: str, group: Group) -> tuple[int, int]:
    """Latency steps (within a node, between nodes) of a collective.

    A tree for all_reduce and broadcast, a ring or pairwise exchange for the rest, as in the latency model of NCCL
    (``src/graph/tuning.cc``).
    """
    n, nodes = group.size, group.nodes
    within, between = n - nodes, nodes - 1
    if n == 1:
        return 0, 0
    if collective == "send":
        return (1, 0) if nodes == 1 else (0, 1)
    if collective == "all_reduce":
        return 2 * (math.ceil(n / nodes) - 1), 2 * math.ceil(math.log2(nodes))
    if collective == "broadcast":
        return math.ceil(n / nodes) - 1, math.ceil(math.log2(nodes))
    return within, between


def traffic(collective: str, group: Group) -> tuple[float, float]:
    """Bytes over the link per byte of size: (each rank's within the node, each of the node's network ports').

    Within a node the ring bound, ``(n-1)/n`` of the size and twice that for all_reduce. Between N nodes, p ranks each with a
    port of its own: all_reduce as a tree or per rail moves ``2(N-1)/N`` of the size into a node, all_gather and reduce_scatter
    as a ring ``(n-1)/n``, all_to_all what lies on the other nodes, ``p(n-p)/n``; the ports of the node share it.
    """
    n, p, nodes = group.size, group.per_node, group.nodes
    if n == 1:
        return 0.0, 0.0
    ring = (n - 1) / n
    within = {"all_reduce": 2 * ring, "send": 1.0, "broadcast": 1.0}.get(collective, ring)
    if collective == "send":
        return (1.0, 0.0) if nodes == 1 else (0.0, 1.0)
    if nodes == 1:
        return within, 0.0
    between = {
        "all_reduce": 2 * (nodes - 1) / nodes / p,
        "broadcast": 1.0 / p,
        "all_to_all": (n - p) / n,
    }.get(collective, ring / p)
    return (within if p > 1 else 0.0), between
