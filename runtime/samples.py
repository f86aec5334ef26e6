"""Samples, fetched and collated: datasets that are asked for this rank's part of a global batch.

Random numbers drawn on the way are made from (seed, epoch, place in the epoch), so that ranks that load the same rows get the same
samples, whatever else they have drawn; the process's own generators stay as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, Subset, get_worker_info

Collate = Callable[[list[Any]], Any]

# ---------------------------------------------------------------- random numbers while loading


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """What is drawn inside leaves the process's generators as they were."""
    before = _generators()
    try:
        yield
    finally:
        _set_generators(before)


def _generators() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _set_generators(states: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def number_of(*key: int | str) -> int:
    """64 bits made from ``key``; neighbouring keys give unrelated ones."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def _seed(*key: int | str) -> None:
    """Set torch's, numpy's and Python's generators."""
    number = number_of(*key)
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


# ---------------------------------------------------------------- datasets that give whole parts


@dataclass(frozen=True)
class Part:
    """This rank's samples of one global batch: what the sampler asks for."""

    epoch: int
    index: int
    """Which global batch of the epoch."""
    places: tuple[int, ...]
    """Places of the samples in the order of the epoch."""
    samples: tuple[int, ...]
    """Their indices in the dataset."""


@dataclass(frozen=True)
class Collating:
    collate: Collate
    seed: int
    share: int
    """Ranks that are given different rows collate them with different random numbers."""

    def __call__(self, samples: list[Any], *where: int) -> Any:
        _seed("collate", self.seed, self.share, *where)
        return self.collate(samples)


class PartDataset(Dataset[Any]):
    """A map-style dataset, asked for parts."""

    def __init__(self, dataset: Any, collate: Collating) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, part: Part) -> Any:
        with _own_randomness():
            if gives_many(self.dataset):
                _seed("samples", self.collate.seed, self.collate.share, part.epoch, part.index)
                samples = self.dataset.__getitems__(list(part.samples))
            else:
                samples = [self.sample(part.epoch, place, index) for place, index in zip(part.places, part.samples)]
            return self.collate(samples, part.epoch, part.index)

    def sample(self, epoch: int, place: int, index: int) -> Any:
        _seed("sample", self.collate.seed, epoch, place)
        return self.dataset[index]


class PartStream(IterableDataset[Any]):
    """A stream, cut into global batches of which the own rows are kept. With workers each cuts its own copy of the stream."""

    def __init__(
        self, stream: Iterable[Any], collate: Collating, rows: Sequence[int], batch_size: int, drop_last: bool, epoch: int
    ) -> None:
        self.stream, self.collate, self.rows = stream, collate, rows
        self.batch_size, self.drop_last, self.epoch = batch_size, drop_last, epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        kept: list[Any] = []
        with _own_randomness():
            _seed("stream", self.collate.seed, self.epoch, worker)
            source, inside = iter(self.stream), _generators()
        for index in itertools.count():
            with _own_randomness():
                _set_generators(inside)
                found = self.read(source, kept, index)
                inside = _generators()
                if found is None:
                    return
                part = self.collate([found[row] for row in self.rows], self.epoch, worker, index)
            yield part

    def read(self, source: Iterator[Any], kept: list[Any], index: int) -> dict[int, Any] | None:
        """Row -> sample of the next global batch; None at the end. ``kept``: the first batch, to fill the last one with."""
        own, count, found = set(self.rows), 0, {}
        for row, sample in enumerate(itertools.islice(source, self.batch_size)):
            count = row + 1
            if row in own:
                found[row] = sample
            if index == 0 and not self.drop_last:
                kept.append(sample)
        if count == 0 or (count < self.batch_size and self.drop_last):
            return None
        return found | {row: kept[(row - count) % len(kept)] for row in own if row >= count}


class PartOrder(Sampler[Part]):
    """The parts of one epoch, from the ``first`` on."""

    def __init__(self, order: Sequence[int], rows: Sequence[int], batch_size: int, batches: int, epoch: int, first: int) -> None:
        self.order, self.rows, self.batch_size, self.batches, self.epoch, self.first = order, rows, batch_size, batches, epoch, first

    def __iter__(self) -> Iterator[Part]:
        for index in range(self.first, self.batches):
            places = tuple(index * self.batch_size + row for row in self.rows)
            yield Part(self.epoch, index, places, tuple(self.order[place % len(self.order)] for place in places))

    def __len__(self) -> int:
        return max(0, self.batches - self.first)


def gives_many(dataset: Any) -> bool:
    """Fetches many samples at once, of its own (a Subset has the method whatever it is of)."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))
