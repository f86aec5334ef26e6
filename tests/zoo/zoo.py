"""A small zoo: one model of each kind that architectures differ in. Plain torch and, for two, transformers from a config.

    entry = get("mixture_of_experts"); model = entry.build(); loss = loss_of(model(**entry.inputs(4)))

Every model is seeded and draws no random numbers; dim 0 of every input is the batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH = 48, 12, 16
Inputs = Callable[[int, torch.Generator], dict[str, Tensor]]


@dataclass(frozen=True)
class Entry:
    name: str
    make: Callable[[], nn.Module]
    draw: Inputs

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().train()
        with torch.no_grad():
            # zero-initialised biases would hide wrong gradients
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.03)
        return model

    def inputs(self, batch: int) -> dict[str, Tensor]:
        return self.draw(batch, torch.Generator().manual_seed(1))


ENTRIES: dict[str, Entry] = {}


def names() -> list[str]:
    return list(ENTRIES)


def get(name: str) -> Entry:
    return ENTRIES[name]


def loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output["loss"]


def entry(inputs: Inputs) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", make.__name__).lower()
        ENTRIES[name] = Entry(name, make, inputs)
        return make

    return register


# ---------------------------------------------------------------- inputs


def ints(g: torch.Generator, *shape: int, below: int = VOCABULARY) -> Tensor:
    return torch.randint(0, below, shape, generator=g)


def floats(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g)


def tokens(batch: int, g: torch.Generator) -> dict[str, Tensor]:
    """Every row counts another number of labels."""
    ids = ints(g, batch, LENGTH)
    labels = ids.clone()
    for row in range(batch):
        labels[row, : (3 * row) % 7] = -100
    return {"input_ids": ids, "labels": labels}


def padded(batch: int, g: torch.Generator) -> dict[str, Tensor]:
    made = tokens(batch, g)
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    for row in range(batch):
        mask[row, LENGTH - row % 4 :] = 0
    return made | {"attention_mask": mask}


def images(batch: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"x": floats(g, batch, 3, 8, 8), "y": ints(g, batch, below=10)}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


# ---------------------------------------------------------------- sequences


class Block(nn.Module):
    """Pre-norm; queries in groups, rotary positions, fused projection."""

    def __init__(self, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, WIDTH // heads
        self.first, self.second = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (heads + 2 * groups) * self.size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.first(x)).split([self.heads * self.size, *[self.groups * self.size] * 2], -1)
        q, k, v = (z.view(b, t, -1, self.size).transpose(1, 2) for z in (q, k, v))
        q, k = rotate(q), rotate(k)
        k, v = (z.repeat_interleave(self.heads // self.groups, 1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        gate, value = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


def rotate(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] / 10.0 ** torch.arange(x.shape[3] // 2, dtype=x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)


@entry(tokens)
class TiedDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(x, self.embed.weight)
        return {"loss": cross_entropy(logits[:, :-1], labels[:, 1:]), "logits": logits}


@entry(padded)
def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=VOCABULARY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


@entry(lambda b, g: {"input_ids": ints(g, b, 9), "labels": ints(g, b, 7)})
def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False))


@entry(tokens)
class MixtureOfExperts(nn.Module):
    """Top-2 of 4 experts, with an auxiliary loss over the whole batch."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 24) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 24, WIDTH) * 0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(input_ids)
        share = self.router(x).softmax(-1)
        top, chosen = share.topk(2, -1)
        weights = torch.zeros_like(share).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        each = torch.einsum("btd,edh->bteh", x, self.up).relu()
        x = x + torch.einsum("bteh,ehd,bte->btd", each, self.down, weights)
        balance = (share.mean((0, 1)) * F.one_hot(chosen, share.shape[-1]).to(x.dtype).mean((0, 1, 2))).sum()
        return cross_entropy(self.head(x), labels) + 0.1 * balance, x


@entry(tokens)
class StateSpace(nn.Module):
    """Depthwise causal convolution, gates, and a scan written as a cumulative sum in log space."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.wide = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.conv, self.out = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.decay = nn.Parameter(torch.rand(WIDTH))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, step, gate = self.wide(self.embed(input_ids)).chunk(3, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : input_ids.shape[1]].transpose(1, 2))
        logs = -(F.softplus(step) * self.decay).cumsum(1)
        distance = (logs[:, :, None] - logs[:, None]).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool()[None, :, :, None], -1e9)
        return cross_entropy(self.out((distance.exp() * x[:, None]).sum(2) * F.silu(gate)), labels)


@entry(tokens)
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, VOCABULARY)
        self.cells = nn.LSTM(WIDTH, WIDTH, 1, batch_first=True, bidirectional=True)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.out(self.cells(self.embed(input_ids))[0]), labels)


# ---------------------------------------------------------------- images


@entry(images)
class BatchNormNet(nn.Module):
    """Grouped convolutions, batch norm (its buffers change), squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.deep, self.norm2 = nn.Conv2d(12, 12, 3, 2, 1, groups=3), nn.BatchNorm2d(12)
        self.squeeze, self.out = nn.Conv2d(12, 12, 1), nn.Linear(12, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.hardswish(self.norm(self.stem(x)))
        x = F.max_pool2d(self.norm2(self.deep(x)), 2)
        x = x * self.squeeze(F.adaptive_avg_pool2d(x, 1)).sigmoid()
        return F.cross_entropy(self.out(x.flatten(2).mean(-1)), y, label_smoothing=0.1)


@entry(lambda b, g: {"x": floats(g, b, 4, 8, 8), "t": floats(g, b), "noise": floats(g, b, 4, 8, 8)})
class UNet(nn.Module):
    """Skips, group norm, a time embedding, up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 8)
        self.down, self.middle = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.norm, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 8, 2, 2)
        self.out = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        skip = F.silu(self.down(x) + self.time(t[:, None])[:, :, None, None])
        deep = F.silu(self.norm(self.middle(skip)))
        return F.mse_loss(self.out(torch.cat([self.up(deep), F.interpolate(deep, scale_factor=2.0) + skip], 1)), noise)


@entry(images)
class ShiftedWindows(nn.Module):
    """Patches in rolled windows, a gathered position bias."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.qkv, self.out = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 10)
        self.bias = nn.Parameter(torch.randn(7, 2))
        self.register_buffer("index", (torch.arange(4)[:, None] - torch.arange(4)) + 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1).roll((-1, -1), (1, 2))
        b, h, w, c = x.shape
        x = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        q, k, v = self.qkv(x).view(-1, 4, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        score = q @ k.transpose(-1, -2) / math.sqrt(c // 2) + self.bias[self.index].permute(2, 0, 1)
        x = (score.softmax(-1) @ v).transpose(1, 2).reshape(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h * w, c)
        return F.cross_entropy(self.out(x.mean(1)), y)


# ---------------------------------------------------------------- other losses and data


@entry(lambda b, g: {"image": floats(g, b, 10), "text": ints(g, b, 6)})
class Contrastive(nn.Module):
    """Two towers; every row is compared with every other of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.embed, self.right = nn.Linear(10, WIDTH), nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a, b = F.normalize(self.left(image), dim=-1), F.normalize(self.right(self.embed(text).mean(1)), dim=-1)
        logits = self.scale.exp() * a @ b.T
        target = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@entry(lambda b, g: {"dense": floats(g, b, 5), "sparse": ints(g, b, 3, 2, below=20), "y": ints(g, b, below=2).float()})
class Recommender(nn.Module):
    """Embedding bags per feature, pairwise interaction, a weighted binary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 8, mode=mode) for mode in ("sum", "mean", "sum"))
        self.bottom, self.top = nn.Linear(5, 8), nn.Linear(8 + 6, 1)

    def forward(self, dense: Tensor, sparse: Tensor, y: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], 1)
        pairs = rows @ rows.transpose(1, 2)
        i, j = torch.tril_indices(4, 4, -1)
        logit = self.top(torch.cat([x, pairs[:, i, j]], 1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logit, y, pos_weight=torch.tensor(2.0))


@entry(lambda b, g: {"x": floats(g, b, 6, 5), "y": floats(g, b)})
class MessagePassing(nn.Module):
    """Edges of a fixed graph: gathered, summed back by index."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.out = nn.Linear(10, 8), nn.Linear(8, 1)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.edges
        sent = F.elu(self.message(torch.cat([x[:, a], x[:, b]], -1)))
        nodes = torch.zeros(*x.shape[:2], 8, dtype=x.dtype).index_add(1, b, sent)
        return F.smooth_l1_loss(self.out(nodes.amax(1)).squeeze(-1), y)


# ---------------------------------------------------------------- what has to be refused


@entry(lambda b, g: {"x": floats(g, b, 6)})
class BranchOnData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        return self.out(x).mean()


class Twice(torch.autograd.Function):
    """A backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@entry(lambda b, g: {"x": floats(g, b, 6)})
class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Twice.apply(self.into(x))).square().mean()
