"""Every conversion of the table, value and gradient, against its meaning on the whole tensor."""

import itertools

import pytest
import torch

from planner.reshard import COLLECTIVES, steps
from planner.sharding import R, S, Type, chunk_sizes, parse
from runtime.collectives import convert, local, own_part
from runtime.simulate import simulate


def pieces(whole: torch.Tensor, type_: Type, ranks: int) -> list[torch.Tensor]:
    """What each rank holds of ``whole``."""
    if type_.kind in "IR":
        return [whole.clone() for _ in range(ranks)]
    if type_.is_split:
        return [own_part(whole, type_, ranks, rank).clone() for rank in range(ranks)]
    parts = [torch.randn_like(whole) for _ in range(ranks - 1)]
    return [*parts, whole - sum(parts)]


def whole_of(parts: list[torch.Tensor], type_: Type) -> torch.Tensor:
    if type_.kind in "IR":
        for part in parts:
            torch.testing.assert_close(part, parts[0])
        return parts[0]
    if not type_.is_split:
        return sum(parts)
    # a grouped split, taken apart by hand: group by group, rank by rank
    pieces = [part.chunk(type_.groups, type_.dim) for part in parts]
    return torch.cat([piece[g] for g in range(type_.groups) for piece in pieces], type_.dim)


def dual(type_: Type) -> Type:
    return type_ if type_.is_split else Type({"I": "I", "R": "P", "P": "R"}[type_.kind])


PAIRS = [(Type(a) if a != "S" else S(0), Type(b) if b != "S" else S(1) if a == "S" else S(0)) for a, b in COLLECTIVES] + [
    (S(1), Type("R")),
    (Type("P"), S(1)),
    (Type("R"), S(1)),
    (S(1), S(0)),
]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_value_and_gradient(pair, ranks):
    check(*pair, ranks, (7, 5))


def check(source, target, ranks, shape):
    torch.manual_seed(0)
    whole, grad = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    xs, gs = pieces(whole, source, ranks), pieces(grad, dual(target), ranks)
    size = whole.shape[source.dim] if source.is_split else 0

    def body(at):
        x = xs[at["a"]].requires_grad_()
        y = convert(x, "a", str(source), str(target), size)
        y.backward(gs[at["a"]])
        return y.detach(), x.grad

    results = simulate({"a": ranks}, body)
    torch.testing.assert_close(whole_of([y for y, _ in results], target), whole)
    torch.testing.assert_close(whole_of([g for _, g in results], dual(source)), grad)


GROUPED = [
    (S(0, 2), Type("R")), (S(0, 2), Type("I")), (Type("P"), S(0, 2)), (Type("I"), S(0, 2)), (Type("R"), S(0, 2)),
    (S(0, 2), S(1)), (S(1), S(0, 2)), (S(0, 2), S(1, 3)),
]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("pair", GROUPED, ids=lambda p: f"{p[0]}-{p[1]}")
def test_grouped_splits(pair, ranks):
    check(*pair, ranks, (4 * 2 * 3, 3 * 4 * 3))


@pytest.mark.parametrize("shape", [(8, 8), (7, 6)])
def test_chains_over_two_axes(shape):
    sizes = (2, 2)
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)
    kinds = ["R", "S(0)", "S(1)"]

    def nested(sharding):
        def part(at):
            x = whole
            for t, n, c in zip(sharding, sizes, (at["a"], at["b"])):
                if t.is_split:
                    x = x.split(list(chunk_sizes(x.shape[t.dim], n)), t.dim)[c]
            return x

        return part

    for a, b in itertools.product(itertools.product(kinds, repeat=2), repeat=2):
        source, target = parse(",".join(a)), parse(",".join(b))

        def body(at, source=source, target=target):
            from planner.sharding import local_shape

            state, x = list(source), nested(source)(at)
            for step in steps(source, target, shape, sizes):
                before = tuple(R if i == step.axis else t for i, t in enumerate(state))
                dim = step.source.dim if step.source.is_split else 0
                size = local_shape(shape, before, sizes, (at["a"], at["b"]))[dim]
                x = convert(x, "ab"[step.axis], str(step.source), str(step.target), size)
                state[step.axis] = step.target
            return torch.equal(x, nested(target)(at))

        assert all(simulate({"a": 2, "b": 2}, body)), (a, b)


def test_local_leaves_plain_tensors_alone():
    x = torch.ones(2)
    assert local(x) is x
