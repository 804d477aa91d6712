"""Which data there is and which requests for it make sense. Cheap: no torch, no ale-py, and PyAV only for a path.

The command line refuses bad input through here before it imports anything heavy; ``load_clip`` refuses the same
input with the same words.
"""

from __future__ import annotations

import os
from pathlib import Path

from model.data.folder import IMAGE_SUFFIXES, image_files

_ACTIONS = {
    "freeway": ("NOOP", "UP", "DOWN"),
    "pong": ("NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE"),
    "breakout": ("NOOP", "FIRE", "RIGHT", "LEFT"),
    "video": ("NOOP",),
    "synthetic": ("NOOP", "UP", "RIGHT", "DOWN", "LEFT"),
    "loops": ("NOOP",),
}
"""Action names by data name; for a game its minimal action set, in the emulator's order."""

DATA_NAMES = tuple(_ACTIONS)
GAMES = ("freeway", "pong", "breakout")


def check_name(name: str) -> None:
    """Raise ``ValueError`` unless ``name`` is one of ``DATA_NAMES``."""
    if name not in _ACTIONS:
        raise ValueError(f"data={name!r}: expected one of {', '.join(DATA_NAMES)}")


def action_names(name: str) -> tuple[str, ...]:
    """Names of the actions of ``name``, by action index; index 0 is NOOP everywhere. ``ValueError`` if unknown."""
    check_name(name)
    return _ACTIONS[name]


def game_actions(name: str) -> int:
    """Number of actions of ``name``: the size of a model's action embedding. ``ValueError`` if unknown."""
    return len(action_names(name))


def check_request(
    name: str,
    *,
    num_frames: int,
    channels: int,
    height: int,
    width: int,
    seed: int = 0,
    index: int = 0,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Raise ``ValueError``, one line with key, value and what is allowed, unless ``load_clip`` could serve this.

    What only decoding shows (too few frames in a video) is left to ``load_clip``.
    """
    check_name(name)
    for key, value, minimum in (
        ("num_frames", num_frames, 1),
        ("data.channels", channels, 1),
        ("data.height", height, 1),
        ("data.width", width, 1),
        ("seed", seed, 0),
        ("data.index", index, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{key}={value!r}: expected an integer >= {minimum}")
    if name != "synthetic" and channels not in (1, 3):
        raise ValueError(f"data.channels={channels}: expected 3 (RGB) or 1 (luma) with data={name}")
    if name == "video":
        if path is None:
            raise ValueError("data.path=None: expected a video file or a folder of images with data=video")
        check_path(path)
    elif path is not None:
        raise ValueError(f"data.path={str(path)!r}: expected none with data={name}; only data=video reads a path")


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise ``ValueError``, one line, unless ``path`` is a readable video file or a folder that holds images.

    A file is opened, not only looked up: what is no video is refused here.
    """
    where = Path(path)
    wanted = f"expected a video file or a folder of {', '.join(IMAGE_SUFFIXES)} images"
    if not where.exists():
        raise ValueError(f"data.path={str(path)!r}: no such file or folder; {wanted}")
    if not os.access(where, os.R_OK | os.X_OK if where.is_dir() else os.R_OK):
        raise ValueError(f"data.path={str(path)!r}: not readable; {wanted}")
    if where.is_dir():
        if not image_files(where):
            raise ValueError(f"data.path={str(path)!r}: a folder without images; {wanted}")
        return
    from model.data.video import check_video  # decodes with PyAV, which a request for a game never needs

    check_video(where)
