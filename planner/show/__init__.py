"""Drawing a plan: in the terminal, as one self-contained page, as a fragment for notebooks."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from planner.plan import Plan
from planner.plan_io import write_aside
from planner.show.page import fragment, page
from planner.show.terminal import render

__all__ = ["fragment", "page", "render", "show"]


def show(plan: Plan, html: str | os.PathLike[str] | None = None) -> None:
    """Print the plan, or write its page to ``html``."""
    if html is None:
        Console().print(render(plan))
    else:
        write_aside(Path(html), page(plan).encode("utf-8"))
