"""A small convolutional network reads handwritten digits: torchrun --nproc-per-node 4 examples/digits.py [epochs]

The 1,797 images of 8 x 8 pixels that come with scikit-learn, a fifth of them held out. Each rank loads its part of a batch.
Exits with status 1 if fewer than 90 % of the held-out digits are read right after all epochs (given on the command line: not checked).
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split

from planner import auto_parallelize
from runtime import parallelize

BATCH, EPOCHS = 96, 12


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(64 * 2 * 2, 10)

    def forward(self, image: Tensor, digit: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.features(image).flatten(1))
        return F.cross_entropy(logits, digit), logits


def accuracy(parallel, held_out) -> float:
    """Of the digits held out. A plan is for one batch size, so the last batch is filled up, and what was filled in is not counted."""
    parallel.eval()
    loader = parallel.dataloader(held_out, BATCH, shuffle=False, drop_last=False)
    read = torch.cat([parallel(*batch)[1].argmax(1) for batch in loader])[: len(held_out)]
    parallel.train()
    return (read == torch.stack([digit for _, digit in held_out])).float().mean().item()


def main() -> int:
    dist.init_process_group()
    first, epochs = dist.get_rank() == 0, int(sys.argv[1]) if len(sys.argv) > 1 else EPOCHS
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target))
    training, held_out = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))

    torch.manual_seed(0)
    model = Reader()
    example = (torch.empty(BATCH, 1, 8, 8), torch.empty(BATCH, dtype=torch.int64))
    plans = [auto_parallelize(model, dist.get_world_size(), example_inputs=example, hardware="cpu") if first else None]
    dist.broadcast_object_list(plans)
    parallel = parallelize(model, plans[0], batch="local")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)
    loader = parallel.dataloader(training, BATCH, seed=1)
    if first:
        print(f"{plans[0]}\n{len(training)} digits to learn from, {len(held_out)} held out, {len(loader)} x {BATCH} an epoch", flush=True)

    for epoch in range(1, epochs + 1):
        for batch in loader:
            loss = parallel.step(*batch)
            optimizer.step()
            optimizer.zero_grad()
        if first:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)

    right = accuracy(parallel, held_out)
    if first:
        print(f"reads {right:.1%} of the held-out digits", flush=True)
    dist.destroy_process_group()
    return 1 if right < 0.9 and epochs == EPOCHS else 0


if __name__ == "__main__":
    sys.exit(main())
