"""The files of a run: what was asked for, a row per step, and what came out. Strict JSON, one run per directory.

    config.json     the resolved config, plain values, and the version of the record
    frames.jsonl    one object per step, append-only; columns: FRAME_COLUMNS
    segments.json   an entry per start: one, and one more each time that the run was resumed; SEGMENT_COLUMNS
    summary.json    one object, replaced as a whole; keys: SUMMARY_COLUMNS, absent until the run ended
    snapshots/      while the run is not finished: what it can be resumed from

JSON has no NaN and no infinity: a number that is not finite is written as null. Records of an older version are read
as they are; ``columns.missing_columns`` says what they lack.
"""

from __future__ import annotations

import dataclasses
import enum
import fcntl
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from ringkv.files import replaced_atomically
from ringkv.harness.columns import FRAME_COLUMNS as FRAME_COLUMNS
from ringkv.harness.columns import RECORD_VERSION as RECORD_VERSION
from ringkv.harness.columns import SUMMARY_COLUMNS as SUMMARY_COLUMNS
from ringkv.harness.columns import VERSION_KEY, version_of

CONFIG_FILE = "config.json"
FRAMES_FILE = "frames.jsonl"
SEGMENTS_FILE = "segments.json"
SUMMARY_FILE = "summary.json"
SNAPSHOT_FOLDER = "snapshots"
VIDEO_FILE = "rollout.mp4"
STRIP_FILE = "strip.png"
PLOT_FILE = "frames.png"

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
    """The directory of one run, held by it alone. Made by ``create`` or ``reopen``; a context manager.

    While it is open it holds a lock on frames.jsonl, which the kernel drops with the process, however that ends.
    Leaving the ``with`` block on an exception writes a failed summary, unless one was written, and lets it pass.
    resumes: whether it holds an unfinished run; nothing is changed in it then until ``continue_run``.
    """

    def __init__(self, path: Path, frames_fd: int, *, resumes: bool = False) -> None:
        """Wrap a claimed directory; use ``create`` or ``reopen``."""
        self.path = path
        self.resumes = resumes
        self._frames_fd: int | None = frames_fd
        self._begun = not resumes

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
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND
        if not held:
            try:
                descriptor = os.open(directory / FRAMES_FILE, flags, 0o644)
            except FileExistsError:
                held = [FRAMES_FILE]
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                return cls(directory, descriptor)
        raise ValueError(f"run directory {directory}: already holds a run ({', '.join(held)}); expected a new path")

    @classmethod
    def reopen(cls, path: str | os.PathLike[str]) -> Self:
        """Take over the unfinished run in ``path``, changing nothing in it.

        ``ValueError`` with one line if there is none, it is finished, a living process holds it, or its record is of
        a version without the checksums that made a frame comparable.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise ValueError(f"run directory {directory}: no such folder; expected one that holds a run")
        absent = [name for name in (CONFIG_FILE, FRAMES_FILE) if not (directory / name).is_file()]
        if absent:
            raise ValueError(f"run directory {directory}: holds no run that can go on ({', '.join(absent)} missing)")
        descriptor = os.open(directory / FRAMES_FILE, os.O_RDWR | os.O_APPEND)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"run directory {directory}: a living process is running it") from None
            version = read_version(directory)
            if version < RECORD_VERSION:
                raise ValueError(
                    f"run directory {directory}: its record is of version {version}, without checksums to compare "
                    "frames by; expected a new run"
                )
            if (directory / SUMMARY_FILE).exists() and read_summary(directory).get("status") == "ok":
                raise ValueError(f"run directory {directory}: this run is finished; there is nothing to resume")
        except BaseException:
            os.close(descriptor)
            raise
        return cls(directory, descriptor, resumes=True)

    @property
    def begun(self) -> bool:
        """Whether this process may change what the directory holds."""
        return self._begun

    def continue_run(self) -> None:
        """Make a reopened run ready for more rows: cut an incomplete last line off, drop the summary of its failure."""
        descriptor = self._open_descriptor()
        whole = (self.path / FRAMES_FILE).read_bytes().rfind(b"\n") + 1
        os.ftruncate(descriptor, whole)
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)
        self._begun = True

    def write_config(self, config: Any) -> None:
        """Write the resolved config. ``ValueError`` as ``to_plain``, before anything is written."""
        self._replace(CONFIG_FILE, dumps_strict({**to_plain(config), VERSION_KEY: RECORD_VERSION}, indent=2))

    def write_segments(self, segments: Sequence[Mapping[str, Any]]) -> None:
        """Write segments.json as a whole."""
        self._replace(SEGMENTS_FILE, dumps_strict(segments, indent=2))

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
        descriptor = self._open_descriptor()
        line = (dumps_strict({name: row[name] for name in FRAME_COLUMNS}) + "\n").encode()
        size = os.fstat(descriptor).st_size
        written = os.write(descriptor, line)
        if written != len(line):
            os.ftruncate(descriptor, size)
            raise OSError(f"{self.path / FRAMES_FILE}: {written} of {len(line)} bytes written; is the disk full?")

    def flush_frames(self) -> None:
        """Wait until every row is on the disk, so that nothing written later can outlive one."""
        os.fsync(self._open_descriptor())

    def write_summary(self, metrics: Mapping[str, Any], *, error: BaseException | None = None) -> None:
        """Write summary.json as a whole: ``metrics`` with version, ``status``, ``error`` and ``traceback``."""
        outcome = {
            VERSION_KEY: RECORD_VERSION,
            "status": "ok" if error is None else "failed",
            "error": None if error is None else error_line(error),
            "traceback": None if error is None else "".join(traceback.format_exception(error)),
        }
        self._replace(SUMMARY_FILE, dumps_strict(outcome | dict(metrics), indent=2))

    def close(self) -> None:
        """Stop taking rows, and let go of the directory. Idempotent."""
        if self._frames_fd is not None:
            os.close(self._frames_fd)
            self._frames_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._begun and not (self.path / SUMMARY_FILE).exists():
            self.write_summary({}, error=error)
        self.close()

    def _open_descriptor(self) -> int:
        if self._frames_fd is None:
            raise ValueError(f"run directory {self.path}: closed; no row can be added")
        return self._frames_fd

    def _replace(self, name: str, text: str) -> None:
        replace_text(self.path / name, text + "\n")


class FrameRows(NamedTuple):
    """rows: the whole rows of frames.jsonl, in order. incomplete: whether the last line was cut off, and left out."""

    rows: list[dict[str, Any]]
    incomplete: bool


def can_resume(run: str | os.PathLike[str]) -> bool:
    """Whether the directory holds an unfinished run that ``RunDir.reopen`` would take now."""
    try:
        RunDir.reopen(run).close()
    except (OSError, ValueError):
        return False
    return True


def read_version(run: str | os.PathLike[str]) -> int:
    """The version of the record in directory ``run``, 0 where it names none. ``ValueError`` if it is a later one."""
    version = version_of(read_object(Path(run) / CONFIG_FILE))
    if version > RECORD_VERSION:
        raise ValueError(f"{run}: its record is of version {version}; this release reads up to {RECORD_VERSION}")
    return version


def read_config(run: str | os.PathLike[str]) -> dict[str, Any]:
    """The config of the run in directory ``run``, without the version. ``ValueError`` if it is not strict JSON."""
    config = read_object(Path(run) / CONFIG_FILE)
    config.pop(VERSION_KEY, None)
    return config


def read_summary(run: str | os.PathLike[str]) -> dict[str, Any]:
    """The summary of the run in directory ``run``. ``ValueError`` if it is not strict JSON."""
    return read_object(Path(run) / SUMMARY_FILE)


def read_segments(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The entries of segments.json, [] where it is missing. ``ValueError`` if it is not a strict JSON list."""
    path = Path(run) / SEGMENTS_FILE
    return _loads(path.read_text(encoding="utf-8"), str(path), list) if path.exists() else []


def read_frames(run: str | os.PathLike[str]) -> FrameRows:
    """The rows of the run in directory ``run``. A last line without its newline is left out, and said so.

    ``ValueError`` names the line that is not strict JSON.
    """
    path = Path(run) / FRAMES_FILE
    *lines, rest = path.read_bytes().split(b"\n")
    rows = [_loads(line.decode("utf-8", "replace"), f"{path} line {i}", dict) for i, line in enumerate(lines, 1)]
    return FrameRows(rows, rest != b"")


def error_line(error: BaseException) -> str:
    """Type and message of an exception, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file of strict JSON. ``ValueError`` if it is none."""
    return _loads(path.read_text(encoding="utf-8"), str(path), dict)


def _loads(text: str, where: str, kind: type) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    expected = "one JSON object" if kind is dict else "a JSON list"
    try:
        value = json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; expected {expected}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{where}: {type(value).__name__}; expected {expected}")
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
