"""All rules. Importing this package registers every family; ``rule_of`` finds the rule of a node."""

from planner.rules import creation, matmul, pointwise, random_ops, reductions, stacking, views
from planner.rules.base import REGISTRY, Rule, Strategy, one_axis, over_mesh, rule_of

__all__ = [
    "REGISTRY", "Rule", "Strategy", "one_axis", "over_mesh", "rule_of",
    "creation", "matmul", "pointwise", "random_ops", "reductions", "stacking", "views",
]  # fmt: skip
