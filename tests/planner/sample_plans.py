"""Hand-made plans: sound ones, so that tests of reading, drawing and comparing need neither a model nor a solver."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from planner.plan import Plan
from planner.plan_check import check

MLP_IN = "aten.linear.default"


def sharding(mesh: dict[str, int], **types: str) -> str:
    """A sharding's text for the axes that the mesh has; R on those not named."""
    names = [name for name, key in (("micro", "microbatches"), ("data", "data"), ("tensor", "tensor")) if mesh[key] > 1]
    return ",".join(types.get(name, "R") for name in names) or "-"


def data(pipe: int = 2, data: int = 2, tensor: int = 2, microbatches: int = 4, layers: int = 4, fsdp: bool = True) -> dict[str, Any]:
    """The data of a transformer's plan: embedding, ``layers`` equal blocks, a head with the loss."""
    mesh = {"pipe": pipe, "data": data, "tensor": tensor, "microbatches": microbatches}

    def t(**types: str) -> str:
        return sharding(mesh, **{"micro": "S(0)", "data": "S(0)", **types})

    def w(**types: str) -> str:
        return sharding(mesh, **types)

    fsdp = fsdp and data > 1
    block_ops = [
        f"aten.layer_norm.default: {t(tensor='I')} | {w(tensor='I')} | {w(tensor='I')} -> {t(tensor='I')}",
        f"aten.linear.default: {t()} | {w(tensor='S(0)')} -> {t(tensor='S(2)')}",
        f"aten.scaled_dot_product_attention.default: {t(tensor='S(1)')} | {t(tensor='S(1)')} | {t(tensor='S(1)')} -> {t(tensor='S(1)')}",
        f"aten.linear.default: {t(tensor='S(2)')} | {w(tensor='S(1)')} -> {t(tensor='P')}",
        f"aten.add.Tensor: {t(tensor='I')} | {t(tensor='I')} -> {t(tensor='I')}",
        f"aten.linear.default: {t()} | {w(tensor='S(0)')} -> {t(tensor='S(2)')}",
        f"aten.gelu.default: {t(tensor='S(2)')} -> {t(tensor='S(2)')}",
        f"aten.linear.default: {t(tensor='S(2)')} | {w(tensor='S(1)')} -> {t(tensor='P')}",
        f"aten.add.Tensor: {t(tensor='S(1)')} | {t(tensor='S(1)')} -> {t(tensor='S(1)')}",
    ]
    kernel = " @vocab_embedding" if tensor > 1 else ""
    embed_ops = [f"aten.embedding.default: {w(tensor='S(0)')} | {t()} -> {t(tensor='P')}{kernel}"]
    head_ops = [
        f"aten.linear.default: {t()} | {w(tensor='S(0)')} -> {t(tensor='S(2)')}",
        f"aten.cross_entropy_loss.default: {t(tensor='S(1)')} | {t()} -> {sharding(mesh, micro='P', data='P', tensor='P')}",
    ]
    cut = (layers + 2) // pipe
    firsts = [i * cut for i in range(pipe)] + [layers + 2]
    stage_memory = {"parameters": 400_000_000, "gradients": 400_000_000, "optimizer": 800_000_000, "activations": 1_300_000_000}
    breakdown = {"forward": 0.020, "backward": 0.040, "communication": 0.018, "bubble": 0.02, "optimizer": 0.002}
    parameters = {
        "embed.weight": ("float32[1000,64]", w(tensor="S(0)"), False),
        "layers.*.norm.weight": ("float32[64]", w(tensor="I"), False),
        "layers.*.qkv.weight": ("float32[192,64]", w(tensor="S(0)"), fsdp),
        "layers.*.out.weight": ("float32[64,64]", w(tensor="S(1)"), fsdp),
        "layers.*.up.weight": ("float32[256,64]", w(tensor="S(0)"), fsdp),
        "layers.*.down.weight": ("float32[64,256]", w(tensor="S(1)"), fsdp),
        "head.weight": ("float32[1000,64]", w(tensor="S(0)"), fsdp),
    }
    return {
        "schema_version": 1,
        "model": {
            "name": "ToyTransformer",
            "fingerprint": "0123456789abcdef" * 4,
            "torch": "2.13.0",
            "loss": "callable",
            "parameters": {name: text for name, (text, _, _) in parameters.items()},
            "inputs": {"args": [{"tensor": "tokens", "shape": [16, 32], "dtype": "int64"}], "kwargs": []},
            "batch_dims": {"tokens": 0},
        },
        "mesh": mesh,
        "schedule": "1f1b" if pipe > 1 else "none",
        "stages": [{"first": first, "last": last} for first, last in pairwise(firsts)],
        "segments": [
            {"name": "embed", "segments": [0], "ops": embed_ops, "recompute": "none"},
            {"name": "layers.*", "segments": list(range(1, layers + 1)), "ops": block_ops, "recompute": "full"},
            {"name": "head", "segments": [layers + 1], "ops": head_ops, "recompute": "none"},
        ],
        "parameters": [{"name": name, "sharding": text, "fsdp": shard} for name, (_, text, shard) in parameters.items()],
        "optimizer": "adamw",
        "precision": "fp32",
        "hardware": "h100",
        "hardware_id": "h100-abc123",
        "memory_per_gpu": 4_000_000_000,
        "predicted": {
            "step_time_s": 0.1,
            "peak_memory_bytes": [2_900_000_000] * pipe,
            "breakdown": breakdown,
            "memory": [dict(stage_memory) for _ in range(pipe)],
            "replicated_time_share": 0.01,
        },
        "solver": {
            "status": "optimal",
            "objective": 0.1,
            "bound": 0.1,
            "gap": 0.0,
            "seconds": 1.5,
            "scope": "all meshes of 8 GPUs with 1 to 16 micro-batches",
            "candidates": 37,
        },
        "alternatives": [
            {"what": "pipe=1 data=8 tensor=1 microbatches=1", "step_time_s": 0.125, "why": "communication 0.05 s"},
            {"what": "pipe=8 data=1 tensor=1 microbatches=16", "step_time_s": 0.18, "why": "bubble 0.06 s"},
            {"what": "pipe=1 data=1 tensor=8 microbatches=1", "step_time_s": None, "why": "needs 5.1 GB of 4.0 GB"},
        ],
        "warnings": ["aten.foo.default has no rule: replicated, 0.001 s of every step (layers.0.moe)"],
    }


def plan(**sizes: Any) -> Plan:
    """The plan of ``data``, checked."""
    made = Plan.model_validate(data(**sizes))
    check(made)
    return made
