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


@dataclass(frozen=True)
class Evaluation:
    """PSNR (dB) of predicted frames: the mean over clips.

    model: ``{ring_frames: [PREDICTED]}``. repeat_last, mean_frame: what the last context frame, and the mean frame of
    the context, reach: ``[PREDICTED]``.
    """

    model: dict[int, list[float]]
    repeat_last: list[float]
    mean_frame: list[float]

    def metrics(self) -> dict[str, float]:
        """Flat, for the tracker and the curve: PSNR per ring and frame, and the smallest lead over a baseline."""
        named = {
            f"psnr/ring{ring}/frame{frame}": values[frame - 1]
            for ring, values in self.model.items()
            for frame in REPORTED
        }
        named |= {f"psnr/repeat_last/frame{frame}": self.repeat_last[frame - 1] for frame in REPORTED}
        named |= {f"psnr/mean_frame/frame{frame}": self.mean_frame[frame - 1] for frame in REPORTED}
        return named


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
    """Roll ``model`` out over ``clips``, in rings of several sizes, one denoise pass a frame.

    The mean frame is that of the training data (its median) where there is one, else that of the context.
    """
    loops = background is None
    context = LOOP_CONTEXT if loops else GAME_CONTEXT
    truth = np.stack([clip.frames[context:] for clip in clips])
    last = np.stack([clip.frames[context - 1 : context] for clip in clips])
    if background is None:
        mean = np.stack([clip.frames[:context].mean(0, keepdims=True) for clip in clips])
    else:
        mean = frames_to_uint8(background[None])[None]
    rings = LOOP_RINGS if loops else GAME_RINGS
    return Evaluation(
        model={ring: psnr(_rollouts(model, clips, ring, context), truth) for ring in rings},
        repeat_last=psnr(last, truth),
        mean_frame=psnr(mean, truth),
    )


def psnr(frames: np.ndarray, truth: np.ndarray) -> list[float]:
    """dB per frame, the mean over clips of 8-bit ``[clips, N, H, W, C]``; 48 for the one equal frame, not infinity."""
    squared = np.square(frames.astype(np.float64) - truth).mean(axis=(2, 3, 4))
    return (10 * np.log10(255.0**2 / squared.clip(1.0))).mean(axis=0).tolist()


def _rollouts(model: FrameTransformer, clips: Sequence[Clip], ring_frames: int, context: int) -> np.ndarray:
    """Generated frames uint8 ``[clips, PREDICTED, H, W, C]``."""
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
