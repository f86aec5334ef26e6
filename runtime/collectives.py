"""Typed conversions between shardings, differentiable, over any group of ranks.

Converting a value from type a to type b on one axis converts its gradient from dual(b) to dual(a), where dual(I) = I, dual(R) = P,
dual(P) = R and dual(S) = S. So one table of moves, ``move``, is forward and backward at once, and ``Convert`` is its autograd
function (which makes higher derivatives right as well).

    y = convert(x, "tensor", "P", "I", 0)       # all-reduce forward, nothing backward
    y = convert(x, "data", "S(0)", "R", 64)     # all-gather forward, reduce-scatter backward; 64: length of dim 0 over the axis

Groups are found by axis name among those made active with ``use``: process groups in a run, threads in a simulation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.errors import ReshardError
from planner.sharding import P, Type, chunk_sizes, chunk_start

DUAL = {"I": "I", "R": "P", "P": "R", "S": "S"}


class Group(Protocol):
    """The ranks along one axis. All tensors keep dtype and device; results are new tensors."""

    size: int
    rank: int

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Elementwise "sum" or "max" over the group."""

    def all_gather(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Parts of lengths ``sizes`` along ``dim``, joined in rank order."""

    def reduce_scatter(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Own part, along ``dim``, of the sum over the group."""

    def all_to_all(self, x: Tensor, split_dim: int, split_sizes: tuple[int, ...], join_dim: int, join_sizes: tuple[int, ...]) -> Tensor:
        """Split along one dim, send part r to rank r, join what arrives along another."""


class TimeGroup:
    """The micro-batches: every "rank" of this axis runs in one process, one after another, so nothing can be exchanged."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def _refuse(self, *_: Any) -> Tensor:
        raise ReshardError("nothing can be exchanged between micro-batches: this conversion should not have been planned")

    all_reduce = all_gather = reduce_scatter = all_to_all = _refuse


# ---------------------------------------------------------------- the active groups

_active: dict[str, Group] = {}
_simulated = threading.local()


@contextlib.contextmanager
def use(groups: Mapping[str, Group]) -> Iterator[None]:
    """Make these groups the ones that axis names mean, in this process, while the context lasts."""
    global _active
    before, _active = _active, dict(groups)
    try:
        yield
    finally:
        _active = before


@contextlib.contextmanager
def use_in_thread(groups: Mapping[str, Group]) -> Iterator[None]:
    """The same for one thread only: simulated ranks."""
    before = getattr(_simulated, "groups", None)
    _simulated.groups = dict(groups)
    try:
        yield
    finally:
        _simulated.groups = before


def group_of(axis: str) -> Group:
    groups = getattr(_simulated, "groups", None) or _active
    if axis not in groups:
        raise ReshardError(f"no group is active for axis {axis!r} (active: {sorted(groups) or 'none'})")
    return groups[axis]


# ---------------------------------------------------------------- moves


def move(x: Tensor, group: Group, source: Type, target: Type, size: int) -> Tensor:
    """Convert ``x`` from one type to another on one axis, without autograd. ``size``: length of the split dim over the whole axis."""
    n = group.size
    match (source.kind, target.kind):
        case ("I", "R") | ("R", "I") | ("I", "I") | ("R", "R"):
            return x
        case ("P", "I") | ("P", "R"):
            return group.all_reduce(x)
        case ("S", "R") | ("S", "I"):
            return swap(group.all_gather(x, source.dim, chunk_sizes(size, n)), source.dim, n, source.groups)
        case ("P", "S"):
            return group.reduce_scatter(swap(x, target.dim, target.groups, n), target.dim, chunk_sizes(x.shape[target.dim], n))
        case ("I", "S") | ("R", "S"):
            return own_part(x, target, n, group.rank)
        case ("R", "P") | ("I", "P"):
            return x if group.rank == 0 else torch.zeros_like(x)
        case ("S", "P"):
            return _zeros_around(x, group, source, size)
        case ("S", "S"):
            x = swap(x, target.dim, target.groups, n)
            parts = chunk_sizes(x.shape[target.dim], n)
            return swap(group.all_to_all(x, target.dim, parts, source.dim, chunk_sizes(size, n)), source.dim, n, source.groups)
    raise ReshardError(f"no conversion from {source} to {target}")


def swap(x: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """Reorder a dim that is (outer, inner, rest) long into (inner, outer, rest): from grouped to contiguous parts, or back."""
    if outer == 1 or inner == 1:
        return x
    return x.unflatten(dim, (outer, inner, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def own_part(x: Tensor, type_: Type, ranks: int, rank: int) -> Tensor:
    """Rank's part of a whole tensor under a split type. A view where the parts are contiguous."""
    if type_.groups > 1:
        x = swap(x, type_.dim, type_.groups, ranks)
    size = x.shape[type_.dim]
    return x.narrow(type_.dim, chunk_start(size, ranks, rank), chunk_sizes(size, ranks)[rank])


def _zeros_around(x: Tensor, group: Group, type_: Type, size: int) -> Tensor:
    shape = list(x.shape)
    shape[type_.dim] = size
    whole = x.new_zeros(shape)
    whole.narrow(type_.dim, chunk_start(size, group.size, group.rank), x.shape[type_.dim]).copy_(x)
    return swap(whole, type_.dim, group.size, type_.groups)


class Convert(torch.autograd.Function):
    """``move`` with the gradient of its types."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, source: Type, target: Type, size: int) -> Tensor:
        ctx.group, ctx.source, ctx.target = group, source, target
        # the length that the backward needs: of the dim that the forward splits, or splits already
        ctx.size = x.shape[target.dim] if target.is_split else size
        y = move(x, group, source, target, size)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        source, target = _dual(ctx.target), _dual(ctx.source)
        return Convert.apply(grad.contiguous(), ctx.group, source, target, ctx.size), None, None, None, None


def _dual(type_: Type) -> Type:
    return type_ if type_.is_split else Type(DUAL[type_.kind])


def convert(x: Tensor, axis: str, source: str, target: str, size: int) -> Tensor:
    """Convert on one axis, types in text form; ``size`` is the length over the whole axis of the dim that ``source`` splits (else 0)."""
    return Convert.apply(x, group_of(axis), Type.parse(source), Type.parse(target), size)


def select_micro(x: Tensor, source: str, target: str, size: int, count: int, micro: int) -> Tensor:
    """The same along the micro-batches: ``micro`` of ``count``."""
    return Convert.apply(x, TimeGroup(count, micro), Type.parse(source), Type.parse(target), size)


def reduce_sum(x: Tensor, axis: str) -> Tensor:
    """For kernels: a pending sum becomes an invariant value (gradient: the same on every rank, P -> R): see ``move``."""
    return Convert.apply(x, group_of(axis), P, Type("R"), 0)


def local(x: Tensor) -> Tensor:
    """The part of a parameter that this rank holds: DTensor -> its local tensor (differentiable), a plain tensor -> itself."""
    to_local = getattr(x, "to_local", None)
    return to_local() if to_local is not None else x
