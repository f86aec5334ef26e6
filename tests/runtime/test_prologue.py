"""Denominators over uneven micro-batches: known before the first one runs, also where they need a buffer."""

import torch
from harness import run_equal
from torch import nn
from torch.nn import functional as F


class Weighted(nn.Module):
    """Cross entropy with class weights in a buffer: the denominator is a sum of weights, not a count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.register_buffer("weights", torch.rand(5) + 0.1)

    def forward(self, x, labels):
        return F.cross_entropy(self.layers(x), labels, self.weights, ignore_index=2, label_smoothing=0.1)


def build():
    torch.manual_seed(0)
    labels = torch.tensor([2, 2, 1, 0, 3, 4, 2, 1])
    return Weighted(), ((torch.randn(8, 6), labels), {}), None


def test_class_weights_over_micro_batches():
    for layout in (dict(pipe=2, microbatches=4), dict(data=2, microbatches=2), dict(data=2, microbatches=4)):
        run_equal(build, layout, steps=2)
