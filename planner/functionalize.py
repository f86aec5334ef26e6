"""Rewrite in-place ops as functional ones.

Values that share memory form a tree: a base, and views of it, each made from its parent by one view op. A write goes::

    base ──select──▶ view          view.add_(1)
                                   1. new view = add(view, 1)
                                   2. base     = select_scatter(base, new view)      (up to the root)
                                   3. every other view of the tree is stale: the next read makes it again from its parent

What a parameter or buffer holds at the end, where it differs from what it held at the start, is a *mutation* of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from planner.errors import CaptureError
from planner.graph import BUFFER, PARAMETER, Arg, Node, Spec, Symbol, Value, map_values
from planner.torch_ops import has_overload, infer, without_out, written_arguments
from planner.view_inverses import INVERSES


@dataclass
class Functional:
    nodes: list[Node]
    outputs: list[Arg]
    mutations: tuple[tuple[str, Value], ...]


@dataclass
class _Slot:
    """One value of the exported graph: what functional value it has now, and how it hangs in its tree of views."""

    current: Value
    parent: Value | None = None
    version: int = 0
    """Of a root: number of writes to its tree. Of a view: the root's version that ``current`` belongs to."""


VIEW_METHODS_IN_PLACE = {
    "aten.unsqueeze_": "aten.unsqueeze",
    "aten.squeeze_": "aten.squeeze",
    "aten.t_": "aten.t",
    "aten.transpose_": "aten.transpose",
    "aten.swapaxes_": "aten.swapaxes",
    "aten.swapdims_": "aten.swapdims",
    "aten.detach_": "aten.detach",
}


def functionalize(nodes: list[Node], outputs: list[Arg], parent: dict[Value, Value]) -> Functional:
    """``nodes`` as exported, ``parent``: value -> the value whose memory it shares. Raises CaptureError for a write that has no
    functional form."""
    return _Pass(nodes, parent).run(outputs)


@dataclass
class _Pass:
    source: list[Node]
    parent: dict[Value, Value]
    out: list[Node] = field(default_factory=list)
    slots: dict[Value, _Slot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_name = {node.name: node for node in self.source}
        self.specs: dict[str, tuple[Spec, ...]] = {}
        self.differentiable: set[str] = set()
        self.same: dict[Value, Value] = {}

    def run(self, outputs: list[Arg]) -> Functional:
        for node in self.source:
            if node.is_source:
                self._append(node)
                self.slots[Value(node.name)] = _Slot(Value(node.name))
            elif node.op == "aten.batch_norm.default":
                self._batch_norm(node)
            elif node.op.rsplit(".", 1)[0] in VIEW_METHODS_IN_PLACE:
                self._rebind_as_view(node)
            elif written_arguments(node.op):
                self._write(node)
            else:
                self._plain(node)
        results = [map_values(item, lambda v: self.read(v, self.by_name[v.node])) for item in outputs]
        return Functional(self.out, results, tuple(self._mutations()))

    def _mutations(self) -> list[tuple[str, Value]]:
        changed = []
        for node in self.source:
            if node.op in (PARAMETER, BUFFER):
                now = self.read(Value(node.name), node)
                if now != Value(node.name):
                    changed.append((node.target, now))
        return changed

    # ---- reading

    def _canonical(self, value: Value) -> Value:
        """The result of an in-place op is its target."""
        return self.same.get(value, value)

    def _root(self, value: Value) -> Value:
        above = self.slots[value].parent
        return value if above is None else self._root(above)

    def read(self, value: Value, user: Node) -> Value:
        """The functional value that ``value`` has now; a stale view is made again from its parent."""
        value = self._canonical(value)
        slot = self.slots[value]
        if slot.parent is None:
            return slot.current
        version = self.slots[self._root(value)].version
        if slot.version != version:
            above = self.read(slot.parent, user)
            slot.current = self._remake(value, slot.parent, above, user)
            slot.version = version
        return slot.current

    def _remake(self, value: Value, parent: Value, above: Value, user: Node) -> Value:
        made_by = self.by_name[value.node]
        if not _is_view_op(made_by):
            return above
        args = map_values(made_by.args, lambda v: above if self._canonical(v) == parent else self.read(v, user))
        op = "aten.reshape.default" if made_by.op in ("aten.view.default", "aten._unsafe_view.default") else made_by.op
        return Value(self.emit(op, args, dict(made_by.kwargs), user), value.index)

    # ---- writing

    def _plain(self, node: Node) -> None:
        new = replace(
            node,
            args=map_values(node.args, lambda v: self.read(v, node)),
            kwargs=tuple((k, map_values(a, lambda v: self.read(v, node))) for k, a in node.kwargs),
        )
        self._append(new)
        for i in range(len(node.outputs)):
            self._register(Value(node.name, i), Value(node.name, i))

    def _register(self, value: Value, current: Value) -> None:
        above = self.parent.get(value)
        if above is None:
            self.slots[value] = _Slot(current)
        else:
            above = self._canonical(above)
            self.slots[value] = _Slot(current, above, self.slots[self._root(above)].version)

    def _rebind_as_view(self, node: Node) -> None:
        """``x.unsqueeze_(1)``: the name goes to a view of what it was; memory is untouched."""
        op, variant = node.op.rsplit(".", 1)
        variant = "int" if op == "aten.transpose_" else variant
        view = replace(node, op=f"{VIEW_METHODS_IN_PLACE[op]}.{variant}")
        self.by_name[node.name] = view
        self._plain(view)

    def _write(self, node: Node) -> None:
        places = written_arguments(node.op)
        if len(places) == 1 and places[0][1] == "out":
            self._write_out(node)
            return
        if len(places) > 1 or places[0][0] != 0:
            raise self._error(node, f"{node.op} writes to its argument {places[-1][1]!r}; use the form that returns a new tensor")
        target = self._canonical(node.args[0])
        new = self._functional(node, target)
        for i in range(len(node.outputs)):
            self.same[Value(node.name, i)] = target
        self._store(target, new, node)

    def _write_out(self, node: Node) -> None:
        """``torch.div(a, b, out=c)``: the same op without ``out``, then a write to c."""
        given = dict(node.kwargs)
        target = self._canonical(given.pop("out"))
        op = without_out(node.op)
        if op is None:
            raise self._error(node, f"{node.op} has no form that returns a new tensor")
        spec = self.spec(self.read(target, node))
        args = map_values(node.args, lambda v: self.read(v, node))
        kwargs = {k: map_values(a, lambda v: self.read(v, node)) for k, a in given.items()}
        new = Value(self.emit(op, args, kwargs, node))
        self.same[Value(node.name)] = target
        self._store(target, self._fit(new, spec, node), node)

    def _functional(self, node: Node, target: Value) -> Value:
        """The functional form of an in-place op, with the dtype and shape that its target keeps."""
        old = self.read(target, node)
        spec = self.spec(old)
        args = map_values(node.args, lambda v: self.read(v, node))
        kwargs = {k: map_values(a, lambda v: self.read(v, node)) for k, a in node.kwargs}
        name, _, variant = node.op.rpartition(".")
        base = name.removesuffix("_")
        if base == "aten.copy":
            new = args[1]
        elif base == "aten.zero" or (base == "aten.fill" and not isinstance(args[1], Value)):
            new = Value(self.emit("aten.full_like.default", (old, 0 if base == "aten.zero" else args[1]), {}, node))
        elif base == "aten.fill":
            new = args[1]
        elif base == "aten.uniform" and tuple(args[1:]) in ((), (0.0, 1.0)):
            new = Value(self.emit("aten.rand_like.default", (old,), {}, node))
        elif base == "aten.normal" and tuple(args[1:]) in ((), (0.0, 1.0)):
            new = Value(self.emit("aten.randn_like.default", (old,), {}, node))
        elif base == "aten.bernoulli" and variant == "float":
            new = Value(self.emit("aten.bernoulli.p", (old, *args[1:]), {}, node))
        elif has_overload(f"{base}.{variant}") and not written_arguments(f"{base}.{variant}"):
            new = Value(self.emit(f"{base}.{variant}", args, kwargs, node))
        else:
            raise self._error(node, f"{node.op} has no functional form")
        return self._fit(new, spec, node)

    def _fit(self, value: Value, spec: Spec, like: Node) -> Value:
        if self.spec(value).dtype != spec.dtype:
            value = Value(self.emit("aten.to.dtype", (value, Symbol("dtype", spec.dtype)), {}, like))
        if self.spec(value).shape != spec.shape:
            value = Value(self.emit("aten.expand.default", (value, spec.shape), {}, like))
        return value

    def _store(self, target: Value, new: Value, node: Node) -> None:
        """``target`` now holds ``new``: write through to the root of its tree, and make every other view stale."""
        if "no_grad" in node.context:
            new = self._graft(self.read(target, node), new, node)
        chain = [target]
        while (above := self.slots[chain[-1]].parent) is not None:
            chain.append(self._canonical(above))
        before = [self.read(value, node) for value in chain[1:]]
        root = self.slots[chain[-1]]
        root.version += 1
        for value, old in zip(chain, [*before, None]):
            slot = self.slots[value]
            slot.current = new
            if old is not None:
                slot.version = root.version
                new = self._write_back(value, new, old, node)

    def _graft(self, old: Value, new: Value, node: Node) -> Value:
        """A value written where autograd does not look keeps its own gradient: old + (new - old).detach().

        ``embedding(max_norm=)`` does this to its weight."""
        if old.node not in self.differentiable or new == old:
            return new
        outside = replace(node, context=";".join(p for p in node.context.split(";") if p != "no_grad"))
        change = Value(self.emit("aten.detach.default", (Value(self.emit("aten.sub.Tensor", (new, old), {}, outside)),), {}, outside))
        return Value(self.emit("aten.add.Tensor", (old, change), {}, outside))

    def _write_back(self, view: Value, new: Value, base: Value, node: Node) -> Value:
        """``base`` with the part that ``view`` shows replaced by ``new``."""
        made_by = self.by_name[view.node]
        if not _is_view_op(made_by):
            return new
        name = made_by.op.split(".")[1]
        undo = INVERSES.get(name)
        if undo is None:
            raise self._error(node, f"a write through {made_by.op} has no functional form")
        op, args = undo(made_by, view.index, self.spec(base).shape)
        if op == "aten.detach.default":
            return self._graft(base, new, node)
        if "_scatter." in op:
            return Value(self.emit(op, (base, new, *args), {}, node))
        return Value(self.emit(op, (new, *args), {}, node))

    def _batch_norm(self, node: Node) -> None:
        """``aten.batch_norm`` writes its running statistics: ``shard.batch_norm`` returns them."""
        args = map_values(node.args, lambda v: self.read(v, node))
        channels = node.outputs[0].shape[1]
        dtype = self.spec(args[3]).dtype if isinstance(args[3], Value) else node.outputs[0].dtype
        stats = Spec((channels,), dtype)
        self._append(replace(node, op="shard.batch_norm", args=args[:8], kwargs=(), outputs=(node.outputs[0], stats, stats)))
        self._register(Value(node.name), Value(node.name))
        if node.args[5]:
            for position in (3, 4):
                if isinstance(node.args[position], Value):
                    self._store(self._canonical(node.args[position]), Value(node.name, position - 2), node)

    # ---- emitting

    def spec(self, value: Value) -> Spec:
        return self.specs[value.node][value.index]

    def _append(self, node: Node) -> None:
        self.out.append(node)
        self.specs[node.name] = node.outputs
        upstream = any(value.node in self.differentiable for value in node.inputs)
        if any(node.grad) or (upstream and "no_grad" not in node.context and node.op != "aten.detach.default"):
            self.differentiable.add(node.name)

    def emit(self, op: str, args: tuple[Arg, ...], kwargs: dict[str, Arg], like: Node) -> str:
        outputs = infer(op, args, kwargs, self.spec)
        name = f"f{len(self.out)}"
        self._append(Node(name, op, tuple(args), tuple(kwargs.items()), outputs, (), like.module, like.source, "", like.context))
        return name

    def _error(self, node: Node, what: str) -> CaptureError:
        return CaptureError(f"{node.source or 'the model'} (module {node.module!r}): {what}")


def _is_view_op(node: Node) -> bool:
    return not node.is_source and not written_arguments(node.op) and node.op.split(".")[1] not in IDENTITIES


IDENTITIES = {"alias", "lift_fresh", "contiguous", "to", "_to_copy", "dropout", "clone", "type_as", "resolve_conj", "resolve_neg"}
"""Ops that, where they share memory with their input, are the input. (An op that shares no memory has no parent at all.)"""
