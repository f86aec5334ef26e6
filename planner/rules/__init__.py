"""All rules. Importing this package registers every family; ``rule_of`` finds the rule of a node."""

from planner.rules import (
    attention,
    complex_ops,
    convolution,
    creation,
    embedding,
    indexing,
    linalg,
    losses,
    matmul,
    moe,
    normalization,
    ordering,
    pointwise,
    pooling,
    random_ops,
    recurrent,
    reductions,
    softmax,
    stacking,
    views,
)
from planner.rules.base import REGISTRY, Rule, Strategy, one_axis, over_mesh, rule_of

__all__ = [
    "REGISTRY", "Rule", "Strategy", "one_axis", "over_mesh", "rule_of",
    "attention", "complex_ops", "convolution", "creation", "embedding", "indexing", "linalg", "losses", "matmul", "moe",
    "normalization", "ordering", "pointwise", "pooling", "random_ops", "recurrent", "reductions", "softmax", "stacking", "views",
]  # fmt: skip
