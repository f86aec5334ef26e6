"""Loading data: the batches that a plan runs are those that plain training on one process would see, whatever the layout."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import builds
import numpy as np
import pytest
import torch
from builds import plan_of
from harness import built, descend, make_plan, relative
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from planner.errors import InputError
from planner.mesh import Mesh
from planner.plan import MeshPlan, Plan
from runtime import launch, parallelize
from runtime.data import BatchLoader, dataloader, global_batch_size, own_rows
from runtime.groups import Ranks

SAMPLES, BATCH = 20, 8
ONE = plan_of(builds.plain, seed=1)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)
    y[::5] = -100
    return TensorDataset(torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64), y)


class Stream(IterableDataset[Any]):
    """The same samples one after another, without a length."""

    def __init__(self, dataset: Any = None) -> None:
        self.dataset = samples() if dataset is None else dataset

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return (self.dataset[i] for i in range(first, len(self.dataset), step))


class Noisy(Dataset[Any]):
    """Augments: every sample is its index and random numbers of three generators."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).double(), float(np.random.rand()), random.random()


class NoisyStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        for index in range(SAMPLES):
            yield index, torch.rand(()).double(), float(np.random.rand()), random.random()


def alone(dataset: Any, plan: Plan = ONE, batch: Any = "global", at: int = 0, batch_size: int = BATCH, **options: Any) -> BatchLoader:
    """The loader of one rank of ``plan``, without processes: ``at`` along data."""
    mesh = plan.mesh.mesh()
    return dataloader(plan, Ranks(mesh, mesh.rank(0, at, 0), torch.device("cpu"), 60.0), batch, dataset, batch_size, **options)


def on(mesh: Mesh, plan: Plan = ONE) -> Plan:
    return plan.model_copy(update={"mesh": MeshPlan(pipe=mesh.pipe, data=mesh.data, tensor=mesh.tensor, microbatches=mesh.microbatches)})


def indices(loader: BatchLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


# ---------------------------------------------------------------- training


def plainly(order: list[list[int]], dataset: TensorDataset, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and final state of plain training on one process, on the given samples."""
    model, _, _, _ = built(builds.plain, dtype)
    losses = []
    for rows in order:
        loss = model(*(torch.stack(column) for column in zip(*(dataset[i] for i in rows))))
        loss.backward()
        losses.append(loss.detach())
        descend(model)
    return losses, model.state_dict()


def trained(plan: Plan, batch: Any, dataset: Any, epochs: int, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    model, _, _, _ = built(builds.plain, torch.float64)
    parallel = parallelize(model, plan, batch=batch)
    loader = parallel.dataloader(dataset, BATCH, seed=3, **options)
    losses = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for part in loader:
            losses.append(parallel.step(*part))
            descend(parallel)
    return losses, parallel.gather_state_dict()


LAYOUTS = [dict(data=2), dict(data=2, tensor=2), dict(pipe=2, microbatches=4), dict(data=2, microbatches=2)]


@pytest.mark.parametrize("batch", ["local", "global"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_equals_plain_loading_on_one_process(layout: dict[str, int], batch: str) -> None:
    dataset, plan = samples(), make_plan(builds.plain, layout, torch.float64, {})
    # the order of the epochs, as one process without a plan would read it
    one = alone(TensorDataset(torch.arange(SAMPLES)), seed=3, drop_last=False)
    order = [rows for _ in range(2) for rows in indices(one)]
    read = [row for rows in order[:3] for row in rows]
    assert len(order) == 6 and sorted(read[:SAMPLES]) == list(range(SAMPLES)) and order[:3] != order[3:]
    losses, state = plainly(order, dataset)
    for got, found in launch(trained, plan, batch, dataset, 2, dict(drop_last=False), timeout_s=90, start="fork"):
        assert len(got) == len(losses) and all(relative(a, b) < 1e-10 for a, b in zip(got, losses))
        assert all(relative(found[name], value) < 1e-10 for name, value in state.items())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [samples, Stream])
def test_training_from_workers_and_streams(make: Callable[[], Any], workers: int) -> None:
    plan, options = make_plan(builds.plain, dict(data=2), torch.float64, {}), dict(num_workers=workers)
    if make is samples:
        order = indices(alone(TensorDataset(torch.arange(SAMPLES)), seed=3))
    else:  # workers take turns, each with its own part of the stream
        whole = [list(range(w, SAMPLES, max(1, workers))) for w in range(max(1, workers))]
        order = [rows[i : i + BATCH] for i in (0, 8) for rows in whole if len(rows) >= i + BATCH]
    losses, _ = plainly(order, samples())
    for got, _ in launch(trained, plan, "local", make(), 1, options, timeout_s=90, start="fork"):
        assert len(got) == len(losses) == 2 and all(relative(a, b) < 1e-10 for a, b in zip(got, losses))


# ---------------------------------------------------------------- which rows, in which order


MESHES = [Mesh(data=2), Mesh(data=4), Mesh(data=2, tensor=2), Mesh(pipe=2, data=2, microbatches=2), Mesh(data=3)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("make", [Noisy, NoisyStream])
def test_parts_make_up_the_global_batch(make: Callable[[], Any], mesh: Mesh) -> None:
    """Samples too: what is drawn for a sample does not depend on which rank draws it."""
    whole = list(alone(make()))
    ranks = [list(alone(make(), on(mesh), "local", at)) for at in range(mesh.data)]
    assert len(whole) == SAMPLES // BATCH
    for index, batch in enumerate(whole):
        rows = torch.tensor([row for at in range(mesh.data) for row in own_rows(on(mesh), at, "local")])
        assert sorted(rows.tolist()) == list(range(BATCH))
        for column, values in enumerate(batch):
            assert torch.equal(torch.cat([parts[index][column] for parts in ranks]), values[rows])


def test_order_comes_from_seed_and_epoch() -> None:
    torch.manual_seed(1)
    first = alone(Noisy(), seed=4)
    one, two = indices(first), indices(first)
    torch.manual_seed(2)
    again = alone(Noisy(), seed=4)
    assert one != two and (one, two) == (indices(again), indices(again))
    again.set_epoch(1)
    assert indices(again) == two and again.epoch == 2
    assert indices(alone(Noisy(), seed=5)) != one
    assert indices(alone(Noisy(), shuffle=False)) == [list(range(8)), list(range(8, 16))]


def test_a_break_starts_the_epoch_again() -> None:
    loader = alone(Noisy(), seed=4)
    first = next(iter(loader))[0].tolist()
    assert loader.epoch == 0 and indices(loader)[0] == first


def test_random_numbers_of_the_process_are_left_alone() -> None:
    def drawn() -> tuple[float, float, float]:
        return torch.rand(()).item(), np.random.rand(), random.random()

    for dataset in (Noisy(), NoisyStream()):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        want = drawn(), drawn()
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        got = [drawn() for _ in alone(dataset)]
        assert tuple(got) == want


def test_random_collation_agrees_where_rows_do() -> None:
    def collate(rows: list[Any]) -> Tensor:
        return torch.rand(len(rows))

    def batches(at: int, tensor: int) -> list[Tensor]:
        plan = on(Mesh(data=2, tensor=2))
        ranks = Ranks(plan.mesh.mesh(), plan.mesh.mesh().rank(0, at, tensor), torch.device("cpu"), 60.0)
        torch.manual_seed(10 * at + tensor)
        return list(dataloader(plan, ranks, "local", Noisy(), BATCH, collate_fn=collate))

    assert all(torch.equal(a, b) for a, b in zip(batches(0, 0), batches(0, 1)))
    assert not any(torch.equal(a, b) for a, b in zip(batches(0, 0), batches(1, 0)))


def test_datasets_that_fetch_many_at_once() -> None:
    class Many(Noisy):
        asked: list[int]

        def __getitems__(self, rows: list[int]) -> list[Any]:
            self.asked = rows
            return [self[row] for row in rows]

    for dataset in (Many(), Subset(Many(), range(SAMPLES))):
        found = indices(alone(dataset, seed=2))
        many = dataset.dataset if isinstance(dataset, Subset) else dataset
        assert many.asked == found[-1] and found == indices(alone(Noisy(), seed=2))
    plain = list(alone(Noisy(), seed=2))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(plain, alone(Subset(Noisy(), range(SAMPLES)), seed=2)))


# ---------------------------------------------------------------- the end of an epoch


@pytest.mark.parametrize("make", [Noisy, NoisyStream])
def test_last_incomplete_batch(make: Callable[[], Any]) -> None:
    options: dict[str, Any] = {} if make is NoisyStream else {"shuffle": False}
    assert len(indices(alone(make(), **options))) == 2
    filled = indices(alone(make(), drop_last=False, **options))
    assert filled[2] == [16, 17, 18, 19, 0, 1, 2, 3]
    halves = [indices(alone(make(), on(Mesh(data=2)), "local", at, drop_last=False, **options)) for at in (0, 1)]
    assert [half[2] for half in halves] == [[16, 17, 18, 19], [0, 1, 2, 3]]


def test_lengths() -> None:
    assert len(alone(Noisy())) == 2 and len(alone(Noisy(), drop_last=False)) == 3 and len(alone(Noisy(16), drop_last=False)) == 2
    with pytest.raises(TypeError, match="NoisyStream is a stream"):
        len(alone(NoisyStream()))


def test_less_than_one_batch() -> None:
    with pytest.raises(InputError, match=r"Noisy has 5 samples, less than one batch of 8.*drop_last=False"):
        alone(Noisy(5))
    assert indices(alone(Noisy(3), drop_last=False, shuffle=False)) == [[0, 1, 2, 0, 1, 2, 0, 1]]
    short = Stream(Subset(Noisy(), range(3)))
    assert indices(alone(short, drop_last=False)) == [[0, 1, 2, 0, 1, 2, 0, 1]]
    with pytest.raises(InputError, match="before its first whole batch of 8 samples"):
        list(alone(short))


# ---------------------------------------------------------------- going on in the middle of an epoch


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Noisy, NoisyStream])
def test_going_on(make: Callable[[], Any], workers: int) -> None:
    options: dict[str, Any] = dict(drop_last=False, seed=6, num_workers=workers)
    whole = alone(make(), **options)
    want = [list(whole), list(whole)]
    first = alone(make(), **options)
    list(first)
    for _, batch in zip(range(2), first):
        assert torch.equal(batch[0], want[1][first.batch - 1][0])
    state = first.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 2)
    # on another layout: the same global batches, cut anew
    parts = [alone(make(), on(Mesh(data=2)), "local", at, **options) for at in (0, 1)]
    for part in parts:
        part.load_state_dict(state)
        part.set_epoch(1)
    halves = [list(part) for part in parts]
    assert len(halves[0]) == len(want[1]) - 2
    for a, b, batch in zip(*halves, want[1][2:]):
        assert all(torch.equal(torch.cat([x, y]), z) for x, y, z in zip(a, b, batch))
    assert [part.epoch for part in parts] == [2, 2]


def test_a_state_of_other_data() -> None:
    state = alone(Noisy(), seed=6).state_dict()
    with pytest.raises(InputError, match=r"seed=6, this loader has 7"):
        alone(Noisy(), seed=7).load_state_dict(state)
    with pytest.raises(InputError, match=r"samples=20, this loader has 30"):
        alone(Noisy(30), seed=6).load_state_dict(state)
    with pytest.raises(InputError, match="epoch is a whole number"):
        alone(Noisy()).set_epoch(-1)


def stopped_and_resumed(plan: Plan, dataset: Any, folder: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Three of four steps, a checkpoint after the third, everything made anew, the fourth."""
    losses = []
    for stop in (3, 4):
        model, _, _, _ = built(builds.plain, torch.float64)
        parallel = parallelize(model, plan, batch="local")
        loader = parallel.dataloader(dataset, BATCH, seed=3)
        if stop == 4:
            parallel.load(folder)
            loader.load_state_dict(torch.load(f"{folder}/loader"))
        while len(losses) < stop:
            for part in loader:
                losses.append(parallel.step(*part))
                descend(parallel)
                if len(losses) == stop:
                    break
        if stop == 3:
            parallel.save(folder)
            torch.save(loader.state_dict(), f"{folder}/loader")
            torch.distributed.barrier()
    return losses, parallel.gather_state_dict()


def test_training_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    plan = make_plan(builds.plain, dict(data=2), torch.float64, {})
    one = alone(TensorDataset(torch.arange(SAMPLES)), seed=3)
    losses, state = plainly(indices(one) + indices(one), samples())
    for got, found in launch(stopped_and_resumed, plan, samples(), str(tmp_path), timeout_s=90, start="fork"):
        assert len(got) == 4 and all(relative(a, b) < 1e-10 for a, b in zip(got, losses))
        assert all(relative(found[name], value) < 1e-10 for name, value in state.items())


# ---------------------------------------------------------------- what is refused


def test_another_batch_size() -> None:
    assert global_batch_size(ONE) == BATCH
    with pytest.raises(InputError, match=r"batch_size=4, the plan was made for a global batch of 8"):
        alone(Noisy(), on(Mesh(data=2)), "local", batch_size=4)


def test_wrong_arguments() -> None:
    for options, what in (
        (dict(seed=-1), "seed=-1"), (dict(num_workers=1.5), "num_workers=1.5"), (dict(batch_size=True), "batch_size=True"),
        (dict(seed=2**63), "below 2"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=what):
            alone(Noisy(), **options)
    with pytest.raises(InputError, match="NoisyStream is a stream, which comes in its own order"):
        alone(NoisyStream(), shuffle=True)
    with pytest.raises(InputError, match="generator can be read once only"):
        alone(i for i in range(3))
    with pytest.raises(InputError, match="int is no dataset"):
        alone(3)


def flattened(rows: int, samples: int) -> Plan:
    """A plan with an input of several rows per sample."""
    leaves = [{"tensor": name, "shape": [size], "dtype": "float32"} for name, size in (("x", samples), ("y", rows))]
    model = ONE.model.model_copy(update={"inputs": {"args": leaves, "kwargs": {}}, "batch_dims": {"x": 0, "y": 0}})
    return ONE.model_copy(update={"model": model})


def test_several_rows_per_sample() -> None:
    plan = on(Mesh(data=2, microbatches=2), flattened(24, 8))
    assert global_batch_size(plan) == 8 and own_rows(plan, 1, "local") == [2, 3, 6, 7]
    inside = on(Mesh(data=2), flattened(10, 5))
    assert own_rows(inside, 0, "global") == [0, 1, 2, 3, 4]
    with pytest.raises(InputError, match="'y' has 10 rows for 5 samples"):
        own_rows(inside, 0, "local")


def disagreeing(plan: Plan) -> str:
    model, _, _, _ = built(builds.plain, torch.float64)
    parallel = parallelize(model, plan)
    with pytest.raises(InputError) as raised:
        parallel.dataloader(Noisy(20 + torch.distributed.get_rank()), BATCH)
    return str(raised.value)


def test_ranks_must_load_the_same() -> None:
    plan = make_plan(builds.plain, dict(data=2), torch.float64, {})
    for text in launch(disagreeing, plan, timeout_s=60, start="fork"):
        assert "rank 1 loads data with samples=21, rank 0 with 20" in text
