"""The examples run under torchrun, learn, and leave nothing behind. Few steps each; without arguments they check themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torchrun import MARK, ROOT, command, gone, marked, run

EXAMPLES = {
    # name: (processes, argument, lowest share of losses that must be gone at the end, what it says)
    "train.py": (4, "20", 0.2, r"\d+ bytes of Python, 8 x 128 bytes a step, 20 steps"),
    "digits.py": (4, "2", 0.5, r"reads (\d+\.\d)% of the held-out digits"),
    "sequence.py": (2, "30", 0.3, r"tells (\d+\.\d)% of 256 fresh melodies"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path) -> None:
    processes, argument, fall, says = EXAMPLES[name]
    with marked() as environment:
        words = command("--standalone", f"--nproc-per-node={processes}", str(ROOT / "examples" / name), argument)
        (output,) = run([words], environment, tmp_path, timeout_s=240)
        assert gone(environment[MARK])
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) >= 2 and losses[-1] < (1 - fall) * losses[0], output
    found = re.search(says, output)
    assert found is not None, output
    if found.groups():
        assert float(found[1]) > 40, output  # by chance: 10 % and 12.5 %
    assert [path.name for path in tmp_path.iterdir()] == ["out-0.txt"]


def test_all_examples_are_here() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"demo.py"}
    assert scripts == set(EXAMPLES)
