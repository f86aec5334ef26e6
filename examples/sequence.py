"""An LSTM hears which of eight melodies is played in the noise: torchrun --nproc-per-node 2 examples/sequence.py [steps]

A melody is a sequence of four tones, and most have the tones of another one in another order; where it begins, its phases, its loudness
and the noise are random. Waveforms are made as they are needed: an endless stream, which all ranks read alike.
Exits with status 1 if fewer than 90 % of fresh melodies are told right after all steps (given on the command line: not checked).
"""

import sys
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from planner import auto_parallelize
from runtime import parallelize

BATCH, STEPS = 64, 100
RATE_HZ, LENGTH, TONE, FRAME = 4000, 2400, 400, 100
"""Samples in a second, a waveform, a tone and a frame."""
TONES_HZ = np.array([400.0, 560.0, 760.0, 1000.0, 1300.0, 1600.0])
MELODIES = np.array([[0, 1, 2, 3], [3, 2, 1, 0], [4, 5, 0, 2], [2, 0, 5, 4], [1, 4, 3, 5], [5, 3, 4, 1], [0, 3, 5, 1], [4, 2, 1, 0]])


def waveform(melody: int) -> np.ndarray:
    """0.6 s: the tones one after another, somewhere in noise."""
    tones = TONES_HZ[MELODIES[melody]][:, None]
    phase, loudness = np.random.uniform(0, 2 * np.pi, tones.shape), np.random.uniform(0.5, 1.0, tones.shape)
    played = loudness * np.sin(2 * np.pi * tones * np.arange(TONE) / RATE_HZ + phase)
    wave = np.random.normal(0.0, 0.4, LENGTH)
    start = np.random.randint(LENGTH - played.size + 1)
    wave[start : start + played.size] += played.ravel()
    return wave


class Melodies(IterableDataset):
    """(log-magnitudes of 24 frames x 51 frequencies, number of the melody), without end."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while True:
            melody = int(np.random.randint(len(MELODIES)))
            spectrum = np.abs(np.fft.rfft(waveform(melody).reshape(-1, FRAME) * np.hanning(FRAME)))
            yield torch.tensor(np.log(spectrum + 0.5), dtype=torch.float32), melody


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ear = nn.Linear(FRAME // 2 + 1, 64)
        self.memory = nn.LSTM(64, 96, batch_first=True)
        self.head = nn.Linear(96, len(MELODIES))

    def forward(self, frames: Tensor, melody: Tensor) -> tuple[Tensor, Tensor]:
        heard, _ = self.memory(torch.relu(self.ear(frames)))
        logits = self.head(heard[:, -1])
        return F.cross_entropy(logits, melody), logits


def main() -> int:
    dist.init_process_group()
    first, steps = dist.get_rank() == 0, int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    torch.manual_seed(0)
    model = Listener()
    example = (torch.empty(BATCH, LENGTH // FRAME, FRAME // 2 + 1), torch.empty(BATCH, dtype=torch.int64))
    plans = [auto_parallelize(model, dist.get_world_size(), example_inputs=example, hardware="cpu") if first else None]
    dist.broadcast_object_list(plans)
    parallel = parallelize(model, plans[0])
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=5e-3)
    if first:
        print(f"{plans[0]}\n{len(MELODIES)} melodies in noise, {BATCH} a step, {steps} steps", flush=True)

    for step, batch in enumerate(islice(parallel.dataloader(Melodies(), BATCH, seed=1), steps), 1):
        loss = parallel.step(*batch)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first and (step == 1 or step % 10 == 0):
            print(f"step {step}: loss {loss:.4f}", flush=True)

    parallel.eval()
    fresh = list(islice(parallel.dataloader(Melodies(), BATCH, seed=2), 4))
    right = torch.cat([parallel(*batch)[1].argmax(1) == batch[1] for batch in fresh]).float().mean().item()
    if first:
        print(f"tells {right:.1%} of {len(fresh) * BATCH} fresh melodies", flush=True)
    dist.destroy_process_group()
    return 1 if right < 0.9 and steps == STEPS else 0


if __name__ == "__main__":
    sys.exit(main())
