"""The law that every rule is held to: run on shards, joined again, it is the whole op, in value and gradient.

A sample is a call written with descriptions of tensors in the places of tensors::

    samples("aten.linear.default", (f(2, 8, 7), f(6, 7), f(6)))

For each strategy over each number of ranks the inputs are taken apart by their types, the op runs on every rank in one process in
float64, outputs are joined by theirs; gradients of the outputs are given by the dual types, and those of the inputs joined by theirs:

    type   value on the ranks          gradient on the ranks
    I      equal                       equal
    R      equal                       pieces that sum
    S(d)   parts                       parts
    P      pieces that sum             equal
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import planner.rules  # noqa: F401 (registers every family)
from planner.graph import Arg, Node, Spec, Symbol, Value
from planner.mesh import Axis
from planner.rules.base import MeshStrategy, Rule, one_axis, over_mesh, rule_of
from planner.sharding import Sharding, Type
from runtime.collectives import own_part
from runtime.local_op import local_call
from runtime.simulate import simulate

torch.set_num_threads(1)

DUAL = {"I": "I", "R": "P", "P": "R"}
RANKS = (2, 3, 4)


# ---------------------------------------------------------------- samples


@dataclass(frozen=True)
class T:
    """A tensor to draw: floats from N(0, 1) (or what ``make`` makes of them), integers in [low, high), booleans."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    grad: bool = True
    low: int = -5
    high: int = 6
    make: Callable[[Tensor], Tensor] | None = None

    def draw(self, generator: torch.Generator) -> Tensor:
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.5
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return torch.randint(self.low, self.high, self.shape, generator=generator, dtype=self.dtype)
        x = torch.randn(self.shape, generator=generator, dtype=self.dtype)
        return (self.make(x) if self.make else x).requires_grad_(self.grad)


def f(*shape: int, **fields: Any) -> T:
    """A float64 tensor with gradient."""
    return T(shape, **fields)


def fixed(*shape: int, **fields: Any) -> T:
    """A float64 tensor without gradient."""
    return T(shape, grad=False, **fields)


def ints(*shape: int, low: int = -5, high: int = 6, dtype: torch.dtype = torch.int64) -> T:
    return T(shape, dtype, False, low, high)


def bools(*shape: int) -> T:
    return T(shape, torch.bool, False)


@dataclass(frozen=True)
class Sample:
    """One call. ``values=False``: what it returns is random or undefined, so only shapes and dtypes are held."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: bool = True
    mesh: bool = False
    """Also check the products over two axes."""

    def __str__(self) -> str:
        return f"{self.op}{self.args}{self.kwargs or ''}"


SAMPLES: dict[str, list[Sample]] = {}


def samples(op: str, *calls: tuple[Any, ...], values: bool = True, mesh: bool = False, **kwargs: Any) -> None:
    """Register calls of one op that share keyword arguments."""
    for args in calls:
        SAMPLES.setdefault(op, []).append(Sample(op, args, kwargs, values, mesh))


def ops_here(before: set[str]) -> list[str]:
    """Ops that got samples since ``before = set(SAMPLES)``: what a test file parametrises its law test with."""
    return sorted(set(SAMPLES) - before)


# ---------------------------------------------------------------- a call as a node


@dataclass(frozen=True)
class Case:
    """A sample drawn: its node, tensors, whole outputs and the gradients that are given to them."""

    sample: Sample
    node: Node
    rule: Rule
    tensors: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    grads: tuple[Tensor | None, ...]
    wanted: tuple[Tensor | None, ...]

    @property
    def grad_in(self) -> tuple[bool, ...]:
        return tuple(x.requires_grad for x in self.tensors)


def spec_of(x: Tensor) -> Spec:
    return Spec(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def draw(sample: Sample) -> Case:
    """Run the whole op. Raises AssertionError where there is no rule for the call."""
    generator = torch.Generator().manual_seed(sum(map(ord, sample.op)))
    tensors: list[Tensor] = []

    def to_arg(arg: Any) -> Arg:
        if isinstance(arg, T):
            tensors.append(arg.draw(generator))
            return Value(f"x{len(tensors) - 1}")
        if isinstance(arg, list | tuple):
            return tuple(map(to_arg, arg))
        if isinstance(arg, torch.dtype):
            return Symbol("dtype", str(arg).removeprefix("torch."))
        return arg

    args, kwargs = to_arg(sample.args), tuple((key, to_arg(arg)) for key, arg in sample.kwargs.items())
    bare = Node("node", sample.op, args, kwargs)
    outputs = as_tuple(local_call(bare, None, None, (), ()).run(tensors))
    flags = tuple(y.requires_grad for y in outputs)
    node = Node("node", sample.op, args, kwargs, tuple(map(spec_of, outputs)), flags)
    rule = rule_of(node, [spec_of(x) for x in tensors])
    assert rule is not None, f"no rule for {sample}"
    grads = tuple(torch.randn(y.shape, generator=generator, dtype=y.dtype) if flag else None for y, flag in zip(outputs, flags))
    return Case(sample, node, rule, tuple(tensors), tuple(y.detach() for y in outputs), grads, backward(outputs, grads, tensors))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)


def backward(outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs that have one; zeros where none arrives."""
    given = [(y, g) for y, g in zip(outputs, grads) if g is not None and y.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not given or not wanted:
        return tuple(torch.zeros_like(x) if x.requires_grad else None for x in inputs)
    found = iter(torch.autograd.grad([y for y, _ in given], wanted, [g for _, g in given], allow_unused=True, materialize_grads=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


# ---------------------------------------------------------------- taking apart and joining


def apart(x: Tensor, sharding: Sharding, sizes: Sequence[int]) -> list[Tensor]:
    """What each rank holds, in rank order (the first axis is the outermost)."""
    if not sharding:
        return [x]
    type_, ranks = sharding[0], sizes[0]
    if type_.is_split:
        parts = [own_part(x, type_, ranks, rank) for rank in range(ranks)]
    elif type_.kind == "P":
        parts = _pending(x, ranks)
    else:
        parts = [x] * ranks
    return [piece for part in parts for piece in apart(part, sharding[1:], sizes[1:])]


def _pending(x: Tensor, ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(x.numel())
    if x.is_floating_point() or x.is_complex():
        parts = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(ranks - 1)]
    else:
        parts = [torch.randint(-3, 4, x.shape, generator=generator, dtype=x.dtype) for _ in range(ranks - 1)]
    return [*parts, x - sum(parts)]


def joined(parts: Sequence[Tensor], sharding: Sharding, sizes: Sequence[int], tolerance: float, values: bool = True) -> Tensor:
    """The whole tensor; asserts that ranks that must agree do. ``values=False``: P cannot be summed, and is taken from one rank."""
    if not sharding:
        return parts[0]
    type_, ranks = sharding[0], sizes[0]
    step = len(parts) // ranks
    below = [joined(parts[i * step : (i + 1) * step], sharding[1:], sizes[1:], tolerance, values) for i in range(ranks)]
    if type_.is_split:
        pieces = [part.chunk(type_.groups, type_.dim) for part in below]
        return torch.cat([piece[g] for g in range(type_.groups) for piece in pieces], type_.dim)
    if type_.kind == "P":
        return torch.stack(list(below)).sum(0).to(below[0].dtype) if values else below[0]
    for part in below[1:] if values else ():
        close(part, below[0], tolerance)
    return below[0]


def dual(sharding: Sharding) -> Sharding:
    return tuple(t if t.is_split else Type(DUAL[t.kind]) for t in sharding)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def tolerance_of(case: Case) -> float:
    """1e-10, or what the narrowest floating point number in the call allows."""
    narrow = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
    return max(narrow.get(x.dtype, 1e-10) for x in case.tensors + case.outputs)


# ---------------------------------------------------------------- the law


def strategies(case: Case, sizes: Sequence[int]) -> list[MeshStrategy]:
    """Those of the rule over the mesh, with splits in groups on one axis, but for pending sums of booleans, which no op makes."""
    flags = case.node.grad
    groups = dict.fromkeys(case.rule.size, (1, 2)) if len(sizes) == 1 else None
    per_axis = [one_axis(case.rule, case.grad_in, flags, ranks, groups) for ranks in sizes]
    found = over_mesh(case.rule, per_axis, sizes)
    dtypes = [x.dtype for x in case.tensors]
    return [s for s in found if not any(d == torch.bool and Type("P") in sharding for d, sharding in zip(dtypes, s.inputs))]


def hold(case: Case, strategy: MeshStrategy, sizes: Sequence[int]) -> None:
    """Assert the law for one strategy over a mesh of ``sizes``."""
    axes = [Axis(("data", "tensor")[2 - len(sizes) + i], n) for i, n in enumerate(sizes)]
    coords = list(itertools.product(*(range(n) for n in sizes)))
    inputs = [apart(x.detach(), sharding, sizes) for x, sharding in zip(case.tensors, strategy.inputs)]
    given = [apart(g, dual(s), sizes) if g is not None else [None] * len(coords) for g, s in zip(case.grads, strategy.outputs)]

    def rank(number: int) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        own = [parts[number].detach().requires_grad_(x.requires_grad) for parts, x in zip(inputs, case.tensors)]
        call = local_call(case.node, case.rule, strategy, axes, coords[number])
        outputs = as_tuple(call.run(own))
        grads = [parts[number] for parts in given]
        return tuple(y.detach() for y in outputs), backward(outputs, grads, own)

    if strategy.kernel:
        by_coords = {c: n for n, c in enumerate(coords)}
        names = [axis.name for axis in axes]
        results = simulate(dict(zip(names, sizes)), lambda at: rank(by_coords[tuple(at[name] for name in names)]))
    else:
        results = [rank(number) for number in range(len(coords))]

    values, tolerance = case.sample.values, tolerance_of(case)
    for k, (expected, sharding) in enumerate(zip(case.outputs, strategy.outputs)):
        actual = joined([outputs[k] for outputs, _ in results], sharding, sizes, tolerance, values)
        assert spec_of(actual) == spec_of(expected), f"output {k} is {spec_of(actual)}, not {spec_of(expected)}"
        if values:
            close(actual, expected, tolerance)
    for i, (expected_grad, sharding) in enumerate(zip(case.wanted, strategy.inputs)):
        if expected_grad is not None and values:
            actual = joined([grads[i] for _, grads in results], dual(sharding), sizes, tolerance)  # type: ignore[misc]
            close(actual, expected_grad, tolerance)


def check(op: str) -> None:
    """The law for every sample of an op, every strategy, 2 to 4 ranks, and two axes where the sample asks for it."""
    for sample in SAMPLES[op]:
        case = draw(sample)
        meshes: list[tuple[int, ...]] = [(ranks,) for ranks in RANKS]
        if sample.mesh:
            meshes += [(2, 2), (2, 3)]
        for sizes in meshes:
            for strategy in strategies(case, sizes):
                try:
                    hold(case, strategy, sizes)
                except Exception as error:
                    raise AssertionError(f"{sample} over {sizes}: {strategy} {strategy.kernel}: {error}") from error


def split_factors(op: str) -> set[tuple[str, bool]]:
    """(factor, evenly) of every split that the samples of an op exercise: what coverage tests look at."""
    found = set()
    for sample in SAMPLES[op]:
        case = draw(sample)
        for ranks in RANKS:
            for strategy in one_axis(case.rule, case.grad_in, case.node.grad, ranks):
                if strategy.factor:
                    found.add((strategy.factor, math.gcd(case.rule.size[strategy.factor], ranks) == ranks))
    return found


# ---------------------------------------------------------------- what is kept for the backward


def kept_elements(op: str) -> int:
    """How many elements autograd keeps for the backward of the first sample, each tensor counted once, scalars left out."""
    case = draw(SAMPLES[op][0])
    if not any(case.node.grad):
        return 0
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in case.tensors]
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        outputs = local_call(case.node, None, None, (), ()).run(inputs)
    assert outputs is not None  # alive until here, so that no address is used twice
    return sum(x.numel() for x in kept.values() if x.numel() > 1)


def told_elements(op: str) -> int:
    """The same as ``Rule.saves`` tells it; 0 where the call has no gradient."""
    case = draw(SAMPLES[op][0])
    if not any(case.node.grad):
        return 0
    tensors = {f"in{i}": x for i, x in enumerate(case.tensors)} | {f"out{i}": x for i, x in enumerate(case.outputs)}
    return sum(tensors[name].numel() for name in case.rule.saves if tensors[name].numel() > 1)
