"""A small zoo of unlike architectures, through capture, planning and running (ranks as threads), against the plain models.

benchmarks/zoo.py does the same for any zoo and all layouts, in processes as well.
"""

from __future__ import annotations

import re

import pytest
from zoo.zoo import get, loss_of, names
from zoo_check import outcomes

LAYOUTS = ["data=2 tensor=2", "pipe=2", "random data=2 tensor=2"]
MIXES = {
    "mixture_of_experts": "aten.mul.Tensor",
    "batch_norm_net": "shard.batch_norm",
    "contrastive": "aten.matmul.default",
}
"""Models that need the whole batch at once, and the op that says so: they run in any layout without micro-batches."""
NOT_CAPTURED = {
    "branch_on_data": r"zoo/zoo.py:\d+ in `if x.sum\(\) > 0:`",
    "straight_through": r"zoo/zoo.py:\d+: the custom autograd function .*Twice has its own backward",
}


@pytest.mark.parametrize("name", names())
def test_equal_or_refused_for_a_true_reason(name):
    found = dict(outcomes(get(name), loss_of, LAYOUTS))
    for layout, outcome in found.items():
        refused = name in NOT_CAPTURED or (name in MIXES and layout == "pipe=2")
        assert outcome.status == ("refused" if refused else "equal"), f"{layout}: {outcome}"
    if name in NOT_CAPTURED:
        assert re.search(NOT_CAPTURED[name], found["pipe=2"].detail)
    elif name in MIXES:
        assert f"{MIXES[name]} in module" in found["pipe=2"].detail and "zoo/zoo.py:" in found["pipe=2"].detail


def test_most_work_is_divided():
    """The optimiser leaves little whole: the zoo's transformers have a rule for every op that counts."""
    for name in ("tied_decoder", "bert"):
        ((_, outcome),) = outcomes(get(name), loss_of, ["data=2 tensor=2"])
        assert outcome.status == "equal" and outcome.replicated is not None and outcome.replicated < 0.2


def test_a_wrong_gradient_is_noticed(monkeypatch):
    """The comparison itself: a plan whose gradients are doubled must not count as equal."""
    import zoo_check

    def doubled_run(*args, **kwargs):
        losses, gradients, mutated, outputs = original(*args, **kwargs)
        return losses, {n: 2 * g for n, g in gradients.items()}, mutated, outputs

    original = zoo_check.run
    monkeypatch.setattr(zoo_check, "run", doubled_run)
    ((_, outcome),) = outcomes(get("message_passing"), loss_of, ["data=2"])
    assert outcome.status == "FAILED" and "gradient of" in outcome.detail
