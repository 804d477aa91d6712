"""The picture of a comparison: time per frame and KV memory against the frame index. As PNG, and as SVG for a page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringkv.harness.plots import new_figure, save_png
from scripts.app.styles import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 1024.0**2
_INK = "#010203"
"""Drawn in this, text and axes of the SVG are then given the page's own colour."""


def write_png(path: Path, rows: Sequence[Mapping[str, Any]], *, title: str, block_frames: int) -> None:
    """Write the picture of ``rows``, the strategies of compare.json."""
    save_png(_draw(rows, title, block_frames, ink="#262626"), path)


def to_svg(rows: Sequence[Mapping[str, Any]], *, block_frames: int) -> str:
    """The picture as an ``<svg>`` element without a background, its ink ``currentColor``."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure = _draw(rows, "", block_frames, ink=_INK)
    figure.patch.set_alpha(0.0)
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # else a block of metadata that cites its schemas
    FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def _draw(rows: Sequence[Mapping[str, Any]], title: str, block_frames: int, ink: str) -> Figure:
    figure = new_figure(9.5, 7.2)
    time_axis, memory_axis = figure.subplots(2, 1, sharex=True)
    for row in rows:
        curves, name = row["curves"], row["strategy"]
        if not curves["frame"]:
            continue
        front = 3 if name == "ring" else 2
        style: dict[str, Any] = {"color": COLORS[name], "zorder": front, "linewidth": 2.4 if name == "ring" else 1.5}
        frames, ms = _generated(curves)
        if len(frames):
            time_axis.plot(frames, ms, color=style["color"], linewidth=0.5, alpha=0.25, zorder=1)
            middles, medians = _block_medians(frames, ms, block_frames)
            time_axis.plot(middles, medians, label=name, **style)
            _mark_end(time_axis, row, middles[-1], medians[-1], style["color"])
        reserved, in_use = (np.array(curves[key]) / _MIB for key in ("kv_bytes", "kv_in_use_bytes"))
        memory_axis.plot(curves["frame"], reserved, drawstyle="steps-mid", **style)
        memory_axis.plot(curves["frame"], in_use, **style | {"linewidth": 1.0, "linestyle": (0, (2, 2))})
        _mark_end(memory_axis, row, curves["frame"][-1], reserved[-1], style["color"])
    time_axis.set_ylabel("time per frame (ms)")
    memory_axis.set_ylabel("KV memory (MiB)")
    memory_axis.set_xlabel("frame index")
    above = _cut_off(time_axis, [_generated(row["curves"])[1] for row in rows])
    for axis in (time_axis, memory_axis):
        axis.set_ylim(bottom=0)
        axis.margins(x=0.01)
        _ink(axis, ink)
    handles, labels = time_axis.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=5,
        fontsize=9,
        frameon=False,
        labelcolor=ink,
        handlelength=1.6,
    )
    note = f"median of {block_frames} frames; thin: each frame" if block_frames > 1 else "each frame"
    note += f"; {above} above the edge" if above else ""
    time_axis.set_title(note, fontsize=9, loc="right", color=ink)
    memory_axis.set_title("solid: reserved; dotted: in use; ×: ended early", fontsize=9, loc="right", color=ink)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left", color=ink)
    return figure


def _generated(curves: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Index and milliseconds of the generated frames."""
    chosen = np.array([phase == "generated" for phase in curves["phase"]], dtype=bool)
    return np.array(curves["frame"])[chosen], np.array(curves["latency_ms"], dtype=float)[chosen]


def _block_medians(frames: np.ndarray, ms: np.ndarray, block_frames: int) -> tuple[np.ndarray, np.ndarray]:
    """Middle and median of each block, of the incomplete last one too."""
    starts = range(0, len(frames), block_frames)
    middles = [frames[start : start + block_frames].mean() for start in starts]
    return np.array(middles), np.array([np.median(ms[start : start + block_frames]) for start in starts])


def _cut_off(axis: Axes, frame_ms: Sequence[np.ndarray]) -> int:
    """Leave out frames that were held up, lest they flatten the rest; how many of them lie above the axis.

    A curve that rises in proportion to the frame ends at 1.11 times its 90th percentile.
    """
    measured = [ms for ms in frame_ms if len(ms)]
    if not measured:
        return 0
    top = 1.25 * max(float(np.percentile(ms, 90)) for ms in measured)
    above = sum(int((ms > top).sum()) for ms in measured)
    if above:
        axis.set_ylim(top=top)
    return above


def _mark_end(axis: Axes, row: Mapping[str, Any], x: float, y: float, color: str) -> None:
    if row["ended"] is not None:
        axis.plot([x], [y], marker="x", markersize=8, markeredgewidth=2.2, color=color, zorder=4, clip_on=False)


def _ink(axis: Axes, ink: str) -> None:
    axis.set_facecolor("none")
    axis.grid(color=ink, alpha=0.12, linewidth=0.8)
    axis.tick_params(colors=ink, labelsize=9)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set_color(ink)
    for side, spine in axis.spines.items():
        spine.set_color(ink)
        spine.set_visible(side in ("left", "bottom"))
