"""What one rollout works with, made from a checked config: frames, weights, cache and runner."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from model.config import ModelConfig
from model.data import Clip
from model.sampler import FrameSampler
from ringkv import StepRunner
from ringkv.harness.video import Pixels
from ringkv.recompute import RecomputeRunner
from scripts.app import build
from scripts.app.geometry import model_config
from scripts.app.schema import RolloutConfig
from scripts.app.strategies import kv_config


class _Frozen(FrameSampler):
    """Over weights that stay as they are while the rollout lasts: their name, a hash of them all, is computed once."""

    @functools.cached_property
    def fingerprint(self) -> str:
        return super().fingerprint


@dataclass
class Rollout:
    """What a run works with. frames: per session, the pixels shown so far, uint8 [H, W, C] each."""

    config: RolloutConfig
    geometry: ModelConfig
    clips: list[Clip]
    weights: build.Weights
    runner: StepRunner | RecomputeRunner
    frames: dict[str, list[np.ndarray]]
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def truths(self) -> dict[str, Pixels]:
        """Per session the recorded frames, uint8 [N, H, W, C]."""
        return {name: clip.frames for name, clip in zip(self.frames, self.clips, strict=True)}

    @classmethod
    def set_up(cls, config: RolloutConfig) -> Rollout:
        """Load and build everything, deterministically from the seed. ``ValueError`` for input that turns out unfit."""
        assert config.threads is not None
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        geometry = model_config(config)
        clips = build.load_clips(config, geometry)
        weights = build.build_weights(config, geometry)
        sampler = _Frozen(weights.model)
        runner = build.build_runner(
            config.kv.strategy,
            kv_config(config, geometry),
            build.resource_info(config),
            sampler,
            compiled=sampler if config.compile else None,
        )
        names = [f"session-{index}" for index in range(config.num_sessions)]
        return cls(config, geometry, clips, weights, runner, {name: [] for name in names})
