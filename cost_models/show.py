"""A profile for people: text tables, and one HTML page with curves drawn as SVG (no script, nothing loaded from elsewhere)."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.figures import Curve, Figure, Provenance
from cost_models.profile import HardwareProfile

GiB = 2**30
SHOWN_BYTES = tuple(2.0**e for e in range(12, 33, 4))
SHOWN_FLOPS = tuple(10.0**e for e in range(6, 14))
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


@dataclass(frozen=True)
class Table:
    """One table: its title, the names of the columns, the rows as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """One chart with two logarithmic axes."""

    title: str
    x_name: str
    y_name: str
    lines: tuple[Line, ...]


def to_text(profile: HardwareProfile) -> str:
    """The tables of a profile as plain text."""
    head = f"{profile.name}  id {profile.id}  {profile.nodes} nodes of {profile.gpus_per_node}\n{profile.description}".rstrip()
    return "\n\n".join([head, *(_text_table(table) for table in tables(profile))]) + "\n"


def to_html(profile: HardwareProfile) -> str:
    """The tables and curves of a profile as one HTML page."""
    title = html.escape(f"{profile.name} ({profile.nodes} nodes of {profile.gpus_per_node})")
    parts = [f"<h1>{title}</h1><p>{html.escape(profile.description)}. Profile id <code>{profile.id}</code>.</p>"]
    parts += [_svg(chart) for chart in charts(profile)]
    parts += [_html_table(table) for table in tables(profile)]
    style = (
        "body{font:14px system-ui,sans-serif;margin:2em;max-width:70em}table{border-collapse:collapse;margin:1em 0}"
        "td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}caption{font-weight:bold;text-align:left}"
        "svg{margin:0 1em 1em 0}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


# -- what is shown ----------------------------------------------------------------------------------------------------


def tables(profile: HardwareProfile) -> list[Table]:
    """Figures, arithmetic, memory and collectives with their origins."""
    return [_figures(profile), _arithmetic(profile), _collectives(profile)]


def charts(profile: HardwareProfile) -> list[Chart]:
    """Arithmetic over FLOPs, memory over bytes, and one chart of collectives for each group that has a table."""
    arithmetic = [
        Line(f"{rate.kind} {rate.dtype}", SHOWN_FLOPS, _floats(rate.peak.value * rate.efficiency.at(SHOWN_FLOPS) / 1e9))
        for rate in profile.rates
        if rate.kind == "matmul"
    ]
    band = profile.bandwidth
    memory = Line("bandwidth", SHOWN_BYTES, _floats(band.peak.value * band.efficiency.at(SHOWN_BYTES) / 1e9))
    found = [
        Chart("Matrix products", "FLOPs", "GFLOPs/s", tuple(arithmetic)),
        Chart("Memory", "bytes", "GB/s", (memory,)),
    ]
    for group in sorted({table.group for table in profile.collectives}, key=lambda group: (group.nodes, group.size)):
        lines = [
            Line(table.collective, table.seconds.x, _floats(table.seconds.at(table.seconds.x) * 1e6))
            for table in profile.collectives
            if table.group == group
        ]
        found.append(Chart(f"Collectives, group {group}", "bytes", "us", tuple(lines)))
    return found


def _figures(profile: HardwareProfile) -> Table:
    links = [profile.link_within] + ([profile.link_between] if profile.link_between else [])
    figures: list[tuple[str, str, Figure]] = [
        ("memory", f"{profile.memory.value / GiB:.2f} GiB", profile.memory),
        ("launch overhead", f"{profile.launch_overhead.value * 1e6:.2f} us", profile.launch_overhead),
        ("overlap slowdown", f"{profile.overlap.value:.2f}", profile.overlap),
        ("memory bandwidth", f"{profile.bandwidth.peak.value / 1e9:.1f} GB/s", profile.bandwidth.peak),
        ("optimizer step", f"{profile.optimizer_bandwidth.value / 1e9:.1f} GB/s", profile.optimizer_bandwidth),
    ]
    for link in links:
        figures.append((f"{link.name}, bandwidth", f"{link.bandwidth.value / 1e9:.2f} GB/s", link.bandwidth))
        figures.append((f"{link.name}, one step", f"{link.step_latency.value * 1e6:.2f} us", link.step_latency))
    rows = tuple((name, shown, str(figure.provenance)) for name, shown, figure in figures)
    return Table("Figures", ("figure", "value", "origin"), rows)


def _arithmetic(profile: HardwareProfile) -> Table:
    sizes = SHOWN_FLOPS[::2]
    rows = tuple(
        (
            f"{rate.kind} {rate.dtype}",
            f"{rate.peak.value / 1e9:.5g}",
            *(f"{rate.peak.value * share / 1e9:.4g}" for share in rate.efficiency.at(sizes)),
            _deviation(rate.efficiency),
            _origin(rate.peak.provenance, rate.efficiency.provenance),
        )
        for rate in profile.rates
    )
    columns = ("GFLOPs/s of an op of", "peak", *(f"{size:.0e}" for size in sizes), "fit error", "origin")
    return Table("Arithmetic", columns, rows)


def _collectives(profile: HardwareProfile) -> Table:
    rows = tuple(
        (
            table.collective,
            str(table.group),
            *(f"{seconds * 1e6:.4g}" for seconds in table.seconds.at(SHOWN_BYTES)),
            _deviation(table.seconds),
            str(table.seconds.provenance),
        )
        for table in profile.collectives
    )
    columns = ("microseconds of", "group", *(_bytes(size) for size in SHOWN_BYTES), "fit error", "origin")
    return Table("Collectives", columns, rows)


def _deviation(curve: Curve) -> str:
    return "" if curve.residual is None else f"{curve.residual:.1%}"


def _origin(*origins: Provenance) -> str:
    return "; ".join(dict.fromkeys(str(origin) for origin in origins))


def _bytes(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size:g} B"


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


# -- how it is drawn --------------------------------------------------------------------------------------------------


def _text_table(table: Table) -> str:
    """Columns padded to their widest cell; the last one, an origin, runs on."""
    grid = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in grid) for i in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in grid]
    return "\n".join([table.title, *lines])


def _html_table(table: Table) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    return f"<table><caption>{html.escape(table.title)}</caption>{row(table.columns, 'th')}{body}</table>"


def _svg(chart: Chart, width: int = 520, height: int = 320) -> str:
    """Both axes logarithmic with a grid line per decade; the legend stands right of the curves."""
    left, right, top, bottom = 60, 150, 30, 40
    x_low, x_high = _decades([x for line in chart.lines for x in line.x])
    y_low, y_high = _decades([y for line in chart.lines for y in line.y])

    def across(x: float) -> float:
        return left + (math.log10(x) - x_low) / (x_high - x_low) * (width - left - right)

    def up(y: float) -> float:
        return height - bottom - (math.log10(y) - y_low) / (y_high - y_low) * (height - top - bottom)

    parts = [f'<text x="{left}" y="18" font-weight="bold">{html.escape(chart.title)}</text>']
    for decade in range(x_low, x_high + 1):
        x = across(10.0**decade)
        parts.append(f'<path d="M{x:.1f} {top}V{height - bottom}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 14}" text-anchor="middle">1e{decade}</text>')
    for decade in range(y_low, y_high + 1):
        y = up(10.0**decade)
        parts.append(f'<path d="M{left} {y:.1f}H{width - right}" stroke="#eee"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">1e{decade}</text>')
    parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 6}" text-anchor="middle">{chart.x_name}</text>')
    parts.append(f'<text x="4" y="{top + 4}">{chart.y_name}</text>')
    for number, line in enumerate(chart.lines):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in zip(line.x, line.y))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        label = f'<text x="{width - right + 8}" y="{top + 14 * number + 8}" fill="{colour}">{html.escape(line.name)}</text>'
        parts.append(label)
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-size="11" role="img" '
        f'aria-label="{html.escape(chart.title)}">{"".join(parts)}</svg>'
    )


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten that enclose the values, at least one decade."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)
