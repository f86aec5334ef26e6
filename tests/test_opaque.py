"""A submodule that cannot be captured is named opaque, and then planned and run as one op."""

import warnings

import pytest
import torch
from torch import nn

from planner import auto_parallelize
from planner.errors import CaptureError
from runtime import launch, parallelize


class Branches(nn.Module):
    """Decides by the values of its input: no graph can hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        if x.sum() > 0:
            return self.linear(x)
        return -self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branches, self.last = nn.Linear(6, 6), Branches(), nn.Linear(6, 3)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.last(self.branches(torch.tanh(self.first(x)))), y)


def build():
    torch.manual_seed(0)
    return Model().double(), torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))


def gradients(plan, model, x, y):
    parallel = parallelize(model, plan, opaque=["branches"])
    loss = parallel.step(x, y)
    return loss, parallel.gather_gradients()


def test_refused_with_the_line_and_the_way_on():
    model, x, y = build()
    with pytest.raises(CaptureError, match=r"if x.sum\(\) > 0.*'branches'.*opaque=\('branches',\)"):
        auto_parallelize(model, 2, example_inputs=(x, y), hardware="cpu")


@pytest.mark.parametrize("layout", [dict(data=2), dict(tensor=2), dict(pipe=2)], ids=str)
def test_named_opaque_it_runs_equal(layout):
    model, x, y = build()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = auto_parallelize(model, 2, example_inputs=(x, y), hardware="cpu", layout={**layout, "microbatches": 1}, opaque=["branches"])
    # over stages nothing is done twice, so there is nothing to warn of
    assert any("opaque" in str(w.message) for w in told) == ("pipe" not in layout)
    loss = model(x, y)
    loss.backward()
    for found, grads in launch(gradients, plan, build()[0], x, y, timeout_s=60):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-14)
