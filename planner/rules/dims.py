"""Factors of dims, worked out from shapes: what the families share when an op's ranks vary from call to call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from planner.graph import Arg
from planner.rules.base import Call, Dim, Dims, Rule, dims_rule


def words(text: str) -> list[str]:
    return text.split()


def dim_of(dim: Arg, ndim: int) -> int:
    """A dim argument as a position from the left."""
    return int(dim) % ndim if ndim else 0


def dims_of(dims: Arg, ndim: int) -> tuple[int, ...]:
    """A dim argument that may be None or empty (all dims), one dim, or several."""
    if dims is None or dims == ():
        return tuple(range(ndim))
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(dim_of(dim, ndim) for dim in dims)


def numbered(shape: Sequence[int], prefix: str = "d") -> Dims:
    """One factor per dim, ``d0 d1 ...``; a dim of size 1 has none."""
    return tuple((f"{prefix}{i}",) if size != 1 else () for i, size in enumerate(shape))


def aligned(shape: Sequence[int], out: Sequence[int], prefix: str = "d") -> Dims:
    """Factors of a tensor that broadcasts to ``out``, whose factors are ``numbered``."""
    first = len(out) - len(shape)
    return tuple((f"{prefix}{first + i}",) if size != 1 else () for i, size in enumerate(shape))


def through(call: Call, origin: Sequence[int | None], whole: Iterable[int] = (), **fields: object) -> Rule:
    """A rule for an op on one tensor whose output dims are input dims, moved or not.

    ``origin``: per output dim the input dim that it is, None for a dim that the op makes (never split). Input dims that are not
    named are used up whole. ``whole``: input dims that stay but cannot be split.
    """
    shape = call.shape(0)
    passed = {i for i in origin if i is not None}
    kept = [numbered(shape)[i] if i in passed else (f"i{i}",) for i in range(len(shape))]
    outputs = []
    made: set[str] = set()
    for k, spec in enumerate(call.node.outputs):
        dims: list[Dim] = []
        for j, i in enumerate(origin):
            dims.append(kept[i] if i is not None else (f"o{j}_{k}",))
            if i is None:
                made.add(f"o{j}_{k}")
        outputs.append(tuple(dims[: len(spec.shape)]))
    unsplit = {f"d{i}" for i in whole} | {f"i{i}" for i in range(len(shape)) if i not in passed} | made
    return dims_rule(call, [tuple(kept)], outputs, whole=unsplit, **fields)


def regroup(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Common factors of the two shapes of a view: dims of the input, dims of the output, sizes, and the factors that are whole.

    Factors are peeled off outermost first, so each factor starts both dims that it is found in, as splitting it needs::

        (4, 6, 32) -> (24, 4, 8):    a b (c d) -> (a b) c d

    Where sizes do not divide each other (4, 6) -> (3, 8) the stretch up to where they line up again is tangled: it stays whole.
    """
    dims_in: list[list[str]] = [[] for _ in before]
    dims_out: list[list[str]] = [[] for _ in after]
    sizes: dict[str, int] = {}
    whole: set[str] = set()

    def factor(size: int, *dims: list[str]) -> None:
        if size == 1:
            return
        name = f"f{len(sizes)}"
        sizes[name] = size
        if len(dims) == 1:
            whole.add(name)
        for dim in dims:
            dim.append(name)

    left = [(size, i) for i, size in enumerate(before) if size != 1]
    right = [(size, j) for j, size in enumerate(after) if size != 1]
    if 0 in before or 0 in after:
        for size, i in left:
            factor(size, dims_in[i])
        for size, j in right:
            factor(size, dims_out[j])
        left, right = [], []
    while left and right:
        (a, i), (b, j) = left[0], right[0]
        common = math.gcd(a, b)
        factor(common, dims_in[i], dims_out[j])
        a, b = a // common, b // common
        left[0], right[0] = (a, i), (b, j)
        if a > 1 and b > 1:
            _tangled(left, right, dims_in, dims_out, factor)
        else:
            left, right = left[a == 1 :], right[b == 1 :]
    return tuple(map(tuple, dims_in)), tuple(map(tuple, dims_out)), sizes, whole


def _tangled(
    left: list[tuple[int, int]],
    right: list[tuple[int, int]],
    dims_in: list[list[str]],
    dims_out: list[list[str]],
    factor: Callable[..., None],
) -> None:
    """Use up both sides, as whole factors, until their products are equal."""
    sides = ((left, dims_in), (right, dims_out))
    products = [1, 1]
    while products[0] != products[1] or products[0] == 1:
        side = 0 if products[0] <= products[1] else 1
        size, position = sides[side][0].pop(0)
        factor(size, sides[side][1][position])
        products[side] *= size
