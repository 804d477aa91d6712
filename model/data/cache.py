"""Recorded clips on disk, each in one file that is verified before it is used.

The name of a file is its whole key: request, recorder version and emulator version. Inside are frames, actions, the
rest of the clip as JSON, and the sha256 of frames and actions.
"""

from __future__ import annotations

import json
import logging
import os
import zipfile
import zlib
from importlib.metadata import version
from pathlib import Path

import numpy as np

from model.data import atari
from model.data.clip import Clip, content_hash
from ringkv.files import replaced_atomically

_log = logging.getLogger(__name__)


def clip_file(request: atari.ClipRequest, folder: str | os.PathLike[str]) -> Path:
    """Where the clip of ``request`` is cached."""
    return Path(folder) / (
        f"{request.game}-seed{request.seed}-clip{request.index}-{request.num_frames}x{request.height}x{request.width}"
        f"x{request.channels}-recorder{atari.RECORDER_VERSION}-ale{version('ale-py')}.npz"
    )


def load_or_record(request: atari.ClipRequest, folder: str | os.PathLike[str]) -> Clip:
    """The cached clip of ``request``, or a new recording, which is then cached.

    A file that is damaged, or is not what its name says, is recorded again with a warning in the log. ``ValueError``
    if ``folder`` cannot be written to.
    """
    path = clip_file(request, folder)
    if path.exists():
        try:
            return _read(path, request)
        except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            _log.warning("%s: not usable (%s: %s), recording it again", path, type(error).__name__, error)
    clip = atari.record(request)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(path, clip)
    except OSError as error:
        raise ValueError(f"data.folder={str(folder)!r}: expected a folder to write to ({error.strerror})") from error
    return clip


def _read(path: Path, request: atari.ClipRequest) -> Clip:
    with np.load(path, allow_pickle=False) as stored:
        frames, actions = stored["frames"], stored["actions"]
        about = json.loads(str(stored["about"]))
    clip = Clip(frames=frames, actions=actions, **about)
    expected = (request.num_frames, request.height, request.width, request.channels)
    if frames.dtype != np.uint8 or frames.shape != expected or actions.shape != (request.num_frames,):
        raise ValueError(f"holds {frames.dtype}{list(frames.shape)}, expected uint8{list(expected)}")
    if content_hash(frames, actions) != clip.content_hash:
        raise ValueError("frames and actions do not match the stored sha256")
    return clip


def _write_atomically(path: Path, clip: Clip) -> None:
    """Whoever looks sees the whole file or none; two processes that record the same clip write the same bytes."""
    about = {
        "num_actions": clip.num_actions,
        "fps": clip.fps,
        "source": clip.source,
        "content_hash": clip.content_hash,
    }
    with replaced_atomically(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, frames=clip.frames, actions=clip.actions, about=np.array(json.dumps(about)))
