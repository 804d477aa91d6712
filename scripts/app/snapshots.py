"""What an unfinished run can go on from: ``snapshots/`` in its folder.

    frames-00000016.npy    uint8 [steps, S, H, W, C]: what every session showed in the steps since the set before
    step-00000016/         the latest set, whole or not there
        session-0.safetensors ...  a ``RolloutState`` per session, taken between the same two steps
        snapshot.json              what SNAPSHOT_COLUMNS names

The pixels are kept because the video shows them all and a state holds no pixels. Every frame is written once, so that
they cost as much disk as the rollout has pixels, however long it is; to make the frames before a snapshot again would
cost as much time as the whole run.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringkv import StepRunner
from ringkv.files import replaced_atomically
from ringkv.harness.columns import Column
from ringkv.harness.frames import frame_checksum
from ringkv.harness.records import dumps_strict, error_line, read_object, replace_text
from ringkv.harness.video import Pixels
from ringkv.runner import RolloutState

SNAPSHOT_FILE = "snapshot.json"
SNAPSHOT_COLUMNS: Mapping[str, Column] = {
    "step": Column("int", "", "steps made before it; the next one has this index", since=1),
    "sessions": Column("texts", "", "request ids, in batch order", since=1),
    "frames": Column("texts", "", "files with the pixels of the steps before it, in order", since=1),
    "first_frame_ms": Column("float", "ms", "latency/first_frame_ms of the summary", since=1),
}

_BEGUN = ".begun"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A set that was read back. states, frames: per session; frames uint8 [step, H, W, C]."""

    step: int
    states: dict[str, RolloutState]
    frames: dict[str, Pixels]
    first_frame_ms: float | None
    frame_files: list[str]


class Snapshots:
    """Takes sets in ``folder``, every ``every`` steps (0: none), and keeps the latest.

    A set that cannot be written, or for whose copy there is no memory, ends neither the run nor the set before it: one
    warning says so, and no more are taken.
    """

    def __init__(self, folder: Path, every: int, last: Snapshot | None) -> None:
        self.folder = folder
        self._every = every
        self._step = 0 if last is None else last.step
        self._files = [] if last is None else list(last.frame_files)

    def due(self, steps: int) -> bool:
        """Whether one is to be taken after ``steps`` steps."""
        return self._every > 0 and steps % self._every == 0 and steps > self._step

    def take(self, runner: StepRunner, frames: Mapping[str, Sequence[Pixels]], first_frame_ms: float | None) -> None:
        """Take one of all sessions. frames: per session, uint8 [H, W, C] of every step so far."""
        try:
            self._write(runner, frames, first_frame_ms)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            self._every = 0
            shutil.rmtree(self.folder / _BEGUN, ignore_errors=True)
            _log.warning("snapshot_every: no more snapshots are taken (%s); the run goes on", error_line(error))

    def _write(self, runner: StepRunner, frames: Mapping[str, Sequence[Pixels]], first_frame_ms: float | None) -> None:
        step = len(next(iter(frames.values())))
        self.folder.mkdir(exist_ok=True)
        name = f"frames-{step:08d}.npy"
        since = np.stack([np.stack([shown[at] for shown in frames.values()]) for at in range(self._step, step)])
        with replaced_atomically(self.folder / name) as temporary, open(temporary, "wb") as file:
            np.save(file, since)
        begun = self.folder / _BEGUN
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir()
        for rid in frames:
            runner.state_of(rid).save(begun / f"{rid}.safetensors")
        files = [*self._files, name]
        content = {"step": step, "sessions": list(frames), "frames": files, "first_frame_ms": first_frame_ms}
        replace_text(begun / SNAPSHOT_FILE, dumps_strict(content, indent=2) + "\n")
        os.rename(begun, self.folder / f"step-{step:08d}")
        _sync_folder(self.folder)
        for older in self.folder.glob("step-*"):
            if older.name != f"step-{step:08d}":
                shutil.rmtree(older)
        self._step, self._files = step, files


def read_snapshot(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Snapshot | None:
    """The latest set in ``folder``, None without one. rows: those of frames.jsonl.

    ``ValueError`` with one line if a file of it cannot be read, or if it does not belong to ``rows``.
    """
    sets = sorted(folder.glob("step-*"))
    if not sets:
        return None
    path = sets[-1]
    try:
        content = read_object(path / SNAPSHOT_FILE)
        step, rids = int(content["step"]), list(content["sessions"])
        states = {rid: RolloutState.read(path / f"{rid}.safetensors") for rid in rids}
        shown = np.concatenate([np.load(folder / name, allow_pickle=False) for name in content["frames"]])
    except (OSError, KeyError, TypeError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: not a whole snapshot ({error_line(error)})") from error
    if step > len(rows) or shown.shape[:2] != (step, len(rids)):
        raise ValueError(
            f"{path}: is of step {step} with pixels of {len(shown)} steps, and frames.jsonl has {len(rows)} rows"
        )
    for at, row in enumerate(rows[:step]):
        for (rid, frame), checksum, image in zip(row["frames"], row["checksums"], shown[at], strict=True):
            if frame_checksum(image) != checksum:
                raise ValueError(f"{path}: its frame {frame} of {rid} is not the one that frames.jsonl has")
    frames = {rid: shown[:, index] for index, rid in enumerate(rids)}
    return Snapshot(step, states, frames, content["first_frame_ms"], list(content["frames"]))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
