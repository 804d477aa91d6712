"""The summary table: every value under its label with its unit, and n/a where there is none."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from ringkv.harness import tables
from ringkv.harness.meters import FrameMeter
from ringkv.harness.records import SUMMARY_COLUMNS, dumps_strict
from ringkv.harness.tables import format_value, print_summary


def printed(summary: dict) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    print_summary(summary, console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("memory/kv_bytes", 0, ("0", "B")),
        ("memory/kv_bytes", 1023, ("1023", "B")),
        ("memory/kv_bytes", 1024, ("1.00", "KiB")),
        ("memory/kv_bytes_predicted", 3 * 2**20 + 2**19, ("3.50", "MiB")),
        ("memory/peak_rss_bytes", 5 * 2**40, ("5120.00", "GiB")),
        ("latency/on_time_fraction", 0.9754, ("97.5", "%")),
        ("throughput/frames_per_s", 17.456, ("17.46", "frames/s")),
        ("latency/frame_ms_p99", 12.0, ("12.00", "ms")),
        ("warmup/ms_total", 510.25, ("510.25", "ms")),
        ("latency/jitter_ms", 0.0, ("0.00", "ms")),
        ("warmup/steps", 1, ("1", "")),
        ("frames/measured", 96, ("96", "")),
        ("latency/frame_ms_p50", None, ("n/a", "")),
        ("memory/kv_bytes", float("nan"), ("n/a", "")),
        ("throughput/frames_per_s", float("inf"), ("n/a", "")),
    ],
)
def test_a_value_is_shown_in_the_unit_its_key_names(key, value, expected):
    assert format_value(key, value) == expected


def test_the_table_pairs_labels_and_values_and_says_what_is_not_there():
    lines = printed({"throughput/frames_per_s": 17.4, "latency/frame_ms_p50": float("nan"), "memory/kv_bytes": 2**20})
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines.splitlines() if "│" in line]
    table = {(row[1]): (row[2], row[3]) for row in cells}
    assert [row[0] for row in cells if row[0]] == ["throughput", "frame latency", "kept apart", "memory"]
    assert table["frames, all sessions"] == ("17.40", "frames/s")
    assert table["p50"] == table["KV predicted"] == ("n/a", "")
    assert table["KV held"] == ("1.00", "MiB")
    assert "nan" not in lines.lower().replace("n/a", "")


def test_a_run_without_measured_frames_is_strict_json_and_a_table():
    meter = FrameMeter(lambda: None, warmup=2, target_fps=10, clock=iter(range(100)).__next__)
    for _ in range(2):
        meter.start()
        meter.stop()
    summary = json.loads(dumps_strict(meter.summary()))
    assert summary["throughput/frames_per_s"] is None
    text = printed(summary)
    assert text.count("n/a") > 5
    assert "2000.00 │ ms" in text


def test_every_row_of_the_table_is_a_documented_key_of_the_summary():
    assert {key for _, rows in tables._ROWS for key, _ in rows} <= SUMMARY_COLUMNS.keys()
    meter = FrameMeter(lambda: None, warmup=0, target_fps=10)
    assert meter.summary().keys() <= SUMMARY_COLUMNS.keys()


def test_a_failed_run_says_what_ended_it_brackets_included():
    text = printed({"status": "failed", "error": "ValueError: ring_frames[0]=0"})
    assert "failed: ValueError: ring_frames[0]=0" in text
    assert "failed" not in printed({"status": "ok", "error": None})
