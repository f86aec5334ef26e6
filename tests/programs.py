"""Random small models from lists of numbers: what the property test draws and shrinks.

An instruction is (which op, which values, choices); every number is taken modulo what there is to choose from, so any list of numbers is
a program. Each op becomes a module of its own, ``steps.0``, ``steps.1``, ..., so that a pipeline can be cut between any two.

    Program([(3, 0, 1, ...), ...], inputs)       # inputs: x float64 (batch first), ids int64 (B, T), y int64 (B,)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = (2, 3, 4, 6, 1, 5, 8, 7)
LARGEST, MOST_DIMS = 3000, 5
VOCABULARY = 12

Made = tuple[list[tuple[int, ...]], Callable[..., Tensor]] | None
"""Shapes of the parameters, and the op: fn(parameters, *tensors). None where the op does not apply."""
Pick = Callable[[int], int]
OPS: list[tuple[int, Callable[..., Made]]] = []
"""(how many tensors it reads, maker)."""


def op(tensors: int) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    def register(maker: Callable[..., Made]) -> Callable[..., Made]:
        OPS.append((tensors, maker))
        return maker

    return register


# ---------------------------------------------------------------- products


@op(1)
def linear(pick: Pick, x: Tensor) -> Made:
    if not x.dim():
        return None
    out = SIZES[pick(8)]
    if pick(2):
        return [(out, x.shape[-1])], lambda p, x: F.linear(x, p[0])
    return [(out, x.shape[-1]), (out,)], lambda p, x: F.linear(x, p[0], p[1])


@op(1)
def matmul_parameter(pick: Pick, x: Tensor) -> Made:
    if x.dim() < 2:
        return None
    shape = (x.shape[-1], SIZES[pick(8)])
    return [shape], [lambda p, x: x @ p[0], lambda p, x: torch.einsum("...k,kn->...n", x, p[0])][pick(2)]


@op(1)
def self_product(pick: Pick, x: Tensor) -> Made:
    if x.dim() < 2:
        return None
    scale = 1 / math.sqrt(x.shape[-1])
    return [], [lambda p, x: x @ x.transpose(-1, -2) * scale, lambda p, x: x.transpose(-1, -2) @ x * scale][pick(2)]


@op(2)
def product(pick: Pick, x: Tensor, y: Tensor) -> Made:
    if x.dim() < 2 or y.dim() < 2 or x.shape[-1] != y.shape[-2] or not _broadcast(x.shape[:-2], y.shape[:-2]):
        return None
    return [], lambda p, x, y: torch.matmul(x, y)


@op(1)
def attention(pick: Pick, x: Tensor) -> Made:
    if x.dim() != 3:
        return None
    heads = [h for h in (1, 2, 3) if x.shape[-1] % h == 0]
    h, causal, d = heads[pick(len(heads))], bool(pick(2)), x.shape[-1]

    def run(p: Any, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, p[0]).view(*x.shape[:2], 3, h, d // h).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(x.shape)

    return [(3 * d, d)], run


@op(1)
def convolution(pick: Pick, x: Tensor) -> Made:
    if x.dim() not in (3, 4) or min(x.shape[2:]) < 2:
        return None
    conv = F.conv1d if x.dim() == 3 else F.conv2d
    groups = [g for g in (1, 2, 3) if x.shape[1] % g == 0][pick(2) if x.shape[1] % 2 == 0 or x.shape[1] % 3 == 0 else 0]
    out, kernel, stride = groups * (1 + pick(3)), 2 + pick(2), 1 + pick(2)
    shape = (out, x.shape[1] // groups, *[kernel] * (x.dim() - 2))
    return [shape, (out,)], lambda p, x: conv(x, p[0], p[1], stride=stride, padding=1, groups=groups)


# ---------------------------------------------------------------- pointwise

UNARY = (torch.relu, torch.tanh, F.gelu, torch.sigmoid, F.silu, torch.neg, torch.square, torch.abs, lambda x: x.tanh().exp(), torch.sin,
         lambda x: x + 1.5, lambda x: 0.5 * x, lambda x: 1.0 - x, lambda x: x / 3, lambda x: x.clamp(-0.5, 0.5), F.softplus,
         lambda x: (x * x + 0.1).rsqrt(), lambda x: x.float().double(), lambda x: x.masked_fill(x > 0.3, 0.0), lambda x: x.detach() * x,
         lambda x: torch.where(x > 0, x, 0.1 * x))  # fmt: skip


@op(1)
def unary(pick: Pick, x: Tensor) -> Made:
    f = UNARY[pick(len(UNARY))]
    return [], lambda p, x: f(x)


BINARY = (torch.add, torch.sub, torch.mul, lambda x, y: x / (y.square() + 1), torch.maximum, lambda x, y: torch.where(x > y, x, -y),
          lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: torch.addcmul(x, x, y, value=0.5))  # fmt: skip


@op(2)
def binary(pick: Pick, x: Tensor, y: Tensor) -> Made:
    if not _broadcast(x.shape, y.shape):
        return None
    f = BINARY[pick(len(BINARY))]
    return [], lambda p, x, y: f(x, y)


@op(1)
def with_parameter(pick: Pick, x: Tensor) -> Made:
    """A parameter of some of the last dims, single ones among them."""
    kept = pick(x.dim() + 1)
    shape = tuple(1 if pick(3) == 1 else n for n in x.shape[x.dim() - kept :])
    f = BINARY[pick(len(BINARY))]
    return [shape], [lambda p, x: f(x, p[0]), lambda p, x: f(p[0], x)][pick(2)]


# ---------------------------------------------------------------- reductions, norms


def _mean_and_spread(x: Tensor, d: int, keep: bool) -> Tensor:
    return x.mean(d, keepdim=keep) + x.var(d, keepdim=keep, correction=0)


@op(1)
def reduction(pick: Pick, x: Tensor) -> Made:
    if not x.dim():
        return None
    d, keep = pick(x.dim()), bool(pick(2))
    f = [torch.sum, torch.mean, torch.logsumexp, torch.amax, _mean_and_spread][pick(5)]
    return [], lambda p, x: f(x, d, keep)


@op(1)
def along(pick: Pick, x: Tensor) -> Made:
    if not x.dim():
        return None
    d = pick(x.dim())
    moves = [lambda x, d: x.flip(d), lambda x, d: x.roll(1, d), lambda x, d: F.normalize(x, dim=d, eps=1e-3)]
    f = [torch.softmax, torch.log_softmax, torch.cumsum, *moves][pick(6)]
    return [], lambda p, x: f(x, d)


@op(1)
def norm(pick: Pick, x: Tensor) -> Made:
    if x.dim() < 2:
        return None
    kind = pick(3)
    if x.numel() == x.shape[1]:
        return None  # one value per channel has no spread
    if kind == 0 or x.dim() < 3:
        last = x.shape[-1:]
        return [last, last], lambda p, x: F.layer_norm(x, last, p[0], p[1])
    groups = [g for g in (1, 2, 3) if x.shape[1] % g == 0]
    g, c = groups[pick(len(groups))], x.shape[1:2]
    if kind == 1:
        return [c, c], lambda p, x: F.group_norm(x, g, p[0], p[1])
    return [c, c], lambda p, x: F.batch_norm(x, None, None, p[0], p[1], training=True, eps=1e-2)


# ---------------------------------------------------------------- views


@op(1)
def flatten(pick: Pick, x: Tensor) -> Made:
    if x.dim() < 2:
        return None
    a = pick(x.dim() - 1)
    b = a + 1 + pick(x.dim() - 1 - a)
    return [], lambda p, x: x.flatten(a, b)


@op(1)
def unflatten(pick: Pick, x: Tensor) -> Made:
    if not x.dim():
        return None
    d = pick(x.dim())
    cuts = [n for n in range(1, x.shape[d] + 1) if x.shape[d] % n == 0]
    n = cuts[pick(len(cuts))]
    return [], lambda p, x: x.unflatten(d, (n, x.shape[d] // n))


@op(1)
def permuted(pick: Pick, x: Tensor) -> Made:
    if x.dim() < 2:
        return None
    a, b = pick(x.dim()), pick(x.dim())
    order = [*range(1, x.dim()), 0]
    return [], [lambda p, x: x.transpose(a, b), lambda p, x: x.permute(order)][pick(2)]


@op(1)
def single(pick: Pick, x: Tensor) -> Made:
    """A dim of size 1 comes, goes or is expanded."""
    d, n = pick(x.dim() + 1), SIZES[pick(8)]
    shape = [*x.shape[:d], n, *x.shape[d:]]
    return [], [lambda p, x: x.unsqueeze(d), lambda p, x: x.squeeze(), lambda p, x: x.unsqueeze(d).expand(shape)][pick(3)]


@op(1)
def piece(pick: Pick, x: Tensor) -> Made:
    if not x.dim():
        return None
    d = pick(x.dim())
    n = x.shape[d]
    start = pick(n)
    length = 1 + pick(n - start)
    return [], [
        lambda p, x: x.narrow(d, start, length),
        lambda p, x: x.select(d, start),
        lambda p, x: x.chunk(2, d)[0] * 2,
        lambda p, x: sum(x.split(max(1, n // 2), d)[i].sum(d) for i in range(2 if n > 1 else 1)),
        lambda p, x: x.unbind(d)[-1],
    ][pick(5)]  # type: ignore[return-value]


@op(2)
def joined(pick: Pick, x: Tensor, y: Tensor) -> Made:
    if x.dim() != y.dim() or not x.dim():
        return None
    differ = [d for d in range(x.dim()) if x.shape[d] != y.shape[d]]
    if len(differ) > 1:
        return None
    d = differ[0] if differ else pick(x.dim())
    if not differ and pick(2):
        return [], lambda p, x, y: torch.stack([x, y], d)
    return [], lambda p, x, y: torch.cat([x, y], d)


@op(1)
def larger(pick: Pick, x: Tensor) -> Made:
    if not x.dim():
        return None
    d, n = pick(x.dim()), 1 + pick(2)
    repeats = [n + 1 if i == d else 1 for i in range(x.dim())]
    pads = [n if i == 2 * (x.dim() - 1 - d) else 0 for i in range(2 * x.dim())]
    return [], [
        lambda p, x: x.repeat(repeats),
        lambda p, x: F.pad(x, pads),
        lambda p, x: x.repeat_interleave(n + 1, d),
        lambda p, x: x.tril() if x.dim() > 1 else x,
    ][pick(4)]  # type: ignore[return-value]


@op(1)
def in_place(pick: Pick, x: Tensor) -> Made:
    if not x.dim():
        return None
    d = pick(x.dim())
    start = pick(x.shape[d])

    def add(p: Any, x: Tensor) -> Tensor:
        y = x * 2
        y.select(d, start).add_(1.0)
        return y

    def write(p: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y.narrow(d, start, 1).mul_(p[0])
        return y

    return [()], [add, write][pick(2)]


# ---------------------------------------------------------------- indices


@op(1)
def indexed(pick: Pick, x: Tensor) -> Made:
    if not x.dim():
        return None
    d = pick(x.dim())
    n = x.shape[d]
    order = torch.arange(n + 1) * 5 % n
    return [], [
        lambda p, x: x.index_select(d, order),
        lambda p, x: x.gather(d, x.detach().argsort(d)),
        lambda p, x: x.movedim(d, 0)[order],
        lambda p, x: x.topk(1 + n // 2, d).values,
    ][pick(4)]  # type: ignore[return-value]


# ---------------------------------------------------------------- the program


def _broadcast(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b)))


class Step(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], run: Callable[..., Tensor], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = [torch.randn(shape, dtype=torch.float64, generator=generator) * 0.6 for shape in shapes]
        self.p = nn.ParameterList([nn.Parameter(t) for t in draw])
        self.run = run

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.run(self.p, *tensors)


class Program(nn.Module):
    """forward(x, ids, y) -> (loss, last value)."""

    def __init__(self, instructions: Sequence[Sequence[int]], inputs: dict[str, Tensor]) -> None:
        super().__init__()
        self.steps, self.wiring, self.made = nn.ModuleList(), [], []  # type: ignore[var-annotated]
        generator = torch.Generator().manual_seed(99)
        self.table = nn.Parameter(torch.randn(VOCABULARY, 4, dtype=torch.float64, generator=generator))
        with torch.no_grad():
            values = self._start(inputs["x"], inputs["ids"])
            for number, instruction in enumerate(instructions):
                self._append(number, list(instruction), values)
        self.used = {i for wires in self.wiring for i in wires}
        last = values[-1]
        self.head = nn.Linear(last.shape[-1], VOCABULARY, dtype=torch.float64) if last.dim() and last.numel() else None
        self.rows = bool(last.dim() == 2 and last.shape[0] == inputs["y"].shape[0])

    def _start(self, x: Tensor, ids: Tensor) -> list[Tensor]:
        return [x, F.embedding(ids, self.table)]

    def _append(self, number: int, instruction: list[int], values: list[Tensor]) -> None:
        which, *rest = instruction
        count, maker = OPS[which % len(OPS)]
        wires = [len(values) - 1 - rest.pop(0) % min(len(values), 4) for _ in range(count)]
        pick = lambda n: rest.pop(0) % n if rest else 0  # noqa: E731
        found = maker(pick, *(values[i] for i in wires))
        if found is None:
            return
        step = Step(*found, seed=number)
        made = step(*(values[i] for i in wires))
        if made.dim() <= MOST_DIMS and 0 < made.numel() <= LARGEST and made.isfinite().all() and made.abs().max() < 1e4:
            self.steps.append(step)
            self.wiring.append(wires)
            self.made.append(maker.__name__)
            values.append(made)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        values = self._start(x, ids)
        for step, wires in zip(self.steps, self.wiring):
            values.append(step(*(values[i] for i in wires)))
        last = values[-1]
        loss = last.square().mean() * 0.5 + last.sum() * 0.01
        if self.head is not None and self.rows:
            loss = loss + F.cross_entropy(self.head(last), y)
        for i, value in enumerate(values[:-1]):
            if i not in self.used:
                loss = loss + 0.1 * value.tanh().mean()
        return loss, last

    def __repr__(self) -> str:
        return f"Program({' '.join(f'{name}{wires}' for name, wires in zip(self.made, self.wiring))})"
