"""One op on one rank: its arguments made local, its kernel chosen. Needs no process group.

``local_call`` turns a node and its strategy into a plain function of local tensors, used by the lowering and by the tests that prove
the rules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.errors import PlanError
from planner.graph import Arg, Node, Symbol, Value
from planner.mesh import Axis
from planner.rules.base import MeshStrategy, Rule, local_argument, local_factors
from planner.sharding import Sharding, local_shape
from runtime.kernels import KERNELS, KernelInfo
from runtime.ops import OPS

TRAINING_FLAGS = {"aten.dropout.default": 2, "aten.feature_dropout.default": 2, "aten.alpha_dropout.default": 2,
                  "aten.native_dropout.default": 2, "shard.batch_norm": 5}  # fmt: skip
"""Op -> position of the argument that says "training": turned off in ``eval()``."""
DROPOUT_PROBABILITIES = {"aten.scaled_dot_product_attention.default": 4}
"""Op -> position of a dropout probability: zero in ``eval()``."""


OPAQUE = "shard.opaque"
"""A submodule taken as one op: ``shard.opaque(key, tensors, states)``."""
NEED_STRIDES = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default",
                "aten.view_as.default": "aten.reshape_as.default"}  # fmt: skip
"""Ops that need a whole tensor's strides: a part of it may not have them, so the op that copies where it must runs instead."""


def resolve(op: str) -> Callable[..., Any]:
    """ "aten.linear.default" -> the torch op; "shard.valid_count" -> the project's own. Nothing outside torch.ops can be named."""
    if op in OPS:
        return OPS[op]
    op = NEED_STRIDES.get(op, op)
    parts = op.split(".")
    if len(parts) != 3:
        raise PlanError(f"unknown op {op!r}: expected namespace.name.overload or one of {sorted(OPS)}")
    try:
        return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except AttributeError as error:
        raise PlanError(f"op {op!r} does not exist in torch {torch.__version__}") from error


def to_torch(arg: Arg) -> Any:
    """Symbols become torch constants, tuples lists; Values stay."""
    if isinstance(arg, Symbol):
        if arg.kind == "device":
            return torch.device(arg.value)
        return getattr(torch, arg.value)
    return [to_torch(item) for item in arg] if isinstance(arg, tuple) else arg


def local_args(
    node: Node, rule: Rule | None, strategy: MeshStrategy | None, axes: Sequence[Axis], coords: Sequence[int]
) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """The node's arguments with sizes made local."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if rule is None or strategy is None or not rule.local_args:
        return tuple(args), kwargs
    sizes = tuple(axis.size for axis in axes)
    shape = local_shape(node.outputs[0].shape, strategy.outputs[0] if strategy.per_axis else (), sizes, tuple(coords))
    parts = local_factors(rule, strategy.per_axis, sizes, coords)
    for position, what in rule.local_args:
        if position < len(args):
            args[position] = local_argument(what, shape, parts)
    return tuple(args), kwargs


def kernel_info(node: Node, rule: Rule, strategy: MeshStrategy, axes: Sequence[Axis], coords: Sequence[int]) -> KernelInfo:
    parts = local_factors(rule, strategy.per_axis, tuple(axis.size for axis in axes), coords)
    return KernelInfo(
        op=node.op,
        axes=tuple((a.name, s.factor) for a, s in zip(axes, strategy.per_axis) if s.kernel),
        sizes=rule.size,
        starts={factor: start for factor, (start, _) in parts.items()},
    )


def evaluation_mode(node: Node, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """The arguments as ``model.eval()`` would give them."""
    changed = list(args)
    if (flag := TRAINING_FLAGS.get(node.op)) is not None and flag < len(args):
        changed[flag] = False
    if (p := DROPOUT_PROBABILITIES.get(node.op)) is not None and p < len(args):
        changed[p] = 0.0
    return tuple(changed)


def draws(node: Node, rule: Rule | None, args: tuple[Arg, ...]) -> bool:
    """True if the op really draws random numbers with these arguments."""
    if rule is None or not rule.random:
        return False
    if (flag := TRAINING_FLAGS.get(node.op)) is not None and flag < len(args):
        return bool(args[flag])
    if (p := DROPOUT_PROBABILITIES.get(node.op)) is not None:
        return p < len(args) and args[p] != 0.0
    return True


# ---------------------------------------------------------------- randomness


@dataclass
class RandomState:
    """Where the random numbers of a step come from: one seed, counted on with every step."""

    seed: int = 0
    step: int = 0


RANDOM = RandomState()


def seed_of(name: str, coords: Sequence[int], micro: int) -> int:
    """Reproducible from (seed, step, op, micro-batch, coordinates along the axes that split the tensor), on any machine."""
    text = f"{RANDOM.seed}/{RANDOM.step}/{name}/{micro}/{tuple(coords)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def seeded(op: Callable[..., Any], name: str, coords: Sequence[int]) -> Callable[..., Any]:
    """``op`` drawing from its own stream, whatever was drawn before: the same on ranks with equal ``coords``, and when recomputed."""

    def call(micro: int, *args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=_cuda_devices()):
            torch.manual_seed(seed_of(name, coords, micro))
            return op(*args, **kwargs)

    call.__name__ = f"seeded_{getattr(op, '__name__', 'op').replace('.', '_')}"
    return call


def _cuda_devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []


def random_coords(sharding: Sharding, axes: Sequence[Axis], coords: Sequence[int]) -> tuple[int, ...]:
    """Coordinates along the ranked axes that split the tensor; -1 elsewhere (the micro-batch is told apart by itself)."""
    return tuple(c if t.is_split and not a.is_time else -1 for t, a, c in zip(sharding, axes, coords))


# ---------------------------------------------------------------- regions


def in_context(op: Callable[..., Any], context: str) -> Callable[..., Any]:
    """``op`` inside the regions that the model ran it in: ``autocast(cpu,bfloat16)``, ``autocast(cpu,off)``, ``no_grad``."""
    regions = [region for region in context.split(";") if region]
    if not regions:
        return op

    def call(*args: Any, **kwargs: Any) -> Any:
        import contextlib

        with contextlib.ExitStack() as stack:
            for region in regions:
                stack.enter_context(_region(region))
            return op(*args, **kwargs)

    call.__name__ = f"{getattr(op, '__name__', 'op').replace('.', '_')}_in_{'_'.join(r.split('(')[0] for r in regions)}"
    return call


def _region(region: str) -> Any:
    if region == "no_grad":
        return torch.no_grad()
    if region == "enable_grad":
        return torch.enable_grad()
    if region.startswith("autocast("):
        device, dtype = region[len("autocast(") : -1].split(",")[:2]
        if dtype == "off":
            return torch.autocast(device, enabled=False)
        return torch.autocast(device, dtype=getattr(torch, dtype), cache_enabled=False)
    raise PlanError(f"unknown region {region!r} in the graph")


# ---------------------------------------------------------------- one op


@dataclass(frozen=True)
class LocalOp:
    """``call(*args)`` with local tensors in the places of Values; ``micro_first``: it takes the micro-batch's index first."""

    call: Callable[..., Any]
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]
    micro_first: bool = False

    def run(self, tensors: Sequence[Any], micro: int = 0) -> Any:
        """Call with the tensor inputs in the order of ``Node.inputs``."""
        args, kwargs = self.filled(tensors)
        return self.call(*([micro] if self.micro_first else []), *args, **kwargs)

    def filled(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments with ``tensors`` (or graph nodes) in the places of Values, by order of appearance."""
        remaining = iter(tensors)
        args = [_fill(to_torch(arg), remaining) for arg in self.args]
        return args, {key: _fill(to_torch(arg), remaining) for key, arg in self.kwargs.items()}


def _fill(arg: Any, remaining: Iterator[Any]) -> Any:
    if isinstance(arg, Value):
        return next(remaining)
    return [_fill(item, remaining) for item in arg] if isinstance(arg, list) else arg


def returns_sequence(node: Node) -> bool:
    """True if the op returns a tuple or list, also one of length 1."""
    if node.op == OPAQUE:
        return True
    op = resolve(node.op)
    schema = getattr(op, "_schema", None)
    if schema is None:
        return len(node.outputs) > 1
    return len(schema.returns) != 1 or "[]" in str(schema.returns[0].type) or "List" in str(schema.returns[0].type)


def local_call(
    node: Node,
    rule: Rule | None,
    strategy: MeshStrategy | None,
    axes: Sequence[Axis],
    coords: Sequence[int],
    training: bool = True,
    opaque: Mapping[str, Callable[..., Any]] | None = None,
) -> LocalOp:
    """The op of ``node`` as the rank at ``coords`` runs it. ``opaque``: what runs the submodules taken as one op, by key."""
    if node.op == OPAQUE:
        return LocalOp(in_context(_opaque_call(node, opaque or {}), node.context), node.args[1:], {})
    args, kwargs = local_args(node, rule, strategy, axes, coords)
    if not training:
        args = evaluation_mode(node, args)
    call: Callable[..., Any] = resolve(node.op)
    if strategy is not None and strategy.kernel and rule is not None:
        call = _kernel_call(strategy.kernel, call, kernel_info(node, rule, strategy, axes, coords))
    call = in_context(call, node.context)
    random = draws(node, rule, args)
    if random:
        sharding = strategy.outputs[0] if strategy and strategy.per_axis else ()
        call = seeded(call, node.name, random_coords(sharding, axes, coords))
    return LocalOp(call, args, kwargs, random)


def _opaque_call(node: Node, opaque: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    key = node.args[0]
    if key not in opaque:
        raise PlanError(f"the plan takes {key.split('#')[0]!r} as one op: pass opaque= as auto_parallelize was given it")
    run = opaque[key]

    def call(tensors: list[Any], states: list[Any]) -> Any:
        return run(tensors, states)

    call.__name__ = "opaque"
    return call


def _kernel_call(name: str, op: Callable[..., Any], info: KernelInfo) -> Callable[..., Any]:
    if name not in KERNELS:
        raise PlanError(f"the plan names kernel {name!r} for {info.op}, known are {sorted(KERNELS)}")
    kernel = KERNELS[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel(op, list(args), dict(kwargs), info)

    call.__name__ = name
    return call
