"""What stands in the files of a run: name, type, unit and meaning of every column, and since when it is there.

``RECORD_VERSION`` goes up by one whenever a column is added or changes its meaning; ``since`` names that version.
docs/records.md is made of these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

RECORD_VERSION = 1
"""Version of the records that this release writes. A record that names none is of version 0."""
VERSION_KEY = "record/version"
"""Key of the version in config.json and summary.json."""

Kind = Literal["int", "float", "bool", "text", "ints", "floats", "texts", "pairs", "object"]


class Column(NamedTuple):
    """kind: of its values; each may be null. unit: "" for a count, a name or a flag. since: first version with it."""

    kind: Kind
    unit: str
    meaning: str
    since: int = 0


FRAME_COLUMNS: Mapping[str, Column] = {
    "step": Column("int", "", "index of the step, from 0"),
    "phase": Column(
        "text", "", "context (every row was primed with a real frame) or generated (at least one row was generated)"
    ),
    "clocks": Column("ints", "", "frame index of every row of the step, in batch order"),
    "frames": Column("pairs", "", "[request id, frame index] of every row of the step, in batch order"),
    "sessions": Column("int", "", "sessions resident in the cache after the step"),
    "latency_ms": Column("float", "ms", "from the start of the step to the end of its work on the device"),
    "warmup": Column("bool", "", "whether the step was one of the warm-up steps, which are not measured"),
    "kv_bytes": Column("int", "bytes", "KV memory allocated by the resource"),
    "kv_in_use_bytes": Column("int", "bytes", "the part of it that holds frames a later step can see"),
    "rss_bytes": Column("int", "bytes", "resident memory of the process after the step"),
    "checksums": Column("texts", "", "checksum of every row's frame, see ``frame_checksum``, in batch order", since=1),
    "psnr_db": Column(
        "floats",
        "dB",
        "every row's peak signal-to-noise ratio against the recorded frame, both in 8 bits, in batch order; null for "
        "a context row, without a recorded frame, and where the two are equal",
        since=1,
    ),
}
"""Columns of frames.jsonl. Every row has all of its version; null stands for what could not be measured."""

TIMED_COLUMNS = ("latency_ms", "rss_bytes")
"""Those of them that are not the same when the same frames are made again."""

SUMMARY_COLUMNS: Mapping[str, Column] = {
    VERSION_KEY: Column("int", "", "version of the record", since=1),
    "status": Column("text", "", "ok or failed"),
    "error": Column("text", "", "type and message of what ended a failed run, one line; null when ok"),
    "traceback": Column("text", "", "its traceback; null when ok"),
    "throughput/frames_per_s": Column(
        "float", "frames/s", "measured frames over all sessions, per second of measured step time"
    ),
    "latency/frame_ms_mean": Column("float", "ms", "mean over measured frames of the latency of the frame's step"),
    "latency/frame_ms_p50": Column("float", "ms", "median of the same"),
    "latency/frame_ms_p95": Column("float", "ms", "95th percentile of the same"),
    "latency/frame_ms_p99": Column("float", "ms", "99th percentile of the same"),
    "latency/jitter_ms": Column("float", "ms", "standard deviation of the same"),
    "latency/first_frame_ms": Column(
        "float", "ms", "from the start of the rollout to its first generated frame; null if it was resumed in between"
    ),
    "latency/on_time_fraction": Column(
        "float", "fraction", "share of measured frames whose step took at most 1 / target_fps"
    ),
    "steps/measured": Column("int", "", "steps that generated frames, warm-up left out"),
    "frames/measured": Column("int", "", "frames that those steps generated, over all sessions"),
    "warmup/steps": Column("int", "", "generating steps kept out of the measured ones"),
    "warmup/ms_total": Column("float", "ms", "the warm-up steps together"),
    "warmup/ms_max": Column("float", "ms", "the slowest warm-up step"),
    "context/steps": Column("int", "", "steps that only primed the cache with context"),
    "context/ms_total": Column("float", "ms", "those steps together"),
    "compile/ms_total": Column("float", "ms", "compiling before the first step; of the last segment"),
    "memory/kv_bytes_predicted": Column("int", "bytes", "KV memory computed from the geometry, before allocation"),
    "memory/kv_bytes": Column("int", "bytes", "KV memory really held"),
    "memory/kv_in_use_bytes": Column("int", "bytes", "highest kv_in_use_bytes of any step"),
    "memory/peak_rss_bytes": Column(
        "int",
        "bytes",
        "highest resident memory of the process since it began; with the copy of one session that a snapshot takes",
    ),
    "quality/psnr_db": Column("float", "dB", "mean over generated frames of psnr_db, where it is not null", since=1),
    "machine": Column("object", "", "machine card: what the run, or its last segment, ran on"),
}
"""Keys of summary.json. A run may add keys of its own, named the same way: the unit stands in the name."""

SEGMENT_COLUMNS: Mapping[str, Column] = {
    "segment": Column("int", "", "index of the segment, from 0", since=1),
    "started_at": Column("text", "", "when it began, ISO 8601 in UTC", since=1),
    "from_step": Column("int", "", "first step that it made: that of the snapshot it went on from, or 0", since=1),
    "first_step": Column(
        "int", "", "first step that it logged; those before, which it made again, it compared by checksum", since=1
    ),
    "record_version": Column("int", "", "version of what it wrote", since=1),
    "weights": Column("text", "", "fingerprint of the weights", since=1),
    "data_hashes": Column("texts", "", "hash of each session's recorded frames", since=1),
    "source_hash": Column("text", "", "sha256 of the source files that it ran", since=1),
    "git_commit": Column("text", "", "commit that they were checked out from", since=1),
    "group": Column("text", "", "W&B group, the same in every segment", since=1),
    "name": Column("text", "", "W&B name, the same in every segment", since=1),
    "wandb_id": Column("text", "", "id of its own W&B run; null without one", since=1),
}
"""Columns of segments.json, a list with an entry for each time that the run was started or resumed."""


def missing_columns(declared: Mapping[str, Column], version: int) -> list[str]:
    """Columns that a record of ``version`` does not have yet."""
    return [name for name, column in declared.items() if column.since > version]


def table(declared: Mapping[str, Column]) -> str:
    """The columns as a Markdown table."""
    lines = ["| column | type | unit | since | meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{name}` | {column.kind} | {column.unit} | {column.since} | {column.meaning.replace('``', '`')} |"
        for name, column in declared.items()
    ]
    return "\n".join(lines)


def version_of(content: Mapping[str, Any]) -> int:
    """The version that a config.json or summary.json names; 0 without one. ``ValueError`` for what none can be."""
    version = content.get(VERSION_KEY, 0)
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise ValueError(f"{VERSION_KEY}={version!r}: expected an integer >= 0")
    return version
