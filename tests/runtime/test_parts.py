"""Parts of tensors: they tile the whole, and agree with what collectives and DTensor call a rank's part."""

from __future__ import annotations

import itertools

import pytest
import torch

from planner.mesh import Mesh
from planner.sharding import R, S, Sharding
from runtime.collectives import own_part
from runtime.parts import Part, common, part_of, shifted, whole_part

CASES = [
    ((12, 5), (R, R), False),
    ((12, 5), (S(0), R), False),
    ((13, 5), (R, S(1)), False),
    ((12, 5), (S(0), S(0)), False),
    ((12, 6), (R, S(0, 3)), False),
    ((12, 6), (S(1), S(0, 3)), False),
    ((12, 6), (R, S(0, 3)), True),
    ((7, 3), (R, S(0)), True),
    ((3,), (R, R), True),
    ((5, 4), (R, S(1)), True),
]


@pytest.mark.parametrize(("shape", "sharding", "fsdp"), CASES, ids=str)
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2)])
def test_parts_tile_the_whole(shape: tuple[int, ...], sharding: Sharding, fsdp: bool, sizes: tuple[int, int]) -> None:
    mesh = Mesh(data=sizes[0], tensor=sizes[1])
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    back = torch.full(shape, -1.0)
    held = 0
    for d, t in itertools.product(range(sizes[0]), range(sizes[1])):
        part = part_of(shape, sharding, mesh, {"pipe": 0, "data": d, "tensor": t}, fsdp)
        local = part.take(whole)
        assert local.shape == part.shape
        part.put(local, back)
        held += local.numel()
        expected = whole
        for type_, size, coord in zip(sharding, sizes, (d, t)):
            expected = own_part(expected, type_, size, coord) if type_.is_split else expected
        chunks = expected.chunk(sizes[0]) if fsdp else (expected,) * sizes[0]
        assert torch.equal(local, chunks[d] if d < len(chunks) else expected[:0])
    assert torch.equal(back, whole)
    copies = 1
    for type_, size, is_data in zip(sharding, sizes, (True, False)):
        copies *= 1 if type_.is_split or (fsdp and is_data) else size
    assert held == whole.numel() * copies


def test_scalars_and_empty_tensors() -> None:
    assert whole_part(()).take(torch.tensor(3.0)).item() == 3.0
    assert whole_part((0, 4)).is_empty
    part = Part((((0, 3),),)).split(0, 4, 3)
    assert part.is_empty and part.shape == (0,)


def test_blocks_in_common() -> None:
    a, b = ((0, 4), (2, 6)), ((2, 4), (0, 4))
    shared = common(a, b)
    assert shared == ((2, 2), (2, 2))
    assert shifted(shared, a, ((10, 4), (0, 6))) == ((12, 2), (0, 2))
    assert common(a, ((4, 2), (0, 4))) is None
