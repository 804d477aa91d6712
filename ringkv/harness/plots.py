"""PNG figures of a run. matplotlib is imported where it draws, without its global state or a display."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringkv.files import replaced_atomically
from ringkv.harness.video import CONTEXT_COLOR, GENERATED_COLOR, Pixels, to_rgb

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 1024.0**2


def strip_png(
    path: str | os.PathLike[str],
    truth: Pixels,
    rollout: Pixels,
    frame_indices: Sequence[int],
    context_frames: int,
) -> None:
    """Draw chosen frames of one session: a row of truth above a row of rollout, a column per frame.

    truth, rollout: uint8 [N, H, W, C], context included. frame_indices: the columns. context_frames: frames below
    this index were given; their columns are marked. ``ValueError`` for no columns or an index outside either array.
    """
    count = min(len(truth), len(rollout))
    outside = [index for index in frame_indices if not 0 <= index < count]
    if not frame_indices or outside:
        raise ValueError(f"strip frame_indices={list(frame_indices)}: expected one or more of 0 .. {count - 1}")
    height, width = truth.shape[1:3]
    figure = new_figure(1.3 * len(frame_indices) + 0.6, 2 * 1.3 * height / width + 0.5)
    axes = figure.subplots(2, len(frame_indices), squeeze=False)
    for axis_row, name, frames in zip(axes, ("truth", "rollout"), (truth, rollout), strict=True):
        axis_row[0].set_ylabel(name, fontsize=10)
        for axis, index in zip(axis_row, frame_indices, strict=True):
            color = _unit(CONTEXT_COLOR if index < context_frames else GENERATED_COLOR)
            axis.imshow(to_rgb(frames[index : index + 1])[0], interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            for spine in axis.spines.values():
                spine.set(edgecolor=color if name == "rollout" else "0.6", linewidth=2)
    for axis, index in zip(axes[0], frame_indices, strict=True):
        context = index < context_frames
        axis.set_title(
            f"{index}\n{'context' if context else 'generated'}",
            fontsize=8,
            color=_unit(CONTEXT_COLOR if context else GENERATED_COLOR),
        )
    save_png(figure, path)


def frames_png(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw latency and KV memory of the rows of frames.jsonl against the step; gaps where a value is missing.

    Without any row, or with nothing measured, the plot is written all the same and says so.
    """
    figure = new_figure(8.0, 4.6)
    latency_axis, memory_axis = figure.subplots(2, 1, sharex=True)
    steps = _column(rows, "step")
    latency = _column(rows, "latency_ms")
    context = np.array([row.get("phase") == "context" for row in rows], dtype=bool)
    warmup = np.array([bool(row.get("warmup")) for row in rows], dtype=bool)
    measured = ~context & ~warmup
    for chosen, label, color in (
        (context, "context", _unit(CONTEXT_COLOR)),
        (measured, "generated", _unit(GENERATED_COLOR)),
    ):
        if np.isfinite(latency[chosen]).any():
            latency_axis.plot(steps[chosen], latency[chosen], marker=".", lw=0.8, c=color, label=label)
    if not np.isfinite(latency[measured]).any():
        latency_axis.text(0.5, 0.5, "no measured frames", transform=latency_axis.transAxes, ha="center", va="center")
    latency_axis.set_ylim(bottom=0)
    if np.isfinite(latency[warmup]).any():
        # Compilation may take a thousand frames' time: warm-up sits at the upper edge where it would flatten the rest.
        top = latency_axis.get_ylim()[1] if latency_axis.lines else 1.1 * np.nanmax(latency[warmup])
        highest = f"warm-up, up to {np.nanmax(latency[warmup]):.0f} ms"
        latency_axis.plot(steps[warmup], np.minimum(latency[warmup], top), "^", c="0.4", clip_on=False, label=highest)
        latency_axis.set_ylim(top=top)
    latency_axis.set_ylabel("step latency (ms)")
    for name, label, line in (("kv_bytes", "allocated", "0.25"), ("kv_in_use_bytes", "in use", "tab:green")):
        values = _column(rows, name) / _MIB
        if np.isfinite(values).any():
            memory_axis.plot(steps, values, c=line, label=label)
    memory_axis.set_ylim(bottom=0)
    memory_axis.set_ylabel("KV memory (MiB)")
    memory_axis.set_xlabel("step")
    for axis in (latency_axis, memory_axis):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            # Above the axes, where it cannot lie over the curve.
            axis.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    save_png(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write ``figure`` atomically: the old file or the new one, never a part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with replaced_atomically(path) as temporary:
        FigureCanvasAgg(figure).print_figure(str(temporary), format="png")


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Column ``name`` as float64 [len(rows)], NaN where it is missing or null."""
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], dtype=np.float64)


def _unit(color: tuple[int, int, int]) -> tuple[float, ...]:
    return tuple(channel / 255 for channel in color)
