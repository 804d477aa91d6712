"""Tools for model tests: a small geometry, rings that fit it, and resources that show what the model asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from ringkv import EngineResourceInfo, KVSpec, RingKVConfig, RingKVLayerConfig, RolloutRequest, StepRunner

SMALL = ModelConfig(
    name="test",
    channels=1,
    height=8,
    width=8,
    tokens_per_frame=4,
    d_model=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_actions=3,
    global_period=2,
)


def ring_layers(config: ModelConfig, ring_frames: int, dilation: int) -> tuple[RingKVLayerConfig, ...]:
    """A ring per layer, compact."""
    return tuple(
        RingKVLayerConfig(ring_frames=ring_frames, ring_buckets=ring_frames, pinned_dilation=each)
        for each in config.layer_dilations(dilation)
    )


def ring_for(
    config: ModelConfig,
    *,
    ring_frames: int = 3,
    dilation: int = 2,
    num_sessions: int = 1,
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
) -> Any:
    """A ring manager that fits ``config``, built the way an engine builds it."""
    spec = KVSpec(
        resource_key="kv",
        config=RingKVConfig(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_qo_heads=config.num_heads,
            tokens_per_frame=config.tokens_per_frame,
            num_sessions=num_sessions,
            layers=ring_layers(config, ring_frames, dilation),
        ),
    )
    return spec.resource_class.build(spec, EngineResourceInfo(device="cpu", kv_dtype=dtype, attention=attention))


class OwnFrameOnly:
    """A resource without a past: each frame attends to itself. Records every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, int, bool]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_idx: int, frame_pos: Tensor, *, commit: bool) -> Tensor:
        self.calls.append((q, k, v, layer_idx, commit))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def random_frames(count: int, config: ModelConfig = SMALL, seed: int = 0) -> Tensor:
    """[count, C, H, W] in [-1, 1]."""
    shape = (count, config.channels, config.height, config.width)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def random_actions(count: int, config: ModelConfig = SMALL, seed: int = 0) -> Tensor:
    """[count] int64."""
    return torch.randint(config.num_actions, (count,), generator=torch.Generator().manual_seed(seed))


def request(rid: str, num_frames: int, *, context: Tensor, actions: Tensor, seed: int = 0, stream: int = 0) -> Any:
    """A rollout request."""
    return RolloutRequest(rid=rid, seed=seed, stream=stream, num_frames=num_frames, context=context, actions=actions)


def run(resource: Any, sampler: Any, requests: Sequence[Any], *, steps_apart: int = 0) -> dict[str, Tensor]:
    """All frames of each request, [num_frames, C, H, W]; request i is submitted ``i * steps_apart`` steps late."""
    runner = StepRunner(resource, sampler)
    waiting = list(requests)
    frames: dict[str, list[Tensor]] = {each.rid: [] for each in requests}
    step = 0
    while waiting or runner.pending:
        while waiting and step >= (len(requests) - len(waiting)) * steps_apart:
            runner.submit(waiting.pop(0))
        for result in runner.step():
            assert result.frame == len(frames[result.rid])
            frames[result.rid].append(result.image)
        assert not runner.failed, runner.failed
        step += 1
    return {rid: torch.stack(images) for rid, images in frames.items()}
