"""Tables of runs: what they ran on, configurations with their medians, what failed, and every run by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringkv.harness.tables import NOT_AVAILABLE, format_value
from scripts.app.columns import MACHINE_COLUMNS
from scripts.app.html.runs import MACHINE, MIB, Point, Points
from scripts.app.html.spec import Column, Row, Table

_METRICS = (
    ("throughput/frames_per_s", "frames/s", 1.0, 2),
    ("latency/frame_ms_p50", "p50 ms", 1.0, 1),
    ("latency/frame_ms_p95", "p95 ms", 1.0, 1),
    ("latency/first_frame_ms", "first frame ms", 1.0, 1),
    ("memory/kv_bytes", "KV held MiB", MIB, 2),
    ("memory/kv_in_use_bytes", "KV in use MiB", MIB, 2),
    ("memory/peak_rss_bytes", "process MiB", MIB, 0),
    ("quality/psnr_db", "PSNR dB", 1.0, 2),
)
_COMMAND = Column("command", "command")


def machine_table(points: Points) -> Table:
    """A row per fact, a column per machine. Source, commit and threads belong to it: they decide what was measured."""
    letters = list(points.machines)
    rows = []
    for fact in MACHINE_COLUMNS:
        values = [points.machines[letter].get(fact) for letter in letters]
        if any(value is not None for value in values):
            rows.append(Row([fact, *(_fact(fact, value) for value in values)]))
    caption = (
        "What the runs ran on. Runs on different machines, or of different source files, are never put into one median."
    )
    return Table("machines", "Machine", caption, [Column("fact"), *(Column(letter) for letter in letters)], rows)


def common_table(points: Points) -> Table | None:
    """Knobs that all points share."""
    same = points.same(points.all)
    rows = [Row([knob, value]) for knob, value in sorted(same.items())]
    caption = "Set the same in every run."
    return (
        Table("common", "Conditions in common", caption, [Column("knob"), Column("value")], rows, True)
        if rows
        else None
    )


def point_table(points: Points) -> Table:
    """A row per point that has a result: medians over repeats, n, machine, and the command of its first run."""
    shown = points.measured
    metrics = [metric for metric in _METRICS if any(point.interval(metric[0]).median is not None for point in shown)]
    knobs = [knob for knob in points.varying if knob != MACHINE]
    columns = [
        *map(Column, knobs),
        *(Column(label, "interval", digits) for _, label, _, digits in metrics),
        Column("n", "number", 0),
        Column(MACHINE),
        _COMMAND,
    ]
    rows = [
        Row(
            [
                *(point.tags.get(knob) for knob in knobs),
                *(point.interval(key, scale) for key, _, scale, _ in metrics),
                len(point.runs),
                point.letter,
                _command(point),
            ],
            point.tags,
        )
        for point in shown
    ]
    caption = (
        "Medians over n repeats; below each its 95 % interval. The command is that of the first repeat; the others "
        f"differ in seed. {points.conditions(shown)}"
    )
    return Table("configurations", "Every configuration", caption.strip(), columns, rows)


def failed_table(points: Points) -> Table | None:
    """A row per run without a result, with its reason."""
    knobs = [knob for knob in points.varying if knob != MACHINE]
    rows = []
    for point in points.all:
        for run in point.failed:
            predicted = run.metric("memory/kv_bytes_predicted", MIB)
            reason = run.row.get("reason") or "no reason on record"
            cells = [
                *(point.tags.get(knob) for knob in knobs),
                str(run.row["status"]),
                run.row.get("failure"),
                reason,
                predicted,
            ]
            rows.append(Row([*cells, run.row.get("command")], point.tags))
    if not rows:
        return None
    columns = [
        *map(Column, knobs),
        Column("status"),
        Column("failure"),
        Column("reason", "long"),
        Column("KV predicted MiB", "number"),
        _COMMAND,
    ]
    caption = "These are results too: what a machine, a budget or a strategy cannot do. They enter no median."
    return Table("failed", "Runs without a result", caption, columns, rows)


def run_table(points: Points) -> Table:
    """A row per run."""
    columns = [
        Column("run"),
        Column("configuration"),
        Column("seed"),
        Column("status"),
        Column("frames/s", "number"),
        Column("p50 ms", "number"),
        Column("KV held MiB", "number"),
        Column("missing on record"),
        _COMMAND,
    ]
    rows = []
    for point in points.all:
        for run in [*point.runs, *point.failed]:
            row = run.row
            cells = [
                str(row["run_dir"]),
                point.label,
                NOT_AVAILABLE if row.get("seed") is None else str(row["seed"]),
                str(row["status"]),
                run.metric("throughput/frames_per_s"),
                run.metric("latency/frame_ms_p50"),
                run.metric("memory/kv_bytes", MIB),
                _missing(row),
                row.get("command"),
            ]
            rows.append(Row(cells, point.tags))
    caption = "Single runs, without repeats put together. Missing: what a record of an older version does not say."
    return Table("runs", "Every run", caption, columns, rows, folded=True)


def _missing(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row.get("missing") or ()))


def _command(point: Point) -> str | None:
    return next((run.row["command"] for run in point.runs if run.row.get("command")), None)


def _fact(name: str, value: Any) -> str:
    if value is None:
        return NOT_AVAILABLE
    if name.endswith("_bytes"):
        return " ".join(format_value(name, value))
    return str(value)
