"""The summary of a run as a table for a person."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

NOT_AVAILABLE = "n/a"

_ROWS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "throughput",
        (
            ("throughput/frames_per_s", "frames, all sessions"),
            ("latency/on_time_fraction", "on time"),
            ("frames/measured", "frames measured"),
            ("steps/measured", "steps measured"),
        ),
    ),
    (
        "frame latency",
        (
            ("latency/frame_ms_mean", "mean"),
            ("latency/frame_ms_p50", "p50"),
            ("latency/frame_ms_p95", "p95"),
            ("latency/frame_ms_p99", "p99"),
            ("latency/jitter_ms", "jitter (std)"),
            ("latency/first_frame_ms", "first frame"),
        ),
    ),
    (
        "kept apart",
        (
            ("compile/ms_total", "compile"),
            ("warmup/steps", "warm-up steps"),
            ("warmup/ms_total", "warm-up"),
            ("context/steps", "context steps"),
            ("context/ms_total", "context"),
        ),
    ),
    (
        "memory",
        (
            ("memory/kv_bytes_predicted", "KV predicted"),
            ("memory/kv_bytes", "KV held"),
            ("memory/kv_in_use_bytes", "KV in use, highest"),
            ("memory/peak_rss_bytes", "process, highest"),
        ),
    ),
)


def render_summary(summary: Mapping[str, Any]) -> Table:
    """Throughput, latency and memory of a summary (``records.SUMMARY_COLUMNS``), grouped, one value per line.

    A value that is missing, null or not a number shows as "n/a".
    """
    table = Table(title="rollout", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for group, rows in _ROWS:
        for position, (key, label) in enumerate(rows):
            value, unit = format_value(key, summary.get(key))
            last = position == len(rows) - 1
            table.add_row(group if position == 0 else "", label, value, unit, end_section=last)
    return table


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print the table of ``render_summary``, and what ended the run if it failed, to ``console``."""
    console.print(render_summary(summary))
    if summary.get("status") == "failed":
        console.print(f"failed: {summary.get('error')}", style="bold red", markup=False)


def format_value(key: str, value: float | int | None) -> tuple[str, str]:
    """Value and unit of a summary entry as text, the unit taken from the name of its key.

    Bytes come in KiB, MiB or GiB, a fraction in percent; None, NaN and infinities give ("n/a", "").
    """
    if value is None or not math.isfinite(value):
        return NOT_AVAILABLE, ""
    if key.endswith(("_bytes", "_bytes_predicted")):
        size = float(value)
        for unit in ("B", "KiB", "MiB"):
            if abs(size) < 1024:
                return (f"{size:.0f}" if unit == "B" else f"{size:.2f}"), unit
            size /= 1024
        return f"{size:.2f}", "GiB"
    if key.endswith("_fraction"):
        return f"{100 * value:.1f}", "%"
    if key.endswith("_per_s"):
        return f"{value:.2f}", "frames/s"
    if "ms" in key.rsplit("/", 1)[-1].split("_"):
        return f"{value:.2f}", "ms"
    return str(value), ""
