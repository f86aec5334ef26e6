"""Collectives over real processes: every move of every type, even and uneven, against one process that holds the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from planner.errors import PlanError, WorkerError
from planner.mesh import Mesh
from runtime.collectives import convert, use
from runtime.groups import check_world, connect
from runtime.launch import run_processes

CPU = torch.device("cpu")


def moves(length: int, dtype: torch.dtype) -> list[str]:
    ranks = connect(Mesh(data=dist.get_world_size()), 20.0, CPU)
    n, me = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randint(-8, 9, (length, 3, length), generator=generator).to(dtype) for _ in range(n)]
    whole = sum(parts[1:], parts[0])
    wrong = []

    def expect(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if got.dtype != want.dtype or not torch.equal(got, want):
            wrong.append(name)

    def mine(x: torch.Tensor, dim: int) -> torch.Tensor:
        chunks = x.chunk(n, dim)
        return chunks[me] if me < len(chunks) else x.narrow(dim, 0, 0)

    with use(ranks.axes):
        expect("P->R", convert(parts[me], "data", "P", "R", 0), whole)
        for dim in (0, 2):
            expect(f"P->S({dim})", convert(parts[me], "data", "P", f"S({dim})", 0), mine(whole, dim))
            expect(f"S({dim})->R", convert(mine(whole, dim), "data", f"S({dim})", "R", length), whole)
            other = 2 - dim
            expect(f"S({dim})->S({other})", convert(mine(whole, dim), "data", f"S({dim})", f"S({other})", length), mine(whole, other))
    return wrong


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("length", [6, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_moves(world: int, length: int, dtype: torch.dtype) -> None:
    assert run_processes(moves, world, (length, dtype), timeout_s=60, start="fork") == [[]] * world


def test_gathering_booleans() -> None:
    def gather() -> list[bool]:
        ranks = connect(Mesh(tensor=2), 20.0, CPU)
        with use(ranks.axes):
            return convert(torch.tensor([dist.get_rank() == 1]), "tensor", "S(0)", "R", 2).tolist()

    assert run_processes(gather, 2, timeout_s=60, start="fork") == [[False, True]] * 2


def test_axes_join_the_right_ranks() -> None:
    def along() -> list[list[int]]:
        ranks = connect(Mesh(pipe=2, tensor=2), 20.0, CPU)
        names = ("pipe", "data", "tensor", "stage", "world")
        return [dist.get_process_group_ranks(ranks.groups[name]) for name in names]

    first, *_, last = run_processes(along, 4, timeout_s=60, start="fork")
    assert first == [[0, 2], [0], [0, 1], [0, 1], [0, 1, 2, 3]]
    assert last == [[1, 3], [3], [2, 3], [2, 3], [0, 1, 2, 3]]


def test_a_wait_ends_and_names_the_collective() -> None:
    def wait() -> None:
        ranks = connect(Mesh(data=2), 1.0, CPU)
        if ranks.rank == 0:
            with use(ranks.axes):
                convert(torch.ones(2), "data", "P", "R", 0)
        else:
            dist.barrier()

    with pytest.raises(WorkerError, match=r"all_reduce over axis data \(2 ranks\) failed at rank 0 \(pipe 0, data 0, tensor 0\)"):
        run_processes(wait, 2, timeout_s=30, start="fork")


def test_the_wrong_number_of_processes_is_named_before_any_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PlanError, match="made for 4 processes, 2 are running"):
        check_world(4)
