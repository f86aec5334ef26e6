"""Models on the meta device: initialised by their own classes, the same on every rank, memory for this rank's parts only."""

from __future__ import annotations

from typing import Any

import builds
import pytest
import torch
from builds import plan_of
from conftest import Pool
from float64 import doubled
from harness import built
from torch import nn

from planner.errors import InputError
from runtime.api import parallelize
from runtime.materialize import Source


def on_meta(cls: type[nn.Module], *args: Any) -> nn.Module:
    with torch.device("meta"):
        return cls(*args)


def test_modules_initialise_themselves() -> None:
    source = Source(on_meta(builds.Buffers), 7)
    weight = source("conv.weight")
    assert weight.shape == (8, 3, 3, 3) and 0.01 < weight.std() < 0.3 and not weight.is_meta
    assert torch.equal(source("norm.weight"), torch.ones(8)) and source("norm.num_batches_tracked").item() == 0
    assert torch.equal(source("conv.weight"), weight)
    assert torch.equal(Source(on_meta(builds.Buffers), 7)("conv.weight"), weight)
    assert not torch.equal(Source(on_meta(builds.Buffers), 8)("conv.weight"), weight)


def test_real_values_are_taken_as_they_are() -> None:
    model = builds.Plain()
    assert Source(model, 0)("a.weight") is model.a.weight


def test_what_nobody_initialises_is_named() -> None:
    source = Source(on_meta(builds.Buffers), 0)
    assert source("counts").isnan() and not source("norm.weight").isnan().any()
    assert source.unset == {"counts": "Buffers"}
    parallel = parallelize(on_meta(builds.Buffers), plan_of(builds.buffers, dtype=torch.float32))
    for call in (lambda: parallel.step(*builds.buffers()[1][0]), parallel.gather_state_dict, lambda: parallel.save("never")):
        with pytest.raises(InputError, match=r"'counts' has no value: .* Buffers does not say how to initialise it. Load a checkpoint"):
            call()
    parallel.counts.zero_(), parallel.scale.fill_(1.0)
    assert not parallel.step(*builds.buffers()[1][0]).isnan()
    with pytest.raises(InputError, match="no parameter or buffer 'x'"):
        Source(builds.Plain(), 0)("x")


def test_hugging_face_models_use_their_own_initialisation() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, initializer_range=0.5
    )
    model = on_meta(transformers.LlamaForCausalLM, config)
    source = Source(model, 0)
    assert source("model.layers.0.self_attn.q_proj.weight").std() == pytest.approx(0.5, rel=0.3)
    assert torch.equal(source("model.norm.weight"), torch.ones(16))
    real = transformers.LlamaForCausalLM(config)
    torch.testing.assert_close(source("model.rotary_emb.inv_freq"), real.model.rotary_emb.inv_freq)


def train_from_meta(plan: Any) -> Any:
    model = doubled(on_meta(builds.Plain))
    _, args, _, _ = built(builds.plain, torch.float64)
    parallel = parallelize(model, plan)
    start = parallel.gather_state_dict()
    loss = parallel.step(*args)
    return start, loss.item(), parallel.gather_gradients(), all(p.is_meta for p in model.parameters())


def test_training_from_meta_equals_training_from_the_same_values(pool: Pool) -> None:
    plan = plan_of(builds.plain, data=2, tensor=2, fsdp=["a.weight"])
    results = pool.run(train_from_meta, 4, plan)
    start, loss, gradients, still_meta = results[0]
    model, args, _, _ = built(builds.plain, torch.float64)
    model.load_state_dict(start)
    want = model(*args)
    want.backward()
    assert still_meta and loss == pytest.approx(want.item())
    for other in results:
        assert all(torch.equal(other[0][name], start[name]) for name in start)
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                assert other[2][name] is None
            else:
                torch.testing.assert_close(gradients[name], parameter.grad)
