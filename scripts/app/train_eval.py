"""How good a model is while it trains: short rollouts on held-out data, served as they will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from model.data import Clip, frames_to_model, frames_to_uint8, load_clip
from model.sampler import FrameSampler
from model.transformer import FrameTransformer
from ringkv import EngineResourceInfo, KVSpec, RingKVConfig, RingKVLayerConfig, RolloutRequest, StepRunner
from scripts.app.schema import TrainConfig

CLIPS = 2
SEED = 900
"""Of the recordings and of the noise; recordings to train on have seeds from 1000."""

GAME_RINGS, LOOP_RINGS = (5, 16, 32), (4, 6, 9, 12)
GAME_CONTEXT, LOOP_CONTEXT = 8, 12
PREDICTED = 32
REPORTED = (1, 8, 16, 32)
"""Predicted frames whose quality is logged, counted from 1."""

ONE_PASS = (1.0, 0.0)
"""Noise levels of these rollouts: a frame in one denoise pass reaches the PSNR of four."""


@dataclass(frozen=True)
class Evaluation:
    """PSNR (dB) of predicted frames: the mean over clips.

    model: by ring_frames, ``[PREDICTED]`` each. baselines: by name, the same.
    """

    model: dict[int, list[float]]
    baselines: dict[str, list[float]]

    def metrics(self) -> dict[str, float]:
        """Flat, for the tracker and the curve."""
        named = {f"ring{ring}": values for ring, values in self.model.items()} | self.baselines
        return {f"psnr/{name}/frame{frame}": values[frame - 1] for name, values in named.items() for frame in REPORTED}


def held_out_clips(config: TrainConfig) -> list[Clip]:
    """Clips that no training run sees."""
    context = LOOP_CONTEXT if config.data.name == "loops" else GAME_CONTEXT
    channels, height, width = config.data.channels, config.data.height, config.data.width
    assert channels is not None
    assert height is not None
    assert width is not None
    return [
        load_clip(
            config.data.name,
            num_frames=context + PREDICTED,
            channels=channels,
            height=height,
            width=width,
            seed=SEED,
            index=index,
            folder=config.data.folder,
        )
        for index in range(CLIPS)
    ]


def evaluate(model: FrameTransformer, clips: Sequence[Clip], background: torch.Tensor | None) -> Evaluation:
    """Roll ``model`` out over ``clips``, in rings of several sizes. background: as for ``baselines``."""
    loops = background is None
    context = LOOP_CONTEXT if loops else GAME_CONTEXT
    truth = np.stack([clip.frames[context:] for clip in clips])
    return Evaluation(
        model={
            ring: psnr(rollouts(model, clips, ring, context), truth) for ring in (LOOP_RINGS if loops else GAME_RINGS)
        },
        baselines={name: psnr(frames, truth) for name, frames in baselines(clips, context, background).items()},
    )


def baselines(clips: Sequence[Clip], context: int, background: torch.Tensor | None) -> dict[str, np.ndarray]:
    """What needs no model, as frames uint8 ``[clips, 1, H, W, C]``: the last context frame, and the mean frame.

    background: ``[C, H, W]``, to stand for the mean frame; None: the mean of the context.
    """
    last = np.stack([clip.frames[context - 1 : context] for clip in clips])
    if background is None:
        mean = np.stack([clip.frames[:context].mean(axis=0, keepdims=True).round().astype(np.uint8) for clip in clips])
    else:
        mean = np.repeat(frames_to_uint8(background[None])[None], len(clips), axis=0)
    return {"repeat_last": last, "mean_frame": mean}


def psnr(frames: np.ndarray, truth: np.ndarray) -> list[float]:
    """dB per frame of 8-bit ``[clips, N, H, W, C]``, the mean over clips; at most 48, one grey level."""
    squared = np.square(frames.astype(np.float64) - truth).mean(axis=(2, 3, 4))
    return (10 * np.log10(255.0**2 / squared.clip(1.0))).mean(axis=0).tolist()


def rollouts(model: FrameTransformer, clips: Sequence[Clip], ring_frames: int, context: int) -> np.ndarray:
    """Generated frames uint8 ``[clips, PREDICTED, H, W, C]``, one denoise pass each, through the served path."""
    config = model.config
    layer = RingKVLayerConfig(ring_frames=ring_frames, ring_buckets=ring_frames, pinned_dilation=1)
    geometry = RingKVConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_qo_heads=config.num_heads,
        tokens_per_frame=config.tokens_per_frame,
        num_sessions=len(clips),
        layers=(layer,) * config.num_layers,
    )
    spec = KVSpec(resource_key="kv", config=geometry)
    info = EngineResourceInfo(device="cpu", kv_dtype=torch.float32, attention="auto")
    runner = StepRunner(spec.resource_class.build(spec, info), FrameSampler(model, ONE_PASS))
    for stream, clip in enumerate(clips):
        runner.submit(
            RolloutRequest(
                rid=str(stream),
                seed=SEED,
                stream=stream,
                num_frames=context + PREDICTED,
                context=frames_to_model(clip.frames[:context]),
                actions=torch.from_numpy(clip.actions),
            )
        )
    frames: dict[str, list[Any]] = {str(stream): [] for stream in range(len(clips))}
    while runner.pending:
        for result in runner.step():
            if result.phase == "generated":
                frames[result.rid].append(result.image)
        if runner.failed:
            raise next(iter(runner.failed.values()))
    return np.stack([frames_to_uint8(torch.stack(images)) for images in frames.values()])
