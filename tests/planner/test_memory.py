"""Bytes and seconds of stored parameters, saved activations, recomputation."""

from __future__ import annotations

import itertools

import pytest
from small_graphs import Maker, mlp, prepared, profile

from planner.costs import BUCKET_BYTES, Precision, Pricer
from planner.errors import InputError
from planner.evaluate import evaluate
from planner.graph import Spec
from planner.ilp.problem import Q
from planner.memory import FSDP_BUFFERS, Optimizer, Storage, Unit, gathered_bytes, storage_cost, storages
from planner.mesh import Mesh
from planner.sharding import parse

FOUR_BY_TWO = Mesh(1, 4, 2)
SPEC = Spec((1024, 1024), "float32")
MIB4 = SPEC.nbytes


def cost(
    stored: str,
    use: str = "",
    fsdp: bool = False,
    mesh: Mesh = FOUR_BY_TWO,
    optimizer: str | int = "adamw",
    precision: str = "fp32",
    trains: bool = True,
):
    pricer = Pricer(profile("h100:8"), mesh, Precision(precision), True)
    storage = Storage(parse(stored), parse(use or stored), fsdp)
    return storage_cost(storage, SPEC, trains, pricer, Optimizer.of(optimizer), Unit(MIB4), 10 * BUCKET_BYTES)


def test_adamw_in_fp32_is_sixteen_bytes_per_parameter() -> None:
    whole = cost("R,R")
    assert whole[[Q["parameters"], Q["gradients"], Q["state"]]].tolist() == [MIB4, MIB4, 2 * MIB4]


@pytest.mark.parametrize(("optimizer", "state"), [("sgd", 0), ("sgd-momentum", MIB4), ("adamw", 2 * MIB4), (12, 3 * MIB4)])
def test_state_of_optimizers(optimizer: str | int, state: int) -> None:
    assert cost("R,R", optimizer=optimizer)[Q["state"]] == state


@pytest.mark.parametrize("bad", ["adam", -1, True, 1.5, None])
def test_unknown_optimizer(bad: object) -> None:
    with pytest.raises(InputError, match="optimizer="):
        Optimizer.of(bad)  # type: ignore[arg-type]


def test_storage_divides_everything_that_is_kept() -> None:
    quantities = [Q["parameters"], Q["gradients"], Q["state"], Q["optimizer"]]
    whole = cost("R,R")[quantities]
    assert cost("R,S(0)")[quantities] == pytest.approx(whole / 2)
    assert cost("R,R", fsdp=True)[quantities] == pytest.approx(whole / 4)
    assert cost("R,S(0)", fsdp=True)[quantities] == pytest.approx(whole / 8)


def test_gradients_are_summed_over_axes_typed_r_only() -> None:
    assert cost("R,R")[Q["sync"]] > cost("R,I")[Q["sync"]] > 0
    assert cost("I,I")[Q["sync"]] == cost("S(0),S(1)")[Q["sync"]] == 0
    fsdp = cost("R,I", fsdp=True)
    assert fsdp[Q["sync"]] == 0 and fsdp[Q["gather"]] > 0


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    frozen = cost("R,R", trains=False)
    assert frozen[Q["parameters"]] == MIB4
    assert not frozen[[Q["gradients"], Q["state"], Q["sync"], Q["optimizer"]]].any()


def test_mixed_precision_keeps_a_copy() -> None:
    assert cost("R,R", precision="bf16-mixed")[Q["parameters"]] == 1.5 * MIB4
    assert cost("R,R", precision="bf16-mixed")[Q["gradients"]] == MIB4


def test_storages_on_offer() -> None:
    pricer = Pricer(profile("h100:8"), Mesh(1, 4, 2), Precision(), True)
    offered = set(map(str, storages(SPEC, [parse("R,S(0)")], True, pricer, None)))
    assert offered == {"R,S(0) -> R,S(0)", "R,S(0) fsdp -> R,S(0)"}
    assert set(map(str, storages(SPEC, [parse("R,S(0)")], True, pricer, 0))) == {"R,S(0) -> R,S(0)"}
    assert set(map(str, storages(SPEC, [parse("R,S(0)")], True, pricer, 3))) == {"R,S(0) fsdp -> R,S(0)"}
    assert "R,S(0) -> R,R" in set(map(str, storages(SPEC, [parse("R,R")], True, pricer, 0))), "gathered inline over tensor"
    assert [str(s) for s in storages(SPEC, [parse("R,P")], True, pricer, 0)] == ["R,I -> R,P"]
    scalar = storages(Spec((), "float32"), [parse("R,R")], True, pricer, 3)
    assert [s.fsdp for s in scalar] == [False], "fully_shard takes no scalars"
    uneven = storages(Spec((6, 6), "float32"), [parse("S(0),S(0)")], True, pricer, None)
    assert not uneven, "6 rows do not split over 4 x 2"


def test_gathered_units_are_whole() -> None:
    pricer = Pricer(profile("h100:8"), Mesh(1, 4, 2), Precision(), True)
    assert gathered_bytes(Storage(parse("R,S(0)"), parse("R,S(0)"), True), SPEC, pricer) == FSDP_BUFFERS * MIB4 / 2
    assert gathered_bytes(Storage(parse("R,S(0)"), parse("R,S(0)")), SPEC, pricer) == 0


# ---------------------------------------------------------------- activations


def activations(graph, mesh: Mesh, recompute: str = "none") -> list[int]:
    problem = prepared(graph, mesh, recompute).tables.problem
    return [kinds["activations"] for kinds in evaluate(problem, (0,) * len(problem.ops)).memory]


def test_saved_activations_of_an_mlp() -> None:
    """Per block: x (read by both projection and add, kept once) and relu's output (kept by relu and by the next projection, once)."""
    batch, width, hidden, layers = 8, 16, 64, 3
    x, relu = batch * width * 4, batch * hidden * 4
    # the first block reads the input itself, which is there anyway
    assert activations(mlp(layers, batch, width, hidden), Mesh()) == [layers * relu + (layers - 1) * x]


def test_recomputation_keeps_the_inputs_of_repeated_blocks_only() -> None:
    batch, width, hidden, layers = 8, 16, 64, 8
    x, relu = batch * width * 4, batch * hidden * 4
    graph = mlp(layers, batch, width, hidden)
    # the first and the last block are not like the others, and keep all of theirs
    assert activations(graph, Mesh(), "full") == [2 * relu + (layers - 1) * x]
    none, full = (prepared(graph, Mesh(), how).tables.problem for how in ("none", "full"))
    a, b = (evaluate(p, (0,) * len(p.ops)) for p in (none, full))
    assert b.breakdown["backward"] > a.breakdown["backward"] and b.breakdown["forward"] == a.breakdown["forward"]
    assert b.memory[0]["transient"] >= relu


def test_micro_batches_in_flight() -> None:
    """Stage k of p holds min(p - k, m) micro-batches under 1F1B."""
    problem = prepared(mlp(4), Mesh(4, 1, 1, 8)).tables.problem
    assert problem.times.in_flight == (4, 3, 2, 1)
    assert prepared(mlp(4), Mesh(4, 1, 1, 2)).tables.problem.times.in_flight == (2, 2, 2, 1)


def test_what_is_saved_is_what_the_reader_was_given() -> None:
    """The second projection keeps its input in the type that it wants, converted or not; the input of the first is there anyway."""
    make = Maker()
    x = make.linear("first", make.input("x", (8, 16)), 16)
    graph = make.graph(make.linear("second", x, 16))
    tables = prepared(graph, Mesh(1, 2, 1)).tables
    names = [op.name for op in tables.problem.ops]
    first, second = names.index("first"), names.index("second")
    seen = set()
    for choice in itertools.product(*(range(op.strategies) for op in tables.problem.ops)):
        bill = evaluate(tables.problem, choice)
        if bill.legal:
            wanted, given = tables.labels[second][choice[second]].inputs[0], tables.labels[first][choice[first]].inputs[0]
            copy_of_input = 0 if given == parse("S(0)") else 8 * 16 * 4 / (2 if given[0].is_split else 1)
            seen.add((wanted, given))
            assert bill.memory[0]["activations"] == 8 * 16 * 4 / (2 if wanted[0].is_split else 1) + copy_of_input
    assert len(seen) > 4


def test_memory_of_inference_is_parameters_and_work() -> None:
    problem = prepared(mlp(3), Mesh(1, 2, 1), optimizer="none").tables.problem
    bill = evaluate(problem, (0,) * len(problem.ops))
    memory = bill.memory[0]
    assert memory["gradients"] == memory["optimizer"] == memory["activations"] == 0
    assert memory["parameters"] > 0 and memory["transient"] > 0
    assert bill.breakdown["backward"] == bill.breakdown["optimizer"] == bill.breakdown["gradient sync"] == 0
