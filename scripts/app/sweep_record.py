"""sweep.json: a row per point, whole at every moment, whichever process the point ran in. No torch.

Points may run in several processes at once, so every change reads the file, adds its row and replaces the file as a
whole, under a lock; and one process at a time may run a sweep in a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ringkv.harness.columns import VERSION_KEY
from ringkv.harness.records import dumps_strict, replace_text, to_plain

SWEEP_FILE = "sweep.json"
LOCK_FILE = "sweep.lock"
PACKAGES = ("ringkv", "model", "scripts")
"""Those that ``source_hash`` covers, as in the machine card of a run."""

ROW_COLUMNS: Mapping[str, str] = {
    "job": "number of the point, from 0, and name of its folder",
    "repeat": "which repeat of its config it is, from 0; null when it has no config",
    "overrides": "what the point was asked for, as on the command line of a run of its own",
    "run_dir": "its folder",
    "status": "ok or failed",
    "reason": "kind of failure, one of REASONS; null when ok",
    "error": "why it failed, one line; null when ok",
    "traceback": "where it failed; null when ok or when the process was ended from outside",
    "exit_code": "of its process, negative for a signal; null when none was started",
    "wall_s": "seconds from start to end of its process",
    "peak_rss_bytes": "highest resident bytes of its process and descendants, as far as it was watched",
    "steps": "rows in its frames.jsonl",
    "config_hash": "of its resolved config, see hash_config; null when it has none",
    "source_hash": "sha256 of the source files that it ran",
}
"""Columns of a row of sweep.json; ``ROW_METRICS`` of the point's summary follow, null where there is none."""

ROW_METRICS = (
    "throughput/frames_per_s",
    "latency/frame_ms_p50",
    "latency/frame_ms_p95",
    "memory/kv_bytes_predicted",
    "memory/kv_bytes",
    "memory/peak_rss_bytes",
)

REASONS: Mapping[str, str] = {
    "refused": "its config cannot work, or its data turned out not to fit",
    "out_of_memory": "it held more than sweep.memory_gib, or an allocation failed",
    "timeout": "it took longer than sweep.timeout_s",
    "crashed": "anything else that went wrong in it",
    "interrupted": "the sweep was ended while it ran",
}
"""Kinds of failure. The first three say that a point is infeasible here, the others nothing about the point."""


def hash_config(config: Any) -> str:
    """sha256 (hex) of a point's resolved config, typed or as in its config.json.

    Left out is what changes nothing of its record: the limits of the sweep, the W&B group, the folder of the cache.
    """
    plain = to_plain(config)
    plain.pop(VERSION_KEY, None)
    del plain["sweep"], plain["tracking"]["group"], plain["data"]["folder"]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make ``folder`` where it is missing, and keep other sweeps out of it. ``BlockingIOError`` if one is in there."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def read_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """The rows of the sweep in ``folder`` by job. ``OSError`` or ``ValueError`` if it holds none that can be read."""
    content = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))
    try:
        return {int(row["job"]): row for row in content["rows"]}
    except (TypeError, KeyError) as error:
        raise ValueError(f"{folder / SWEEP_FILE}: no rows with a job in it") from error


def begin(folder: Path, *, launcher: str, note: str | None, rows: Mapping[int, dict[str, Any]]) -> None:
    """Write sweep.json of a sweep that starts with ``rows`` of an earlier attempt.

    launcher: name of Hydra's. note: what a reader of the times has to know; None for what an earlier attempt noted.
    """

    def start(old: dict[str, Any]) -> dict[str, Any]:
        return {"launcher": launcher, "note": note or old.get("note"), "rows": list(rows.values())}

    _change(folder, start)


def store(folder: Path, row: Mapping[str, Any]) -> None:
    """Put the row of a point into sweep.json, in place of an older one of the same job."""

    def put(content: dict[str, Any]) -> dict[str, Any]:
        others = [other for other in content["rows"] if other["job"] != row["job"]]
        return content | {"rows": sorted([*others, row], key=lambda each: each["job"])}

    _change(folder, put)


def finish(folder: Path) -> dict[str, Any]:
    """Note that every point had its turn; what sweep.json then holds."""
    return _change(folder, lambda content: content | {"finished": True})


def _change(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    with open(folder / LOCK_FILE, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / SWEEP_FILE
        content = change(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})
        counts = Counter(row["status"] for row in content["rows"])
        content = {
            "finished": content.get("finished", False),
            "counts": {status: counts[status] for status in ("ok", "failed")},
            **{key: content[key] for key in ("launcher", "note", "rows")},
        }
        replace_text(path, dumps_strict(content, indent=2) + "\n")
        return content
