"""Splits inside groups that follow from the neighbours: what comes as ``S(0:12)`` is worked on as ``S(0:12)``.

A view that flattens (time batch) into one dim keeps a split of the batch, as a split inside each of the groups that time makes::

    reshape: t b k -> (t b) k        S(1) -> S(0:t)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from planner.rules.base import Rule
from planner.sharding import Type


def groups_in(rule: Rule, types: Sequence[Type]) -> Mapping[str, tuple[int, ...]]:
    """Factor -> in how many groups to split it so that the op can take its tensors as ``types`` (of its inputs, then outputs) say:
    the ``groups`` of ``one_axis``."""
    found: dict[str, set[int]] = defaultdict(set)
    for dims, type_ in zip(rule.inputs + rule.outputs, types):
        before = 1
        for factor in dims[type_.dim] if type_.is_split else ():
            if type_.groups % before == 0:
                found[factor].add(type_.groups // before)
            before *= rule.size[factor]
    return {factor: tuple(sorted(counts)) for factor, counts in found.items()}
