"""The command line: ``shardwright`` and ``python -m planner``.

Exit codes: 0 ok, 2 usage, 3 infeasible, 4 invalid plan, 5 a worker failed. Errors are one line on stderr.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from planner.cli_parts import guarded, load_target, parse_counts, parse_layout, stdout_for_json
from planner.errors import BatchError, InfeasibleError, InputError, WorkerError
from planner.plan import Plan
from planner.plan_io import load_plan, write_aside
from planner.show import units

app = typer.Typer(
    name="shardwright", help="Plan, inspect and run parallel training of PyTorch models.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip

PlanFile = Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")]
TargetText = Annotated[str, typer.Argument(help="module:function returning a model or (model, example_inputs[, loss]).", metavar="TARGET")]
Hardware = Annotated[str | None, typer.Option(help="Preset (h100, h100:16x8, ...) or profile JSON; default: this machine.")]
Memory = Annotated[str | None, typer.Option("--memory-per-gpu", help="Limit, such as 70GiB; default: the profile's.")]
Optimizer = Annotated[str, typer.Option(help="adamw, sgd, sgd-momentum, none, or bytes of state per parameter.")]
Precision = Annotated[str, typer.Option(help="fp32, bf16-mixed or fp16-mixed.")]
Layout = Annotated[str | None, typer.Option(help="Force a part of it: data=2,tensor=2,pipe=1,microbatches=4,...")]
TimeLimit = Annotated[float, typer.Option(help="Seconds for the solver.")]
Meta = Annotated[bool, typer.Option("--meta", help="Build the model on the meta device: no memory is allocated.")]


def make_plan(
    target: str, gpus: int, hardware: str | None, memory: str | None, optimizer: str, precision: str, layout: str | None, limit: float,
    meta: bool,
) -> Plan:  # fmt: skip
    forced, loaded = parse_layout(layout), load_target(target, meta)
    from planner.api import auto_parallelize

    return auto_parallelize(
        loaded.model,
        gpus,
        example_inputs=loaded.example_inputs,
        hardware=hardware,
        memory_per_gpu=memory,
        optimizer=int(optimizer) if optimizer.isdigit() else optimizer,
        precision=precision,
        layout=forced,
        loss=loaded.loss,
        time_limit=limit,
    )


@app.command("plan")
@guarded
def plan_command(
    target: TargetText,
    gpus: Annotated[int, typer.Option(help="How many GPUs (or local processes).")] = 4,
    hardware: Hardware = None,
    memory: Memory = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    layout: Layout = None,
    time_limit: TimeLimit = 60.0,
    meta: Meta = False,
    out: Annotated[str, typer.Option("--out", "-o", help="Where to write the plan; - is stdout.")] = "plan.json",
) -> None:
    """Make the fastest plan that fits, write it, and show it."""
    with stdout_for_json() if out == "-" else contextlib.nullcontext():
        plan = make_plan(target, gpus, hardware, memory, optimizer, precision, layout, time_limit, meta)
    if out == "-":
        typer.echo(plan.to_json(), nl=False)
        return
    plan.save(out)
    plan.show()
    typer.echo(f"wrote {out}")


@app.command()
@guarded
def explain(plan: PlanFile) -> None:
    """Say why each choice was made, what the runners-up would cost, and what binds."""
    typer.echo(load_plan(plan).explain(), nl=False)


@app.command()
@guarded
def diff(before: PlanFile, after: PlanFile) -> None:
    """List what changes from one plan to another."""
    typer.echo(str(load_plan(before).diff(load_plan(after))))


@app.command()
@guarded
def validate(plan: PlanFile) -> None:
    """Check a plan file; exit code 4 where it is not sound."""
    loaded = load_plan(plan)
    ops = sum(len(segment.ops) for segment in loaded.segments)
    typer.echo(
        f"{plan}: valid; {loaded.model.name} on {loaded.world_size} × {loaded.hardware}, {loaded.mesh.mesh()}, "
        f"{units.count(ops, 'op')} in {units.count(len(loaded.segments), 'segment class', 'es')}"
    )


@app.command()
@guarded
def show(
    plan: PlanFile,
    html: Annotated[Path | None, typer.Option("--html", "--out", "-o", help="Where to write the page.")] = None,
) -> None:
    """Draw a plan in the terminal and write it as one self-contained HTML page."""
    loaded = load_plan(plan)
    loaded.show()
    page = html or plan.with_suffix(".html")
    loaded.show(page)
    typer.echo(f"wrote {page}")


@app.command()
@guarded
def trace(
    plan: PlanFile,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where to write the trace.")] = None,
) -> None:
    """Write the predicted schedule as a trace for ui.perfetto.dev."""
    from planner.show.perfetto import trace as make_trace

    path = out or plan.with_suffix(".trace.json")
    write_aside(path, make_trace(load_plan(plan)).encode())
    typer.echo(f"wrote {path}; open it in ui.perfetto.dev")


@app.command()
@guarded
def simulate(
    target: TargetText,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, such as 1,2,4,8.")] = "1,2,4,8",
    hardware: Hardware = None,
    memory: Memory = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    layout: Layout = None,
    time_limit: TimeLimit = 60.0,
    meta: Meta = False,
) -> None:
    """Plan for several numbers of GPUs and print how the predicted step scales (the global batch stays the same)."""
    rows: list[tuple[int, Plan | Exception]] = []
    for count in parse_counts(gpus):
        try:
            rows.append((count, make_plan(target, count, hardware, memory, optimizer, precision, layout, time_limit, meta)))
        except (InfeasibleError, BatchError) as error:
            rows.append((count, error))
    Console().print(scaling_table(rows))
    if all(isinstance(made, Exception) for _, made in rows):
        raise InfeasibleError(f"no plan for any of {gpus} GPUs; the reasons are in the table")


def scaling_table(rows: list[tuple[int, Plan | Exception]]) -> Table:
    """One row per number of GPUs; speed-up and efficiency against the smallest number that has a plan."""
    caption = "mesh: pipe × data × tensor; micro: micro-batches; memory: peak per GPU"
    table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for heading in ("gpus", "mesh", "micro", "step", "speed-up", "efficiency", "memory", "solver"):
        table.add_column(heading, justify="left" if heading == "solver" else "right")
    plans = [(count, made) for count, made in rows if isinstance(made, Plan)]
    base_gpus, base = min(plans, key=lambda row: row[0], default=(1, None))
    for count, made in rows:
        if isinstance(made, Exception) or base is None:
            table.add_row(str(count), "-", "-", "-", "-", "-", "-", str(made).splitlines()[0])
            continue
        speedup = base.predicted.step_time_s / made.predicted.step_time_s
        mesh = made.mesh
        table.add_row(
            str(count), f"{mesh.pipe}×{mesh.data}×{mesh.tensor}", str(mesh.microbatches), units.seconds(made.predicted.step_time_s),
            f"{speedup:.2f}×", units.share(speedup * base_gpus / count), units.nbytes(max(made.predicted.peak_memory_bytes)),
            made.solver.status,
        )  # fmt: skip
    return table


@app.command()
@guarded
def profile(
    hardware: Annotated[str | None, typer.Argument(help="Preset or profile JSON to show; default: measure this machine.")] = None,
    ranks: Annotated[int, typer.Option(help="How many ranks work at the same time.")] = 4,
    device: Annotated[str, typer.Option(help="cpu or cuda, for measuring.")] = "cpu",
    budget: Annotated[float, typer.Option(help="Seconds for measuring.")] = 30.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where to write the profile.")] = None,
    shown: Annotated[bool, typer.Option("--show", help="Print the tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write tables and curves as one HTML page.")] = None,
) -> None:
    """Measure this machine (or take a known profile), write the profile, print its tables."""
    from cost_models import load_profile, measure_profile
    from cost_models.show import to_html, to_text

    made = load_profile(hardware, ranks=ranks) if hardware else measure_profile(ranks, budget, device)
    if out:
        write_aside(out, made.to_json().encode())
        typer.echo(f"wrote {out} (profile {made.name}, id {made.id})")
    if html:
        write_aside(html, to_html(made).encode())
        typer.echo(f"wrote {html}")
    if shown or not (out or html):
        typer.echo(to_text(made), nl=False)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@guarded
def run(
    plan: PlanFile,
    script: Annotated[Path, typer.Argument(help="Python script to start on every rank.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    nnodes: Annotated[int, typer.Option(help="Number of nodes; this command runs on each.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Which node this is.")] = 0,
    master: Annotated[str, typer.Option(help="host:port of node 0, for several nodes.")] = "",
) -> None:
    """Start a script with torchrun, one process per rank of the plan; the plan's path is in $SHARDWRIGHT_PLAN."""
    loaded = load_plan(plan)
    if not script.is_file():
        raise InputError(f"script {str(script)!r} does not exist")
    command = torchrun_command(loaded, script, arguments or [], nnodes, node_rank, master)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "SHARDWRIGHT_PLAN": str(plan.resolve())}
    code = subprocess.run(command, env=environment).returncode
    if code:
        raise WorkerError(f"a worker of {str(script)!r} failed: torchrun ended with code {code}; what it said is above")


def torchrun_command(plan: Plan, script: Path, arguments: list[str], nnodes: int, node_rank: int, master: str) -> list[str]:
    """On one node everything stays on the loopback."""
    if nnodes < 1 or plan.world_size % nnodes:
        raise InputError(f"nnodes={nnodes}: the plan's {plan.world_size} ranks must divide evenly over the nodes")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={plan.world_size // nnodes}", f"--nnodes={nnodes}"]
    if nnodes == 1:
        command += ["--standalone", "--local-addr=127.0.0.1"]
    else:
        host, colon, port = master.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise InputError(f"master {master!r}: with nnodes={nnodes} give --master host:port of node 0")
        command += [f"--node-rank={node_rank}", f"--master-addr={host}", f"--master-port={port}"]
    return [*command, str(script), *arguments]


def main() -> None:
    app()


if __name__ == "__main__":
    main()
