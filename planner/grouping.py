"""Which dims are worth splitting inside groups: ``S(d:3)`` for a fused query-key-value projection that is cut in three afterwards.

An op that parts a dim (q h d) and leaves h to be split asks for a grouped split of the whole dim. The wish travels over every op that
passes the dim on unchanged (the projection, its weight and bias, pointwise ops), by union-find over (value, dim) through the rules'
factors. So the projection gets a strategy whose output needs no exchange before it is cut.

The batch stays split where a model flattens (time batch) into one dim: as a split inside each of the groups that time makes.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping

from networkx.utils import UnionFind

import planner.rules  # noqa: F401 - registers every rule
from planner.blocks import classes, segments
from planner.errors import BatchError
from planner.graph import INPUT, Graph, Value
from planner.micro import propagate
from planner.rules.base import Dim, Rule, Strategy, rule_of
from planner.rules.groups import groups_in

MOST_GROUPS = 16
"""More parts than this are not a fused projection."""
MOST_OUTER = 3
"""An outer factor that may itself be split (heads before head size) is split instead, unless it is as small as query, key, value."""

Place = tuple[Value, int]


@functools.lru_cache(maxsize=64)
def groupings(graph: Graph) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
    """Node name -> factor -> group counts to offer besides contiguous splits. Equal segments get equal offers."""
    rules = {n.name: rule_of(n, [graph.spec(v) for v in n.inputs]) for n in graph.nodes if not n.is_source}
    same: UnionFind[Place] = UnionFind()
    wishes: dict[Place, set[int]] = defaultdict(set)
    offers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    tensors = {name: _tensors(graph, name, rule) for name, rule in rules.items() if rule}
    for name, placed in tensors.items():
        rule = rules[name]
        assert rule is not None
        for factor in rule.size:
            alone = [place for place, dim in placed if factor in dim and _before(rule, dim, factor) == 1]
            if alone:
                same.union(*alone)
            for place, dim in placed:
                groups = _before(rule, dim, factor) if factor in dim else 1
                if groups > 1 and place[1] > 0 and factor not in rule.whole and _worth(rule, dim[: dim.index(factor)], groups):
                    wishes[place].add(groups)
                    offers[name][factor].add(1)
    wanted: dict[Place, set[int]] = defaultdict(set)
    for place, counts in wishes.items():
        wanted[same[place]] |= counts
    for name, placed in tensors.items():
        for place, dim in placed:
            if dim and (wish := wanted.get(same[place])):
                offers[name][dim[0]] |= wish
    for name, strategy in _following_the_batch(graph).items():
        rule, types = rules[name], strategy.inputs + strategy.outputs
        if rule is not None and any(type_.groups > 1 for type_ in types):
            offers[name][strategy.factor].update(groups_in(rule, types).get(strategy.factor, ()))
    return _even_out(graph, offers)


def _following_the_batch(graph: Graph) -> Mapping[str, Strategy]:
    """The strategies of plain data parallelism, which keep the batch split where it is flattened behind another dim."""
    sizes = [n.outputs[0].shape[dim] for n in graph.of(INPUT) for name, dim in graph.batch_dims if name == n.target]
    ranks = next((n for n in range(2, math.gcd(*sizes) + 1) if math.gcd(*sizes) % n == 0), 0) if sizes else 0
    try:
        return propagate(graph, ranks).strategies if ranks else {}
    except BatchError:
        return {}


def _tensors(graph: Graph, name: str, rule: Rule) -> list[tuple[Place, Dim]]:
    """Every dim of every tensor that a node touches, with the factors that its rule gives it."""
    node = graph.by_name[name]
    values = [*node.inputs, *(Value(name, i) for i in range(len(node.outputs)))]
    return [((v, d), dim) for v, dims in zip(values, rule.inputs + rule.outputs) for d, dim in enumerate(dims)]


def _before(rule: Rule, dim: Dim, factor: str) -> int:
    return math.prod(rule.size[f] for f in dim[: dim.index(factor)])


def _worth(rule: Rule, outer: Dim, groups: int) -> bool:
    return groups <= (MOST_GROUPS if all(factor in rule.whole for factor in outer) else MOST_OUTER)


def _even_out(graph: Graph, offers: Mapping[str, Mapping[str, set[int]]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Equal segments share one list of strategies, so each of their nodes gets what any of its likes was offered."""
    result: dict[str, dict[str, tuple[int, ...]]] = {}
    for likes in classes(segments(graph)).values():
        for names in zip(*(segment.nodes for segment in likes)):
            merged: dict[str, set[int]] = defaultdict(set)
            for name in names:
                for factor, counts in offers.get(name, {}).items():
                    merged[factor] |= counts
            for name in names:
                result[name] = {factor: tuple(sorted(counts)) for factor, counts in merged.items()}
    return result
