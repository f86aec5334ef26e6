"""The drawings of a plan's page, as SVG text. Each function takes plain numbers and names; nothing here knows a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from planner.show.timeline import Event

WIDTH = 900
PALETTE = {
    "forward": "#3f7de0",
    "backward": "#23a07c",
    "gather": "#d0a92b",
    "gradient sync": "#c94f7c",
    "communication": "#e2793b",
    "bubble": "#8f99aa",
    "optimizer": "#8d6bd1",
    "parameters": "#3f7de0",
    "gradients": "#e2793b",
    "activations": "#23a07c",
    "transient": "#d0a92b",
}
SPARE = ("#23a07c", "#c94f7c", "#d0a92b", "#5aa9c7", "#7f8c4f", "#a0623d", "#6474b8", "#999999")
FORWARD, BACKWARD = "#3f7de0", "#23a07c"


@dataclass(frozen=True)
class Bar:
    """One stacked bar: (kind, value, the value as text) from left to right, and a note behind it."""

    label: str
    parts: tuple[tuple[str, float, str], ...]
    note: str = ""


def colours(kinds: Sequence[str]) -> dict[str, str]:
    """A colour for each kind; known kinds keep theirs, the others take the spare ones that are left in order."""
    taken = {PALETTE[kind] for kind in kinds if kind in PALETTE}
    spare = [colour for colour in SPARE if colour not in taken] or list(SPARE)
    unknown = [kind for kind in kinds if kind not in PALETTE]
    return {kind: PALETTE.get(kind) or spare[unknown.index(kind) % len(spare)] for kind in kinds}


def svg(width: float, height: float, body: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "", rest: str = "") -> str:
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{height:.2f}" fill="{fill}" {rest}>{tip}</rect>'


def text(x: float, y: float, content: str, css: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" class="{css}" text-anchor="{anchor}">{escape(content)}</text>'


# ---------------------------------------------------------------- bars


def bars(rows: Sequence[Bar], limit: float | None = None, limit_text: str = "", label: str = "") -> str:
    """Stacked horizontal bars on one scale, with a dashed line at ``limit`` where it is on the scale's page."""
    left, right, row = 84, 150, 30
    longest = max((sum(value for _, value, _ in bar.parts) for bar in rows), default=0.0)
    near = limit is not None and limit <= 4 * longest
    scale = max(longest, limit if near and limit else 0.0) or 1.0
    span = WIDTH - left - right
    top = 16 if near else 2
    kinds = list(dict.fromkeys(kind for bar in rows for kind, _, _ in bar.parts))
    paint = colours(kinds)
    body = []
    for i, bar in enumerate(rows):
        y, x = top + i * row, float(left)
        body.append(text(left - 8, y + 16, bar.label, "label", "end"))
        for kind, value, shown in bar.parts:
            width = span * value / scale
            body.append(rect(x, y + 3, width, 20, paint[kind], f"{kind}: {shown}"))
            if width > 7 * len(shown) + 8:
                body.append(text(x + width / 2, y + 17, shown, "inside", "middle"))
            x += width
        body.append(text(max(x, left + span * (limit or 0) / scale if near else 0) + 8, y + 17, bar.note, "note"))
    height = top + row * len(rows)
    if near and limit is not None:
        x = left + span * limit / scale
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height}" class="limit"/>')
        body.append(text(x, 11, limit_text, "note", "middle"))
    return svg(WIDTH, height, "".join(body), label) + legend([(kind, paint[kind]) for kind in kinds])


def legend(items: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in items)
    return f'<div class="legend">{keys}</div>'


# ---------------------------------------------------------------- mesh


def mesh(pipe: int, data: int, tensor: int, captions: Sequence[str]) -> str:
    """Stages as columns; in each the ranks as a grid, data downwards, tensor to the right."""
    cell, gap, head, foot = 34.0, 26.0, 34, 20
    columns, rows, stages = min(tensor, 8), min(data, 8), min(pipe, 12)
    width = max(columns * cell, 96.0)
    body = []
    for k in range(stages):
        x = 60 + k * (width + gap)
        body.append(text(x + width / 2, 14, f"stage {k}" if pipe > 1 else "all layers", "label", "middle"))
        body.append(text(x + width / 2, 28, captions[k][:22], "note", "middle"))
        body.append(rect(x - 5, head, width + 10, rows * cell + 8, "none", "", 'class="frame" rx="6"'))
        for d in range(rows):
            for t in range(columns):
                rank = (k * data + d) * tensor + t
                left = x + (width - columns * cell) / 2 + t * cell
                tip = f"rank {rank}: pipe {k}, data {d}, tensor {t}"
                body.append(rect(left + 2, head + 6 + d * cell, cell - 4, cell - 4, "", tip, 'class="rank" rx="4"'))
                body.append(text(left + cell / 2, head + 6 + d * cell + 19, str(rank), "inside", "middle"))
        if k + 1 < stages:
            body.append(text(x + width + gap / 2, head + rows * cell / 2 + 8, "→", "label", "middle"))
    body.append(text(48, head + rows * cell / 2 + 8, f"data {data}", "note", "end"))
    body.append(text(60 + width / 2, head + rows * cell + foot + 4, f"tensor {tensor}", "note", "middle"))
    cut = " (the first of each axis)" if (columns, rows, stages) != (tensor, data, pipe) else ""
    total = 60 + stages * (width + gap) + 10
    if cut:
        body.append(text(60 + 1.5 * width + gap, head + rows * cell + foot + 4, cut, "note", "middle"))
    return svg(total, head + rows * cell + foot + 12, "".join(body), f"mesh of {pipe} x {data} x {tensor} ranks")


# ---------------------------------------------------------------- schedule


def schedule(events: Sequence[Event], stages: int, end_s: float, end_text: str) -> str:
    """One lane per stage; what is empty is the bubble."""
    left, lane, span = 84, 28, WIDTH - 84 - 20
    scale = span / end_s if end_s else 0.0
    others = colours(sorted({e.kind for e in events if e.kind not in "FB"}))
    body = []
    for k in range(stages):
        body.append(text(left - 8, k * lane + 18, f"stage {k}", "label", "end"))
        body.append(rect(left, k * lane + 3, span, lane - 6, "", "", 'class="idle"'))
    for e in events:
        x, width = left + e.start_s * scale, (e.end_s - e.start_s) * scale
        fill = {"F": FORWARD, "B": BACKWARD}.get(e.kind) or others[e.kind]
        body.append(rect(x, e.stage * lane + 3, max(width - 0.6, 0.4), lane - 6, fill, e.name))
        if e.kind in "FB" and width > 13:
            body.append(text(x + width / 2, e.stage * lane + 18, str(e.microbatch), "inside", "middle"))
    height = stages * lane + 18
    body.append(text(left, height - 4, "0", "note"))
    body.append(text(left + span, height - 4, end_text, "note", "end"))
    keys = [("forward", FORWARD)] + ([("backward", BACKWARD)] if any(e.kind == "B" for e in events) else [])
    return svg(WIDTH, height, "".join(body), "schedule of one step") + legend([*keys, *others.items()])
