"""Validation that costs nothing: every bad request is one line, and nothing heavy is imported to say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ale_py
import ale_py.roms
import pytest

from model.data import DATA_NAMES, action_names, check_path, check_request, game_actions, load_clip

GOOD: dict[str, Any] = {"num_frames": 4, "channels": 3, "height": 16, "width": 16, "seed": 0}


def test_action_counts_are_those_of_the_minimal_action_sets() -> None:
    assert [game_actions(name) for name in DATA_NAMES] == [3, 6, 4, 1, 5, 1]
    for game in ("freeway", "pong", "breakout"):
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        emulator = ale_py.ALEInterface()
        emulator.loadROM(ale_py.roms.get_rom_path(game))
        assert tuple(action.name for action in emulator.getMinimalActionSet()) == action_names(game)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("tetris", {}, "data='tetris': expected one of freeway, pong, breakout, video, synthetic, loops"),
        ("pong", {"num_frames": 0}, "num_frames=0: expected an integer >= 1"),
        ("pong", {"num_frames": 2.5}, "num_frames=2.5: expected an integer >= 1"),
        ("pong", {"num_frames": True}, "num_frames=True: expected an integer >= 1"),
        ("pong", {"channels": 2}, "data.channels=2: expected 3 (RGB) or 1 (luma) with data=pong"),
        ("synthetic", {"channels": 0}, "data.channels=0: expected an integer >= 1"),
        ("pong", {"height": 0}, "data.height=0: expected an integer >= 1"),
        ("pong", {"width": -3}, "data.width=-3: expected an integer >= 1"),
        ("pong", {"seed": -1}, "seed=-1: expected an integer >= 0"),
        ("pong", {"index": -1}, "data.index=-1: expected an integer >= 0"),
        ("video", {}, "data.path=None: expected a video file or a folder of images with data=video"),
        ("pong", {"path": "a.mp4"}, "data.path='a.mp4': expected none with data=pong; only data=video reads a path"),
    ],
)
def test_a_bad_request_is_refused_with_key_value_and_what_is_allowed(
    name: str, changes: dict, said: str, tmp_path: Path
) -> None:
    for refuse in (check_request, lambda *a, **k: load_clip(*a, folder=tmp_path / "data", **k)):
        with pytest.raises(ValueError) as refused:
            refuse(name, **(GOOD | changes))
        assert str(refused.value) == said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["missing", "text", "empty file", "empty folder"])
def test_a_path_that_cannot_be_read_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    if kind == "text":
        path.write_text("this is not a video\n")
    elif kind == "empty file":
        path.touch()
    elif kind == "empty folder":
        path.mkdir()
    for refuse in (lambda: check_path(path), lambda: load_clip("video", path=path, **GOOD)):
        with pytest.raises(ValueError) as refused:
            refuse()
        assert str(refused.value).startswith(f"data.path={str(path)!r}: ")
        assert "\n" not in str(refused.value)


def test_validating_and_loading_a_clip_import_no_torch() -> None:
    program = """
import sys
import model, model.data
from model.data.names import check_request, game_actions
check_request("freeway", num_frames=4, channels=3, height=8, width=8)
assert not {"torch", "numpy", "ale_py", "av"} & set(sys.modules), "validation imports something heavy"
from model.data import load_clip
load_clip("synthetic", num_frames=2, channels=3, height=8, width=8, seed=0)
assert not {"torch", "ale_py", "av"} & set(sys.modules), "loading imports what it does not use"
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
