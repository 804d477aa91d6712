"""What the shipped weights are said to do, measured again by the probes. Each test waits for its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import SHIPPED, load_checkpoint
from model.config import preset
from model.data import load_clip
from model.metrics import frame_psnr
from scripts.app.train_eval import GAME_CONTEXT, PREDICTED, SEED, rollouts
from scripts.probe import main

pytestmark = pytest.mark.slow


def shipped(checkpoint: str) -> Path:
    """The weights of that name; skips while they are not there."""
    path = SHIPPED / f"{checkpoint}.safetensors"
    if not path.is_file():
        pytest.skip(f"model/checkpoints/{checkpoint}.safetensors is not shipped")
    return path


def measured(folder: Path, checkpoint: str, *overrides: str) -> dict[str, Any]:
    """probe.json of a run with the shipped weights of that name."""
    path = shipped(checkpoint)
    knobs = [f"model={checkpoint}", f"checkpoint={path}", "tracking=disabled", f"data.folder={folder / 'data'}"]
    assert main([*overrides, *knobs, f"hydra.run.dir={folder / 'run'}"]) == 0
    return json.loads((folder / "run" / "probe.json").read_text())


@pytest.fixture(scope="module")
def recall(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("recall"), "recall", "probe=recall")


@pytest.fixture(scope="module")
def freeway(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("freeway"), "freeway", "probe=fidelity", "probe.samples=1")


@pytest.fixture(scope="module")
def pong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("pong"), "pong", "probe=fidelity", "probe.samples=1")


@pytest.mark.parametrize("loop", [4, 6, 8])
def test_error_falls_by_twenty_where_the_ring_reaches_a_whole_loop_back(loop: int, recall: dict[str, Any]):
    assert recall["settings"]["weights"] == "recall"
    assert recall["summary"][f"recall/cliff_{loop}"] >= 20
    curve = next(
        each
        for each in recall["series"]
        if each["name"] == f"N = {loop}" and each["panel"].startswith("error of the model")
    )
    short = [error for ring, error in zip(curve["x"], curve["y"], strict=True) if ring <= loop]
    long = [error for ring, error in zip(curve["x"], curve["y"], strict=True) if ring > loop]
    assert min(short) > 10 * max(long)


def test_a_frame_of_freeway_beats_both_baselines_at_every_one_of_the_first_16(freeway: dict[str, Any]):
    leads = [each for each in freeway["series"] if each["panel"] == "PSNR: leads, paired" and each["low"] is not None]
    assert len(leads) == 2
    assert all(min(each["low"][:16]) > 0 for each in leads)


def test_freeway_s_chicken_follows_the_actions_over_32_frames(freeway: dict[str, Any]):
    assert freeway["settings"]["predicted frames"] == 32
    assert freeway["summary"]["fidelity/chicken_correlation"] >= 0.9
    assert freeway["summary"]["fidelity/chicken_correlation_all"] >= 0.9  # with missing ones where they were last seen
    assert freeway["summary"]["fidelity/chicken_found"] >= 0.95


def test_freeway_s_cars_keep_their_lanes_and_speeds_through_frame_16(freeway: dict[str, Any]):
    assert freeway["summary"]["fidelity/cars_kept_worst_lane"] >= 0.8


@pytest.mark.parametrize(("name", "until"), [("freeway", 32), ("pong", 12)])
def test_the_largest_ring_is_within_a_decibel_of_the_best(name: str, until: int, tmp_path: Path):
    """A model that was trained on short pasts alone gets worse where a ring shows it more: Pong does, later on."""
    config = preset(name)
    model = load_checkpoint(shipped(name), config, torch.float32)
    shape = {"channels": config.channels, "height": config.height, "width": config.width}
    clips = [
        load_clip(name, num_frames=GAME_CONTEXT + PREDICTED, **shape, seed=SEED, index=index, folder=tmp_path)
        for index in range(16)
    ]
    truth = np.stack([clip.frames[GAME_CONTEXT:] for clip in clips])
    quality = {}
    for ring in (4, 8, 16, 32):
        made = rollouts(model, clips, ring, GAME_CONTEXT)
        scores = [frame_psnr(*pair).numpy() for pair in zip(made, truth, strict=True)]
        quality[ring] = np.mean(scores, axis=0)
    behind = (np.max(list(quality.values()), axis=0) - quality[32])[:until]
    assert len(behind) == until
    assert behind.max() <= 1, f"dB behind, by frame: {behind.round(2).tolist()}"


def test_pong_s_paddle_and_ball_are_where_they_should_be(pong: dict[str, Any]):
    assert pong["summary"]["fidelity/paddle_correlation"] >= 0.8
    assert pong["summary"]["fidelity/paddle_found"] >= 0.9
    assert pong["summary"]["fidelity/ball_error_px_worst_frame"] < 2.0
    assert pong["summary"]["fidelity/ball_found"] >= 0.8
