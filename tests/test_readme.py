"""The README's scripts do what it says: they are run as they stand there, with fewer steps."""

import re

import pytest
import torch
from models import gpt2
from torchrun import MARK, ROOT, command, gone, marked, run

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def block(marker: str) -> str:
    found = [text for text in BLOCKS if marker in text]
    assert len(found) == 1, f"the README has {len(found)} scripts with {marker!r}"
    return found[0]


def test_the_example():
    script = block("def train(plan, model, batches)")
    model, (_, batch), _ = gpt2()
    batches = [{name: tensor.clone() for name, tensor in batch.items()}] * 2
    # the model of the script is the reader's own; its inputs are told by the config
    script = script.replace("gpus=4)", "gpus=2, example_inputs=batches[0])").replace("plan.save", "# plan.save")
    found = {"model": model, "batches": batches, "__name__": "readme"}
    exec(compile(script, "README.md", "exec"), found)
    assert len(found["losses"]) == 2
    assert found["losses"][0] == pytest.approx(found["losses"][1])

    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found["losses"][0] == pytest.approx(float(loss), rel=1e-5)


def test_the_torchrun_script(tmp_path):
    script = block("dist.init_process_group()")
    assert len([line for line in script.splitlines() if line.strip()]) <= 30
    (tmp_path / "train.py").write_text(script.replace("range(100)", "range(8)"), encoding="utf-8")
    with marked() as environment:
        (output,) = run([command("--standalone", "--nproc-per-node=4", "train.py")], environment, tmp_path, timeout_s=240)
        assert gone(environment[MARK])
    loss = re.search(r"loss (\d+\.\d+)", output)
    assert loss is not None and 2.0 < float(loss[1]) < 5.4, output  # 5.55 is a guess among 256 bytes
