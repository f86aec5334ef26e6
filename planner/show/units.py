"""Numbers as people read them: seconds, bytes, shares."""

from __future__ import annotations


def seconds(value: float) -> str:
    """``1.25 s``, ``12.5 ms``, ``125 us``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value / 1e-9)} ns" if value else "0 s"


def nbytes(value: float) -> str:
    """``1.25 GiB``, ``12.5 MiB``, ``125 B``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{_three(value / 1024**power)} {unit}"
    return f"{int(value)} B"


def share(value: float) -> str:
    """``12.5 %``; what is not zero never reads as zero."""
    if 0 < value < 0.0005:
        return "<0.05 %"
    return f"{_three(100 * value)} %"


def count(number: int, noun: str, ending: str = "s") -> str:
    """``1 op``, ``3 ops``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"


def _three(value: float) -> str:
    """Three significant digits without an exponent."""
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"
