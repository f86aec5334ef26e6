"""Views against the law, and the factors that ``regroup`` finds."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law import SAMPLES, check, draw, f, fixed, ints, kept_elements, ops_here, samples, told_elements

from planner.rules.base import one_axis
from planner.rules.dims import regroup

BEFORE = set(SAMPLES)

for _op in ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.view_copy.default"):
    samples(
        _op, (f(2, 8, 12), (2, 8, 4, 3)), (f(4, 7, 6), (28, 6)), (f(8, 7), (8, 1, 7)), (f(8, 6), (4, 12)), (f(6, 4), (3, 8)),
        (f(12), (3, -1)), (f(1, 8), (8,)), (f(1,), ()), (f(0, 4), (4, 0)),
    )  # fmt: skip
samples("aten.view.default", (f(4, 8, 12), (4, 8, 4, 3)), (f(4, 6, 7), (24, 7)), mesh=True)
samples("aten.flatten.using_ints", (f(4, 7, 6), 1), (f(4, 3, 8), 0, 1), (f(8, 7),), (f(),))
samples("aten.ravel.default", (f(4, 7),))
samples("aten.unsqueeze.default", (f(8, 7), 0), (f(8, 7), -1))
samples("aten.atleast_1d.default", (f(),), (f(7),))
samples("aten.atleast_2d.default", (f(8),), (f(8, 7),))
samples("aten.atleast_3d.default", (f(8),), (f(8, 7),))
samples("aten.unflatten.int", (f(7, 12), -1, (4, 3)), (f(8, 7, 5), 0, (4, 2)), (f(12, 7), 0, (-1, 2, 1)))
samples("aten.squeeze.default", (f(8, 1, 7),), (f(2, 1, 4),), (f(7, 8),), mesh=True)
samples("aten.squeeze.dim", (f(8, 1, 7), 1), (f(2, 7, 1), 0), (f(1, 2, 1), -1))
samples("aten.squeeze.dims", (f(8, 1, 7, 1), (1, 3)), (f(1, 2, 1, 4), (0, 1)))
samples("aten.permute.default", (f(4, 7, 6), (2, 0, 1)), (f(4, 7, 6), (0, -1, 1)))
samples("aten.transpose.int", (f(4, 7, 6), 1, 2), (f(8, 7), -1, 0))
samples("aten.swapaxes.default", (f(4, 7, 6), 0, 2))
samples("aten.swapdims.default", (f(4, 7, 6), 0, 1))
samples("aten.t.default", (f(8, 7),), (f(7),))
for _op in ("mT", "mH", "adjoint", "matrix_H"):
    samples(f"aten.{_op}.default", (f(8, 7),))
samples("aten.mT.default", (f(4, 8, 7),))
samples("aten.numpy_T.default", (f(8, 7),), (f(4, 7, 6),))
samples("aten.movedim.int", (f(4, 7, 6), 0, 2), (f(4, 7, 6), -1, 0))
samples("aten.movedim.intlist", (f(4, 7, 6), (0, 1), (1, 2)))
samples("aten.moveaxis.int", (f(4, 7, 6), 2, 0))
samples("aten.moveaxis.intlist", (f(4, 7, 6), (2, 0), (0, 1)))
samples("aten.rot90.default", (f(4, 7, 6), 1, (1, 2)), (f(4, 7, 6), 2, (0, 1)), (f(8, 7), 4))

samples("aten.expand.default", (f(1, 7), (8, 7)), (f(7), (8, 7)), (f(8, 1, 7), (-1, 6, -1)), (f(), (8, 7)), mesh=True)
samples("aten.broadcast_to.default", (f(1, 7), (8, 7)))
samples("aten.expand_as.default", (f(1, 7), fixed(8, 7)), (f(7), f(8, 7)))
samples("aten.view_as.default", (f(8, 6), fixed(8, 2, 3)), (f(4, 7), fixed(28)))
samples("aten.reshape_as.default", (f(8, 6), fixed(8, 2, 3)))
samples("aten.repeat.default", (f(1, 8, 7), (4, 1, 1)), (f(8, 7), (6, 1, 2)), (f(7), (3,)), (f(1, 7), (7, 3)), mesh=True)
samples("aten.tile.default", (f(8, 7), (2, 1)), (f(8, 7), (2,)), (f(1, 7), (8, 1)))
samples("aten.repeat_interleave.self_int", (f(8, 7), 3, 0), (f(4, 8, 5), 2, -2))

samples("aten.slice.Tensor", (f(8, 7), 1, 2, 5), (f(8, 7), 0, 0, 2**63 - 1), (f(8, 7), 1, 0, 7, 2), (f(8, 7),))
samples("aten.slice.Tensor", (f(8, 7), -1, -3, 2**63 - 1), (f(8, 7), 0, -8, 8))
samples("aten.narrow.default", (f(8, 7), 1, 2, 3))
samples("aten.select.int", (f(8, 7, 4), 1, 3), (f(8, 7), -1, -1))
samples("aten.unbind.int", (f(3, 8, 7),), (f(8, 3), -1))
samples("aten.split.Tensor", (f(8, 12), 4, 1), (f(8, 7), 3, 1), (f(8, 7), 4), (f(8, 7), 8))
for _op in ("split.sizes", "split.default", "split_with_sizes.default", "unsafe_split_with_sizes.default"):
    samples(f"aten.{_op}", (f(8, 12), (4, 4, 4), 1), (f(8, 7), (2, 5), -1))
for _op in ("chunk", "unsafe_chunk"):
    samples(f"aten.{_op}.default", (f(8, 12), 3, 1), (f(8, 7), 2, -1), (f(8, 7), 4))
samples("aten.unsafe_split.Tensor", (f(8, 12), 6, 1), (f(8, 7), 3, 1))
samples("aten.tensor_split.sections", (f(8, 12), 3, 1), (f(8, 7), 2, 1))
samples("aten.tensor_split.indices", (f(8, 12), (4, 8), 1), (f(8, 7), (1, 3), 1))
samples("aten.unfold.default", (f(8, 7, 6), 1, 3, 2))
samples("aten.diagonal.default", (f(8, 5, 5), 0, 1, 2), (f(6, 7),))
samples("aten.linalg_diagonal.default", (f(8, 5, 6),))
samples("aten.diag_embed.default", (f(8, 5),), (f(8, 5), 0, 0, 2))
for _op in ("alias", "detach", "lift_fresh", "positive"):
    samples(f"aten.{_op}.default", (f(8, 7),), (ints(8, 7),))

samples("aten.flip.default", (f(8, 7), (1,)), (f(8, 7, 4), (0, -1)), (f(8, 7), ()))
samples("aten.fliplr.default", (f(8, 7),))
samples("aten.flipud.default", (f(8, 7),))
samples("aten.roll.default", (f(8, 7), (2,), (1,)), (f(8, 7), (3,)))
samples("aten.tril.default", (f(4, 8, 7),), (f(8, 7), -1))
samples("aten.triu.default", (f(4, 8, 7), 1))
samples("aten.pad.default", (f(8, 7), (1, 2)), (f(8, 6, 7), (0, 0, 1, 1)), (f(8, 7), (0, -2), "constant", 1.5))
samples("aten.pad.default", (f(4, 8, 7), (2, 1), "reflect"), (f(4, 8, 7), (2, 1), "circular"), (f(4, 8, 7), (2, 1), "replicate"))
samples("aten.constant_pad_nd.default", (f(8, 7), (1, 2)), (f(8, 7), (1, 2), 0.5))
for _n, _pads in ((1, (1, 2)), (2, (1, 2, 0, 1)), (3, (1, 1, 0, 1, 1, 0))):
    for _kind in ("reflection", "replication"):
        samples(f"aten.{_kind}_pad{_n}d.default", (f(4, 6, *(5, 4, 3)[:_n]), _pads))

OPS = ops_here(BEFORE)


@pytest.mark.parametrize("op", OPS)
def test_law(op):
    check(op)


@pytest.mark.parametrize("op", OPS)
def test_keeps_what_autograd_keeps(op):
    assert kept_elements(op) == told_elements(op)


def strategies_of(op, number, ranks=2):
    case = draw(SAMPLES[op][number])
    return {str(s) for s in one_axis(case.rule, case.grad_in, case.node.grad, ranks)}


def test_views_split_heads():
    """[2, 8, 12] -> [2, 8, 4, 3]: a split of the flat dim along whole heads is a split of the heads."""
    assert "S(2) -> S(2)" in strategies_of("aten.view.default", 0)
    assert "S(2) -> S(2)" not in strategies_of("aten.view.default", 0, 3)  # 3 ranks do not divide 4 heads


def test_an_expanded_dim_is_made_in_parts():
    assert {"R -> S(0)", "S(1) -> S(1)"} <= strategies_of("aten.expand.default", 0)


@pytest.mark.parametrize(
    ("before", "after", "dims"),
    [
        ((4, 6, 32), (24, 4, 8), "f0 f1 (f2 f3) -> (f0 f1) f2 f3"),
        ((2, 1, 3), (6,), "f0 1 f1 -> (f0 f1)"),
        ((12, 2), (4, 6), "(f0 f1) f2 -> f0 (f1 f2)"),
        ((4, 6), (3, 8), "f0 f3 -> f1 f2"),
        ((6, 4), (4, 6), "(f0 f1) f4 -> (f0 f2) f3"),
    ],
)
def test_common_factors(before, after, dims):
    left, right, _, _ = regroup(before, after)
    assert " -> ".join(" ".join(map(show, side)) for side in (left, right)) == dims


def show(dim):
    return "1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})"


PARTS = st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4)


@settings(max_examples=100, deadline=None)
@given(PARTS, st.lists(st.integers(0, 3), max_size=4), st.permutations([2, 3, 4]))
def test_any_view_regroups(before, places, more):
    """Dims multiply up to their sizes, and a factor on both sides moves the same elements: checked by splitting it in two."""
    before = [*before, *more]
    after = rearranged(before, places)
    left, right, sizes, whole = regroup(before, after)
    for dims, shape in ((left, before), (right, after)):
        assert [math.prod(sizes[name] for name in dim) for dim in dims] == list(shape)
    x = torch.arange(math.prod(before)).reshape(before)
    for name in set(sizes) - whole:
        i, j = (next(p for p, dim in enumerate(side) if name in dim) for side in (left, right))
        if left[i][0] != name or right[j][0] != name or sizes[name] % 2:
            continue
        halves = [part.flatten() for part in x.chunk(2, i)]
        for half, expected in zip(halves, x.reshape(after).chunk(2, j), strict=True):
            assert torch.equal(half, expected.flatten())


def rearranged(shape, places):
    """Another shape of the same size: prime factors of all dims, in order, joined again with cuts at ``places``."""
    primes = [p for size in shape for p in {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [3, 2]}[size]]
    cuts = sorted({0, len(primes), *(place * len(primes) // 4 for place in places)})
    return [math.prod(primes[a:b]) for a, b in itertools.pairwise(cuts)]


def test_regroup_leaves_nothing_out_of_every_pair():
    for before, after in itertools.product([(4, 6), (24,), (2, 3, 4), (8, 3), (1, 24)], repeat=2):
        left, right, sizes, _ = regroup(before, after)
        assert {name for dim in left + right for name in dim} == set(sizes)
