"""Fidelity: how long generated frames of held-out recordings stay close to the truth, in pixels and in places."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from model.data import Clip, frames_to_model, frames_to_uint8
from model.data.clip import Pixels
from model.metrics import frame_psnr, frame_ssim
from model.training.footage import FIRST_TRAINING_SEED
from ringkv.runner import RolloutRequest
from scripts.app.build import load_clips
from scripts.app.geometry import model_config
from scripts.app.probe import positions
from scripts.app.probe.drive import Setup
from scripts.app.probe.result import Found, Series, Sheet, number, spread_text
from scripts.app.probe.stats import Bootstrap, Interval, Values, first_touching

ONE, MEAN, REPEAT, AVERAGE = "one sample", "mean of samples", "repeat last", "mean frame"

LEADS = ((ONE, REPEAT), (ONE, AVERAGE), (MEAN, REPEAT), (MEAN, AVERAGE), (MEAN, ONE))
"""What is paired with what: the better one is said first."""

REPORTED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Predicted frames, counted from 1, that the table shows."""


def measure(setup: Setup) -> Found:
    """All of it; see ``conf/probe/fidelity.yaml``."""
    config, knobs = setup.probe.config, setup.probe.config.probe
    assert knobs.clips is not None
    assert knobs.samples is not None
    assert knobs.sampled_clips is not None
    assert config.num_frames is not None
    clips = held_out(setup, knobs.clips)
    predicted = config.num_frames - config.context_frames
    found = Found(
        settings={
            "data": config.data.name,
            "clips": f"{knobs.clips} recordings of their own, seed {config.seed}, clips 0 to {knobs.clips - 1}",
            "clip length": config.num_frames,
            "context frames": config.context_frames,
            "predicted frames": predicted,
            "stride": "none: one clip from each recording",
            "samples": f"{knobs.samples} of clips 0 to {knobs.sampled_clips - 1}, 1 of the rest",
            "kv": config.kv.strategy,
            "ring_frames": config.ring_frames,
            "dilation": config.dilation,
            "sigmas": list(config.sigmas or ()),
            "weights": setup.weights_name,
        },
        summary={},
    )
    given = np.stack([clip.frames[: config.context_frames] for clip in clips])
    truth = np.stack([clip.frames[config.context_frames :] for clip in clips])
    one, mean = _rollouts(setup, clips, knobs.samples, knobs.sampled_clips)
    ways = {
        ONE: one,
        MEAN: mean,
        REPEAT: np.repeat(given[:, -1:], predicted, axis=1),
        AVERAGE: np.broadcast_to(
            np.concatenate([given, truth], 1).mean(axis=(0, 1)).round().astype(np.uint8), truth.shape
        ),
    }
    if knobs.samples == 1:
        del ways[MEAN]
    bootstraps = {count: Bootstrap(count, config.seed) for count in {knobs.clips, knobs.sampled_clips}}
    _measure_quality(ways, truth, bootstraps, found)
    found.notes.append("Mean frame: of all frames of these very clips, the predicted ones too: no model could know it.")
    if config.data.name in positions.MEASURES and truth.shape[-1] == 3 and min(truth.shape[2:4]) >= positions.MIN_SIDE:
        positions.MEASURES[config.data.name](given, truth, one, bootstraps[knobs.clips], found)
    elif config.data.name in positions.MEASURES:
        found.notes.append(
            f"Places of sprites: read in RGB of {positions.MIN_SIDE} x {positions.MIN_SIDE} or more only."
        )
    return found


def held_out(setup: Setup, count: int) -> list[Clip]:
    """Clip i of the seed, each a recording of its own. ``ValueError`` for a seed that recordings to train on have."""
    config, model = setup.probe.config, model_config(setup.probe.config)
    assert config.num_frames is not None
    if config.seed >= FIRST_TRAINING_SEED and setup.trained:
        raise ValueError(
            f"seed={config.seed}: recordings from seed {FIRST_TRAINING_SEED} on are trained on; expected a lower one"
        )
    return load_clips(config, model, count)


def _rollouts(setup: Setup, clips: list[Clip], samples: int, sampled_clips: int) -> tuple[Pixels, Pixels]:
    """The first sample of each clip, and the mean of all of each of the first ``sampled_clips``.

    uint8 [clips, predicted, H, W, C] both.
    """
    config = setup.probe.config
    assert config.num_frames is not None
    requests = [
        RolloutRequest(
            rid=f"clip-{index}-sample-{sample}",
            seed=config.seed,
            stream=sample * len(clips) + index,
            num_frames=config.num_frames,
            context=frames_to_model(clip.frames[: config.context_frames]),
            actions=torch.from_numpy(clip.actions),
        )
        for sample in range(samples)
        for index, clip in enumerate(clips if sample == 0 else clips[:sampled_clips])
    ]
    made = setup.roll(setup.probe.points["rollout",], requests)
    one = [frames_to_uint8(made[f"clip-{index}-sample-0"]) for index in range(len(clips))]
    mean = []
    for index in range(sampled_clips):
        drawn = torch.stack([made[f"clip-{index}-sample-{sample}"] for sample in range(samples)])
        mean.append(frames_to_uint8(drawn.clamp(-1, 1).mean(dim=0)))
    return np.stack(one), np.stack(mean)


def _measure_quality(ways: dict[str, Pixels], truth: Pixels, bootstraps: dict[int, Bootstrap], found: Found) -> None:
    """PSNR and SSIM of every way, per predicted frame, and paired leads: of one sample and of the mean of samples over
    the baselines, and of that mean over one sample.

    ways: uint8 [n, predicted, H, W, C] of the first n clips. bootstraps: by n.
    """
    predicted = truth.shape[1]
    frames = list(range(1, predicted + 1))
    x_label = "predicted frame"
    leads: dict[str, Interval] = {}
    clips: dict[str, int] = {}
    for label, unit, score in (("PSNR", " (dB)", frame_psnr), ("SSIM", "", frame_ssim)):
        scores: dict[str, Values] = {
            name: score(_flat(way), _flat(truth[: len(way)])).numpy().reshape(-1, predicted)
            for name, way in ways.items()
        }
        curves = {name: bootstraps[len(values)].mean(values) for name, values in scores.items()}
        for name, curve in curves.items():
            found.series.append(Series.of(label, name, frames, curve, x_label=x_label, y_label=label + unit))
        for better, worse in LEADS:
            if better not in ways:
                continue
            both = min(len(scores[better]), len(scores[worse]))
            lead = bootstraps[both].mean(scores[better][:both] - scores[worse][:both])
            name = f"{better} over {worse}"
            leads[f"{label}: {name}"] = lead
            clips[f"{label}: {name}"] = both
            # A panel of its own for the mean: of fewer clips, and five bands on top of each other show nothing.
            panel = f"{label}: leads, paired" if better == ONE else f"{label}: leads of the {better}, paired"
            found.series.append(
                Series.of(panel, name, frames, lead, x_label=x_label, y_label=f"{label} difference{unit}")
            )
        shown = [frame for frame in REPORTED if frame <= predicted]
        found.tables.append(
            Sheet(
                f"{label}{unit} per predicted frame, mean over clips, and 95 % intervals",
                ["frame", *ways],
                [[frame, *(spread_text(_at(curve, frame - 1), 4) for curve in curves.values())] for frame in shown],
            )
        )
        for frame in shown:
            found.summary[f"fidelity/{label.lower()}_frame{frame}"] = number(curves[ONE].middle[frame - 1])
    rows: list[list[Any]] = []
    for name, lead in leads.items():
        first = first_touching(lead)
        rows.append([name, clips[name], "none" if first is None else str(first + 1), number(np.min(lead.middle))])
    found.tables.append(
        Sheet(
            f"Paired leads: first of {predicted} frames whose interval touches zero",
            ["lead", "clips", "frame", "smallest mean lead"],
            rows,
        )
    )
    touching = [first_touching(leads[f"PSNR: {ONE} over {baseline}"]) for baseline in (REPEAT, AVERAGE)]
    known = [frame + 1 for frame in touching if frame is not None]
    found.summary["fidelity/first_frame_touching_zero"] = min(known) if known else None


def _flat(frames: Pixels) -> Pixels:
    """uint8 [n, predicted, H, W, C] as [n * predicted, H, W, C]."""
    return frames.reshape(-1, *frames.shape[2:])


def _at(interval: Interval, index: int) -> Interval:
    return Interval(*(None if each is None else each[index] for each in interval))  # type: ignore[arg-type]
