"""From a checked config to the things that run: frames, weights, cache. Joins ringkv and model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import find_shipped, load_checkpoint, read_metadata
from model.config import ModelConfig
from model.data import Clip, frames_to_model, load_clip
from model.transformer import FrameTransformer, compile_regions
from ringkv import AttentionResource, EngineResourceInfo, KVConfig, KVSpec, StepRunner
from ringkv.config import WindowedKVConfig
from ringkv.graphs import CapturableModel, CapturedSteps
from ringkv.recompute import RecomputeRunner
from ringkv.runner import FrameModel, RolloutRequest
from scripts.app.schema import JobKnobs, RolloutConfig
from scripts.app.strategies import STRATEGIES

_MAY_DIFFER = ("ring_frames", "ring_buckets", "dilation", "context_frames")
"""Knobs that a checkpoint may name as those of its training, and that serving may set otherwise."""


@dataclass(frozen=True)
class Weights:
    """A model and where its weights come from. path: None for random weights. trained_with: what its file says."""

    model: FrameTransformer
    path: Path | None
    trained_with: dict[str, Any]


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` as ``torch.bfloat16``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_clips(config: JobKnobs, model: ModelConfig, count: int | None = None) -> list[Clip]:
    """Clips from 0 on, ``count`` or one per session. ``ValueError`` for data that only decoding shows to be unfit."""
    assert config.num_frames is not None
    return [
        load_clip(
            config.data.name,
            num_frames=config.num_frames,
            channels=model.channels,
            height=model.height,
            width=model.width,
            seed=config.seed,
            index=index,
            path=config.data.path,
            folder=config.data.folder,
        )
        for index in range(config.num_sessions if count is None else count)
    ]


def rollout_requests(config: JobKnobs, clips: list[Clip], num_frames: int, prefix: str = "") -> list[RolloutRequest]:
    """A request ``session-i`` per clip, over its first ``num_frames`` frames, of which one at least is generated."""
    given = min(config.context_frames, num_frames - 1)
    return [
        RolloutRequest(
            rid=f"{prefix}session-{stream}",
            seed=config.seed,
            stream=stream,
            num_frames=num_frames,
            context=frames_to_model(clip.frames[:given]),
            actions=torch.from_numpy(clip.actions[:num_frames]),
        )
        for stream, clip in enumerate(clips)
    ]


def build_weights(config: JobKnobs, geometry: ModelConfig) -> Weights:
    """The model on its device and in its dtype, with the weights that ``checkpoint`` names."""
    dtype = torch_dtype(config.dtype)
    if config.checkpoint == "auto":
        path = find_shipped(geometry, config.data.name)
    else:
        path = Path(config.checkpoint) if config.checkpoint else None
    trained_with: dict[str, Any] = {}
    if path is not None:
        metadata = read_metadata(path)
        trained_with = metadata["config"] | metadata["extra"]
        model = load_checkpoint(path, geometry, dtype)
    else:
        # Drawn on the CPU in fp32 whatever device and dtype are, so that a seed means one set of weights.
        model = FrameTransformer(geometry, config.seed)
    model = model.to(device=config.device, dtype=dtype).eval()
    if config.compile:
        compile_regions(model)
    return Weights(model, path, trained_with)


def resource_info(config: RolloutConfig, attention: str | None = None) -> EngineResourceInfo:
    """Where the cache lives and how it is read; ``attention`` None: as the config says.

    There ``auto`` is the read that a CUDA graph can hold, where one is to be captured.
    """
    assert config.kv_dtype is not None
    attention = attention or config.attention
    captures = config.compile and config.device.startswith("cuda")
    if attention == "auto" and captures and "flex" in STRATEGIES[config.kv.strategy].reads:
        attention = "flex"
    return EngineResourceInfo(device=config.device, kv_dtype=torch_dtype(config.kv_dtype), attention=attention)


def build_resource(kv_config: KVConfig, info: EngineResourceInfo) -> AttentionResource:
    """The cache, allocated. ``ValueError`` for a read path that the strategy lacks."""
    spec = KVSpec(resource_key="kv", config=kv_config)
    return spec.resource_class.build(spec, info)


def build_runner(
    strategy: str,
    kv_config: KVConfig,
    info: EngineResourceInfo,
    model: FrameModel,
    *,
    compiled: CapturableModel | None = None,
) -> StepRunner | RecomputeRunner:
    """What drives the rollouts, with the cache in it; recomputation keeps none.

    compiled: ``model`` again, if it is compiled: its steps are then run in batch buckets, and captured on a GPU if the
    read allows it. They are not warmed up.
    """
    if strategy in ("recompute_all", "recompute_window"):
        assert isinstance(kv_config, WindowedKVConfig)
        return RecomputeRunner(kv_config, info, model, window=strategy == "recompute_window")
    resource = build_resource(kv_config, info)
    captured = None
    if compiled is not None and (resource.device.type != "cuda" or resource.reads_in_graph):
        captured = CapturedSteps(resource, compiled, resource.num_sessions)
    return StepRunner(resource, model, captured)


def kv_held(runner: StepRunner | RecomputeRunner) -> tuple[int, int]:
    """Bytes reserved now, and those in use. Of recomputation: of the frames that it keeps."""
    if isinstance(runner, RecomputeRunner):
        return runner.memory_bytes(), runner.memory_bytes()
    report = runner.resource.memory_report()
    return report["resident"], report["in_use"]


def sessions_held(runner: StepRunner | RecomputeRunner) -> int:
    """Requests whose past is kept."""
    if isinstance(runner, RecomputeRunner):
        return len(runner.resident)
    return runner.resource.num_sessions - runner.resource.num_free_sessions


def differences_from_training(config: JobKnobs, weights: Weights) -> list[str]:
    """Where serving differs from what the checkpoint says of its training, a line each. Allowed, but to be told.

    Two numbers there are the ends of what was drawn. The dilation of a model without global layers is no difference.
    """
    model = weights.model.config
    serving = {name: getattr(config, name) for name in _MAY_DIFFER}
    serving |= {name: getattr(model, name) for name in ("global_period", "sigmas")}
    if max(model.layer_dilations(config.dilation)) == 1:
        serving["dilation"] = 1
    lines = []
    for name, value in serving.items():
        if name not in weights.trained_with:
            continue
        trained = weights.trained_with[name]
        if name in _MAY_DIFFER and isinstance(trained, list):
            low, high = trained
            if not low <= value <= high:
                lines.append(f"{name}={value}: the weights were trained with {low} to {high}")
        elif (list(value) if isinstance(value, tuple) else value) != trained:
            lines.append(f"{name}={value}: the weights were trained with {trained}")
    return lines
