"""Sharding rules as data, and the one algorithm that turns a rule into strategies.

A rule describes an op once, like einsum, by naming the *factors* of every dim::

    linear(x, w, bias):   b t k, n k, n -> b t n        linear in {x, w} + {bias}

From that, ``one_axis`` derives every legal way to run the op over one mesh axis of n ranks:

1. all I -> all I, and all R -> all R: every rank runs the whole op.
2. for each factor that may be split: S where a tensor has the factor, R where it has not; an output without the factor is a
   pending sum (P). In an op that adds terms, a term without the reduced factor must itself be pending (the bias).
3. linear ops carry pending sums: one P input per term, R beside it -> P.
4. the rule's ``extra`` strategies, which run a kernel of their own.

A dim is a tuple of factors, outermost first: ``("b", "t")`` is a flattened dim, ``()`` a dim of size 1 that nothing splits.
A flattened dim can be split along its outermost factor only, and only evenly (otherwise the parts would not line up).
Tensors without gradient make no difference between I and R; they are always written R.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.errors import ShardwrightError
from planner.graph import Arg, Node, Spec
from planner.sharding import I, P, R, S, Sharding, Type, chunk_sizes, chunk_start, splits_whole
from planner.sharding import parse as parse_sharding
from planner.sharding import show as show_sharding

Dim = tuple[str, ...]
Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Comm:
    """A collective inside a kernel. ``nbytes`` of the whole op on this axis alone, in nccl-tests' convention."""

    collective: str
    nbytes: int
    phase: str = "forward"


@dataclass(frozen=True)
class Strategy:
    """One legal way to run an op over ONE axis. Text form: ``S(0),R -> S(0) @kernel``."""

    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    factor: str = ""
    """The factor that is split, "" where every rank runs the whole op (or passes pending sums)."""
    kernel: str = ""
    """Name of the kernel in ``runtime.kernels`` that runs it, "" for the op itself on local tensors."""
    comm: tuple[Comm, ...] = ()

    def __str__(self) -> str:
        text = f"{show_sharding(self.inputs)} -> {show_sharding(self.outputs)}"
        return text + (f" @{self.kernel}" if self.kernel else "")


@dataclass(frozen=True)
class Rule:
    """What an op does with the dims of its tensors. Positions of inputs follow ``Node.inputs``."""

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: tuple[tuple[str, int], ...]
    whole: frozenset[str] = frozenset()
    """Factors that the plain op cannot split (a softmax dim, a kernel window)."""
    linear: tuple[frozenset[int], ...] = ()
    """The op is a sum of terms, each multilinear in these inputs. () for a non-linear op."""
    sums: bool = True
    """A factor missing from the outputs was summed over; False where it was reduced otherwise (max) and so must stay whole."""
    exclusive: tuple[frozenset[str], ...] = ()
    """Sets of factors of which only one may be split, over all axes: two views of one dim whose parts would not line up."""
    makes: frozenset[str] = frozenset()
    """Factors of outputs that no input has and that a rank can still make its own part of (an expanded dim, zeros): an argument tells
    the op how much to make, see ``local_args``."""
    ignored: frozenset[int] = frozenset()
    """Inputs whose values are not read (``type_as`` reads a dtype only): they come in any type, in every strategy."""
    extra: tuple[Strategy, ...] = ()
    kind: str = "memory"
    """What bounds its time: "memory", "matmul", "attention", "conv" or "view" (no kernel runs at all)."""
    flops_per_point: float = 0.0
    """FLOPs of the forward, per point of the product of all factors."""
    saves: tuple[str, ...] = ()
    """What autograd keeps for the backward: "in0", "out0", ... (activations and other tensors alike)."""
    extra_saved_bytes_per_point: float = 0.0
    """Further bytes that the backward needs, per output element (a dropout mask: 1)."""
    local_args: tuple[tuple[int, str], ...] = ()
    """Arguments that hold sizes, as (position, what): "shape" is the local shape of output 0, a factor its local size, and a list such as
    "[h (t d) 1 3]" the local sizes of factors, products of factors and plain numbers. See ``local_argument``."""
    random: bool = False
    """Draws random numbers: lowered with a seed that differs exactly over the axes that split the output."""

    @functools.cached_property
    def size(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def flops(self) -> float:
        return self.flops_per_point * math.prod(size for _, size in self.sizes)


@dataclass(frozen=True)
class Call:
    """What a rule function is given: the node and the specs of its tensor inputs."""

    node: Node
    specs: tuple[Spec, ...]

    def shape(self, position: int) -> tuple[int, ...]:
        return self.specs[position].shape

    @property
    def out(self) -> tuple[int, ...]:
        return self.node.outputs[0].shape

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        return self.node.arg(position, name, default)


RuleFunction = Callable[[Call], "Rule | None"]
REGISTRY: dict[str, RuleFunction] = {}


def rule(*ops: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for ops by their full name, ``aten.linear.default``."""

    def register(function: RuleFunction) -> RuleFunction:
        for op in ops:
            if op in REGISTRY:
                raise ShardwrightError(f"two rules for {op}: {REGISTRY[op].__name__} and {function.__name__}")
            REGISTRY[op] = function
        return function

    return register


_TOKEN = re.compile(r"\([^)]*\)|\S+")


def parse_dims(text: str) -> tuple[Dims, ...]:
    """``"b t k, n k, (b t) 1"`` -> dims of three tensors. ``1`` is a dim without a factor; ``.`` a tensor without dims."""
    tensors = []
    for part in text.split(","):
        tokens = _TOKEN.findall(part.strip())
        tensors.append(tuple(_dim(token) for token in tokens if token != "."))
    return tuple(tensors)


def _dim(token: str) -> Dim:
    if token == "1":
        return ()
    return tuple(token[1:-1].split()) if token.startswith("(") else (token,)


def make_rule(text: str, call: Call, **fields: object) -> Rule:
    """A rule from its einsum-like text; factor sizes are read from the call's shapes (``sizes=`` adds those of flattened dims).

    Raises ShardwrightError where the text does not fit the shapes: that is a bug in the rule.
    """
    left, right = text.split("->")
    inputs = parse_dims(left) if left.strip() else ()
    outputs = parse_dims(right) if right.strip() else ()
    return dims_rule(call, inputs, outputs, **fields)


def dims_rule(call: Call, inputs: Sequence[Dims], outputs: Sequence[Dims], **fields: object) -> Rule:
    """``make_rule`` for dims that are computed rather than written."""
    inputs, outputs = tuple(inputs), tuple(outputs)
    text = f"{inputs} -> {outputs}"
    sizes = dict(fields.pop("sizes", {}))  # type: ignore[call-overload]
    shapes = [spec.shape for spec in call.specs] + [spec.shape for spec in call.node.outputs]
    if len(shapes) != len(inputs + outputs):
        raise ShardwrightError(f"rule {text} does not fit {call.node}: it has {len(shapes)} tensors")
    for dims, shape in zip(inputs + outputs, shapes):
        if len(dims) != len(shape):
            raise ShardwrightError(f"rule {text} does not fit {call.node}: {dims} against shape {shape}")
        for dim, size in zip(dims, shape):
            if len(dim) == 1:
                sizes.setdefault(dim[0], size)
    for dims, shape in zip(inputs + outputs, shapes):
        for dim, size in zip(dims, shape):
            if math.prod(sizes[factor] for factor in dim) != size:
                raise ShardwrightError(f"rule {text} does not fit {call.node}: dim {dim} is not {size} long")
    for name in ("whole",):
        if name in fields:
            fields[name] = frozenset(fields[name])  # type: ignore[call-overload]
    if "linear" in fields:
        fields["linear"] = tuple(frozenset(term) for term in fields["linear"])  # type: ignore[attr-defined]
    return Rule(inputs, outputs, tuple(sizes.items()), **fields)  # type: ignore[arg-type]


def names(prefix: str, count: int) -> str:
    """``names("b", 3)`` -> ``"b0 b1 b2"``: factor names for leading dims that a rule only passes through."""
    return " ".join(f"{prefix}{i}" for i in range(count))


# ---------------------------------------------------------------- strategies over one axis


Groups = Mapping[str, Sequence[int]]
"""Factor -> in how many groups it may be split besides contiguously: see ``planner.grouping``."""


def one_axis(
    rule_: Rule, grad_in: Sequence[bool], grad_out: Sequence[bool], ranks: int, groups: Groups | None = None
) -> tuple[Strategy, ...]:
    """Every legal strategy over one axis of ``ranks``; tensors without gradient are written R where they could be I."""
    found: dict[tuple[tuple[Type, ...], tuple[Type, ...]], Strategy] = {}
    candidates = itertools.chain(
        [_uniform(rule_, I), _uniform(rule_, R)],
        _split_strategies(rule_, ranks, groups or {}),
        _pending_strategies(rule_),
        (extra for extra in rule_.extra if _extra_splits(rule_, extra, ranks)),
    )
    for strategy in itertools.chain.from_iterable(_any_ignored(rule_, candidate, ranks) for candidate in candidates):
        strategy = replace(
            strategy,
            inputs=tuple(_canonical(t, grad) for t, grad in zip(strategy.inputs, grad_in, strict=True)),
            outputs=tuple(_canonical(t, grad) for t, grad in zip(strategy.outputs, grad_out, strict=True)),
        )
        found.setdefault((strategy.inputs, strategy.outputs), strategy)
    return tuple(found.values())


def replicated(inputs: int, grad_in: Sequence[bool], grad_out: Sequence[bool]) -> Strategy:
    """The one strategy of an op without a rule: every rank does all of it."""
    return Strategy(tuple(_canonical(I, g) for g in grad_in), tuple(_canonical(I, g) for g in grad_out))


def _canonical(type_: Type, grad: bool) -> Type:
    return R if type_ == I and not grad else type_


def _uniform(rule_: Rule, type_: Type) -> Strategy:
    return Strategy((type_,) * len(rule_.inputs), (type_,) * len(rule_.outputs))


def _split_strategies(rule_: Rule, ranks: int, groups: Groups) -> Iterator[Strategy]:
    for factor, size in rule_.sizes:
        if factor in rule_.whole or not splits_whole(size, ranks):
            continue
        for count in (None, *groups.get(factor, ())):
            placed = [_place(dims, factor, rule_.size, ranks, count) for dims in rule_.inputs + rule_.outputs]
            if not any(p is _CANNOT for p in placed):
                yield from _split(rule_, factor, placed)


def _split(rule_: Rule, factor: str, placed: Sequence[Type | None]) -> Iterator[Strategy]:
    """The strategy that splits a factor, given where each tensor has it; none where the op's kind does not allow it."""
    inputs, outputs = placed[: len(rule_.inputs)], placed[len(rule_.inputs) :]
    reduced = [p is None for p in outputs]
    if any(reduced) and (not rule_.sums or (rule_.linear and not all(reduced))):
        return
    if all(p is None for p in inputs) and factor not in rule_.makes:
        # nothing says which part a rank should make: only ops that read a factor can split it
        return
    types: list[Type] = [p or R for p in inputs]
    if all(reduced) and rule_.outputs:
        for term in rule_.linear:
            if all(inputs[i] is None for i in term):
                types[min(term)] = P
    yield Strategy(tuple(types), tuple(p or P for p in outputs), factor=factor)


_CANNOT = Type("cannot")


def _place(dims: Dims, factor: str, sizes: dict[str, int], ranks: int, groups: int | None) -> Type | None:
    """S(d) where the factor sits in a dim, None where it is absent, _CANNOT where splitting it would tear a dim apart.

    ``groups``: None for contiguous parts; else the factor is split inside each of so many groups, and where it stands behind other
    factors of its dim, inside each of theirs too.
    """
    for position, dim in enumerate(dims):
        if factor not in dim:
            continue
        before = math.prod(sizes[f] for f in dim[: dim.index(factor)])
        rest = math.prod(sizes[f] for f in dim) // sizes[factor]
        if groups is None:
            return _CANNOT if before > 1 or (rest > 1 and sizes[factor] % ranks) else S(position)
        return _CANNOT if sizes[factor] % (groups * ranks) else S(position, before * groups)
    return None


def _pending_strategies(rule_: Rule) -> Iterator[Strategy]:
    if not rule_.linear:
        return
    for choice in itertools.product(*(sorted(term) for term in rule_.linear)):
        types = [P if i in choice else R for i in range(len(rule_.inputs))]
        yield Strategy(tuple(types), (P,) * len(rule_.outputs))


def _any_ignored(rule_: Rule, strategy: Strategy, ranks: int) -> Iterator[Strategy]:
    """The strategy itself, then with every other type of the inputs that are not read."""
    if not rule_.ignored:
        yield strategy
        return
    choices: list[list[Type]] = []
    for position, type_ in enumerate(strategy.inputs):
        others: list[Type] = []
        if position in rule_.ignored:
            dims = rule_.inputs[position]
            whole = [math.prod(rule_.size[f] for f in dim) for dim in dims]
            others = [t for t in (I, R, P, *(S(d) for d, size in enumerate(whole) if splits_whole(size, ranks))) if t != type_]
        choices.append([type_, *others])
    for inputs in itertools.product(*choices):
        yield replace(strategy, inputs=inputs)


def _extra_splits(rule_: Rule, extra: Strategy, ranks: int) -> bool:
    return not extra.factor or splits_whole(rule_.size[extra.factor], ranks)


# ---------------------------------------------------------------- strategies over all axes


@dataclass(frozen=True)
class MeshStrategy:
    """One strategy per axis, joined. Text form: ``S(0),R | R,S(0) -> S(0),S(2)`` with inputs separated by ``|``."""

    per_axis: tuple[Strategy, ...]
    inputs: tuple[Sharding, ...] = field(init=False)
    outputs: tuple[Sharding, ...] = field(init=False)

    def __post_init__(self) -> None:
        count = (len(self.per_axis[0].inputs), len(self.per_axis[0].outputs)) if self.per_axis else (0, 0)
        for name, n in zip(("inputs", "outputs"), count):
            value = tuple(tuple(getattr(s, name)[i] for s in self.per_axis) for i in range(n))
            object.__setattr__(self, name, value)

    @property
    def kernel(self) -> str:
        return next((s.kernel for s in self.per_axis if s.kernel), "")

    def split_ranks(self, factor: str, sizes: Sequence[int]) -> int:
        """Over how many ranks the factor is split."""
        return math.prod(n for s, n in zip(self.per_axis, sizes) if s.factor == factor)

    def __str__(self) -> str:
        return show_mesh_strategy(self.inputs, self.outputs)


def show_mesh_strategy(inputs: Iterable[Sharding], outputs: Iterable[Sharding]) -> str:
    return f"{' | '.join(map(show_sharding, inputs))} -> {' | '.join(map(show_sharding, outputs))}"


def parse_mesh_strategy(text: str) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
    left, right = text.split("->")
    read = [tuple(parse_sharding(part.strip()) for part in side.split("|")) if side.strip() else () for side in (left, right)]
    return read[0], read[1]


def over_mesh(rule_: Rule | None, per_axis: Sequence[Sequence[Strategy]], sizes: Sequence[int]) -> list[MeshStrategy]:
    """The legal products of one strategy per axis.

    Left out: products that mix two different kernels, those that split one factor over several axes unevenly, and those that split
    exclusive factors (the parts of parts would not line up).
    """
    products = []
    for combination in itertools.product(*per_axis):
        kernels = {s.kernel for s in combination if s.kernel}
        if len(kernels) > 1 or (rule_ and not _nest(rule_, combination, sizes)):
            continue
        products.append(MeshStrategy(tuple(combination)))
    return products


def _nest(rule_: Rule, combination: Sequence[Strategy], sizes: Sequence[int]) -> bool:
    shardings = itertools.chain(zip(*(s.inputs for s in combination)), zip(*(s.outputs for s in combination)))
    if any(_grouped_twice(sharding) for sharding in shardings):
        return False
    factors = [s.factor for s in combination if s.factor]
    if any(len(together & set(factors)) > 1 for together in rule_.exclusive):
        return False
    for factor in set(factors):
        if factors.count(factor) > 1:
            ranks = math.prod(n for s, n in zip(combination, sizes) if s.factor == factor)
            if rule_.size[factor] % ranks:
                return False
    return True


def _grouped_twice(sharding: Sharding) -> bool:
    """True where several axes split one dim and one of them does so in groups: such parts do not nest."""
    splits = [t for t in sharding if t.is_split]
    return any(t.groups > 1 and sum(o.dim == t.dim for o in splits) > 1 for t in splits)


def local_factors(
    rule_: Rule, strategies: Sequence[Strategy], sizes: Sequence[int], coordinates: Sequence[int]
) -> dict[str, tuple[int, int]]:
    """Factor -> (first index, size) of the part that the rank at ``coordinates`` works on. Axes split outermost first."""
    parts = {factor: (0, size) for factor, size in rule_.sizes}
    for strategy, ranks, rank in zip(strategies, sizes, coordinates):
        if strategy.factor:
            start, size = parts[strategy.factor]
            parts[strategy.factor] = (start + chunk_start(size, ranks, rank), chunk_sizes(size, ranks)[rank])
    return parts


def local_argument(what: str, shape: tuple[int, ...], parts: Mapping[str, tuple[int, int]]) -> int | tuple[int, ...]:
    """The local value of an argument that holds sizes: one entry of ``Rule.local_args``.

    ``shape``: local shape of output 0; ``parts``: what ``local_factors`` gives.
    """
    if what == "shape":
        return shape
    if not what.startswith("["):
        return parts[what][1]
    sizes = []
    for token in _TOKEN.findall(what[1:-1]):
        sizes.append(int(token) if token.isdigit() else math.prod(parts[factor][1] for factor in _dim(token)))
    return tuple(sizes)


def rule_of(node: Node, specs: Sequence[Spec]) -> Rule | None:
    """The rule of a node, None where there is none for its op (or for this form of it)."""
    function = REGISTRY.get(node.op)
    found = function(Call(node, tuple(specs))) if function else None
    if found is not None and found.linear and _truth_values(found, node, specs):
        return replace(found, linear=())
    return found


def _truth_values(rule_: Rule, node: Node, specs: Sequence[Spec]) -> bool:
    """True for views and moves of booleans: they have no sum, so none is left pending."""
    terms = [specs[i].dtype for term in rule_.linear for i in term if i < len(specs)]
    return "bool" in terms or all(spec.dtype == "bool" for spec in node.outputs)
