"""docs/records.md, made of the tables that the code writes and reads by.

python -m scripts.app.records_page > docs/records.md
"""

from __future__ import annotations

from collections.abc import Mapping

from ringkv.harness.columns import FRAME_COLUMNS, RECORD_VERSION, SEGMENT_COLUMNS, SUMMARY_COLUMNS, Column, table
from scripts.app.columns import FACT_COLUMNS, MACHINE_COLUMNS, RUN_COLUMNS
from scripts.app.snapshots import SNAPSHOT_COLUMNS
from scripts.app.sweep_record import REASONS, ROW_COLUMNS, ROW_METRICS

_INTRODUCTION = f"""# The files of a run

This page is made of the code: `python -m scripts.app.records_page > docs/records.md`. It describes records of version
{RECORD_VERSION}; *since* is the first version that has a column. A run without `record/version` is of version 0.

    config.json     the resolved config, every knob with the value that it had, and record/version
    frames.jsonl    a row per step, append-only; a line is there whole or not at all
    segments.json   an entry for each time that the run was started or resumed
    summary.json    what came out; not there until the run ended
    rollout.mp4     truth beside rollout, up to nine sessions
    strip.png       the first session, evenly spread frames
    frames.png      latency and memory over the steps
    wandb/          an offline W&B run for each segment
    snapshots/      what the run can be resumed from; not there once it is finished

All JSON is strict: a number that is not finite is null. Bytes are bytes, not multiples; MiB and GiB are powers of two.

A run is resumed by `python scripts/rollout.py rollout.resume=DIR`, in its own folder. The kernel's lock on frames.jsonl
says whether a living process holds the run. What is there is never written again: an incomplete last line is cut, and
frames that were logged after the last snapshot are made again and compared by checksum. Apart from times, the result is
that of a run that never stopped.
"""

_SUMMARY = {**SUMMARY_COLUMNS, **FACT_COLUMNS}

_PARQUET = """`python scripts/collect.py DIR ...` writes a row for each rollout. These columns come first; then,
each under its own name, every knob (`ring_frames`, `kv.strategy`, ...), the keys of summary.json but for status, error
and traceback, and the machine card with `machine/` before each entry. Each field has unit and meaning as metadata."""


def page() -> str:
    """The whole page, Markdown."""
    return "\n".join(
        [
            _INTRODUCTION,
            _section("frames.jsonl", "An object per step.", FRAME_COLUMNS),
            _section(
                "summary.json", "One object. What has no value, such as a rate over no frames, is null.", _SUMMARY
            ),
            _section("The machine card", "`machine` of summary.json.", MACHINE_COLUMNS),
            _section("segments.json", "A list of objects.", SEGMENT_COLUMNS),
            _section("snapshots/step-*/snapshot.json", "One object, beside a state per session.", SNAPSHOT_COLUMNS),
            _sweep(),
            _section("The Parquet file of scripts/collect.py", _PARQUET, RUN_COLUMNS),
        ]
    )


def _section(title: str, text: str, declared: Mapping[str, Column]) -> str:
    return f"## {title}\n\n{text}\n\n{table(declared)}\n"


def _sweep() -> str:
    """sweep.json, whose tables are in words only."""
    lines = ["| column | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in ROW_COLUMNS.items()]
    kinds = "\n".join(f"* `{name}`: {meaning}" for name, meaning in REASONS.items())
    metrics = "\n".join(f"* `{name}`" for name in ROW_METRICS)
    return (
        "## sweep.json\n\nIn the folder of a sweep: one object, with an object per point in `rows`.\n\n"
        + "\n".join(lines)
        + f"\n\nOf the point's summary:\n\n{metrics}\n\nKinds of failure:\n\n{kinds}\n"
    )


if __name__ == "__main__":
    print(page(), end="")
