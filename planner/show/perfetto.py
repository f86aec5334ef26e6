"""The predicted schedule as a trace that ui.perfetto.dev and chrome://tracing read."""

from __future__ import annotations

import json
from typing import Any

from planner.plan import Plan
from planner.show.terminal import run_lengths, segment_names
from planner.show.timeline import timeline

COLOURS = {"F": "thread_state_running", "B": "thread_state_runnable"}


def trace(plan: Plan) -> str:
    """Chrome trace JSON: one process per stage, one slice per forward and backward of a micro-batch. Times in microseconds."""
    names = segment_names(plan)
    events: list[dict[str, Any]] = []
    for k, stage in enumerate(plan.stages):
        title = f"stage {k}: {run_lengths(names[stage.first : stage.last])}"
        events.append({"name": "process_name", "ph": "M", "pid": k, "tid": 0, "args": {"name": title}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": k, "tid": 0, "args": {"sort_index": k}})
    for event in timeline(plan):
        slice_: dict[str, Any] = {
            "name": event.name,
            "cat": {"F": "forward", "B": "backward"}.get(event.kind, "after"),
            "ph": "X",
            "pid": event.stage,
            "tid": 0,
            "ts": event.start_s * 1e6,
            "dur": (event.end_s - event.start_s) * 1e6,
        }
        if event.kind in COLOURS:
            slice_ |= {"cname": COLOURS[event.kind], "args": {"microbatch": event.microbatch}}
        events.append(slice_)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False) + "\n"
