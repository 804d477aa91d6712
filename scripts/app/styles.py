"""One colour for each choice of conf/kv, the same in every figure."""

from __future__ import annotations

COLORS = {
    "ring": "#d62728",
    "ring_uncompacted": "#e58606",
    "paged_windowed": "#2a9d55",
    "shift": "#8f63c9",
    "cat": "#b0703c",
    "full_windowed": "#c95fa8",
    "full": "#3d7fd6",
    "full_static": "#1d9fb5",
    "paged": "#7d8a1e",
    "hf_sliding": "#777777",
    "recompute_all": "#5f8a8b",
    "recompute_window": "#a2565f",
}
"""Of middling lightness, to be read on white and on black."""
