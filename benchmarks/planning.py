"""How long planning takes, how large the problems are, how near to optimal the plans.

    python benchmarks/planning.py             # small models and one Llama-8B layer class: about a minute on two slow cores
    python benchmarks/planning.py --large     # and Llama-3-8B on 8, Llama-3-70B on 128 H100 (meta device): several minutes

Prints a table with the machine and the command that made it.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from cost_models import load_profile
from planner import auto_parallelize
from planner.attempt import Request, Workshop
from planner.candidates import Candidate, Pins
from planner.costs import Precision
from planner.ilp.contract import contract
from planner.ilp.formulate import formulate
from planner.ilp.solve_pulp import solve
from planner.memory import Optimizer
from planner.mesh import Mesh
from planner.trace import capture

LLAMA = {
    "8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "70B": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
}


def gpt2(layers: int = 2) -> torch.nn.Module:
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=layers, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config)


def llama(size: str, layers: int | None = None) -> torch.nn.Module:
    fields: dict[str, Any] = {**LLAMA[size], "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
    if layers is not None:
        fields["num_hidden_layers"] = layers
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**fields, use_cache=False, attn_implementation="sdpa"))


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.empty(rows, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def problems() -> Iterator[tuple[str, ...]]:
    """One mesh at a time: size of the problem, seconds to build and to solve it."""
    cases = [
        ("GPT-2 tiny, 2 layers", gpt2(2), batch(8, 64), Mesh(1, 2, 2), "h100:4"),
        ("GPT-2 tiny, 100 layers", gpt2(100), batch(8, 64), Mesh(1, 2, 2), "h100:4"),
        ("Llama-3-8B, 3 layers", llama("8B", 3), batch(64, 4096), Mesh(1, 64, 1), "h100:8x8"),
        ("Llama-3-8B, 3 layers", llama("8B", 3), batch(64, 4096), Mesh(1, 8, 8), "h100:8x8"),
        ("Llama-3-8B, 3 layers", llama("8B", 3), batch(64, 4096), Mesh(2, 4, 8, 8), "h100:8x8"),
    ]
    for name, model, inputs, mesh, hardware in cases:
        graph = capture(model, ((), inputs)).graph
        profile = load_profile(hardware, ranks=mesh.world_size)
        request = Request(mesh.world_size, 1e15, Optimizer.of("adamw"), Precision(), Pins(), 60.0)
        shop, started = Workshop(graph, profile, request), time.perf_counter()
        prepared = shop.prepare(Candidate(mesh, "1f1b" if mesh.pipe > 1 else "none"))
        formulation = formulate(contract(prepared.tables.problem))
        built = time.perf_counter()
        solution = solve(formulation.program, 60.0)
        variables, rows = formulation.program.size
        choices = sum(map(len, formulation.x))
        ended = time.perf_counter()
        yield (name, str(len(graph.nodes)), str(mesh), f"{choices:,}", f"{variables:,}", f"{rows:,}", f"{built - started:.2f}",
               f"{ended - built:.2f}", solution.status)  # fmt: skip


def plans(large: bool) -> Iterator[tuple[str, ...]]:
    """Whole calls of ``auto_parallelize``."""
    cases: list[tuple[str, torch.nn.Module, dict[str, torch.Tensor], int, str, dict[str, Any]]] = [
        ("GPT-2 tiny", gpt2(2), batch(8, 64), 4, "h100", {}),
        ("GPT-2 tiny", gpt2(2), batch(8, 64), 4, "cpu", {}),
        ("GPT-2 tiny", gpt2(2), batch(16, 64), 8, "h100", {}),
    ]
    if large:
        cases.append(("Llama-3-8B", llama("8B"), batch(16, 4096), 8, "h100", {"precision": "bf16-mixed"}))
        cases.append(("Llama-3-70B", llama("70B"), batch(512, 4096), 128, "h100:16x8", {"precision": "bf16-mixed", "time_limit": 120.0}))
    for name, model, inputs, gpus, hardware, options in cases:
        spec = hardware if ":" in hardware else f"{hardware}:{gpus}"
        started = time.perf_counter()
        plan = auto_parallelize(model, gpus, example_inputs=inputs, hardware=spec, **options)
        took, report = time.perf_counter() - started, plan.solver
        figures = (f"{report.gap:.2%}", str(report.candidates), f"{report.seconds:.1f}", f"{took:.1f}", f"{len(plan.to_json()) / 1000:.1f}")
        yield (name, f"{gpus} x {hardware}", str(plan.mesh.mesh()), f"{plan.predicted.step_time_s * 1e3:.4g}", report.status, *figures)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    console = Console(width=160)
    machine = f"{platform.machine()}, {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f})"
    console.print(f"python {' '.join(sys.argv)}    {machine}, Python {platform.python_version()}, torch {torch.__version__}")
    one = Table("model", "nodes", "mesh", "strategies", "variables", "rows", "build s", "solve s", "status", title="One problem")
    for row in problems():
        one.add_row(*row)
    console.print(one)
    columns = ("model", "on", "plan", "step ms", "status", "gap", "candidates", "search s", "in all s", "plan kB")
    all_of_it = Table(*columns, title="auto_parallelize")
    for row in plans("--large" in sys.argv[1:]):
        all_of_it.add_row(*row)
    console.print(all_of_it)


if __name__ == "__main__":
    main()
