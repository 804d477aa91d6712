"""The files of a run: what was asked for, a row per step, and what came out. Strict JSON, one run per directory.

    config.json     the resolved config, plain values
    frames.jsonl    one object per step, append-only; columns: FRAME_COLUMNS
    summary.json    one object, replaced as a whole; keys: SUMMARY_COLUMNS, absent until the run ended

JSON has no NaN and no infinity: a number that is not finite is written as null.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from ringkv.files import replaced_atomically

CONFIG_FILE = "config.json"
FRAMES_FILE = "frames.jsonl"
SUMMARY_FILE = "summary.json"
VIDEO_FILE = "rollout.mp4"
STRIP_FILE = "strip.png"
PLOT_FILE = "frames.png"

FRAME_COLUMNS: Mapping[str, str] = {
    "step": "index of the step, from 0",
    "phase": "context (every row was primed with a real frame) or generated (at least one row was generated)",
    "clocks": "frame index of every row of the step, in batch order",
    "frames": "[request id, frame index] of every row of the step, in batch order",
    "sessions": "sessions resident in the cache after the step",
    "latency_ms": "milliseconds from the start of the step to the end of its work on the device",
    "warmup": "whether the step was one of the warm-up steps, which are not measured",
    "kv_bytes": "bytes of KV memory allocated by the resource",
    "kv_in_use_bytes": "bytes of it that hold frames a later step can see",
    "rss_bytes": "resident bytes of the process after the step",
}
"""Columns of frames.jsonl. Every row has all of them; null stands for what could not be measured."""

SUMMARY_COLUMNS: Mapping[str, str] = {
    "status": "ok or failed",
    "error": "type and message of what ended a failed run, one line; null when ok",
    "traceback": "its traceback; null when ok",
    "throughput/frames_per_s": "measured frames over all sessions, per second of measured step time",
    "latency/frame_ms_mean": "mean over measured frames of the latency of the frame's step, milliseconds",
    "latency/frame_ms_p50": "median of the same",
    "latency/frame_ms_p95": "95th percentile of the same",
    "latency/frame_ms_p99": "99th percentile of the same",
    "latency/jitter_ms": "standard deviation of the same",
    "latency/first_frame_ms": "milliseconds from the start of the rollout to its first generated frame",
    "latency/on_time_fraction": "share of measured frames whose step took at most 1 / target_fps",
    "steps/measured": "steps that generated frames, warm-up left out",
    "frames/measured": "frames that those steps generated, over all sessions",
    "warmup/steps": "generating steps kept out of the measured ones",
    "warmup/ms_total": "milliseconds of the warm-up steps together",
    "warmup/ms_max": "milliseconds of the slowest warm-up step",
    "context/steps": "steps that only primed the cache with context",
    "context/ms_total": "milliseconds of those steps together",
    "compile/ms_total": "milliseconds spent compiling before the first step",
    "memory/kv_bytes_predicted": "bytes of KV memory computed from the geometry, before allocation",
    "memory/kv_bytes": "bytes of KV memory really held",
    "memory/kv_in_use_bytes": "highest kv_in_use_bytes of any step",
    "memory/peak_rss_bytes": "highest resident bytes of the process since it began",
    "machine": "machine card: what the run ran on",
}
"""Keys of summary.json, the unit in the key. A run may add keys of its own, named the same way."""

_RUN_FILES = (CONFIG_FILE, FRAMES_FILE, SUMMARY_FILE)


def to_plain(value: Any) -> Any:
    """``value`` as dicts with text keys, lists, text, bools, ints, floats and None, nested as it was.

    Takes mappings, lists, tuples, dataclass instances, OmegaConf containers (interpolations resolved),
    paths, enums (their value), torch dtypes ("bfloat16") and devices, numpy scalars and arrays. Ints stay ints.
    ``ValueError`` names the key of a mandatory value that is missing (``???``), of an interpolation that does not
    resolve, or of a value of any other type.
    """
    return _plain(value, "")


def dumps_strict(value: Any, *, indent: int | None = None) -> str:
    """``value`` as strict JSON, through ``to_plain``; a number that is not finite becomes null."""
    return json.dumps(_finite(to_plain(value)), allow_nan=False, indent=indent)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: the old file or the new one, never a part."""
    with replaced_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


class RunDir:
    """The directory of one run, held by it alone. Made by ``create``; a context manager.

    Leaving the ``with`` block on an exception writes a failed summary, unless one was written, and lets it pass.
    """

    def __init__(self, path: Path, frames_fd: int) -> None:
        """Wrap a claimed directory; use ``create``."""
        self.path = path
        self._frames_fd: int | None = frames_fd

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Self:
        """Claim ``path`` for a new run, making it and its parents where they are missing.

        ``ValueError`` if it holds a run, finished or not, or is no directory. Of several processes that claim one
        path at the same time exactly one succeeds: the claim is the exclusive creation of frames.jsonl.
        """
        directory = Path(path)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"run directory {directory}: a file is in the way; expected a new or empty path") from None
        held = [name for name in _RUN_FILES if (directory / name).exists()]
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND
        if not held:
            try:
                return cls(directory, os.open(directory / FRAMES_FILE, flags, 0o644))
            except FileExistsError:
                held = [FRAMES_FILE]
        raise ValueError(f"run directory {directory}: already holds a run ({', '.join(held)}); expected a new path")

    def write_config(self, config: Any) -> None:
        """Write the resolved config. ``ValueError`` as ``to_plain``, before anything is written."""
        self._replace(CONFIG_FILE, dumps_strict(config, indent=2))

    def write_frame(self, row: Mapping[str, Any]) -> None:
        """Append one row to frames.jsonl: in one write, so that a line is there whole or not at all.

        ``ValueError`` unless the row has exactly the columns of FRAME_COLUMNS. ``OSError`` if the disk took only a
        part of it; that part is cut off again.
        """
        unknown = sorted(row.keys() - FRAME_COLUMNS.keys())
        missing = sorted(FRAME_COLUMNS.keys() - row.keys())
        if unknown or missing:
            raise ValueError(
                f"frame row: unknown columns {unknown}, missing columns {missing}; expected {list(FRAME_COLUMNS)}"
            )
        if self._frames_fd is None:
            raise ValueError(f"run directory {self.path}: closed; no row can be added")
        line = (dumps_strict({name: row[name] for name in FRAME_COLUMNS}) + "\n").encode()
        size = os.fstat(self._frames_fd).st_size
        written = os.write(self._frames_fd, line)
        if written != len(line):
            os.ftruncate(self._frames_fd, size)
            raise OSError(f"{self.path / FRAMES_FILE}: {written} of {len(line)} bytes written; is the disk full?")

    def write_summary(self, metrics: Mapping[str, Any], *, error: BaseException | None = None) -> None:
        """Write summary.json as a whole: ``metrics`` with ``status``, ``error`` and ``traceback`` from ``error``."""
        outcome = {
            "status": "ok" if error is None else "failed",
            "error": None if error is None else error_line(error),
            "traceback": None if error is None else "".join(traceback.format_exception(error)),
        }
        self._replace(SUMMARY_FILE, dumps_strict(outcome | dict(metrics), indent=2))

    def close(self) -> None:
        """Stop taking rows. Idempotent."""
        if self._frames_fd is not None:
            os.close(self._frames_fd)
            self._frames_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is not None and not (self.path / SUMMARY_FILE).exists():
            self.write_summary({}, error=error)

    def _replace(self, name: str, text: str) -> None:
        replace_text(self.path / name, text + "\n")


class FrameRows(NamedTuple):
    """rows: the whole rows of frames.jsonl, in order. incomplete: whether the last line was cut off, and left out."""

    rows: list[dict[str, Any]]
    incomplete: bool


def read_config(run: str | os.PathLike[str]) -> dict[str, Any]:
    """The config of the run in directory ``run``. ``ValueError`` if it is not strict JSON."""
    return _read_object(Path(run) / CONFIG_FILE)


def read_summary(run: str | os.PathLike[str]) -> dict[str, Any]:
    """The summary of the run in directory ``run``. ``ValueError`` if it is not strict JSON."""
    return _read_object(Path(run) / SUMMARY_FILE)


def read_frames(run: str | os.PathLike[str]) -> FrameRows:
    """The rows of the run in directory ``run``. A last line without its newline is left out, and said so.

    ``ValueError`` names the line that is not strict JSON.
    """
    path = Path(run) / FRAMES_FILE
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    return FrameRows([_loads_object(line, f"{path} line {i}") for i, line in enumerate(lines, 1)], rest != "")


def error_line(error: BaseException) -> str:
    """Type and message of an exception, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _read_object(path: Path) -> dict[str, Any]:
    return _loads_object(path.read_text(encoding="utf-8"), str(path))


def _loads_object(text: str, where: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; expected one JSON object") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {type(value).__name__}; expected one JSON object")
    return value


def _plain(value: Any, key: str) -> Any:
    # OmegaConf and torch are not imported for this: a value can only be one of theirs if someone else imported them.
    omegaconf, torch = sys.modules.get("omegaconf"), sys.modules.get("torch")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        try:
            value = omegaconf.OmegaConf.to_container(value, resolve=True)
        except omegaconf.errors.OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{error.full_key or key}: {reason}") from None
    if isinstance(value, str) and value == "???":
        raise ValueError(f"{key}=???: a mandatory value is missing; give it one")
    if isinstance(value, enum.Enum):
        return _plain(value.value, key)
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist(), key)
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if value is None:
        return None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(_plain(k, key)): _plain(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{key}[{i}]") for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, key)
    if torch is not None and isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    raise ValueError(
        f"{key or 'value'}: {type(value).__name__} has no plain form; expected numbers, text or containers"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
