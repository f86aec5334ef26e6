"""What was measured, published or assumed of devices and links, and the times that follow.

time of an op         = launch + max( flops / (peak(kind, dtype) * efficiency(flops)), nbytes / (bandwidth * efficiency(nbytes)) )
time of a collective  = table of its collective and group, log-log interpolated; for another group the nearest table's floor
                        is scaled by latency steps (``links.steps``) and the rest by the bytes over the link that bounds
                        the table (``links.traffic``), and never less than the other link needs
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, ValidationError, model_validator

from cost_models.errors import ProfileError
from cost_models.figures import Array, Curve, Figure, Model, Text
from cost_models.links import Group, MeshLink, check_collective, steps, strided_group, traffic

KINDS = ("matmul", "attention", "conv", "memory")
Kind = Literal["matmul", "attention", "conv"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast"]
Count = Annotated[int, Field(ge=1, le=1_000_000)]

# A dtype without a rate of its own is priced as the first of these that has one.
STAND_INS = {
    "float64": ("float32",),
    "float32": ("float64",),
    "bfloat16": ("float16", "float32"),
    "float16": ("bfloat16", "float32"),
    "float8_e4m3fn": ("bfloat16", "float16"),
    "float8_e5m2": ("bfloat16", "float16"),
    "complex64": ("float32",),
    "complex128": ("float64", "float32"),
}
BYTES_ONLY = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")


class Rate(Model):
    """Arithmetic of one kind in one dtype: the peak, and the share of it that an op of so many FLOPs reaches."""

    kind: Kind
    dtype: Annotated[str, Field(max_length=20)]
    peak: Figure
    efficiency: Curve


class Bandwidth(Model):
    """Device memory: the peak, and the share of it that an op reading and writing so many bytes reaches."""

    peak: Figure
    efficiency: Curve


class CollectiveTable(Model):
    """Seconds of one collective over sizes in bytes, for ``ranks`` ranks of which ``per_node`` share a node."""

    collective: Collective
    ranks: Annotated[int, Field(ge=2, le=1_000_000)]
    per_node: Count
    seconds: Curve

    @property
    def group(self) -> Group:
        """The group that was timed."""
        return Group(self.ranks, self.per_node)


class Samples(Model):
    """Raw measurements behind a curve: median over repetitions of the slowest rank, in seconds, by size."""

    what: Annotated[str, Field(max_length=80)]
    unit: Literal["FLOPs", "bytes", "ops"]
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]


class HardwareProfile(Model):
    """A cluster: ``nodes`` nodes of ``gpus_per_node`` devices (or processes, for a CPU). Pure data, byte-stable as JSON."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1, max_length=80)]
    description: Text = ""
    gpus_per_node: Count
    nodes: Count = 1
    ranks_measured: Count | None = None
    memory: Figure
    launch_overhead: Figure
    overlap: Figure
    optimizer_bandwidth: Figure
    bandwidth: Bandwidth
    rates: tuple[Rate, ...]
    link_within: MeshLink
    link_between: MeshLink | None = None
    collectives: tuple[CollectiveTable, ...] = ()
    samples: tuple[Samples, ...] = ()

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if not any(rate.kind == "matmul" for rate in self.rates):
            raise ValueError(f"profile {self.name!r} has no matmul rate")
        if self.overlap.value < 1:
            raise ValueError(f"overlap slowdown must be >= 1, got {self.overlap.value}")
        return self

    # -- facts ---------------------------------------------------------------------------------------------------------

    # Not cached on the model: a copy with other fields would carry the old value along.
    @property
    def id(self) -> str:
        """Twelve hex digits of the SHA-256 of the content."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    @property
    def memory_bytes(self) -> int:
        """Usable bytes per device or process."""
        return int(self.memory.value)

    @property
    def overlap_slowdown(self) -> float:
        """How many times slower compute runs while communication is in flight (>= 1)."""
        return self.overlap.value

    @property
    def ranks(self) -> int:
        """How many devices the profile describes."""
        return self.nodes * self.gpus_per_node

    def shaped(self, nodes: int, gpus_per_node: int) -> HardwareProfile:
        """The same devices and links as a cluster of another shape."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, "nodes": nodes, "gpus_per_node": gpus_per_node})

    # -- times ---------------------------------------------------------------------------------------------------------

    def compute_time_s(self, kind: str, dtype: str, flops: ArrayLike, nbytes: ArrayLike) -> Array:
        """Seconds of one op on one device.

        ``kind``: matmul, attention, conv or memory (FLOPs not counted). ``dtype``: torch's name without ``torch.``; integers
        and booleans are priced by bytes. ``flops``, ``nbytes`` (read plus written): any broadcastable shapes, >= 0.
        Raises ``ProfileError`` for an unknown kind or dtype.
        """
        if kind not in KINDS:
            raise ProfileError(f"unknown kind of op {kind!r}; use one of {', '.join(KINDS)}")
        work, moved = np.broadcast_arrays(np.asarray(flops, np.float64), np.asarray(nbytes, np.float64))
        if (work < 0).any() or (moved < 0).any():
            raise ProfileError(f"FLOPs and bytes must be >= 0, got {work.min():g} and {moved.min():g}")
        seconds = moved / (self.bandwidth.peak.value * self.bandwidth.efficiency.at(moved))
        dtype = dtype.removeprefix("torch.")
        if kind != "memory" and dtype not in BYTES_ONLY:
            rate = self.rate(kind, dtype)
            seconds = np.maximum(seconds, work / (rate.peak.value * rate.efficiency.at(work)))
        result: Array = seconds + self.launch_overhead.value
        return result

    def rate(self, kind: str, dtype: str) -> Rate:
        """The rate for a kind and dtype, or the nearest one that the profile has (``STAND_INS``; matmul for conv and attention)."""
        known = {(rate.kind, rate.dtype): rate for rate in self.rates}
        for name in (dtype, *STAND_INS.get(dtype, ())):
            for stand_in in (kind, "matmul"):
                if (stand_in, name) in known:
                    return known[stand_in, name]  # type: ignore[index]
        dtypes = sorted({rate.dtype for rate in self.rates})
        raise ProfileError(f"profile {self.name!r} has no rate for dtype {dtype!r}; it knows {', '.join(dtypes)}")

    def collective_time_s(self, collective: str, nbytes: ArrayLike, group: Group) -> Array:
        """Seconds of one collective of ``nbytes`` (nccl-tests "size", see ``links``; any shape) over ``group``; 0 for one rank.

        Raises ``UnknownCollectiveError``, and ``ProfileError`` where the group crosses nodes and the profile knows no link.
        """
        check_collective(collective)
        size = np.asarray(nbytes, np.float64)
        if (size < 0).any():
            raise ProfileError(f"the bytes of {collective} must be >= 0, got {size.min():g}")
        if group.size == 1:
            return np.zeros_like(size)
        table = self._table(collective, group)
        if table is None:
            result: Array = self._latency_s(collective, group) + size * max(self._per_byte_s(collective, group))
            return result
        if table.group == group:
            return table.seconds.at(size)
        floor = table.seconds.y[0]
        latency = floor * self._latency_s(collective, group) / self._latency_s(collective, table.group)
        theirs = self._per_byte_s(collective, table.group)
        ours = self._per_byte_s(collective, group)
        slow = theirs.index(max(theirs))
        scaled = (table.seconds.at(size) - floor) * ours[slow] / theirs[slow]
        moved: Array = latency + np.maximum(scaled, size * ours[1 - slow])
        return moved

    def optimizer_time_s(self, nbytes: float) -> float:
        """Seconds of an optimizer step over ``nbytes``: parameters, gradients and states, each read or written once."""
        if nbytes < 0:
            raise ProfileError(f"the bytes of an optimizer step must be >= 0, got {nbytes:g}")
        return float(nbytes) / self.optimizer_bandwidth.value

    # -- groups and links ----------------------------------------------------------------------------------------------

    def group(self, size: int, stride: int) -> Group:
        """The group ``r, r+stride, ...`` of a mesh axis, laid over nodes of ``gpus_per_node``."""
        return strided_group(size, stride, self.gpus_per_node)

    def link(self, group: Group) -> MeshLink:
        """The slowest link that a group crosses."""
        if group.nodes == 1:
            return self.link_within
        if self.link_between is None:
            raise ProfileError(
                f"profile {self.name!r} knows no link between nodes, but a group of {group.size} ranks has only "
                f"{group.per_node} in one node of {self.gpus_per_node}; plan for at most {self.gpus_per_node} ranks or use a preset"
            )
        return self.link_between

    def _table(self, collective: str, group: Group) -> CollectiveTable | None:
        """The table of the nearest group on the same kind of link: by ranks per node, then by ranks, on a log scale."""
        fitting = [table for table in self.collectives if table.collective == collective and (table.group.nodes > 1) == (group.nodes > 1)]

        def distance(table: CollectiveTable) -> tuple[float, float]:
            return abs(np.log(table.per_node / group.per_node)), abs(np.log(table.ranks / group.size))

        return min(fitting, key=distance, default=None)

    def _latency_s(self, collective: str, group: Group) -> float:
        within, between = steps(collective, group)
        step_s = self.link(group).step_latency.value
        return self.launch_overhead.value + within * self.link_within.step_latency.value + between * step_s

    def _per_byte_s(self, collective: str, group: Group) -> tuple[float, float]:
        """Seconds per byte of size that the link within a node and the one between nodes need at least."""
        within, between = traffic(collective, group)
        return within / self.link_within.bandwidth.value, between / self.link(group).bandwidth.value

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Canonical text: sorted keys, shortest floats; equal profiles give equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "profile") -> HardwareProfile:
        """Read a profile; ``ProfileError`` names ``origin`` and the first field that is wrong."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the whole file"
            raise ProfileError(
                f"{origin} is not a hardware profile: {where}: {first['msg']} ({error.error_count()} problems in all); "
                f"write one with `shardwright profile`"
            ) from error
