"""The weights in model/checkpoints: found where they should be, made as they say, and good at what they are for."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import SHIPPED, find_shipped, load_checkpoint, read_metadata
from model.config import preset
from model.data import frames_to_model, load_clip
from model.data.photos import photo_loops
from model.trackers import PongTracker, empty_field
from model.training.recipe import Recipe
from model.training.sequence import SequenceModel, Sequences
from ringkv import RingKVLayerConfig
from scripts.app import schema
from scripts.app.check import effective
from scripts.app.compose import compose_all
from scripts.app.geometry import model_config
from scripts.app.train_check import checked
from scripts.app.train_eval import GAME_CONTEXT, PREDICTED, baselines, held_out_clips, psnr, rollouts
from scripts.rollout import main

schema.register()

NAMES = sorted(path.stem for path in SHIPPED.glob("*.safetensors"))


@pytest.mark.parametrize("name", NAMES)
def test_shipped_weights_fit_their_preset_and_name_the_recipe_that_makes_them(name: str):
    path = SHIPPED / f"{name}.safetensors"
    extra = read_metadata(path)["extra"]
    assert find_shipped(preset(name), extra["data"]) == path
    program, script, *overrides = shlex.split(extra["command"])
    assert (program, script) == ("python", "scripts/train.py")
    (composed,) = compose_all("train", overrides, multirun=False).points
    config = checked(composed)
    recipe = {field.name: getattr(config, field.name) for field in dataclasses.fields(Recipe)}
    # A knob that came later has, in an older file, its default: the value that changes nothing.
    assert dataclasses.asdict(Recipe()) | extra["recipe"] == {"name": name, **recipe}
    assert extra["data"] == config.data.name
    assert extra["steps"] == (config.stop or config.steps)
    assert path.stat().st_size < 5_000_000
    assert {weight.dtype for weight in load_checkpoint(path, preset(name), torch.bfloat16).parameters()} == {
        torch.bfloat16
    }


@pytest.mark.parametrize("name", NAMES)
def test_shipped_weights_load_bit_for_bit_under_the_names_they_were_saved_by(name: str):
    """Whoever renames a parameter, or packs two into one, must map the keys of files that are out there."""
    path = SHIPPED / f"{name}.safetensors"
    saved = load_file(path)
    loaded = load_checkpoint(path, preset(name), torch.bfloat16).state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key].view(torch.int16), saved[key].view(torch.int16)) for key in saved)
    blocks = [
        f"blocks.{index}.{weight}"
        for index in range(preset(name).num_layers)
        for weight in ("qkv_weight", "temperature", "out_weight", "up_weight", "down_weight")
    ]
    conditioning = ("noise_in.weight", "noise_in.bias", "noise_out.weight", "noise_out.bias", "action.weight")
    conditioning = (*conditioning, "weight", "bias")
    others = ("patch_in.weight", "position", "noised_tag", "value_mix", "head.weight", "head.bias")
    assert saved.keys() == {*blocks, *(f"conditioning.{key}" for key in conditioning), *others}


def test_the_canonical_command_rolls_out_trained_weights():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    (command,) = re.findall(r"scripts/rollout\.py(.*)", makefile)
    (config,) = compose_all("rollout", shlex.split(command), multirun=False).points
    config = effective(config)
    assert config.ring_frames == 32
    assert config.checkpoint == "auto"
    assert find_shipped(model_config(config), config.data.name) == SHIPPED / "freeway.safetensors"


@pytest.mark.parametrize(
    ("knob", "weights"), [("data=freeway", "freeway"), ("model=pong", "pong"), ("data=pong", None)]
)
def test_a_rollout_says_whose_weights_it_uses_and_takes_none_that_were_trained_on_other_data(
    knob: str, weights: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = ["num_frames=3", "context_frames=2", "threads=1", "tracking=disabled", f"data.folder={tmp_path}"]
    assert main([knob, *run, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    if weights is None:
        assert f"weights random (none that ships fits this geometry and {knob})" in out
    else:
        assert f"weights {SHIPPED / weights}.safetensors" in out
        assert "random" not in out
        assert "trained with" not in out


def test_a_served_freeway_rollout_is_closer_to_the_truth_than_both_baselines_at_each_of_16_frames(tmp_path: Path):
    (composed,) = compose_all("train", ["recipe=freeway", f"data.folder={tmp_path}"], multirun=False).points
    config = checked(composed)
    model = load_checkpoint(SHIPPED / "freeway.safetensors", preset("freeway"), torch.float32).eval()
    clips = held_out_clips(config)
    context = len(clips[0].frames) - PREDICTED
    truth = np.stack([clip.frames[context:] for clip in clips])
    made = np.array(psnr(rollouts(model, clips, 32, context), truth))
    for name, baseline in baselines(clips, context, None).items():
        assert (made[:16] > np.array(psnr(baseline, truth))[:16] + 3).all(), name


def test_a_served_ball_of_pong_is_where_the_recorded_one_is_through_frame_12(tmp_path: Path):
    config, ring, predicted = preset("pong"), 32, 12
    shape = {"channels": config.channels, "height": config.height, "width": config.width}
    context, length = GAME_CONTEXT, GAME_CONTEXT + PREDICTED
    clips = [load_clip("pong", num_frames=length, seed=0, index=index, folder=tmp_path, **shape) for index in range(6)]
    model = load_checkpoint(SHIPPED / "pong.safetensors", config, torch.float32).eval()
    made = rollouts(model, clips, ring, context)[:, :predicted]
    truth = np.stack([clip.frames[context : context + predicted] for clip in clips])
    tracker = PongTracker(empty_field(np.concatenate([clip.frames for clip in clips])))
    none = (np.nan, np.nan)
    real, ours = (np.array([tracker.ball(f) or none for clip in frames for f in clip]) for frames in (truth, made))
    shown = np.isfinite(real[:, 0])
    error = np.hypot(*(ours - real)[shown].T) * 64 / config.height
    assert shown.sum() > 30
    assert np.isfinite(error).mean() >= 0.7
    assert np.nanmean(error) < 2


@pytest.mark.parametrize("length", [4, 8])
@torch.no_grad()
def test_recall_ends_where_the_ring_does(length: int):
    """A ring of R frames shows R - 1 of the past; a loop of N frames needs the N-th."""
    model = load_checkpoint(SHIPPED / "recall.safetensors", preset("recall"), torch.float32).eval()
    loops = photo_loops("test", length, 8, seed=1)
    shown = loops[:, np.arange(2 * length + 1) % length]
    frames = frames_to_model(shown.reshape(-1, *shown.shape[2:])).unflatten(0, shown.shape[:2])
    past, target = frames[:, :-1], frames[:, -1]
    noise = torch.randn(past.shape, generator=torch.Generator().manual_seed(0))
    actions = torch.zeros(frames.shape[:2], dtype=torch.int64)
    sequences = Sequences(past, noise, torch.ones(past.shape[:2]), actions, start=0)
    errors = {}
    for ring_frames in (length, length + 1):
        layer = RingKVLayerConfig(ring_frames=ring_frames, ring_buckets=ring_frames, pinned_dilation=1)
        predicted = SequenceModel(model)(sequences, [layer] * model.config.num_layers)[:, -1]
        errors[ring_frames] = (predicted - target).square().mean().item()
    assert errors[length] > 20 * errors[length + 1]
