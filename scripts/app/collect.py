"""Any number of runs as rows: rollouts, points of sweeps, and a comparison's strategies. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringkv.harness.columns import (
    FRAME_COLUMNS,
    RECORD_VERSION,
    SUMMARY_COLUMNS,
    VERSION_KEY,
    missing_columns,
    version_of,
)
from ringkv.harness.records import (
    CONFIG_FILE,
    FRAMES_FILE,
    SEGMENTS_FILE,
    SNAPSHOT_FOLDER,
    SUMMARY_FILE,
    read_object,
    read_segments,
)
from scripts.app import schema
from scripts.app.columns import RUN_COLUMNS, knob_columns
from scripts.app.command import command_of, shell
from scripts.app.errors import BadInput
from scripts.app.flat import flat
from scripts.app.sweep_record import SWEEP_FILE
from scripts.app.sweep_resume import ASIDE_FOLDER

_NOT_RUNS = ("wandb", SNAPSHOT_FOLDER, ASIDE_FOLDER)
_OUTCOME = ("status", "error", "traceback", "machine", "reason", VERSION_KEY)


def collect(dirs: Sequence[str | os.PathLike[str]], *, in_each: bool = False) -> list[dict[str, Any]]:
    """A row for each rollout in ``dirs`` and below, in order of their paths; ``columns.collected_columns`` names them.

    A record of an older version gives what it has, and ``missing`` names the rest. Points of a sweep that never made a
    folder are rows too. ``BadInput`` for what is no folder and, with ``in_each``, for one without any rollout.
    """
    schema.register()
    rows: dict[Path, dict[str, Any]] = {}
    for given in dirs:
        path = Path(given)
        if not path.is_dir():
            raise BadInput(f"{given}: no such folder; expected one that holds runs")
        found = list(_below(path.absolute()))
        if in_each and not found:
            raise BadInput(f"{given}: holds no rollout; expected the folder of a run or a sweep, or one above them")
        rows |= {Path(os.path.normpath(row["run_dir"])): row for row in found}
    return list(rows.values())


def _below(folder: Path, point: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of ``folder`` and the folders in it. point: the row of sweep.json that is about ``folder``."""
    if any((folder / name).exists() for name in (FRAMES_FILE, SUMMARY_FILE)):
        row = _row(folder, point)
        if row is not None:
            yield row
    points = _points(folder)
    inner = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    seen = set()
    for path in sorted(inner, key=lambda path: (int(path.name) if path.name.isdigit() else -1, path.name)):
        if path.name not in _NOT_RUNS and not path.is_symlink():
            for row in _below(path, points.get(path.name)):
                if row["run_dir"] == str(path):
                    seen.add(path.name)
                yield row
    for name, lost in points.items():
        if name not in seen:
            row = dict.fromkeys(RUN_COLUMNS) | {"run_dir": str(folder / name), "missing": [CONFIG_FILE]}
            yield _with_point(row | {"status": lost["status"], "reason": lost["error"]}, lost, folder) | {
                "command": shell(lost["overrides"]),
                "steps": 0,
                "segments": 0,
            }


def _points(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The rows of sweep.json by the name of their folder; a sweep may have moved as a whole."""
    try:
        rows = read_object(folder / SWEEP_FILE)["rows"]
        return {Path(row["run_dir"]).name: row for row in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / SWEEP_FILE}: cannot be read ({error})") from error


def _row(folder: Path, point: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The row of the run in ``folder``; None if that is no rollout."""
    row: dict[str, Any] = dict.fromkeys(RUN_COLUMNS) | {"run_dir": str(folder)}
    config, damage = _read(folder / CONFIG_FILE)
    kv = config.get("kv")
    if config and not (isinstance(kv, dict) and "strategy" in kv):
        return None  # a comparison, a plan, a training run
    summary, summary_damage = _read(folder / SUMMARY_FILE)
    damage = damage or summary_damage
    missing = [name for name in (CONFIG_FILE, FRAMES_FILE) if not (folder / name).exists()]
    try:
        version = version_of(config or summary)
        frames, lacks = _frames(folder / FRAMES_FILE)
        row |= {"record_version": version, "steps": frames, "segments": len(read_segments(folder))}
        missing += lacks
        if version > RECORD_VERSION:
            damage = f"its record is of version {version}; this release reads up to {RECORD_VERSION}"
        if version < RECORD_VERSION:
            missing.append(SEGMENTS_FILE)
            missing += [name for name in missing_columns(SUMMARY_COLUMNS, version) if name not in summary]
    except (OSError, ValueError) as error:
        damage = damage or str(error)
    config.pop(VERSION_KEY, None)
    knobs = dict(flat(config))
    if config:
        missing += [name for name, _ in knob_columns() if name not in knobs]
    status, reason = summary.get("status"), summary.get("error")
    if status is None:
        status, reason = "unfinished", "no summary: it was killed, or is still running"
    if damage:
        status, reason = "unreadable", damage
    row |= {"status": status, "reason": reason, "failure": summary.get("reason"), "missing": missing}
    row |= {"command": command_of(config) if config else None}
    row |= knobs | {key: value for key, value in summary.items() if key not in _OUTCOME}
    machine = summary.get("machine")
    row |= {f"machine/{key}": value for key, value in (machine if isinstance(machine, dict) else {}).items()}
    return row if point is None else _with_point(row, point, folder.parent)


def _with_point(row: dict[str, Any], point: Mapping[str, Any], sweep: Path) -> dict[str, Any]:
    """``row`` with what sweep.json knows of it; a run that was resumed by itself since then is as its own files say."""
    same = row["status"] == point["status"]
    return row | {
        "sweep": str(sweep),
        "job": point["job"],
        "failure": (point.get("reason") if same else None) or row["failure"],
        "wall_s": point.get("wall_s") if same else None,
        "exit_code": point.get("exit_code") if same else None,
    }


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """The object in a file, empty where it is missing or damaged; and what the damage is."""
    try:
        return read_object(path), None
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError) as error:
        return {}, " ".join(str(error).split())


def _frames(path: Path) -> tuple[int, list[str]]:
    """How many whole rows a frames.jsonl has, and which columns its first one lacks."""
    if not path.exists():
        return 0, []
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        return 0, []
    try:
        first = json.loads(lines[0])
        return len(lines), [f"{FRAMES_FILE} {name}" for name in FRAME_COLUMNS if name not in first]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} line 1: {error}") from error
