"""Notebooks are tests: each runs from its first cell to its last in a fresh kernel of this Python, and keeps its outputs."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 240


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["01_plan_a_transformer.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = "".join(output.get("data", {}).get("text/html", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert 'class="shardwright"' in shown and "<svg" in shown
    assert (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any("text/html" in output.get("data", {}) for cell in code for output in cell.outputs)
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    text = path.read_text(encoding="utf-8")
    assert str(ROOT) not in text and "/home/" not in text
