"""One colour for each choice of conf/kv, the same in every figure."""

from __future__ import annotations

COLORS = {
    "ring": "#0077cc",
    "ring_uncompacted": "#bbaaff",
    "paged_windowed": "#ff9900",
    "shift": "#775588",
    "cat": "#dd8888",
    "full_windowed": "#ddaa66",
    "full": "#994455",
    "full_static": "#aa5533",
    "paged": "#cc6611",
    "hf_sliding": "#ccaacc",
    "recompute_all": "#7711ff",
    "recompute_window": "#7766ff",
}
"""Of middling lightness, to be read on white and on black; any two differ by CIE76 20 to red-green blindness too."""
