"""Who may import what, read from the sources: the direction of the packages, and the one place of each delicate dependency."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("cost_models", "planner", "runtime")
MAY_IMPORT = {"cost_models": {"cost_models"}, "planner": {"cost_models", "planner"}, "runtime": set(PACKAGES)}
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# module prefix -> the files that may import it
ONE_IMPORTER = {
    "pulp": {"planner/ilp/solve_pulp.py"},
    "highspy": {"planner/ilp/solve_pulp.py"},
    "torch.export": {"planner/trace.py"},
}
COMPAT = {f"{package}/compat.py" for package in PACKAGES}
DATA_ONLY = ("planner/plan.py", "planner/sharding.py", "planner/mesh.py", "planner/graph.py", "planner/reshard.py", "planner/errors.py")
"""Nouns without torch objects."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything a file imports, inside functions too; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def attribute_chains(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every ``torch.a.b`` written out in the code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id == "torch":
            yield node.lineno, ".".join(["torch", *reversed(parts)])


def within(dotted: str, module: str) -> bool:
    return dotted == module or dotted.startswith(module + ".")


def is_private_module(dotted: str) -> bool:
    """``torch._x...`` or ``torch.a._b...``; a private name imported from a public module counts as well."""
    parts = dotted.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_downwards_only(package: str) -> None:
    wrong = [
        f"{name(path)}:{line} imports {dotted}"
        for path in SOURCES
        if path.is_relative_to(ROOT / package)
        for line, dotted in imports(path)
        if dotted.split(".")[0] in PACKAGES and dotted.split(".")[0] not in MAY_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("module", sorted(ONE_IMPORTER))
def test_one_importer(module: str) -> None:
    found = {name(path) for path in SOURCES for _, dotted in imports(path) if within(dotted, module)}
    used = {name(path) for path in SOURCES for _, dotted in attribute_chains(path) if within(dotted, module)}
    assert found | used <= ONE_IMPORTER[module]
    assert found | used or module == "highspy"


def test_private_torch_modules_are_imported_by_compat_modules_only() -> None:
    wrong = [
        f"{name(path)}:{line} imports {dotted}"
        for path in SOURCES
        if name(path) not in COMPAT
        for line, dotted in imports(path)
        if is_private_module(dotted)
    ]
    assert wrong == []


@pytest.mark.parametrize("source", DATA_ONLY)
def test_nouns_know_no_torch(source: str) -> None:
    assert [dotted for _, dotted in imports(ROOT / source) if within(dotted, "torch")] == []


def test_reading_a_plan_loads_no_torch_and_no_solver() -> None:
    """A plan can be read, checked, compared and drawn where torch is not wanted: in seconds, on any machine."""
    modules = "planner.plan_io, planner.explain, planner.diff, planner.show"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {modules}; print(sorted({{'torch', 'pulp'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout == "[]\n", run.stdout + run.stderr


def test_the_readers_of_this_file_see_what_they_should() -> None:
    """The checks above would pass on nothing: make sure that they see known imports."""
    seen = {dotted for path in SOURCES for _, dotted in imports(path)}
    assert {"planner.plan.Plan", "cost_models.errors.CostError"} <= seen
    assert is_private_module("torch.fx._x.y") and is_private_module("torch._dynamo") and not is_private_module("torch.fx.Graph")
    assert within("torch.export.export", "torch.export") and not within("torch.exporter", "torch.export")
