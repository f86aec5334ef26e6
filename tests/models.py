"""Tiny seeded models that all tests share.

Each builder returns (model, (args, kwargs), loss): no dropout, a batch of 8, float32 unless ``dtype`` says otherwise. ``loss`` is None
where the model returns its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Built = tuple[nn.Module, Inputs, Callable[[Any], Tensor] | None]

VOCABULARY, SEQUENCE = 64, 16


def _tokens(batch: int, length: int = SEQUENCE, low: int = 0) -> Tensor:
    return torch.randint(low, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def _ragged(ids: Tensor) -> Tensor:
    """Labels of which each row ignores another number."""
    labels = ids.clone()
    for row in range(labels.shape[0]):
        labels[row, : (row * 3) % 7] = -100
    return labels


def gpt2(layers: int = 2, batch: int = 8, dtype: torch.dtype = torch.float32) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        attn_implementation="sdpa", bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = _tokens(batch)
    return GPT2LMHeadModel(config).to(dtype).train(), ((), {"input_ids": ids, "labels": _ragged(ids)}), None


def llama(layers: int = 2, batch: int = 8, dtype: torch.dtype = torch.float32) -> Built:
    """Grouped queries, rotary positions, SwiGLU, RMS norms, untied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY,
        max_position_embeddings=64, attention_dropout=0.0, attn_implementation="sdpa", tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = _tokens(batch)
    return LlamaForCausalLM(config).to(dtype).train(), ((), {"input_ids": ids, "labels": _ragged(ids)}), None


def bert_mlm(layers: int = 2, batch: int = 8, dtype: torch.dtype = torch.float32) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    ids = _tokens(batch, low=3)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, SEQUENCE - row % 4 :] = 0
    labels = _ragged(ids).masked_fill(mask == 0, -100)
    return BertForMaskedLM(config).to(dtype).train(), ((), {"input_ids": ids, "attention_mask": mask, "labels": labels}), None


def vit(layers: int = 2, batch: int = 8, dtype: torch.dtype = torch.float32) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=64, num_attention_heads=4, image_size=16, patch_size=4, num_labels=10,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, 16, 16, generator=generator).to(dtype)
    labels = torch.randint(0, 10, (batch,), generator=generator)
    return ViTForImageClassification(config).to(dtype).train(), ((), {"pixel_values": images, "labels": labels}), None


class ConvNet(nn.Module):
    """Convolutions with batch norm, pooling and a linear head."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.pool(self.body(self.stem(images))).mean((2, 3))
        return F.cross_entropy(self.head(features), labels)


def convnet(batch: int = 8, dtype: torch.dtype = torch.float32) -> Built:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, 12, 12, generator=generator).to(dtype)
    return ConvNet().to(dtype).train(), ((images, torch.randint(0, 10, (batch,), generator=generator)), {}), None


class MLP(nn.Module):
    def __init__(self, width: int = 24, hidden: int = 48, layers: int = 3) -> None:
        super().__init__()
        sizes = [width, *[hidden] * (layers - 1), width]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


def squared(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def mlp(layers: int = 3, batch: int = 8, dtype: torch.dtype = torch.float32) -> Built:
    torch.manual_seed(0)
    x = torch.randn(batch, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    return MLP(layers=layers).to(dtype).train(), ((x,), {}), squared


BUILDERS: dict[str, Callable[..., Built]] = {
    "gpt2": gpt2, "llama": llama, "bert_mlm": bert_mlm, "vit": vit, "convnet": convnet, "mlp": mlp,
}  # fmt: skip
