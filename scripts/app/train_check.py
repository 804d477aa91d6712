"""What a training config must satisfy before anything runs, and what its nulls stand for. No torch."""

from __future__ import annotations

import copy
import os
from pathlib import Path

from model.config import ModelConfig
from model.data.names import GAMES
from scripts.app.check import PIXEL_CHANNELS, TRACKING_MODES, absolute, check_count, usable_cores
from scripts.app.errors import BadInput
from scripts.app.geometry import fill_in_geometry, model_config
from scripts.app.schema import TrainConfig

STATE_FILE = "state.safetensors"
"""The training state in a run's folder."""

CURVE_FILE = "curve.jsonl"

TRAINABLE = (*GAMES, "loops")


def checked(config: TrainConfig) -> TrainConfig:
    """A copy of ``config`` that says what it means. ``BadInput`` for the first value that cannot work."""
    config = copy.deepcopy(config)
    try:
        config.check()
    except ValueError as error:
        raise BadInput(str(error)) from error
    if config.data.name not in TRAINABLE:
        raise BadInput(f"data.name={config.data.name}: expected one of {', '.join(TRAINABLE)}")
    if config.tracking.mode not in TRACKING_MODES:
        raise BadInput(f"tracking.mode={config.tracking.mode}: expected one of {', '.join(TRACKING_MODES)}")
    _check_counts(config)
    geometry = model_config(config)
    _check_footage(config, geometry)
    fill_in_geometry(config, geometry)
    config.data.folder = absolute(config.data.folder)
    if config.resume is not None:
        config.resume = absolute(config.resume)
        if not (Path(config.resume) / STATE_FILE).is_file():
            raise BadInput(f"resume={config.resume}: no {STATE_FILE} there; expected the folder of a training run")
    if config.out is not None:
        config.out = absolute(config.out)
        parent = Path(config.out).parent
        if not config.out.endswith(".safetensors") or not parent.is_dir() or not os.access(parent, os.W_OK):
            raise BadInput(f"out={config.out}: expected NAME.safetensors in a folder that can be written to")
    return config


def _check_counts(config: TrainConfig) -> None:
    for key, value, lowest, highest in (
        ("clips", config.clips, 1, None),
        ("clip_frames", config.clip_frames, 1, None),
        ("save_every", config.save_every, 0, None),
        ("evaluate_every", config.evaluate_every, 0, None),
        ("stop", config.stop, 1, config.steps),
        ("threads", config.threads, 1, os.cpu_count() or 1),
    ):
        check_count(key, value, lowest, highest)
    if config.threads is None:
        config.threads = usable_cores()


def _check_footage(config: TrainConfig, geometry: ModelConfig) -> None:
    longest = max(config.frames, config.long_frames if config.long_share > 0 else 0) + 1
    if config.data.name in GAMES:
        if geometry.channels not in PIXEL_CHANNELS:
            raise BadInput(f"data.channels={geometry.channels}: expected 1 or 3 with data={config.data.name}")
        if config.clip_frames < longest:
            raise BadInput(f"clip_frames={config.clip_frames}: expected at least {longest}, a whole sequence")
        return
    if (geometry.channels, geometry.height, geometry.width) != (3, 16, 16):
        raise BadInput(
            f"data.name=loops: its frames are 3 x 16 x 16, model={geometry.name} takes {geometry.channels} x "
            f"{geometry.height} x {geometry.width}; expected model.preset=recall"
        )
