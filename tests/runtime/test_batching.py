"""The batch, cut: every element goes to one rank and one micro-batch, in the order that the shardings of the inputs say."""

from __future__ import annotations

import pytest
import torch

from planner.mesh import Mesh
from planner.sharding import S
from runtime.batching import cut, expected_spec
from runtime.collectives import own_part


@pytest.mark.parametrize(("size", "data", "micro"), [(8, 2, 1), (8, 2, 2), (12, 3, 2), (5, 2, 1), (8, 1, 4)])
def test_cut_agrees_with_the_shardings(size: int, data: int, micro: int) -> None:
    mesh = Mesh(data=data, microbatches=micro)
    x, mask = torch.arange(3 * size).view(3, size), torch.ones(2, 2)
    for rank in range(data):
        parts = cut({"x": x, "mask": mask}, {"x": size}, {"x": 1}, mesh, rank, "global")
        assert len(parts) == micro
        for index, part in enumerate(parts):
            assert torch.equal(part["x"], own_part(own_part(x, S(1), micro, index), S(1), data, rank))
            assert part["x"].is_contiguous() and part["mask"] is mask
        own = torch.cat([part["x"] for part in parts], 1)
        again = cut({"x": own, "mask": mask}, {"x": size}, {"x": 1}, mesh, rank, "local")
        assert all(torch.equal(a["x"], b["x"]) for a, b in zip(parts, again))


def test_what_a_call_must_fit() -> None:
    leaf = {"tensor": "x", "shape": [6, 4], "dtype": "float32"}
    spec = {"args": [leaf, {"value": 3}], "kwargs": [["m", {"list": [{"tensor": "m", "shape": [6], "dtype": "bool"}]}]]}
    assert expected_spec(spec, {"x": 0}, Mesh(data=2), 0, "global") is spec
    local = expected_spec(spec, {"x": 0}, Mesh(data=4), 3, "local")
    assert local["args"][0]["shape"] == [0, 4] and local["kwargs"] == spec["kwargs"]
    assert expected_spec(spec, {"x": 0}, Mesh(data=2), 1, "local")["args"][0]["shape"] == [3, 4]
