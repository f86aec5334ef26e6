"""In-place ops, views and buffers: the functional graph gives what the model gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreter import assert_same
from torch import Tensor, nn

from planner.errors import CaptureError
from planner.graph import Graph
from planner.torch_ops import written_arguments
from planner.trace import capture

Body = Callable[[nn.Module, Tensor], Tensor]


class Writes(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).sum()


def base(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    h.mul_(2).add_(1, alpha=3)
    h += x
    return h.relu_() * h


def select(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    h[:, 0] = 3.0
    h[1].mul_(h[2].clone())
    h[2:4, 1] += h[0, 0]
    return h * h


def views_see_writes(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    flat, turned = h.view(-1), h.t()
    flat[::3].mul_(5)
    turned[1].add_(h[0].sum())
    h.permute(1, 0)[2].sub_(1)
    h.narrow(0, 4, 2).zero_()
    return (h * flat.view(6, 4)).sum() + (turned * turned).sum() + turned[3].prod() + flat[0]


def splits(m: nn.Module, x: Tensor) -> Tensor:
    """Views that come several at once take writes only where no gradient flows."""
    h = x * 2
    a, b = h.chunk(2, dim=1)
    a.mul_(b)
    first, _ = h.split([2, 4])
    first.unsqueeze(0).squeeze(0).exp_()
    rows = h.unbind(0)
    rows[3].neg_()
    h.diagonal().fill_(0.5)
    return (a.sum() * b.sum() + rows[3] + h.sum(0)) * m.weight


def view_methods(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    h.unsqueeze_(1)
    h.transpose_(0, 2)
    h[0].mul_(2)
    return h.squeeze_() * x.t()


def index_writes(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    rows = torch.tensor([0, 2, 5])
    h[rows] = x[rows] * 2
    h[x > 1] = 0.25
    h.masked_fill_(x < -1, 4.0)
    h.index_add_(0, rows, m.weight[:3])
    h.scatter_(1, torch.zeros(6, 1, dtype=torch.long), 7.0)
    return h * m.weight


def copies(m: nn.Module, x: Tensor) -> Tensor:
    out = torch.zeros(6, 8, dtype=x.dtype)
    out[:, :4] = x * m.weight
    out[:, 4:].copy_((m.weight * 3).to(torch.float32))
    scaled = torch.zeros_like(x)
    torch.mul(x, 3.0, out=scaled)
    return out * out + torch.cat([scaled, scaled], 1)


def casts_keep_the_target(m: nn.Module, x: Tensor) -> Tensor:
    h = (x * m.weight).to(torch.float32)
    h += m.weight.detach() * 2
    count = torch.zeros(6, 4, dtype=torch.int64)
    count += x > 0
    return h.double() * count


def buffers(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
        m.seen[1:3].clamp_(min=0.01)
    m.count += 1
    return x * m.weight * m.seen + m.count


def assigned(m: nn.Module, x: Tensor) -> Tensor:
    m.seen = m.seen + x.detach().sum(0)
    m.count = m.count + 2
    return x * m.weight + m.seen


def same_memory(m: nn.Module, x: Tensor) -> Tensor:
    """contiguous, to and reshape give the tensor itself where they can."""
    h = x * m.weight
    same, cast, copied = h.contiguous(), h.to(torch.float64), h.t().contiguous()
    h.mul_(3)
    return same * cast + copied.t()


BODIES = [
    base, select, views_see_writes, splits, view_methods, index_writes, copies, casts_keep_the_target, buffers, assigned, same_memory,
]  # fmt: skip


def functional(graph: Graph) -> bool:
    return not any(written_arguments(node.op) for node in graph.nodes if not node.is_source)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_writes(body: Body) -> None:
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 1.5
    kept = x.clone()
    graph = assert_same(Writes(body), ((x,), {}))
    assert functional(graph)
    assert torch.equal(x, kept)
    wanted = {"seen", "count"} if body in (buffers, assigned) else set()
    assert {name for name, _ in graph.mutations} == wanted


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 4, max_norm=0.5, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).pow(2).sum()


def test_a_parameter_that_forward_writes_keeps_its_gradient() -> None:
    model = Renormed()
    graph = assert_same(model, ((torch.tensor([[1, 2, 2, 8]]),), {}))
    assert [name for name, _ in graph.mutations] == ["table.weight"]


def test_a_write_to_an_input_stays_inside() -> None:
    def body(m: nn.Module, x: Tensor) -> Tensor:
        x.mul_(2)
        return x * m.weight

    x = torch.randn(6, 4, dtype=torch.float64)
    captured = capture(Writes(body), ((x.clone(),), {}))
    assert functional(captured.graph)
    assert captured.graph.mutations == ()


def test_a_write_without_inverse_names_the_line() -> None:
    def body(m: nn.Module, x: Tensor) -> Tensor:
        h = (x * m.weight).as_strided((4,), (1,))
        h.mul_(2)
        return h

    with pytest.raises(CaptureError, match=r"test_trace_functional\.py:\d+.*as_strided"):
        capture(Writes(body), ((torch.randn(6, 4, dtype=torch.float64),), {}))
