"""``x[arange(len(x)), ids]``: indices that only count along a dim.

Models pick one position per row that way (the last token of each sequence, the cells of a mask). As an index, ``arange`` would need its dim
whole; said as "runs along with" it splits like any other dim: ``shard.index(x, (None, ids), ((0, 0),))``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.graph import Arg, Node, Spec, Value

Producer = Callable[[Value], Node]
_SAME_ORDER = {"unsqueeze", "view", "reshape", "squeeze", "_unsafe_view", "to", "alias", "clone"}


@dataclass(frozen=True)
class Aligned:
    """Arguments of ``shard.index``; ``rank`` of the index space, which at least one index must have."""

    indices: tuple[Value | None, ...]
    pairs: tuple[tuple[int, int], ...]
    rank: int


def aligned(node: Node, producer: Producer) -> Aligned | None:
    """How an ``aten.index.Tensor`` says it with ``shard.index``; None where no index merely counts."""
    x, indices = node.args[0], tuple(node.args[1])
    shape = _shape(x, producer)
    used = [index for index in indices if index is not None]
    if any(_spec(index, producer).dtype in ("bool", "uint8") for index in used):
        return None
    rank = max((len(_shape(index, producer)) for index in used), default=0)
    left: list[Value | None] = list(indices)
    pairs = []
    for dim, index in enumerate(indices):
        place = None if index is None else _counts(index, shape[dim], producer)
        if index is not None and place is not None:
            pairs.append((dim, rank - len(_shape(index, producer)) + place))
            left[dim] = None
    rest = [index for index in left if index is not None]
    if pairs and not rest and max(position for _, position in pairs) + 1 != rank:
        # nothing would tell of the dims of size 1 at the end: the last index stays one
        last, _ = pairs.pop()
        left[last] = indices[last]
    if not pairs:
        return None
    return Aligned(tuple(left), tuple(pairs), rank)


def _counts(index: Value, size: int, producer: Producer) -> int | None:
    """The dim along which an index is 0, 1, 2, ... up to ``size``, all others being 1; None if it is not."""
    shape = _shape(index, producer)
    long = [dim for dim, n in enumerate(shape) if n != 1]
    if size < 2 or len(long) != 1 or shape[long[0]] != size:
        return None
    node = producer(index)
    while not node.is_source and node.op.split(".")[1] in _SAME_ORDER:
        node = producer(node.args[0])
    return long[0] if from_zero(node) else None


def from_zero(node: Node) -> bool:
    name, _, overload = node.op.removeprefix("aten.").partition(".")
    if name != "arange" or any(key in ("start", "step") for key, _ in node.kwargs):
        return False
    start: Arg = node.args[0] if overload in ("start", "start_step") else 0
    step: Arg = node.args[2] if overload == "start_step" and len(node.args) > 2 else 1
    return start == 0 and step == 1


def _spec(value: Value, producer: Producer) -> Spec:
    return producer(value).outputs[value.index]


def _shape(value: Value, producer: Producer) -> tuple[int, ...]:
    return _spec(value, producer).shape
