"""Drawings: the terminal, the page, the schedule."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import sample_plans
from rich.console import Console

from planner.plan import Plan
from planner.show import fragment, page, render
from planner.show.perfetto import trace
from planner.show.timeline import ORDERS, Event, gpipe, one_f_one_b, run, timeline


class Reader(HTMLParser):
    """Checks that tags nest, and collects attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def terminal(plan: Plan, width: int = 300) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(render(plan))
    return file.getvalue()


def test_terminal_says_what_matters() -> None:
    text = terminal(sample_plans.plan())
    for part in (
        "ToyTransformer on 8 × h100: pipe 2 × data 2 × tensor 2, micro-batches 4, 1f1b", "predicted step 100 ms",
        "2.70 GiB of 3.73 GiB (72.5 %)", "optimal, gap 0.00 %", "embed, layers.* ×2", "activations 1.21 GiB",
        "column-parallel (×2)", "row-parallel: pending sum, then all-reduce",
        "FSDP over data", "communication  18.0 ms", "does not go", "aten.foo.default has no rule",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize("sizes", [{}, {"pipe": 1}, {"pipe": 1, "data": 1, "tensor": 1, "microbatches": 1}, {"tensor": 64, "data": 16}])
def test_page_is_sound_and_loads_nothing(sizes: dict[str, int]) -> None:
    html = page(sample_plans.plan(**sizes))
    reader = read(html)
    tags = {tag for tag, _, _ in reader.attributes}
    assert "script" not in tags and "link" not in tags and "img" not in tags
    urls = [value for _, name, value in reader.attributes if "//" in value and name != "xmlns"]
    assert urls == [] and "@import" not in html and "url(" not in html
    assert len(html) < 200_000


def test_page_shows_every_op_and_parameter() -> None:
    plan = sample_plans.plan()
    reader = read(page(plan))
    text = "".join(reader.text)
    for parameter in plan.parameters:
        assert parameter.name in text
    chips = [value for tag, name, value in reader.attributes if name == "class" and value.startswith("chip")]
    shardings = sum(line.count("|") + 2 for segment in plan.segments for line in segment.ops)
    assert len(chips) == 2 * shardings + 2 * len(plan.parameters)


def test_foreign_names_are_escaped() -> None:
    data = sample_plans.data()
    data["model"]["name"] = "<script>alert(1)</script>"
    data["segments"][0]["name"] = "[red]<b onload=x>"
    plan = Plan.from_json(json.dumps(data))
    assert "<script" not in page(plan) and "<b onload" not in page(plan)
    assert "[red]<b onload=x>" in terminal(plan)


def test_notebook_fragment_is_the_page_without_its_frame() -> None:
    plan = sample_plans.plan()
    assert plan._repr_html_() == fragment(plan) and fragment(plan) in page(plan)
    assert not fragment(plan).startswith("<!doctype")


def test_show_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = sample_plans.plan()
    plan.show()
    assert "ToyTransformer" in capsys.readouterr().out
    plan.show(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == page(plan)
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- the schedule


def test_orders() -> None:
    assert gpipe(2, 0, 2) == [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    assert one_f_one_b(2, 0, 3) == [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    assert one_f_one_b(2, 1, 2) == [("F", 0), ("B", 0), ("F", 1), ("B", 1)]
    assert one_f_one_b(4, 0, 2) == [("F", 0), ("F", 1), ("B", 0), ("B", 1)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 4), (4, 8), (4, 2), (3, 5)])
def test_equal_stages_take_microbatches_plus_stages_minus_one_slots(schedule: str, stages: int, microbatches: int) -> None:
    events = run([ORDERS[schedule](stages, k, microbatches) for k in range(stages)], 1.0, 2.0)
    assert len(events) == 2 * stages * microbatches
    assert max(e.end_s for e in events) == 3.0 * (microbatches + stages - 1)
    for k in range(stages):
        lane = [e for e in events if e.stage == k]
        assert all(a.end_s <= b.start_s for a, b in pairwise(lane))


def test_orders_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        run([[("B", 0), ("F", 0)]], 1.0, 2.0)


def test_timeline_ends_with_the_step() -> None:
    events = timeline(sample_plans.plan())
    assert max(e.end_s for e in events) == pytest.approx(0.1)
    assert [e.name for e in events if e.stage == 0][-1] == "optimizer"
    assert events[0] == Event(0, "F", 0, 0.0, pytest.approx(0.098 / 5 / 3))


def test_inference_has_no_backward() -> None:
    data = sample_plans.data()
    data |= {"optimizer": "none"}
    data["model"]["loss"] = "none"
    events = timeline(Plan.from_json(json.dumps(data)))
    assert {e.kind for e in events} == {"F", "optimizer"}


def test_trace_is_what_perfetto_reads() -> None:
    plan = sample_plans.plan()
    events = json.loads(trace(plan))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "stage 0: embed, layers.* ×2", 1: "stage 1: layers.* ×2, head"}
    assert len(slices) == 2 * (2 * 4 + 1)
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(0.1e6)
    assert all(e["dur"] > 0 for e in slices)
