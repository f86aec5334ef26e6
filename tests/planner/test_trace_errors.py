"""What cannot be captured is refused by name, with the user's own line, or taken as one opaque op."""

from __future__ import annotations

import pytest
import torch
from interpreter import assert_same
from torch import Tensor, nn

from planner.errors import CaptureError, InputError
from planner.trace import capture

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Scaled(torch.autograd.Function):
    """A backward that autograd would not find: twice the true gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 6


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(self.inner(x))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor, pair: tuple[Tensor, int] = (X, 1)) -> dict[str, Tensor]:
        y = self.inner(x)
        if y.sum() > 0:
            y = y * 2
        return {"y": y, "z": torch.stack([row for row in y if row[0] > 0] or [y[0]]).sum(0) + pair[0].sum()}


class Net(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(self.first(x))
        out = out["y"].sum() + out["z"].sum() if isinstance(out, dict) else out
        return out.pow(2).mean()


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sum()


def test_custom_function_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"test_trace_errors\.py:\d+: the custom autograd function .*Scaled.*opaque"):
        capture(Net(Custom()), (X,))


def test_custom_function_inside_an_opaque_module_keeps_its_backward() -> None:
    graph = assert_same(Net(Custom()), (X,), opaque=("block",))
    (node,) = graph.of("shard.opaque")
    assert node.module == "block"
    assert node.grad == (True,)
    assert len(node.args[2]) == 2


def test_custom_function_without_gradient_is_no_matter() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 1, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = Scaled.apply(x)
            return self.linear(y).sum()

    assert_same(Frozen(), (X,))


def test_branch_on_data_names_module_and_line() -> None:
    with pytest.raises(CaptureError, match=r"test_trace_errors\.py:\d+ in `if y\.sum\(\) > 0:` \(module 'block'\).*opaque=\('block',\)"):
        capture(Net(Branch()), (X,))


def test_branch_inside_an_opaque_module() -> None:
    graph = assert_same(Net(Branch()), (X,), opaque=("block",))
    assert len(graph.of("shard.opaque")) == 1


def test_size_that_depends_on_data_names_the_line() -> None:
    with pytest.raises(CaptureError, match=r"test_trace_errors\.py:\d+ \(module 'block'\): aten\.index\.Tensor has a size that depends"):
        capture(Net(Picks()), (X,))


def test_unused_size_that_depends_on_data_is_no_matter() -> None:
    class Checks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._check((x > 0).sum().item() >= 0)
            return x * 2

    graph = assert_same(Net(Checks()), (X,))
    assert not [node for node in graph.nodes if "assert" in node.op or "item" in node.op]


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="no such submodule"):
        capture(Net(Custom()), (X,), opaque=("blok",))
    with pytest.raises(InputError, match=r"a tensor of shape \(4, 6\)"):
        capture(nn.Linear(6, 6, dtype=torch.float64), (X,), loss=lambda out: out)
    with pytest.raises(CaptureError, match="lazy"):
        capture(nn.LazyLinear(3), (X,))


def test_an_output_of_unknown_type_is_named() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> object:
            return {"x": x, "odd": {1, 2}}

    with pytest.raises(CaptureError, match=r"an object of type builtins\.set"):
        capture(Odd(), (X,))


def test_a_failing_forward_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError):
        capture(Net(Branch()), (X,))
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "def forward" not in printed.err
