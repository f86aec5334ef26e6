"""Reading and writing at indices that are data. Legend: v the indexed dim, i, j dims of the indices, d dims that pass."""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph import Value
from planner.rules.arguments import Arguments, broadcast, broadcast_shape, lead, text
from planner.rules.base import Call, Rule, rule
from planner.sharding import P, S

# ---------------------------------------------------------------- one dim


def _dim(call: Call, position: int = 1, default: int = -1) -> int:
    return int(call.arg(position, "dim", default)) % max(1, len(call.shape(0)))


@rule("aten.gather.default")
def gather(call: Call) -> Rule:
    """``gather(self, dim, index)``. A split indexed dim runs the kernel ``vocab_gather``: every rank picks what it has: a pending sum."""
    args = Arguments(call, "self dim index")
    shape, index = args.shape("self"), args.shape("index")
    if not shape or not index:
        return args.rule({"self": text(["v"] * len(shape)), "index": text(["v"] * len(index))}, text(["v"] * len(index)), whole=["v"])
    dim = _dim(call)
    source, target, whole = _beside(shape, index, dim)
    picks = args.extra({"self": S(dim)}, (P,), source[dim], "vocab_gather")
    return args.rule(
        {"self": text(source), "index": text(target)}, text(target), linear=("self",), whole=whole, saves=("self", "index"), extra=(picks,)
    )


def _beside(shape: Sequence[int], index: Sequence[int], dim: int, reduce: bool = False) -> tuple[list[str], list[str], list[str]]:
    """Factors of a tensor and of an index into its ``dim``: equal dims line up, a dim of which the index covers a part is whole.

    With ``reduce`` the index's own dim is summed over, so it does not pass.
    """
    d = lead("d", len(shape))
    cut = [i for i, (size, part) in enumerate(zip(shape, index)) if size != part and i != dim]
    source = ["v" if i == dim else f"u{i}" if i in cut else d[i] for i in range(len(shape))]
    target = ["j" if i == dim else f"c{i}" if i in cut else d[i] for i in range(len(shape))]
    whole = ["v", *(f"u{i}" for i in cut), *(f"c{i}" for i in cut)]
    return source, target, whole


@rule("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default", "aten.scatter_reduce.two", "aten.scatter.reduce",
      "aten.scatter.value_reduce")  # fmt: skip
def scatter(call: Call) -> Rule:
    """``scatter(self, dim, index, src or value)``; adding splits the scattered entries as well: a pending sum."""
    args = Arguments(call, "self dim index src reduce")
    shape, index = args.shape("self"), args.shape("index")
    if not shape or not index:
        return args.rule(dict.fromkeys(args.names, "v" if shape or index else "."), text(["v"] * len(shape)), whole=["v"])
    dim = _dim(call)
    source, target, whole = _beside(shape, index, dim)
    dims = {"self": text(source), "index": text(target)}
    linear: tuple[str, ...] = ()
    adds = call.node.op == "aten.scatter_add.default" or (
        call.node.op == "aten.scatter_reduce.two" and call.arg(4, "reduce") == "sum" and bool(call.arg(5, "include_self", True))
    )
    if args.has("src"):
        src = args.shape("src")
        partial = src != index
        dims["src"] = text([f"x{i}" for i in range(len(src))] if partial else target)
        if partial:
            # entries of the source beyond the index are not read, so positions must not move: nothing of it splits
            whole = sorted({*source, *target, *(f"x{i}" for i in range(len(src)))})
        if adds or call.node.op == "aten.scatter.src":
            linear = ("self", "src")
    elif call.node.op == "aten.scatter.value" and call.arg(3, "value") == 0:
        linear = ("self",)
    if not adds:
        whole = [*whole, "j"]
    saves = (
        ("index",)
        if call.node.op in ("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
        else ("self", "index", "src", "out0")
    )
    return args.rule(dims, text(source), linear=linear, whole=whole, saves=saves)


@rule("aten.index_select.default")
def index_select(call: Call) -> Rule:
    """``index_select(self, dim, index)``; a split indexed dim runs ``vocab_index_select``, as in an embedding."""
    args = Arguments(call, "self dim index")
    d, dim = lead("d", len(args.shape("self"))), _dim(call)
    source = [*d[:dim], "v", *d[dim + 1 :]]
    picks = args.extra({"self": S(dim)}, (P,), "v", "vocab_index_select")
    return args.rule(
        {"self": text(source), "index": "j" if args.shape("index") else "."},
        text([*d[:dim], "j" if args.shape("index") else "1", *d[dim + 1 :]]),
        linear=("self",), whole=["v"], saves=("index",), extra=(picks,),
    )  # fmt: skip


@rule("aten.index_add.default", "aten.index_copy.default")
def index_add(call: Call) -> Rule:
    """``index_add(self, dim, index, source, alpha)``; adding splits the added entries as well: a pending sum."""
    args = Arguments(call, "self dim index source")
    d, dim = lead("d", len(args.shape("self"))), _dim(call)
    adds = call.node.op == "aten.index_add.default"
    added = "j" if args.shape("index") else "1"
    into, source = text([*d[:dim], "v", *d[dim + 1 :]]), text([*d[:dim], added, *d[dim + 1 :]])
    return args.rule(
        {"self": into, "index": added if args.shape("index") else ".", "source": source},
        into,
        linear=("self", "source"),
        whole=["v"] if adds else ["v", "j"],
        saves=("index", "source"),
    )


@rule("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(call: Call) -> Rule:
    """``index_fill(self, dim, index, value)``."""
    args = Arguments(call, "self dim index value")
    d, dim = lead("d", len(args.shape("self"))), _dim(call)
    source = text([*d[:dim], "v", *d[dim + 1 :]])
    return args.rule({"self": source, "index": text("j"), "value": "."}, source, whole=["v", "j"], saves=("index",))


@rule("aten.take.default")
def take(call: Call) -> Rule:
    """``take(self, index)``: the tensor is read as if it were flat, so all of it is whole."""
    args = Arguments(call, "self index")
    v, i = lead("v", len(args.shape("self"))), lead("i", len(args.shape("index")))
    return args.rule({"self": text(v), "index": text(i)}, text(i), linear=("self",), whole=v, saves=("self", "index"))


@rule("aten.take_along_dim.default")
def take_along_dim(call: Call) -> Rule:
    """``take_along_dim(self, indices, dim)``: a gather whose other dims are broadcast."""
    args = Arguments(call, "self indices dim")
    shape, index, dim = args.shape("self"), args.shape("indices"), call.arg(2, "dim")
    if dim is None:
        v, i = lead("v", len(shape)), lead("i", len(index))
        return args.rule(
            {"self": text(v), "indices": text(i)}, text(["o"]), linear=("self",), whole=[*v, *i, "o"], saves=("self", "indices")
        )
    dim = int(dim) % len(shape)
    both = broadcast_shape([1 if i == dim else n for i, n in enumerate(shape)], [1 if i == dim else n for i, n in enumerate(index)])
    d = lead("d", len(shape))
    source, target = broadcast(shape, d, both).split(), broadcast(index, d, both).split()
    source[dim], target[dim] = "v", "j"
    return args.rule(
        {"self": text(source), "indices": text(target)},
        text([*d[:dim], "j", *d[dim + 1 :]]),
        linear=("self",),
        whole=["v"],
        saves=("self", "indices"),
    )


# ---------------------------------------------------------------- several dims at once


def _index_space(call: Call) -> tuple[list[Value | None], tuple[int, ...], list[int]] | None:
    """The index tensors (None where a dim passes), the shape they are broadcast to, the indexed dims. None for masks."""
    given = list(call.arg(1, "indices"))
    specs = dict(zip(call.node.inputs, call.specs))
    indices = given + [None] * (len(call.shape(0)) - len(given))
    used = [index for index in indices if index is not None]
    if any(specs[index].dtype in ("bool", "uint8") for index in used):
        return None
    shape = broadcast_shape(*(specs[index].shape for index in used)) if used else ()
    return indices, shape, [i for i, index in enumerate(indices) if index is not None]


def _joined(rank: int, over: Sequence[int], own: Sequence[str], between: Sequence[str]) -> list[str]:
    """Factors of ``x[indices]``: the index dims stand where the indexed dims stood if those are neighbours, else in front."""
    rest = [own[i] for i in range(rank) if i not in over]
    neighbours = list(over) == list(range(over[0], over[-1] + 1))
    place = over[0] if neighbours else 0
    return [*rest[:place], *between, *rest[place:]]


@rule("aten.index.Tensor")
def index(call: Call) -> Rule | None:
    """``x[indices]`` with index tensors for some dims, which are whole; a mask has no rule, since its shape depends on the data."""
    found = _index_space(call)
    if found is None or not found[2]:
        return None
    indices, shape, over = found
    return _index_rule(call, indices, shape, over, {})


@rule("shard.index")
def aligned_index(call: Call) -> Rule | None:
    """``shard.index(x, indices, aligned)``: besides the dims that tensors index, pairs (dim of x, dim of the index space) that run along
    together, as in ``x[arange(len(x)), ids]``. Those split, which ``arange`` as an index would not."""
    found = _index_space(call)
    aligned = {int(dim): int(position) for dim, position in call.arg(2, "aligned")}
    if found is None:
        return None
    indices, shape, over = found
    rank = max([len(shape), *(position + 1 for position in aligned.values())])
    sizes = [1] * (rank - len(shape)) + list(shape)
    for dim, position in aligned.items():
        sizes[position] = call.shape(0)[dim]
    return _index_rule(call, indices, tuple(sizes), sorted({*over, *aligned}), aligned)


def _index_rule(call: Call, indices: list[Value | None], shape: tuple[int, ...], over: list[int], aligned: dict[int, int]) -> Rule:
    args = Arguments(call, "self indices")
    rank = len(call.shape(0))
    between = lead("i", len(shape))
    own = [between[aligned[i]] if i in aligned else f"v{i}" if i in over else f"d{i}" for i in range(rank)]
    specs = dict(zip(call.node.inputs, call.specs))
    written = [broadcast(specs[one].shape, between, shape) for one in indices if one is not None]
    return args.rule(
        {"self": text(own), "indices": written},
        text(_joined(rank, over, own, between)),
        linear=("self",),
        whole=[f"v{i}" for i in over if i not in aligned],
        saves=("indices",) if written else (),
    )


@rule("aten.index_put.default")
def index_put(call: Call) -> Rule | None:
    """``index_put(self, indices, values, accumulate)``; accumulating splits the written entries as well: a pending sum."""
    args = Arguments(call, "self indices values accumulate")
    found = _index_space(call)
    if found is None:
        return _masked_put(call, args)
    indices, shape, over = found
    if not over:
        return None
    adds = bool(call.arg(3, "accumulate", False))
    rank = len(call.shape(0))
    between = lead("i", len(shape))
    own = [f"v{i}" if i in over else f"d{i}" for i in range(rank)]
    specs = dict(zip(call.node.inputs, call.specs))
    written = [broadcast(specs[one].shape, between, shape) for one in indices if one is not None]
    slots = _joined(rank, over, own, between)
    sizes = dict(zip(own, call.shape(0))) | dict(zip(between, shape))
    values = broadcast(args.shape("values"), slots, [sizes[factor] for factor in slots])
    whole = [f"v{i}" for i in over] + ([] if adds and all(factor in values.split() for factor in between) else between)
    return args.rule(
        {"self": text(own), "indices": written, "values": values}, text(own), linear=("self", "values"), whole=whole, saves=("indices",)
    )


def _masked_put(call: Call, args: Arguments) -> Rule | None:
    """``x[mask] = value`` with one mask over the leading dims and one value: pointwise."""
    indices = call.arg(1, "indices")
    masks = [one for one in indices if one is not None]
    if len(masks) != 1 or indices[0] is None or args.shape("values") not in ((), (1,)) or bool(call.arg(3, "accumulate", False)):
        return None
    d = lead("d", len(call.out))
    mask = text(d[: len(args.shape("indices"))])
    return args.rule({"self": text(d), "indices": [mask], "values": text(["1"] * len(args.shape("values")))}, text(d), saves=("indices",))
