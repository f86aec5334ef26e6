"""From functional nodes to the canonical form that rules, fingerprints and equal blocks rely on.

* what has no effect vanishes: asserts, aliases, casts to the same dtype, dropout with p=0, whatever nothing uses;
* sizes are explicit: no -1 in view, reshape and expand; creation ops state their dtype; devices and pinning are dropped;
* a mean over valid targets becomes a sum divided by a count, so that it is the global mean whatever is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner.graph import Arg, Node, Spec, Symbol, Value, map_values
from planner.torch_ops import infer
from planner.trace_index import aligned

DROPPED_KWARGS = {"device", "pin_memory", "non_blocking"}
SHAPED = {"view", "reshape", "_unsafe_view", "expand", "_reshape_alias"}
CREATION = {"arange", "zeros", "ones", "full", "eye", "linspace", "logspace", "rand", "randn", "empty", "scalar_tensor", "empty_permuted"}
CAN_BE_NOTHING = {"alias", "lift_fresh", "lift_fresh_copy", "lift", "clone", "resolve_conj", "resolve_neg", "positive"}
CASTS = {"to", "_to_copy", "type_as", "_autocast_to_reduced_precision", "_autocast_to_full_precision"}
NLL = {"aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default"}
MEAN, SUM = 1, 2


@dataclass
class Simplifier:
    nodes: list[Node] = field(default_factory=list)
    by_name: dict[str, Node] = field(default_factory=dict)
    env: dict[Value, Value] = field(default_factory=dict)
    specs: dict[Value, Spec] = field(default_factory=dict)

    def run(self, nodes: list[Node]) -> None:
        for node in nodes:
            node = replace(node, args=self.map(node.args), kwargs=tuple((k, self.map(a)) for k, a in node.kwargs))
            if node.is_source:
                self.keep(node)
                continue
            if node.op.split(".")[1].startswith(("_assert", "sym_constrain", "assert")):
                continue
            handler = HANDLERS.get(node.op.split(".")[1], _plain)
            handler(self, _without_devices(node))

    def map(self, arg: Arg) -> Arg:
        return map_values(arg, lambda v: self.env[v])

    def keep(self, node: Node) -> Value:
        """Emit a node under its own name."""
        self.nodes.append(node)
        self.by_name[node.name] = node
        for i, spec in enumerate(node.outputs):
            self.env[Value(node.name, i)] = Value(node.name, i)
            self.specs[Value(node.name, i)] = spec
        return Value(node.name)

    def forward(self, node: Node, to: Value) -> Value:
        """Users of the node read ``to`` instead."""
        self.env[Value(node.name)] = to
        return to

    def emit(
        self,
        like: Node,
        op: str,
        args: tuple[Arg, ...],
        outputs: tuple[Spec, ...] | None = None,
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> Value:
        outputs = outputs if outputs is not None else infer(op, args, dict(kwargs), lambda v: self.specs[v])
        return self.keep(Node(f"s{len(self.nodes)}", op, args, kwargs, outputs, (), like.module, like.source, "", like.context))


Handler = Callable[[Simplifier, Node], object]


def _plain(s: Simplifier, node: Node) -> object:
    return s.keep(node)


def _without_devices(node: Node) -> Node:
    kept = tuple((k, a) for k, a in node.kwargs if k not in DROPPED_KWARGS and not (k == "layout" and str(a) == "layout:strided"))
    return replace(node, kwargs=kept)


def _shaped(s: Simplifier, node: Node) -> object:
    if len(node.args) < 2 or not isinstance(node.args[1], tuple):
        return s.keep(node)
    if s.specs[node.args[0]] == node.outputs[0]:
        return s.forward(node, node.args[0])
    return s.keep(replace(node, args=(node.args[0], node.outputs[0].shape, *node.args[2:]), kwargs=()))


def _like(s: Simplifier, node: Node) -> object:
    """expand_as, view_as and reshape_as read nothing but the shape of their second input."""
    op = "aten.expand.default" if "expand" in node.op else "aten.reshape.default"
    return _shaped(s, replace(node, op=op, args=(node.args[0], node.outputs[0].shape), kwargs=()))


def _broadcast(s: Simplifier, node: Node) -> object:
    """broadcast_tensors is one expand per tensor."""
    for i, (value, spec) in enumerate(zip(node.args[0], node.outputs)):
        same = s.specs[value].shape == spec.shape
        s.env[Value(node.name, i)] = value if same else s.emit(node, "aten.expand.default", (value, spec.shape), (spec,))
    return None


def _creation(s: Simplifier, node: Node) -> object:
    dtype = ("dtype", Symbol("dtype", node.outputs[0].dtype))
    return s.keep(replace(node, kwargs=(*((k, a) for k, a in node.kwargs if k != "dtype"), dtype)))


def _maybe_nothing(s: Simplifier, node: Node) -> object:
    if any(k == "memory_format" and str(a) != "memory_format:preserve_format" for k, a in node.kwargs):
        return s.keep(node)
    return s.forward(node, node.args[0])


def _cast(s: Simplifier, node: Node) -> object:
    source, spec = node.args[0], node.outputs[0]
    if s.specs[source].dtype == spec.dtype:
        return s.forward(node, source)
    return s.keep(replace(node, op="aten.to.dtype", args=(source, Symbol("dtype", spec.dtype)), kwargs=()))


def _index(s: Simplifier, node: Node) -> object:
    """An index that counts along its dim becomes ``shard.index``."""
    found = aligned(node, lambda v: s.by_name[v.node])
    if found is None:
        return s.keep(node)
    indices = list(found.indices)
    given = [(i, index) for i, index in enumerate(indices) if index is not None]
    if given and all(len(s.specs[index].shape) < found.rank for _, index in given):
        place, first = given[0]
        shape = s.specs[first].shape
        indices[place] = s.emit(node, "aten.reshape.default", (first, (1,) * (found.rank - len(shape)) + shape))
    return s.keep(replace(node, op="shard.index", args=(node.args[0], tuple(indices), found.pairs), kwargs=()))


def _with_number(s: Simplifier, node: Node) -> object:
    """x + 0, x - 0, x * 1 and x / 1 are x. A number added to a scalar becomes a scalar tensor: a loss that is a pending sum takes it as a
    term of its own."""
    name = node.op.split(".")[1]
    x, other = node.args[0], node.arg(1, "other")
    if not isinstance(x, Value) or isinstance(other, bool) or not isinstance(other, (int, float)):
        return s.keep(node)
    spec = node.outputs[0]
    if s.specs[x] == spec and other == (0 if name in ("add", "sub") else 1):
        return s.forward(node, x)
    if name in ("add", "sub") and s.specs[x] == spec and spec.shape == () and spec.is_float:
        term = other * node.arg(2, "alpha", 1) * (1 if name == "add" else -1)
        number = s.emit(node, "aten.full.default", ((), float(term)), (spec,), (("dtype", Symbol("dtype", spec.dtype)),))
        return s.keep(replace(node, op="aten.add.Tensor", args=(x, number), kwargs=()))
    return s.keep(node)


def _from_number(s: Simplifier, node: Node) -> object:
    """number - x, for a scalar x, is -x and a scalar tensor: see ``_with_number``."""
    x, other, spec = node.args[0], node.arg(1, "other"), node.outputs[0]
    number = isinstance(other, (int, float)) and not isinstance(other, bool)
    if not (number and isinstance(x, Value) and s.specs[x] == spec and spec.shape == () and spec.is_float):
        return s.keep(node)
    term = s.emit(node, "aten.mul.Tensor", (x, -node.arg(2, "alpha", 1)), (spec,))
    return _with_number(s, replace(node, op="aten.add.Tensor", args=(term, other), kwargs=()))


def _repeat_interleave(s: Simplifier, node: Node) -> object:
    """``output_size`` only tells what is known; without ``dim`` the tensor is flat."""
    if node.op != "aten.repeat_interleave.self_int":
        return s.keep(node)
    x, repeats, dim = node.args[0], node.arg(1, "repeats"), node.arg(2, "dim")
    if dim is None:
        spec = s.specs[x]
        x, dim = s.emit(node, "aten.reshape.default", (x, (spec.numel,)), (Spec((spec.numel,), spec.dtype),)), 0
    return s.keep(replace(node, args=(x, repeats, dim), kwargs=()))


def _dropout(s: Simplifier, node: Node) -> object:
    """dropout(x, p, train): with p=0 it is nothing in either mode; with train=False it stays, so that modes can be switched."""
    return s.forward(node, node.args[0]) if node.arg(1, "p") == 0 else s.keep(node)


def _cross_entropy(s: Simplifier, node: Node) -> object:
    """mean -> sum / shard.valid_count. Targets that are probabilities have a static count."""
    if node.arg(3, "reduction", MEAN) != MEAN:
        return s.keep(node)
    logits, target, weight = node.args[0], node.args[1], node.arg(2, "weight")
    ignore, smoothing = node.arg(4, "ignore_index", -100), node.arg(5, "label_smoothing", 0.0)
    if s.specs[target].is_float:
        total = s.emit(node, node.op, (logits, target, weight, SUM, ignore, smoothing), node.outputs)
        shape = s.specs[logits].shape
        count = s.specs[logits].numel // shape[1 if len(shape) > 1 else 0]
        return s.forward(node, s.emit(node, "aten.div.Tensor", (total, float(count)), node.outputs))
    return _mean_over_valid(s, node, lambda x: (x, target, weight, SUM, ignore, smoothing), logits, target, weight, ignore)


def _nll(s: Simplifier, node: Node) -> object:
    if node.op not in NLL or node.arg(3, "reduction", MEAN) != MEAN or len(node.outputs) != 1:
        return s.keep(node)
    target, weight, ignore = node.args[1], node.arg(2, "weight"), node.arg(4, "ignore_index", -100)
    return _mean_over_valid(s, node, lambda x: (x, target, weight, SUM, ignore), node.args[0], target, weight, ignore)


def _mean_over_valid(
    s: Simplifier, node: Node, args: Callable[[Value], tuple[Arg, ...]], scores: Value, target: Value, weight: Value | None, ignore: int
) -> object:
    """In half precision the sum and the count are kept in float32: a float16 sum over many tokens overflows, a bfloat16 count is
    exact up to 256 only."""
    dtype = node.outputs[0].dtype
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    x, w = _to(s, node, scores, wide), weight if weight is None else _to(s, node, weight, wide)
    given = args(x)
    total = s.emit(node, node.op, (*given[:2], w, *given[3:]), (Spec((), wide),))
    count = s.emit(node, "shard.valid_count", (target, w, ignore, Symbol("dtype", wide)), (Spec((), wide),))
    mean = s.emit(node, "aten.div.Tensor", (total, count), (Spec((), wide),))
    return s.forward(node, _to(s, node, mean, dtype))


def _to(s: Simplifier, like: Node, value: Value, dtype: str) -> Value:
    spec = s.specs[value]
    if spec.dtype == dtype:
        return value
    return s.emit(like, "aten.to.dtype", (value, Symbol("dtype", dtype)), (Spec(spec.shape, dtype),))


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(SHAPED, _shaped),
    **dict.fromkeys(("expand_as", "view_as", "reshape_as"), _like),
    **dict.fromkeys(CREATION, _creation),
    **dict.fromkeys(CAN_BE_NOTHING, _maybe_nothing),
    **dict.fromkeys(CASTS, _cast),
    "broadcast_tensors": _broadcast,
    **dict.fromkeys(("add", "sub", "mul", "div"), _with_number),
    "rsub": _from_number,
    "repeat_interleave": _repeat_interleave,
    "index": _index,
    "dropout": _dropout,
    "feature_dropout": _dropout,
    "cross_entropy_loss": _cross_entropy,
    "nll_loss_nd": _nll,
    "nll_loss": _nll,
    "nll_loss2d": _nll,
}
