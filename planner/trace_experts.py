"""Mixtures of experts that sort their rows, put back in the order of the batch.

A grouped product wants rows sorted by expert, so models sort, work, and undo it::

    sorted, perm = sort(expert)                      # expert: int[R]
    rows    = x[perm // k]                           # every token k times
    y       = grouped_mm(rows, w, cumsum(histc(sorted)))
    y       = ...row by row...
    out     = y[inverse of perm]

A sort needs the whole batch, so no split of the batch would go through it. But nothing of the order is left in ``out``: the same rows in
the order of the batch give the same, if the product is told the expert of every row. That op is ``shard.expert_mm(rows, w, expert)``,
which sorts for itself whatever rows it gets. The rewriting is made only where every reader of the order is of a kind that this module
knows, or works row by row according to its rule; otherwise the graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from planner.graph import Node, Spec, Value, map_values
from planner.rules.base import Rule, rule_of
from planner.trace_index import from_zero

SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
GROUPED = ("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
BLANK = ("aten.empty_like.default", "aten.zeros_like.default", "aten.new_empty.default", "aten.new_zeros.default")


class _Other(Exception):
    """The order is read in a way that this module does not know."""


def unsort_experts(nodes: list[Node], wanted: Iterable[Value]) -> tuple[list[Node], dict[Value, Value]]:
    """The nodes without the sorts that can be undone, and what replaces values that are gone."""
    keep, gone = set(wanted), dict[Value, Value]()
    for sort in [node for node in nodes if node.op in SORTS and len(node.outputs[-1].shape) == 1 and not _descending(node)]:
        region = _Region(sort, keep)
        try:
            nodes = region.rewritten(nodes)
        except _Other:
            continue
        gone.update(region.gone)
    return nodes, gone


def _descending(node: Node) -> bool:
    return bool(dict(node.kwargs).get("descending", node.args[2] if node.op.endswith("default") and len(node.args) > 2 else False))


@dataclass
class _Region:
    """Everything between one sort and the end of its order."""

    sort: Node
    wanted: set[Value]
    same: dict[Value, Value] = field(default_factory=dict)
    """Sorted value -> the same rows in the order of the batch. Its dim 0 is that of the rows."""
    order: dict[Value, int] = field(default_factory=dict)
    """Indices into tokens, in sorted order: perm (1) and perm // k (k)."""
    blank: set[Value] = field(default_factory=set)
    inverse: set[Value] = field(default_factory=set)
    experts: set[Value] = field(default_factory=set)
    """The expert of every row, in any dtype, sorted or not."""
    counts: set[Value] = field(default_factory=set)
    ends: set[Value] = field(default_factory=set)
    gone: dict[Value, Value] = field(default_factory=dict)
    specs: dict[Value, Spec] = field(default_factory=dict)
    ranges: set[Value] = field(default_factory=set)
    """0, 1, 2, ... for every row."""
    products: int = 0
    rows: int = 0

    def rewritten(self, nodes: list[Node]) -> list[Node]:
        """Raises _Other where the sort has to stay."""
        (expert,) = self.sort.inputs
        self.rows = self.sort.outputs[-1].shape[0]
        self.order[Value(self.sort.name, len(self.sort.outputs) - 1)] = 1
        self.experts.add(expert)
        if len(self.sort.outputs) == 2:
            self.same[Value(self.sort.name)] = expert
            self.experts.add(Value(self.sort.name))
        done: list[Node] = []
        for node in nodes:
            self.specs.update({Value(node.name, i): spec for i, spec in enumerate(node.outputs)})
            if node is not self.sort:
                done += self.one(node)
        hidden = [*self.order, *self.blank, *self.inverse, *(v for v in self.same if v not in self.gone)]
        if not self.products or self.wanted.intersection(hidden):
            raise _Other
        return done

    def sorted(self, value: Value) -> bool:
        return value in self.same and value not in self.gone

    def one(self, node: Node) -> list[Node]:
        out = Value(node.name)
        self.note(node, out)
        if not any(v in self.order or v in self.blank or v in self.inverse or self.sorted(v) for v in node.inputs):
            return [self.unsorted(node)]
        for known in (self.row_numbers, self.inverted, self.gathered, self.added, self.product):
            found = known(node, out)
            if found is not None:
                return found
        return self.row_by_row(node, counts=out in self.counts)

    def note(self, node: Node, out: Value) -> None:
        """Recognise casts of the experts, how many rows each has, where they end, and row numbers."""
        x = node.inputs[0] if node.inputs else None
        cast = node.op.startswith("aten.to.")
        if cast and x in self.experts:
            self.experts.add(out)
        if (
            node.op == "aten.histc.default"
            and x in self.experts
            and node.arg(2, "min") == 0
            and node.arg(3, "max") == node.arg(1, "bins") - 1
        ):
            self.counts.add(out)
        if (node.op == "aten.cumsum.default" and x in self.counts) or (cast and x in self.ends):
            self.ends.add(out)
        if node.op.startswith("aten.arange.") and from_zero(node) and node.outputs[0].shape == (self.rows,):
            self.ranges.add(out)

    def final(self, value: Value) -> Value:
        """What holds a value in the order of the batch."""
        return self.gone.get(value) or self.same.get(value, value)

    def unsorted(self, node: Node) -> Node:
        return replace(node, args=map_values(node.args, self.final), kwargs=map_values(node.kwargs, self.final))

    # ------------------------------------------------------------ the kinds that are known

    def row_numbers(self, node: Node, out: Value) -> list[Node] | None:
        """perm // k."""
        x, divisor = node.inputs[0], node.arg(1, "other")
        if node.op in ("aten.floor_divide.default", "aten.div.Tensor_mode") and self.order.get(x) == 1 and isinstance(divisor, int):
            self.order[out] = divisor
            return []
        return None

    def inverted(self, node: Node, out: Value) -> list[Node] | None:
        """argsort(perm), or arange written to the places of perm."""
        x = node.inputs[0]
        if node.op in BLANK and self.order.get(x) == 1:
            self.blank.add(out)
            return []
        if node.op == "aten.argsort.default" and self.order.get(x) == 1:
            self.inverse.add(out)
            return []
        if node.op.startswith("aten.index_put.") and x in self.blank and self.is_perm(node.args[1]) and node.args[2] in self.ranges:
            self.inverse.add(out)
            return []
        return None

    def gathered(self, node: Node, out: Value) -> list[Node] | None:
        """Tokens taken in sorted order; sorted rows taken back."""
        if node.op != "aten.index.Tensor" or not isinstance(node.args[1], tuple) or len(node.args[1]) != 1:
            return None
        x, (index,) = node.args[0], node.args[1]
        if index in self.inverse and self.sorted(x):
            self.gone[out] = self.same[x]
            return []
        if index not in self.order or self.sorted(x):
            return None
        times, (count, *rest) = self.order[index], self.specs[x].shape
        if count * times != self.rows:
            return None
        if times == 1:
            self.same[out] = self.final(x)
            if x in self.experts:
                self.experts.add(out)
            return []
        dtype = node.outputs[0].dtype
        wide = self.emit(node, "apart", "aten.unsqueeze.default", (self.final(x), 1), Spec((count, 1, *rest), dtype))
        each = self.emit(node, "each", "aten.expand.default", (Value(wide.name), (count, times, *rest)), Spec((count, times, *rest), dtype))
        flat = replace(node, op="aten.reshape.default", args=(Value(each.name), (self.rows, *rest)), kwargs=())
        self.same[out] = out
        return [wide, each, flat]

    def added(self, node: Node, out: Value) -> list[Node] | None:
        """Sorted rows added to their tokens."""
        if node.op != "aten.index_add.default" or node.arg(1, "dim") != 0 or node.arg(4, "alpha", 1) != 1:
            return None
        base, index, rows = node.args[0], node.arg(2, "index"), node.arg(3, "source")
        times, spec = self.order.get(index, 0), self.specs[base]
        count, *rest = spec.shape
        if count * times != self.rows or not self.sorted(rows) or self.sorted(base):
            return None
        shape = (count, times, *rest)
        each = self.emit(node, "each", "aten.reshape.default", (self.same[rows], shape), Spec(shape, spec.dtype))
        total = self.emit(node, "total", "aten.sum.dim_IntList", (Value(each.name), (1,)), spec)
        return [each, total, replace(node, op="aten.add.Tensor", args=(self.final(base), Value(total.name)), kwargs=())]

    def product(self, node: Node, out: Value) -> list[Node] | None:
        if node.op not in GROUPED:
            return None
        rows, weight, ends = node.args[0], node.arg(1, "mat2"), node.arg(2, "offs")
        others = [v for v in node.inputs if v not in (rows, weight, ends)]
        if others or ends not in self.ends or not self.sorted(rows) or self.sorted(weight):
            return None
        if len(self.specs[weight].shape) != 3 or node.outputs[0].dtype != self.specs[rows].dtype:
            return None
        self.products += 1
        self.same[out] = out
        (expert,) = self.sort.inputs
        return [replace(node, op="shard.expert_mm", args=(self.same[rows], self.final(weight), self.final(expert)), kwargs=())]

    # ------------------------------------------------------------ everything else

    def row_by_row(self, node: Node, counts: bool) -> list[Node]:
        """An op that counts, or whose rule passes the rows through or sums over them. Raises _Other for any other."""
        inputs = node.inputs
        if any(v in self.order or v in self.blank or v in self.inverse for v in inputs):
            raise _Other
        made = self.unsorted(node)
        if counts:
            return [made]
        rule = rule_of(node, [self.specs[v] for v in inputs])
        dims = {rule.inputs[i][0] for i, v in enumerate(inputs) if self.sorted(v)} if rule is not None else set()
        if rule is None or len(dims) != 1 or not _independent(rule, [self.sorted(v) for v in inputs], *dims):
            raise _Other
        for i, own in enumerate(rule.outputs):
            if own and own[0] in dims:
                self.same[Value(node.name, i)] = Value(node.name, i)
            elif dims.intersection(own):
                raise _Other
        return [made]

    def is_perm(self, indices: object) -> bool:
        return isinstance(indices, tuple) and len(indices) == 1 and self.order.get(indices[0]) == 1

    def emit(self, like: Node, suffix: str, op: str, args: tuple[object, ...], spec: Spec) -> Node:
        return replace(like, name=f"{like.name}_{suffix}", op=op, args=args, kwargs=(), outputs=(spec,))


def _independent(rule: Rule, is_sorted: list[bool], dim: tuple[str, ...]) -> bool:
    """True if the op treats every row alike and by itself (or sums over rows), and no unsorted tensor has rows of its own."""
    if len(dim) != 1 or dim[0] in rule.whole:
        return False
    (factor,) = dim
    own = [any(factor in d for d in dims) for dims in rule.inputs]
    alone = all(factor not in d or d == (factor,) for dims in rule.inputs + rule.outputs for d in dims)
    reduced = not all(any(factor in d for d in dims) for dims in rule.outputs)
    return alone and own == is_sorted and (rule.sums or not reduced)
