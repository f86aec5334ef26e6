"""Lowering: Graph + Plan + coordinates -> a stage as a ``torch.fx.GraphModule`` on local tensors. Needs no process group.

    root(received, inputs, prologue sums, micro)
      ├─ seg_0(...)   one GraphModule per segment: local ops, and between them explicit typed conversions
      ├─ seg_1(...)   parameters sit in the segment that reads them, or on the root where several do
      └─ final conversions of the loss, the outputs, the updated buffers

What depends on inputs alone (masks, positions, label shifts) is computed again in every stage that needs it; what depends on a
parameter crosses from stage to stage, threaded through the stages between.

A value in one sharding is a *key*. Each key is made once, in the segment that first needs it, and shared with all later ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from planner.assignment import Assignment, assign
from planner.errors import PlanError
from planner.graph import BUFFER, CONSTANT, INPUT, PARAMETER, Graph, Node, Spec, Value
from planner.mesh import MICRO, PIPE
from planner.plan import Plan
from planner.reshard import steps
from planner.sharding import I, P, R, Sharding, local_shape
from runtime.collectives import convert, local, select_micro
from runtime.epilogue import delivered
from runtime.local_op import local_call, returns_sequence
from runtime.recompute import recompute_segment
from runtime.stage import Crossing, OutputPart, Stage, StageParameter

Key = tuple[Value, Sharding]
ROOT = -1


def lower(
    graph: Graph,
    plan: Plan,
    coordinates: Mapping[str, int],
    *,
    mode: str = "step",
    training: bool = True,
    opaque: Mapping[str, Callable[..., Any]] | None = None,
) -> Stage:
    """The stage of the rank at ``coordinates`` (pipe, data, tensor).

    ``mode`` "step" computes the loss, "forward" the model's outputs. ``opaque``: what runs the submodules taken as one op
    (``Captured.opaque``). Raises PlanError where plan and graph do not fit.
    """
    if plan.optimizer == "none":
        graph = graph.without_gradients()
    return Lowering(graph, assign(plan, graph), coordinates, mode, training, opaque or {}).stage()


class Part:
    """One fx graph under construction: a segment, or the root."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.graph = fx.Graph()
        self.nodes: dict[Key, fx.Node] = {}
        self.imports: list[Key] = []
        self.exports: list[Key] = []
        self.attributes: dict[str, Any] = {}
        self.micro: fx.Node | None = None
        self._last_placeholder: fx.Node | None = None

    def placeholder(self, name: str) -> fx.Node:
        anchor = self._last_placeholder
        if anchor is not None:
            with self.graph.inserting_after(anchor):
                node = self.graph.placeholder(name)
        elif len(self.graph.nodes):
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                node = self.graph.placeholder(name)
        else:
            node = self.graph.placeholder(name)
        self._last_placeholder = node
        return node


class Lowering:
    def __init__(
        self,
        graph: Graph,
        assignment: Assignment,
        coordinates: Mapping[str, int],
        mode: str,
        training: bool,
        opaque: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.opaque = opaque
        self.graph, self.plan, self.mode, self.training = graph, assignment, mode, training
        self.axes, self.sizes = assignment.mesh.axes, assignment.mesh.sizes
        self.index, self.count = coordinates[PIPE], assignment.mesh.pipe
        self.coords = tuple(0 if axis.is_time else coordinates[axis.name] for axis in self.axes)
        self.micro_axis = assignment.mesh.index(MICRO)
        self.segment_of = {name: s.index for s in assignment.segments for name in s.nodes}
        self.parts: dict[int, Part] = {ROOT: Part(ROOT)}
        self.owner: dict[Key, int] = {}
        self.prologue_keys: list[Key] = []
        self.prologue_sources: dict[str, str] = {}
        self.roots = frozenset([*delivered(graph, assignment), *(v for _, v in graph.mutations), *([graph.loss] if graph.loss else [])])
        self.parameters: dict[str, StageParameter] = {}
        self.buffers: dict[str, str] = {}
        self.constants: dict[str, str] = {}

    # ------------------------------------------------------------ what runs here

    def wanted(self) -> list[Value]:
        """Values that the whole model must deliver, in order."""
        mutated = [v for _, v in self.graph.mutations] if self.training else []
        if self.mode == "step":
            if self.graph.loss is None:
                raise PlanError("step() needs a loss: the model was captured without one")
            return [self.graph.loss, *mutated]
        return [*self.results(), *mutated]

    def live(self) -> list[Node]:
        """Nodes that the wanted values depend on, in execution order."""
        needed = {v.node for v in self.wanted()}
        alive = []
        for node in reversed(self.graph.nodes):
            if node.name in needed:
                alive.append(node)
                needed.update(v.node for v in node.inputs)
        return alive[::-1]

    def travels(self, node: Node) -> bool:
        """True for an activation: computed in one stage only, sent to others. The rest is computed where it is needed."""
        return not node.is_source and node.name in self.graph.parameter_dependent

    def stage_of(self, node: Node) -> int:
        return self.plan.stage_of_segment[self.segment_of[node.name]]

    def crossings(self, alive: Sequence[Node], border: int) -> list[Value]:
        """Values made before stage ``border`` and read in it or later, in the order they are made."""
        read = {v for node in alive if self.travels(node) and self.stage_of(node) >= border for v in node.inputs}
        read.update(self.results())
        return [
            Value(node.name, i)
            for node in alive
            if self.travels(node) and self.stage_of(node) < border
            for i in range(len(node.outputs))
            if Value(node.name, i) in read
        ]

    def results(self) -> list[Value]:
        """Results that the last stage delivers (buffers' new values stay in the stage that makes them)."""
        if self.mode == "step":
            return [self.graph.loss] if self.graph.loss is not None else []
        return list(delivered(self.graph, self.plan))

    # ------------------------------------------------------------ the stage

    def stage(self) -> Stage:
        alive = self.live()
        receives = self.crossings(alive, self.index) if self.index else []
        sends = self.crossings(alive, self.index + 1) if self.index + 1 < self.count else []
        last = self.index + 1 == self.count
        results = self.results() if last else []
        mutations = [(n, v) for n, v in self.graph.mutations if self.training and self.mutated_here(v)]
        nodes = self.nodes_here(alive, [*sends, *results, *(v for _, v in mutations)])

        root = self.parts[ROOT]
        for i, value in enumerate(receives):
            self.provide(root, (value, self.produced(value)), root.placeholder(f"received_{i}"))
        inputs = [n for n in nodes if n.op == INPUT]
        for i, node in enumerate(inputs):
            value = Value(node.name)
            self.provide(root, (value, self.produced(value)), root.placeholder(f"input_{i}"))
        prologue, prologue_inputs = self.prologue(nodes, [v for _, v in mutations])
        for i, key in enumerate(self.prologue_keys):
            self.provide(root, key, root.placeholder(f"total_{i}"))
        root.micro = root.placeholder("micro")
        self.place_sources(nodes)
        for node in nodes:
            if not node.is_source:
                self.emit(node)
        finals = [self.obtain(root, v, self.produced(v)) for v in sends]
        finals += [self.obtain(root, v, self.final(v)) for v in results]
        finals += [self.obtain(root, v, self.everywhere(v)) for _, v in mutations]
        module = self.assemble(finals)
        return Stage(
            index=self.index,
            count=self.count,
            module=module,
            receives=tuple(map(self.crossing, receives)),
            sends=tuple(map(self.crossing, sends)),
            inputs=tuple(n.target for n in inputs),
            prologue=prologue,
            prologue_inputs=prologue_inputs,
            has_loss=last and self.mode == "step",
            outputs=tuple(OutputPart(v, self.micro_type(self.final(v))) for v in results) if self.mode == "forward" else (),
            mutations=tuple(n for n, _ in mutations),
            parameters=self.parameters,
            buffers=self.buffers,
            constants=self.constants,
            prologue_sources=self.prologue_sources,
            segment_names=tuple(f"seg_{i}" for i in sorted(self.parts) if i != ROOT),
        )

    def mutated_here(self, value: Value) -> bool:
        node = self.graph.by_name[value.node]
        return not self.travels(node) or self.stage_of(node) == self.index

    def nodes_here(self, alive: Sequence[Node], wanted: Iterable[Value]) -> list[Node]:
        """This stage's own activations, and everything they need that is not received."""
        needed = {v.node for v in wanted}
        here = []
        for node in reversed(alive):
            own = self.travels(node) and self.stage_of(node) == self.index
            if own or (node.name in needed and not self.travels(node)):
                here.append(node)
                needed.update(v.node for v in node.inputs)
        return here[::-1]

    def crossing(self, value: Value) -> Crossing:
        spec = self.graph.spec(value)
        return Crossing(value, Spec(self.local(spec.shape, self.produced(value)), spec.dtype), self.graph.has_grad(value))

    # ------------------------------------------------------------ shardings

    def produced(self, value: Value) -> Sharding:
        return self.plan.produced(self.graph, value.node, value.index)

    def local(self, shape: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
        return local_shape(shape, sharding, self.sizes, self.coords)

    def micro_type(self, sharding: Sharding) -> Any:
        return R if self.micro_axis is None else sharding[self.micro_axis]

    def final(self, value: Value) -> Sharding:
        """The loss: invariant on ranked axes, a pending sum over micro-batches. An output: whole on ranked axes."""
        is_loss = self.mode == "step"
        made = self.produced(value)
        whole = I if is_loss and self.graph.has_grad(value) else R
        return tuple((P if is_loss else made[i]) if axis.is_time else whole for i, axis in enumerate(self.axes))

    def everywhere(self, value: Value) -> Sharding:
        return tuple(R for _ in self.axes)

    # ------------------------------------------------------------ keys

    def provide(self, part: Part, key: Key, node: fx.Node) -> None:
        part.nodes[key] = node
        self.owner[key] = part.number

    def get(self, part: Part, key: Key) -> fx.Node:
        """The node of a key that exists, imported into this part if another one owns it."""
        if key not in part.nodes:
            if part.number == ROOT:
                raise PlanError(f"value {key[0]} was needed at the root before its segment was placed")
            part.imports.append(key)
            part.nodes[key] = part.placeholder(_identifier(f"x{len(part.imports)}_{key[0].node}"))
        return part.nodes[key]

    def obtain(self, part: Part, value: Value, target: Sharding) -> Any:
        """The value in the sharding ``target``, converting if nobody has yet. At the root: the key, placed by ``assemble``."""
        key = (value, target)
        if key not in self.owner:
            base = self.summed(value, target) or (value, self.produced(value))
            if base[1] == target:
                raise PlanError(f"value {value} is read before it is made")
            if part.number == ROOT:
                return ("convert", base, key)
            self.convert(part, self.get(part, base), base, key)
        return ("key", key) if part.number == ROOT else self.get(part, key)

    def summed(self, value: Value, target: Sharding) -> Key | None:
        """The prologue's total, where the value is a pending sum over micro-batches and is wanted whole."""
        if not self.needs_total(value, target):
            return None
        made = self.produced(value)
        return value, tuple(R if i == self.micro_axis else t for i, t in enumerate(made))

    def needs_total(self, value: Value, target: Sharding) -> bool:
        m = self.micro_axis
        return m is not None and bool(target) and self.produced(value)[m] == P and target[m] != P

    def convert(self, part: Part, node: fx.Node, base: Key, key: Key) -> None:
        """Append the typed conversions from one key to another."""
        value, grad = key[0], self.graph.has_grad(key[0])
        shape, state = self.graph.spec(value).shape, list(base[1])
        for step in steps(base[1], key[1], shape, self.sizes, grad):
            axis = self.axes[step.axis]
            before = tuple(R if i == step.axis else t for i, t in enumerate(state))
            size = self.local(shape, before)[step.source.dim] if step.source.is_split else 0
            arguments: tuple[Any, ...] = (str(step.source), str(step.target), size)
            if not axis.is_time:
                node = part.graph.call_function(convert, (node, axis.name, *arguments))
            elif {step.source.kind, step.target.kind} != {"I", "R"}:
                node = part.graph.call_function(select_micro, (node, *arguments, axis.size, self.micro_in(part)))
            state[step.axis] = step.target
        self.provide(part, key, node)

    def micro_in(self, part: Part) -> fx.Node:
        if part.micro is None:
            part.micro = part.placeholder("micro")
        return part.micro

    # ------------------------------------------------------------ sources and ops

    def part_of(self, node: Node) -> Part:
        number = self.segment_of[node.name]
        if number not in self.parts:
            self.parts[number] = Part(number)
        return self.parts[number]

    def place_sources(self, nodes: Sequence[Node]) -> None:
        readers: dict[str, set[int]] = {}
        for node in nodes:
            for value in node.inputs:
                readers.setdefault(value.node, set()).add(self.segment_of[node.name])
        for node in nodes:
            value = Value(node.name)
            if node.op == PARAMETER:
                numbers = readers.get(node.name, set())
                home = self.parts[ROOT]
                if len(numbers) == 1:
                    home = self.parts.setdefault(min(numbers), Part(min(numbers)))
                self.place_parameter(home, node, value)
            elif node.op in (BUFFER, CONSTANT):
                root = self.parts[ROOT]
                name = f"b_{len(root.attributes)}"
                spec = node.outputs[0]
                root.attributes[name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
                (self.buffers if node.op == BUFFER else self.constants)[node.target] = name
                self.provide(root, (value, self.produced(value)), root.graph.get_attr(name))

    def place_parameter(self, home: Part, node: Node, value: Value) -> None:
        sharding, spec = self.produced(value), node.outputs[0]
        trainable = node.target not in self.graph.frozen
        shape = self.local(spec.shape, sharding)
        name = f"p_{sum(isinstance(a, nn.Parameter) for a in home.attributes.values())}"
        meta = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
        home.attributes[name] = nn.Parameter(meta, requires_grad=(trainable and meta.is_floating_point()) or meta.is_complex())
        fsdp = node.name in self.plan.fsdp
        sync = tuple(
            a.name for a, t in zip(self.axes, sharding) if t == R and not a.is_time and trainable and not (fsdp and a.name == "data")
        )
        path = name if home.number == ROOT else f"seg_{home.number}.{name}"
        self.parameters[node.target] = StageParameter(path, sharding, fsdp, sync, shape, trainable)
        read = home.graph.get_attr(name)
        self.provide(home, (value, sharding), home.graph.call_function(local, (read,)))

    def emit(self, node: Node) -> None:
        """One op: its inputs in the shardings that its strategy wants, its local call, its outputs."""
        part = self.part_of(node)
        strategy, rule = self.plan.strategies[node.name], self.plan.rules[node.name]
        tensors = [self.obtain(part, value, strategy.inputs[i] if strategy.per_axis else ()) for i, value in enumerate(node.inputs)]
        op = local_call(node, rule, strategy, self.axes, self.coords, self.training, self.opaque)
        args, kwargs = op.filled(tensors)
        if op.micro_first:
            args = [self.micro_in(part), *args]
        result = part.graph.call_function(op.call, tuple(args), kwargs)
        if not returns_sequence(node):
            self.provide(part, (Value(node.name), self.produced(Value(node.name))), result)
            return
        for i in range(len(node.outputs)):
            value = Value(node.name, i)
            if value in self.graph.users or value in self.roots:
                self.provide(part, (value, self.produced(value)), part.graph.call_function(_item, (result, i)))

    # ------------------------------------------------------------ prologue

    def prologue(self, nodes: Sequence[Node], mutated: Sequence[Value]) -> tuple[fx.GraphModule | None, tuple[str, ...]]:
        """A flat graph of the values whose total over all micro-batches is needed before the first one runs."""
        reads = [(v, self.everywhere(v)) for v in mutated]
        for node in nodes:
            if not node.is_source and self.axes:
                reads += zip(node.inputs, self.plan.strategies[node.name].inputs)
        wanted = list(dict.fromkeys(value for value, target in reads if self.needs_total(value, target)))
        if not wanted:
            return None, ()
        for value in wanted:
            if value.node in self.graph.parameter_dependent:
                node = self.graph.by_name[value.node]
                raise PlanError(
                    f"{node.op} ({node.module}, {node.source}) is needed summed over all micro-batches, but depends on parameters: "
                    "plan with microbatches=1"
                )
        nested = Lowering(self.graph, self.plan, {PIPE: 0, **self._coordinates()}, "step", self.training, self.opaque)
        module, names = nested.flat(wanted)
        self.prologue_sources = {**nested.buffers, **nested.constants}
        self.prologue_keys = [k for v in wanted if (k := self.summed(v, self.everywhere(v))) is not None]
        return module, names

    def _coordinates(self) -> dict[str, int]:
        return {axis.name: coord for axis, coord in zip(self.axes, self.coords)}

    def flat(self, wanted: Sequence[Value]) -> tuple[fx.GraphModule, tuple[str, ...]]:
        """A graph of inputs alone that returns ``wanted`` in the shardings they are produced with."""
        needed, nodes = {v.node for v in wanted}, []
        for node in reversed(self.graph.nodes):
            if node.name in needed:
                nodes.append(node)
                needed.update(v.node for v in node.inputs)
        nodes.reverse()
        root = self.parts[ROOT]
        inputs = [n for n in nodes if n.op == INPUT]
        for i, node in enumerate(inputs):
            value = Value(node.name)
            self.provide(root, (value, self.produced(value)), root.placeholder(f"input_{i}"))
        root.micro = root.placeholder("micro")
        self.place_sources(nodes)
        for node in nodes:
            if not node.is_source:
                self.emit(node)
        module = self.assemble([("key", (v, self.produced(v))) for v in wanted])
        return module, tuple(n.target for n in inputs)

    # ------------------------------------------------------------ assembly

    def assemble(self, finals: Sequence[Any]) -> fx.GraphModule:
        """Close every segment with the keys that later parts import, call them in order from the root, return the finals."""
        root = self.parts[ROOT]
        segments = [self.parts[i] for i in sorted(self.parts) if i != ROOT]
        needed = [key for part in segments for key in part.imports] + [final[1] for final in finals]
        for key in dict.fromkeys(needed):
            owner = self.parts[self.owner[key]]
            if owner is not root:
                owner.exports.append(key)
        modules: dict[str, Any] = dict(root.attributes)
        for part in segments:
            if not part.exports:
                continue
            name = f"seg_{part.number}"
            part.graph.output(tuple(part.nodes[key] for key in part.exports))
            modules[name] = self.module(part, name)
            arguments = [root.nodes[key] for key in part.imports]
            if part.micro is not None:
                arguments.insert(_position(part), self.micro_in(root))
            call = root.graph.call_module(name, tuple(arguments))
            for i, key in enumerate(part.exports):
                root.nodes[key] = root.graph.call_function(_item, (call, i))
        results = []
        for final in finals:
            if final[0] == "convert" and final[2] not in root.nodes:
                self.convert(root, root.nodes[final[1]], final[1], final[2])
            results.append(root.nodes[final[-1]])
        root.graph.output(tuple(results))
        return fx.GraphModule(_holder(modules), root.graph, "Stage")

    def module(self, part: Part, name: str) -> fx.GraphModule:
        module = fx.GraphModule(_holder(part.attributes), part.graph, name)
        return recompute_segment(module, self.plan.recompute[part.number])


def _position(part: Part) -> int:
    """Where ``micro`` stands among the segment's placeholders."""
    return [n for n in part.graph.nodes if n.op == "placeholder"].index(part.micro)


def _holder(attributes: Mapping[str, Any]) -> nn.Module:
    holder = nn.Module()
    for name, value in attributes.items():
        if isinstance(value, nn.Parameter):
            holder.register_parameter(name, value)
        elif isinstance(value, nn.Module):
            holder.add_module(name, value)
        else:
            holder.register_buffer(name, value, persistent=False)
    return holder


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text)


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index]
