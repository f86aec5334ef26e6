"""Loading data: every rank gets the rows of each global batch that the plan gives it.

    loader = parallel.dataloader(dataset, batch_size=64, seed=0)
    for epoch in range(loader.epoch, 10):
        loader.set_epoch(epoch)
        for batch in loader:
            parallel.step(**batch)

    1. the order of an epoch     a permutation made from (seed, epoch), the same on every rank
    2. global batches            consecutive stretches of that order
    3. rows of this rank         batch="local": micro-batch by micro-batch its part along data; batch="global": all of them
    4. samples, collated         torch's DataLoader, in this process or in its workers

Nothing but 3. depends on the layout, so a run that stops under one plan goes on under another with the same batches. Ranks that differ
on tensor and pipe only load the same rows, and random numbers drawn while loading are the same there too: before each sample and
before each collation, torch's, numpy's and Python's generators are set from (seed, epoch, place in the epoch), and put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, default_collate

from planner.errors import InputError
from planner.mesh import DATA, Mesh
from planner.plan import Plan
from runtime.batching import Batch, part_sizes, part_starts
from runtime.fit import tensor_shapes
from runtime.groups import Ranks
from runtime.samples import Collate, Collating, PartDataset, PartOrder, PartStream, is_stream, number_of

# ---------------------------------------------------------------- which rows


def global_batch_size(plan: Plan) -> int | None:
    """Samples in the plan's global batch; None where the plan knows no batch dim (then every rank works on whole inputs).

    Where batch dims differ in length (a batch of 8 beside 8 x 128 flattened targets), a sample is several rows of the longer ones.
    """
    shapes = tensor_shapes(plan.model.inputs)
    sizes = {shapes[name][dim] for name, dim in plan.model.batch_dims.items()}
    return min(sizes, default=None)


def own_rows(plan: Plan, data: int, batch: Batch) -> list[int]:
    """Places in the global batch of the samples that a rank at ``data`` is given, in the order in which it wants them.

    Raises InputError where an input with several rows per sample is split inside a sample.
    """
    mesh, size = plan.mesh.mesh(), global_batch_size(plan)
    if batch == "global" or size is None:
        return list(range(size or 0))
    shapes = tensor_shapes(plan.model.inputs)
    rows = _rows(size, mesh, data)
    for name, dim in plan.model.batch_dims.items():
        long = shapes[name][dim]
        if _rows(long, mesh, data) != [row * (long // size) + i for row in rows for i in range(long // size)]:
            raise InputError(
                f"input {name!r} has {long} rows for {size} samples, which {mesh} does not split at whole samples: "
                'use parallelize(..., batch="global"), or a batch that data x microbatches divides'
            )
    return rows


def _rows(size: int, mesh: Mesh, data: int) -> list[int]:
    spans = zip(part_starts(size, mesh, data), part_sizes(size, mesh, data))
    return [row for start, length in spans for row in range(start, start + length)]


# ---------------------------------------------------------------- the loader


@dataclass(eq=False)
class BatchLoader:
    """Iterates over one epoch of batches; every further iteration is the next epoch, unless ``set_epoch`` says otherwise."""

    dataset: Any
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    num_workers: int
    collate: Collating
    rows: list[int]
    """Places of this rank's samples in each global batch."""
    pin_memory: bool = False
    timeout_s: float = 0.0
    epoch: int = 0
    batch: int = field(default=0, init=False)
    """Global batches given out in the running epoch."""
    _resumes: bool = field(default=False, init=False)

    @property
    def streams(self) -> bool:
        return is_stream(self.dataset)

    def __len__(self) -> int:
        """Global batches in an epoch. Raises TypeError for a stream, as torch's DataLoader does for one without a length."""
        if self.streams:
            raise TypeError(f"{type(self.dataset).__name__} is a stream: how many batches it holds shows at its end")
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next. Setting the epoch that a loaded state stopped in keeps its place."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise InputError(f"set_epoch({epoch!r}): an epoch is a whole number from 0")
        if epoch != self.epoch:
            self.epoch, self.batch, self._resumes = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain numbers: save it with a checkpoint. The same on every rank, and fits every layout."""
        return {**self._identity(), "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on after the last batch that was given out. Streams are read again up to there.

        Raises InputError where the state belongs to other data or settings, naming both values.
        """
        for name, mine in self._identity().items():
            if name not in state or state[name] != mine:
                have = repr(state[name]) if name in state else "nothing"
                raise InputError(f"the loader's state says {name}={have}, this loader has {mine!r}: make it as it was at the saving")
        self.epoch, self.batch, self._resumes = int(state["epoch"]), int(state["batch"]), True

    def _identity(self) -> dict[str, Any]:
        samples = None if self.streams else len(self.dataset)
        workers = self.num_workers if self.streams else 0  # the order of a stream's batches depends on its readers
        return {
            "batch_size": self.batch_size, "seed": self.seed, "shuffle": self.shuffle, "drop_last": self.drop_last,
            "samples": samples, "stream_workers": workers,
        }  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self.epoch, self.batch if self._resumes else 0
        self.batch, self._resumes = first, False
        if callable(tell := getattr(self.dataset, "set_epoch", None)):
            tell(epoch)
        for part in self._stream(epoch, first) if self.streams else self._loader(self._parts(epoch, first)):
            self.batch += 1
            yield part
        if self.epoch == epoch:
            self.epoch, self.batch = epoch + 1, 0

    def _parts(self, epoch: int, first: int) -> tuple[Dataset[Any], PartOrder]:
        order: Sequence[int] = range(len(self.dataset))
        if self.shuffle:
            generator = torch.Generator().manual_seed(number_of("order", self.seed, epoch))
            order = torch.randperm(len(self.dataset), generator=generator).tolist()
        return PartDataset(self.dataset, self.collate), PartOrder(order, self.rows, self.batch_size, len(self), epoch, first)

    def _stream(self, epoch: int, first: int) -> Iterator[Any]:
        parts = PartStream(self.dataset, self.collate, self.rows, self.batch_size, self.drop_last, epoch)
        count = 0
        for count, part in enumerate(self._loader((parts, None)), 1):
            if count > first:
                yield part
        if count == 0:
            raise InputError(
                f"the stream ended before its first whole batch of {self.batch_size} samples: give it more, "
                "or drop_last=False to fill the batch up with samples that are there"
            )

    def _loader(self, source: tuple[Dataset[Any], PartOrder | None]) -> DataLoader[Any]:
        # a generator of its own: torch's loader would draw from the process's at every start
        return DataLoader(
            source[0], batch_size=None, sampler=source[1], num_workers=self.num_workers, collate_fn=_as_it_is, pin_memory=self.pin_memory,
            timeout=self.timeout_s if self.num_workers else 0.0, generator=torch.Generator().manual_seed(self.seed),
        )  # fmt: skip


def _as_it_is(part: Any) -> Any:
    return part


# ---------------------------------------------------------------- from a plan


def dataloader(
    plan: Plan, ranks: Ranks, batch: Batch, dataset: Any, batch_size: int, seed: int = 0, *, shuffle: bool | None = None,
    drop_last: bool = True, num_workers: int = 0, collate_fn: Collate | None = None,
) -> BatchLoader:  # fmt: skip
    """The loader behind ``ParallelModule.dataloader``; see there."""
    rows = own_rows(plan, ranks.coordinates[DATA], batch)
    planned = global_batch_size(plan)
    _check(dataset, batch_size, seed, shuffle, drop_last, num_workers)
    if planned is not None and batch_size != planned:
        raise InputError(
            f"batch_size={batch_size}, the plan was made for a global batch of {planned}: give {planned} (over all ranks and "
            f"micro-batches), or plan again with example inputs of {batch_size}"
        )
    share = ranks.coordinates[DATA] if batch == "local" and planned is not None else 0
    loader = BatchLoader(
        dataset, batch_size, seed, not is_stream(dataset) if shuffle is None else shuffle, drop_last, num_workers,
        Collating(collate_fn or default_collate, seed, share), rows or list(range(batch_size)),
        pin_memory=ranks.device.type == "cuda", timeout_s=ranks.timeout_s,
    )  # fmt: skip
    _agree(loader.state_dict(), ranks)
    return loader


def _check(dataset: Any, batch_size: int, seed: int, shuffle: bool | None, drop_last: bool, num_workers: int) -> None:
    for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0), ("num_workers", num_workers, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}={value!r}, must be a whole number of at least {least}")
    if seed >= 2**63:
        raise InputError(f"seed={seed}, must be below 2**63")
    kind = type(dataset).__name__
    if not is_stream(dataset):
        if len(dataset) < (batch_size if drop_last else 1):
            raise InputError(
                f"the {kind} has {len(dataset)} samples, less than one batch of {batch_size}: give it more, "
                "or drop_last=False to fill the batch up with samples that are there"
            )
        return
    if shuffle:
        raise InputError(f"shuffle=True, but a {kind} is a stream, which comes in its own order: shuffle inside it")
    if not isinstance(dataset, Iterable):
        raise InputError(f"a {kind} is no dataset: it needs __getitem__ and __len__, or __iter__")
    if isinstance(dataset, Iterator):
        raise InputError(f"a {kind} can be read once only: give an IterableDataset whose __iter__ starts again")


def _agree(settings: dict[str, Any], ranks: Ranks) -> None:
    """Raises InputError on every rank where one of them has other settings or another number of samples. Collective."""
    if not ranks.groups:
        return
    every: list[Any] = [None] * ranks.mesh.world_size
    dist.all_gather_object(every, settings, group=ranks.groups["world"])
    for rank, other in enumerate(every):
        for name, value in every[0].items():
            if other[name] != value:
                raise InputError(f"rank {rank} loads data with {name}={other[name]!r}, rank 0 with {value!r}: all ranks must load the same")
