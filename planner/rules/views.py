"""Views and moves of dims: the same elements under other dims. All are linear in their one tensor.

    view:      b t (h d) -> b t h d       (factors from ``dims.regroup``)
    transpose: d0 d1 d2 -> d1 d0 d2
    expand:    1 d1 -> d0 d1              d0 is made: a rank can make its own part
    slice:     d0 i1 -> d0 o1             a dim that is cut is used whole
"""

from __future__ import annotations

from planner.graph import Arg
from planner.rules.base import Call, Dims, Rule, Strategy, dims_rule, rule
from planner.rules.dims import aligned, dim_of, dims_of, numbered, regroup, through
from planner.sharding import S

LINEAR = ({0},)


def view_rule(call: Call, **fields: object) -> Rule:
    """A rule for any op that keeps the elements in order: the factors follow from the shapes."""
    before, after, sizes, whole = regroup(call.shape(0), call.out)
    fields = {"linear": LINEAR, "kind": "view", **fields}
    return dims_rule(call, [before], [after], sizes=sizes, whole=whole, **fields)


@rule("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.view_copy.default")
def view(call: Call) -> Rule:
    copies = call.node.op == "aten.view_copy.default" or (call.node.op == "aten.reshape.default" and _merges(call))
    return view_rule(call, local_args=((1, "shape"),), kind="memory" if copies else "view")


def _merges(call: Call) -> bool:
    """A reshape that joins dims mostly follows a transpose or an expand, and then copies; one that only parts dims never does."""
    _, after, _, _ = regroup(call.shape(0), call.out)
    return any(len(dim) > 1 for dim in after)


@rule(
    "aten.flatten.using_ints", "aten.ravel.default", "aten.unsqueeze.default", "aten.atleast_1d.default", "aten.atleast_2d.default",
    "aten.atleast_3d.default",
)  # fmt: skip
def reshaped_by_dims(call: Call) -> Rule:
    return view_rule(call)


@rule("aten.unflatten.int")
def unflatten(call: Call) -> Rule:
    dim = dim_of(call.arg(1, "dim"), len(call.shape(0)))
    count = len(call.out) - len(call.shape(0)) + 1
    _, after, _, _ = regroup(call.shape(0), call.out)
    sizes = " ".join(f"({' '.join(factors)})" if factors else "1" for factors in after[dim : dim + count])
    return view_rule(call, local_args=((2, f"[{sizes}]"),))


@rule("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def squeeze(call: Call) -> Rule:
    """Whether a dim vanishes depends on its global size, so the plain op is not run on parts: a local size may be 1 by chance.

    The kernel removes exactly the dims that have no factor.
    """
    shape = call.shape(0)
    named = call.arg(1, "dim")
    gone = set() if named == () else set(dims_of(named, len(shape)))
    kept = [i for i, size in enumerate(shape) if size != 1 or i not in gone]
    dims = tuple((f"d{i}",) if i in kept else () for i in range(len(shape)))
    moved = {i: j for j, i in enumerate(kept)}
    extra = tuple(Strategy((S(i),), (S(moved[i]),), factor=f"d{i}", kernel="squeeze") for i in kept)
    return dims_rule(call, [dims], [tuple(dims[i] for i in kept)], linear=LINEAR, kind="view", whole={f"d{i}" for i in kept}, extra=extra)


# ---------------------------------------------------------------- moving dims


def permuted(call: Call, order: list[int]) -> Rule:
    return through(call, order, linear=LINEAR, kind="view")


@rule("aten.permute.default")
def permute(call: Call) -> Rule:
    return permuted(call, [dim_of(dim, len(call.out)) for dim in call.arg(1, "dims")])


@rule("aten.transpose.int", "aten.swapaxes.default", "aten.swapdims.default")
def transpose(call: Call) -> Rule:
    order = list(range(len(call.out)))
    if order:
        a, b = (dim_of(call.node.args[k], len(order)) for k in (1, 2))
        order[a], order[b] = order[b], order[a]
    return permuted(call, order)


@rule("aten.t.default", "aten.mT.default", "aten.mH.default", "aten.adjoint.default", "aten.matrix_H.default")
def matrix_transpose(call: Call) -> Rule:
    n = len(call.out)
    return permuted(call, [*range(n - 2), n - 1, n - 2] if n > 1 else list(range(n)))


@rule("aten.numpy_T.default")
def reverse_dims(call: Call) -> Rule:
    return permuted(call, list(reversed(range(len(call.out)))))


@rule("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int", "aten.moveaxis.intlist")
def movedim(call: Call) -> Rule:
    n = len(call.out)
    source, destination = dims_of(call.node.args[1], n), dims_of(call.node.args[2], n)
    rest = iter(i for i in range(n) if i not in source)
    placed = dict(zip(destination, source))
    return permuted(call, [placed[j] if j in placed else next(rest) for j in range(n)])


@rule("aten.rot90.default")
def rot90(call: Call) -> Rule:
    n = len(call.out)
    turns = int(call.arg(1, "k", 1)) % 4
    a, b = dims_of(call.arg(2, "dims", (0, 1)), n)
    order = list(range(n))
    if turns % 2:
        order[a], order[b] = b, a
    return through(call, order, whole=(a, b) if turns else (), linear=LINEAR)


# ---------------------------------------------------------------- repeating


@rule("aten.expand.default", "aten.broadcast_to.default")
def expand(call: Call) -> Rule:
    x = aligned(call.shape(0), call.out)
    read = {factor for dim in x for factor in dim}
    made = {factor for dim in numbered(call.out) for factor in dim} - read
    return dims_rule(call, [x], [numbered(call.out)], linear=LINEAR, kind="view", makes=frozenset(made), local_args=((1, "shape"),))


@rule("aten.expand_as.default")
def expand_as(call: Call) -> Rule:
    out = numbered(call.out)
    return dims_rule(call, [aligned(call.shape(0), call.out), out], [out], linear=LINEAR, kind="view")


@rule("aten.view_as.default", "aten.reshape_as.default")
def view_as(call: Call) -> Rule:
    before, after, sizes, whole = regroup(call.shape(0), call.out)
    return dims_rule(call, [before, after], [after], linear=LINEAR, kind="view", sizes=sizes, whole=whole)


@rule("aten.repeat.default", "aten.tile.default")
def repeat(call: Call) -> Rule:
    """A repeated dim is (repeats, size); repeats of a dim that was not there are made like those of ``expand``."""
    shape, out = call.shape(0), call.out
    first = len(out) - len(shape)
    dims: Dims = ()
    sizes: dict[str, int] = {}
    for j, size in enumerate(out):
        own = shape[j - first] if j >= first else 1
        factors = {f"m{j}": size // own if own else 1, f"d{j}": own}
        sizes |= factors
        dims += (tuple(name for name, n in factors.items() if n != 1),)
    x = tuple((f"d{first + i}",) if size != 1 else () for i, size in enumerate(shape))
    repeats = "[" + " ".join(f"m{j}" if sizes[f"m{j}"] != 1 else "1" for j in range(len(out))) + "]"
    made = {f"m{j}" for j in range(len(out)) if sizes[f"d{j}"] == 1 and sizes[f"m{j}"] != 1}
    used = {name: size for name, size in sizes.items() if size != 1}
    whole = {name for name in used if name.startswith("m") and name not in made}
    args = ((1, repeats),) if len(call.arg(1, "repeats")) == len(out) else ()
    return dims_rule(
        call, [x], [dims], linear=LINEAR, sizes=used, whole=whole, makes=frozenset(made if args else ()), local_args=args
    )


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(call: Call) -> Rule | None:
    shape = call.shape(0)
    if call.arg(2, "dim") is None or call.arg(3, "output_size") is not None:
        return None
    dim = dim_of(call.arg(2, "dim"), len(shape))
    repeats = int(call.arg(1, "repeats"))
    x = numbered(shape)
    out = tuple((*factors, "m") if i == dim else factors for i, factors in enumerate(x))
    return dims_rule(call, [x], [out], linear=LINEAR, sizes={"m": repeats, **_sizes(x, shape)}, whole={"m"})


def _sizes(dims: Dims, shape: tuple[int, ...]) -> dict[str, int]:
    return {dim[0]: size for dim, size in zip(dims, shape) if dim}


# ---------------------------------------------------------------- cutting: the dim that is cut is whole


def _keeps_all(call: Call, dim: int) -> bool:
    """A slice that keeps its whole dim keeps any part of it too."""
    step = call.arg(4, "step", 1)
    return call.out[dim] == call.shape(0)[dim] and step in (None, 1)


@rule("aten.slice.Tensor")
def slice_(call: Call) -> Rule:
    dim = dim_of(call.arg(1, "dim", 0), len(call.out))
    return through(call, _except(call, () if _keeps_all(call, dim) else (dim,)), linear=LINEAR, kind="view")


@rule("aten.narrow.default")
def narrow(call: Call) -> Rule:
    dim = dim_of(call.arg(1, "dim"), len(call.out))
    return through(call, _except(call, (dim,)), linear=LINEAR, kind="view")


def _except(call: Call, changed: tuple[int, ...]) -> list[int | None]:
    return [None if i in changed else i for i in range(len(call.shape(0)))]


@rule("aten.select.int")
def select(call: Call) -> Rule:
    dim = dim_of(call.arg(1, "dim"), len(call.shape(0)))
    return through(call, [i for i in range(len(call.shape(0))) if i != dim], linear=LINEAR, kind="view")


@rule("aten.unbind.int")
def unbind(call: Call) -> Rule:
    dim = dim_of(call.arg(1, "dim", 0), len(call.shape(0)))
    return through(call, [i for i in range(len(call.shape(0))) if i != dim], linear=LINEAR, kind="view")


@rule(
    "aten.split.Tensor", "aten.split.sizes", "aten.split.default", "aten.split_with_sizes.default", "aten.chunk.default",
    "aten.tensor_split.sections", "aten.tensor_split.indices", "aten.unsafe_split.Tensor", "aten.unsafe_chunk.default",
    "aten.unsafe_split_with_sizes.default",
)  # fmt: skip
def split(call: Call) -> Rule:
    """Equal parts share a factor, ``d0 (c s) -> d0 s, d0 s``; unequal ones are cut from a dim that is whole."""
    shape = call.shape(0)
    dim = dim_of(call.arg(2, "dim", 0), len(shape))
    lengths = {spec.shape[dim] for spec in call.node.outputs}
    if len(lengths) > 1 or call.node.op == "aten.tensor_split.indices":
        return through(call, _except(call, (dim,)), linear=LINEAR, kind="view")
    x = numbered(shape)
    parts, length = len(call.node.outputs), lengths.pop()
    every = f"[{' '.join(['s'] * parts)}]"
    dims = tuple(("c", "s") if i == dim else factors for i, factors in enumerate(x))
    out = tuple(("s",) if i == dim else factors for i, factors in enumerate(x))
    name = call.node.op.removeprefix("aten.").removeprefix("unsafe_")
    size = {"split.Tensor": "s", "split.sizes": every, "split.default": every, "split_with_sizes.default": every}.get(name)
    args = ((1, size),) if size else ()
    return dims_rule(
        call, [dims], [out] * parts, sizes={"c": parts, "s": length}, whole={"c"}, linear=LINEAR, kind="view", local_args=args
    )


@rule("aten.unfold.default")
def unfold(call: Call) -> Rule:
    dim = dim_of(call.arg(1, "dimension"), len(call.shape(0)))
    return through(call, [*_except(call, (dim,)), None], linear=LINEAR, kind="view")


@rule("aten.diagonal.default", "aten.linalg_diagonal.default")
def diagonal(call: Call) -> Rule:
    n = len(call.shape(0))
    a, b = (0, 1) if call.node.op == "aten.diagonal.default" else (-2, -1)
    gone = {dim_of(call.arg(2, "dim1", a), n), dim_of(call.arg(3, "dim2", b), n)}
    return through(call, [*(i for i in range(n) if i not in gone), None], linear=LINEAR, kind="view")


@rule("aten.diag_embed.default")
def diag_embed(call: Call) -> Rule:
    n = len(call.out)
    new = {dim_of(call.arg(2, "dim1", -2), n), dim_of(call.arg(3, "dim2", -1), n)}
    kept = iter(range(n - 2))
    return through(call, [None if j in new else next(kept) for j in range(n)], linear=LINEAR)


@rule("aten.alias.default", "aten.detach.default", "aten.lift_fresh.default", "aten.positive.default")
def same(call: Call) -> Rule:
    return through(call, range(len(call.out)), linear=LINEAR, kind="view")


# ---------------------------------------------------------------- the dim stays but is mixed


@rule("aten.flip.default", "aten.fliplr.default", "aten.flipud.default")
def flip(call: Call) -> Rule:
    named: dict[str, Arg] = {"aten.fliplr.default": (1,), "aten.flipud.default": (0,)}
    dims = named[call.node.op] if call.node.op in named else call.arg(1, "dims")
    whole = dims_of(dims, len(call.out)) if dims else ()
    return through(call, range(len(call.out)), whole=whole, linear=LINEAR)


@rule("aten.roll.default")
def roll(call: Call) -> Rule:
    return through(call, range(len(call.out)), whole=dims_of(call.arg(2, "dims", ()), len(call.out)), linear=LINEAR)


@rule("aten.tril.default", "aten.triu.default")
def triangle(call: Call) -> Rule:
    n = len(call.out)
    return through(call, range(n), whole=(n - 2, n - 1), linear=LINEAR)


@rule(
    "aten.pad.default", "aten.constant_pad_nd.default", "aten.reflection_pad1d.default", "aten.reflection_pad2d.default",
    "aten.reflection_pad3d.default", "aten.replication_pad1d.default", "aten.replication_pad2d.default", "aten.replication_pad3d.default",
)  # fmt: skip
def pad(call: Call) -> Rule:
    """``pad`` lists (before, after) from the last dim backwards. Zeros at the rim, and copies of elements, are linear."""
    n = len(call.out)
    padded = {n - 1 - k // 2 for k, amount in enumerate(call.node.args[1]) if amount}
    origin = [None if i in padded else i for i in range(n)]
    mode, value = "copies", 0
    if call.node.op == "aten.constant_pad_nd.default":
        mode, value = "constant", call.arg(2, "value", 0)
    elif call.node.op == "aten.pad.default":
        mode, value = call.arg(2, "mode", "constant"), call.arg(3, "value")
    keeps = mode in ("copies", "reflect", "replicate")
    return through(call, origin, linear=() if value else LINEAR, saves=("in0",) if keeps else ())
