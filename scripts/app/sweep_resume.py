"""What an earlier attempt left of a point: whether it is done, goes on, or makes room. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringkv.harness.records import FRAMES_FILE, can_resume, read_config, read_segments, read_summary
from scripts.app.errors import BadInput
from scripts.app.sweep_record import hash_config

ASIDE_FOLDER = "replaced"

_END_S, _POLL_S = 15.0, 0.1
_ALLOCATION_FAILED = ("MemoryError", "OutOfMemoryError")


def is_done(old: Mapping[str, Any], config_hash: str, source_hash: str, path: Path) -> bool:
    """Whether a point is finished as it would be now, and ``path`` holds that record."""
    same = (old["status"], old.get("config_hash"), old.get("source_hash")) == ("ok", config_hash, source_hash)
    return same and summary_of(path).get("status") == "ok" and _recorded_hash(path) == config_hash


def make_room(path: Path, sweep_folder: Path) -> None:
    """Move what an earlier attempt left in ``path`` out of the way, whole. ``BadInput`` while one runs there."""
    if not path.exists() or not any(path.iterdir()):
        return
    _await_end(path)
    aside = sweep_folder / ASIDE_FOLDER
    aside.mkdir(exist_ok=True)
    number = 0
    while (aside / f"{path.name}-{number}").exists():
        number += 1
    path.rename(aside / f"{path.name}-{number}")


def can_go_on(path: Path, row: Mapping[str, Any]) -> bool:
    """Whether ``path`` holds the same point under the same source, interrupted. ``BadInput`` as in ``make_room``."""
    if not (path / FRAMES_FILE).exists():
        return False
    _await_end(path)
    summary = summary_of(path)
    if summary and reason_of(summary) != "interrupted":
        return False
    with contextlib.suppress(OSError, ValueError):
        segments = read_segments(path)
        same = bool(segments) and segments[-1]["source_hash"] == row["source_hash"]
        return same and _recorded_hash(path) == row["config_hash"] and can_resume(path)
    return False


def reason_of(summary: Mapping[str, Any]) -> str:
    """The kind of failure of a run that was not ended by its sweep, or as the sweep noted it."""
    error = summary.get("error") or ""
    if "reason" in summary:
        return str(summary["reason"])
    if error.startswith(_ALLOCATION_FAILED) or "can't allocate memory" in error:
        return "out_of_memory"
    return "interrupted" if error.startswith("KeyboardInterrupt") else "crashed"


def summary_of(path: Path) -> dict[str, Any]:
    """The summary of the run in ``path``; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return read_summary(path)
    return {}


def _recorded_hash(path: Path) -> str | None:
    """``hash_config`` of what ran in ``path``; None where there is no config, or one of another release."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return hash_config(read_config(path))
    return None


def _await_end(path: Path) -> None:
    """Give the process of a sweep that was killed just now the time to note that."""
    if not (path / FRAMES_FILE).exists():
        return
    with open(path / FRAMES_FILE, "rb") as file:
        for _ in range(round(_END_S / _POLL_S)):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(_POLL_S)
    raise BadInput(f"{path}: a living process is running it; expected to wait for its end, or to end it")
