"""Figures over the frames of a rollout: latency, quality and memory, with bands over repeats and sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringkv.harness.records import read_frames
from scripts.app.html.runs import MIB, Point, Points, Run
from scripts.app.html.spec import Axis, Curve, CurveFigure
from scripts.app.html.stats import median_band

MAX_CURVES = 48
MAX_VALUES = 1000

FrameValues = Mapping[int, float | None]
"""Frame index -> value."""


class _Kind(NamedTuple):
    """read: one mapping per repeat (or per repeat and session) of a run's rows."""

    name: str
    title: str
    caption: str
    y: Axis
    read: Callable[[Sequence[Mapping[str, Any]]], list[FrameValues]]


def frame_figures(points: Points) -> list[CurveFigure]:
    """One figure per kind that any run has rows for."""
    shown = points.measured[:MAX_CURVES]
    rows = {id(run): _rows(run) for point in shown for run in point.runs}
    out = []
    for kind in _KINDS:
        curves, blocks, seen = [], set(), dict[str, int]()
        for point in shown:
            repeats = [values for run in point.runs for values in kind.read(rows[id(run)]) if values]
            if not repeats:
                continue
            variant = seen[point.strategy] = seen.get(point.strategy, -1) + 1
            curve, block = _curve(point, repeats, variant)
            curves.append(curve)
            blocks.add(block)
        if curves:
            caption = kind.caption
            if max(blocks) > 1:
                caption += f" Each value is the median of up to {max(blocks)} frames in a row."
            if len(points.measured) > len(shown):
                caption += f" The first {len(shown)} of {len(points.measured)} configurations."
            caption += f" {points.conditions(shown)}"
            x = Axis("frame index", whole=True)
            out.append(CurveFigure(kind.name, kind.title, caption, x, kind.y, curves))
    return out


def _rows(run: Run) -> list[dict[str, Any]]:
    try:
        return read_frames(run.folder).rows
    except FileNotFoundError:
        return []


def _curve(point: Point, repeats: Sequence[FrameValues], variant: int) -> tuple[Curve, int]:
    """The band over ``repeats``, and how many frames each of its values is the median of."""
    frames = sorted({frame for values in repeats for frame in values})
    block = -(-len(frames) // MAX_VALUES)
    starts = range(0, len(frames), block)
    table = [[_median(values.get(f) for f in frames[s : s + block]) for s in starts] for values in repeats]
    curve = Curve(
        point.label, point.strategy, point.tags, [frames[start] for start in starts], median_band(table), variant
    )
    return curve, block


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _latency(rows: Sequence[Mapping[str, Any]]) -> list[FrameValues]:
    """A frame's step, whichever row of the batch made it; the slowest if sessions made it in several steps."""
    values: dict[int, float | None] = {}
    for row in rows:
        if row["phase"] != "generated" or row["warmup"] or row["latency_ms"] is None:
            continue
        for clock in row["clocks"]:
            values[clock] = max(row["latency_ms"], values.get(clock) or 0.0)
    return [values]


def _quality(rows: Sequence[Mapping[str, Any]]) -> list[FrameValues]:
    """One mapping per session."""
    sessions: dict[str, dict[int, float | None]] = {}
    for row in rows:
        for (rid, clock), value in zip(row["frames"], row.get("psnr_db") or (), strict=False):
            if value is not None:
                sessions.setdefault(rid, {})[clock] = value
    return list(sessions.values())


def _memory(column: str) -> Callable[[Sequence[Mapping[str, Any]]], list[FrameValues]]:
    def read(rows: Sequence[Mapping[str, Any]]) -> list[FrameValues]:
        return [{max(row["clocks"]): row[column] / MIB for row in rows if row[column] is not None and row["clocks"]}]

    return read


_KINDS = (
    _Kind(
        "frame_latency",
        "Latency of each frame",
        "Median over repeats of the time of a frame's step, all its passes and all sessions, with a 95 % band. Context "
        "and warm-up frames are left out.",
        Axis("step latency (ms)", zero=True),
        _latency,
    ),
    _Kind(
        "frame_quality",
        "Quality of each predicted frame",
        "PSNR against the recorded frame, median over repeats and sessions, with a 95 % band. Frames of context are "
        "left out. It falls as a rollout leaves its recording, which need not be a fault.",
        Axis("PSNR (dB)"),
        _quality,
    ),
    _Kind(
        "frame_kv_held",
        "KV memory held after each frame",
        "K and V allocated for all sessions, padding included; flags and indices are not counted.",
        Axis("KV memory held (MiB)", zero=True),
        _memory("kv_bytes"),
    ),
    _Kind(
        "frame_kv_in_use",
        "KV memory in use after each frame",
        "The part of it that holds frames a later step can see.",
        Axis("KV memory in use (MiB)", zero=True),
        _memory("kv_in_use_bytes"),
    ),
)
