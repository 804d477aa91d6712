"""One look for each strategy, in the page and in the PNG files: colour, marker, and a dash for its variants."""

from __future__ import annotations

from scripts.app.styles import COLORS

MARKERS = {
    "ring": ("circle", "o"),
    "ring_uncompacted": ("circle-open", "o"),
    "paged_windowed": ("square-open", "s"),
    "shift": ("diamond", "D"),
    "cat": ("diamond-open", "D"),
    "full_windowed": ("triangle-up-open", "^"),
    "full": ("triangle-up", "^"),
    "full_static": ("triangle-down", "v"),
    "paged": ("square", "s"),
    "hf_sliding": ("star", "*"),
    "recompute_all": ("hexagon", "h"),
    "recompute_window": ("hexagon-open", "h"),
}
"""Name of the marker for Plotly and for matplotlib: colour is never the only difference."""

DASHES = (("solid", "-"), ("dash", "--"), ("dot", ":"), ("dashdot", "-."), ("longdash", (0, (8, 3))))
CYCLE = ("ring", "paged_windowed", "full", "recompute_all", "cat", "shift", "paged", "full_static")
"""Whose looks are lent, in turn, to what is no strategy."""


def look_of(strategy: str, index: int) -> str:
    """The strategy whose look a mark has; index: its place among the marks without one of their own."""
    return strategy if strategy in COLORS else CYCLE[index % len(CYCLE)]
