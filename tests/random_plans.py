"""Plans with random (legal) choices: if any choice is legal, every choice must give the plain model's results."""

import random

import torch

from planner.assignment import axis_strategies
from planner.blocks import segments
from planner.errors import ReshardError
from planner.graph import BUFFER, CONSTANT, INPUT, PARAMETER, Graph, Value
from planner.mesh import MICRO, Mesh
from planner.micro import propagate_micro
from planner.plan import MeshPlan, ModelPlan, ParameterPlan, Plan, Predicted, SegmentPlan, SolverReport, StagePlan
from planner.reshard import steps
from planner.rules.base import over_mesh, rule_of
from planner.sharding import I, R, S, show


def random_plan(graph: Graph, mesh: Mesh, seed: int, training: bool = True) -> Plan:
    rng = random.Random(seed)
    micro = propagate_micro(graph, mesh.microbatches).strategies if mesh.microbatches > 1 else {}
    produced = {}
    batch = dict(graph.batch_dims)
    for node in graph.nodes:
        if node.op in (INPUT, BUFFER, CONSTANT):
            dim = batch.get(node.target) if node.op == INPUT else None
            produced[Value(node.name)] = tuple(S(dim) if dim is not None and a.name != "tensor" else R for a in mesh.axes)
    parameters, lines = {}, {}
    for node in graph.of(PARAMETER):
        options = [R, I] if node.grad[0] else [R]
        shape = node.outputs[0].shape
        chosen = []
        for axis in mesh.axes:
            free = [d for d, n in enumerate(shape) if n % axis.size == 0 and n and not any(t == S(d) for t in chosen)]
            chosen.append(R if axis.is_time else rng.choice([*options, *map(S, free)]))
        produced[Value(node.name)] = parameters[node.name] = tuple(chosen)
    parts = segments(graph)
    for part in parts:
        for name in part.nodes:
            node = graph.by_name[name]
            rule = rule_of(node, [graph.spec(v) for v in node.inputs])
            per_axis = [[micro[name]] if a.name == MICRO else axis_strategies(graph, node, rule, a.size) for a in mesh.axes]
            legal = []
            for strategy in over_mesh(rule, per_axis, mesh.sizes):
                try:
                    for i, value in enumerate(node.inputs):
                        if mesh.axes:
                            steps(produced[value], strategy.inputs[i], graph.spec(value).shape, mesh.sizes, graph.has_grad(value))
                except ReshardError:
                    continue
                legal.append(strategy)
            strategy = rng.choice(legal)
            for i in range(len(node.outputs)):
                produced[Value(name, i)] = strategy.outputs[i] if mesh.axes else ()
            lines[name] = f"{node.op}: {strategy}" + (f" @{strategy.kernel}" if strategy.kernel else "")
    cuts = sorted(rng.sample(range(1, len(parts)), mesh.pipe - 1)) if mesh.pipe > 1 else []
    return Plan(
        model=ModelPlan(name="random", fingerprint=graph.fingerprint(), torch=torch.__version__, loss="output", parameters={},
                        inputs=graph.in_spec, batch_dims=batch),
        mesh=MeshPlan(pipe=mesh.pipe, data=mesh.data, tensor=mesh.tensor, microbatches=mesh.microbatches),
        schedule="1f1b" if mesh.pipe > 1 else "none",
        stages=[StagePlan(first=a, last=b) for a, b in zip([0, *cuts], [*cuts, len(parts)])],
        segments=[SegmentPlan(name=p.name, segments=[p.index], ops=[lines[n] for n in p.nodes]) for p in parts],
        parameters=[ParameterPlan(name=graph.by_name[n].target, sharding=show(s)) for n, s in parameters.items()],
        optimizer="adamw", precision="fp32", hardware="none", hardware_id="none", memory_per_gpu=0,
        predicted=Predicted(step_time_s=0.0, peak_memory_bytes=[], breakdown={}, memory=[]),
        solver=SolverReport(status="forced", objective=0.0, bound=0.0, gap=0.0, seconds=0.0, scope="random"),
    )  # fmt: skip
