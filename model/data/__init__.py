"""Real frames and the actions that led to them: recorded Atari games, the user's own video, and synthetic motion.

Public names are resolved on first use, so that importing this package, or ``model.data.names`` to validate input,
loads neither torch nor ale-py nor PyAV.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.data.clip import Clip as Clip
    from model.data.load import load_clip as load_clip
    from model.data.names import DATA_NAMES as DATA_NAMES
    from model.data.names import action_names as action_names
    from model.data.names import check_path as check_path
    from model.data.names import check_request as check_request
    from model.data.names import game_actions as game_actions
    from model.data.tensors import frames_to_model as frames_to_model
    from model.data.tensors import frames_to_uint8 as frames_to_uint8

_HOME = {
    "Clip": "clip",
    "load_clip": "load",
    "DATA_NAMES": "names",
    "action_names": "names",
    "check_path": "names",
    "check_request": "names",
    "game_actions": "names",
    "frames_to_model": "tensors",
    "frames_to_uint8": "tensors",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'model.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"model.data.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
