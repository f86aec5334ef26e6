"""Run a lowered plan with ranks as threads, all stages of a coordinate in a row, and put the pieces together again."""

import torch

from planner.graph import Graph
from planner.mesh import Mesh
from planner.plan import Plan
from planner.sharding import P, S
from runtime.collectives import own_part
from runtime.lower import lower
from runtime.simulate import simulate


def install(module: torch.nn.Module, path: str, value) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        module = getattr(module, parent)
    module._parameters.pop(name, None)
    module._buffers.pop(name, None)
    if isinstance(value, torch.nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value)


def part(whole, sharding, mesh: Mesh, at, micro=0):
    for type_, axis in zip(sharding, mesh.axes):
        if type_.is_split:
            whole = own_part(whole, type_, axis.size, micro if axis.is_time else at[axis.name])
    return whole


def batch_part(graph: Graph, name: str, tensor, mesh: Mesh, at, micro):
    dim = dict(graph.batch_dims).get(name)
    if dim is None:
        return tensor
    for axis in mesh.axes:
        if axis.name != "tensor":
            tensor = own_part(tensor, S(dim), axis.size, micro if axis.is_time else at[axis.name])
    return tensor


def run(graph: Graph, constants, plan: Plan, model, inputs, mode="step", training=True):
    """(loss, {parameter: whole gradient}, {buffer: new value}) in mode step, {Value: whole output} in mode forward."""
    mesh = plan.mesh.mesh()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    grads_wanted = mode == "step"

    def body(at):
        stages, mine = [], {}
        for pipe in range(mesh.pipe):
            stage = lower(
                graph, plan, {"pipe": pipe, "data": at.get("data", 0), "tensor": at.get("tensor", 0)}, mode=mode, training=training
            )
            for name, info in stage.parameters.items():
                local = part(state[name].detach(), info.sharding, mesh, at).clone()
                p = torch.nn.Parameter(local, requires_grad=info.trainable and grads_wanted)
                install(stage.module, info.path, p)
                mine.setdefault(name, []).append((p, info))
            for name, path in stage.buffers.items():
                install(stage.module, path, state[name].detach().clone())
            for name, path in stage.constants.items():
                install(stage.module, path, constants[name])
            for name, path in stage.prologue_sources.items():
                install(stage.prologue, path, state[name].detach().clone() if name in state else constants[name])
            stages.append(stage)
        totals = []
        for stage in stages:
            sums = None
            for micro in range(mesh.microbatches if stage.prologue else 0):
                values = stage.prologue(*(batch_part(graph, n, inputs[n], mesh, at, micro) for n in stage.prologue_inputs), micro)
                sums = values if sums is None else [a + b for a, b in zip(sums, values)]
            totals.append(sums or [])
        loss, results, mutations = 0.0, [], {}
        for micro in range(mesh.microbatches):
            received = ()
            for stage, total in zip(stages, totals):
                local_inputs = [batch_part(graph, n, inputs[n], mesh, at, micro) for n in stage.inputs]
                out = stage.module(*received, *local_inputs, *total, micro)
                for crossing, value in zip(stage.sends, out):
                    assert tuple(value.shape) == crossing.spec.shape and str(value.dtype) == f"torch.{crossing.spec.dtype}"
                received = out[: len(stage.sends)]
                rest = out[len(stage.sends) :]
                if stage.mutations:
                    mutations |= dict(zip(stage.mutations, [v.detach() for v in rest[-len(stage.mutations) :]]))
            if mode == "step":
                rest[0].backward()
                loss = loss + rest[0].detach()
            else:
                results.append([r.detach() for r in rest[: len(stage.outputs)]])
        grads = {}
        for name, uses in mine.items():
            got = [p.grad for p, _ in uses if p.grad is not None]
            if got:
                grads[name] = (sum(got), uses[0][1])
        outputs = {}
        if mode == "forward":
            for i, piece in enumerate(stages[-1].outputs):
                parts = [r[i] for r in results]
                if piece.micro.is_split:
                    outputs[piece.value] = torch.cat(parts, piece.micro.dim)
                else:
                    outputs[piece.value] = sum(parts) if piece.micro == P else parts[-1]
        return loss, grads, mutations, outputs

    ranked = {a.name: a.size for a in mesh.axes if not a.is_time}
    results = simulate(ranked, body) if ranked else [body({})]
    coords = [dict(zip(ranked, c)) for c in _product(ranked)]
    losses = [r[0] for r in results]
    gradients = {}
    for name in {n for r in results for n in r[1]}:
        info = next(r[1][name][1] for r in results if name in r[1])
        gradients[name] = _whole(name, info, results, coords, mesh, state[name])
    return losses, gradients, results[0][2], results[0][3]


def _product(ranked):
    import itertools

    return itertools.product(*(range(n) for n in ranked.values()))


def _whole(name, info, results, coords, mesh, like):
    """Put gradient pieces together: pending sums add up, splits are placed, invariant ones must agree."""
    whole = torch.zeros(like.numel(), dtype=like.dtype)
    places = torch.arange(like.numel()).view(like.shape)
    counted = {}
    for result, at in zip(results, coords):
        invariant = {a.name for t, a in zip(info.sharding, mesh.axes) if not a.is_time and t.kind == "I"}
        piece = result[1][name][0] if name in result[1] else None
        if piece is None:
            continue
        same = counted.setdefault(tuple(n for a, n in at.items() if a not in invariant), piece)
        if same is not piece:
            assert float((same - piece).norm()) <= 1e-4 * float(same.norm()), f"{name}: ranks disagree at {at}"
            continue
        place = part(places, info.sharding, mesh, at)
        assert place.shape == piece.shape, f"{name}: gradient {tuple(piece.shape)}, expected {tuple(place.shape)} at {at}"
        whole.index_add_(0, place.reshape(-1), piece.reshape(-1))
    return whole.view(like.shape)
