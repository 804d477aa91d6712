"""Predicted bytes against what a built resource measures, and against the published geometry's numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ringkv import EngineResourceInfo, KVSpec, RingKVConfig, RingKVLayerConfig, RingKVManager
from ringkv import memory as bytes_ahead
from tests.ring_tools import ring_config

MIB = 2**20


def waypoint(tokens_per_frame: int = 512, compact: bool = True, **changes: int) -> RingKVConfig:
    """The published geometry: 24 layers, every fourth one global; the cache of one session unless changed."""
    local = RingKVLayerConfig(ring_frames=16, ring_buckets=16)
    world = RingKVLayerConfig(ring_frames=16 if compact else 128, ring_buckets=16, pinned_dilation=8)
    values: dict[str, Any] = {"num_kv_heads": 16, "num_qo_heads": 32, "head_dim": 64, "num_sessions": 1} | changes
    layers = tuple(world if i % 4 == 3 else local for i in range(24))
    return RingKVConfig(num_layers=24, layers=layers, tokens_per_frame=tokens_per_frame, **values)


def measured(config: RingKVConfig, dtype: torch.dtype, device: str) -> int:
    spec = KVSpec(resource_key="kv", config=config)
    return spec.resource_class.build(spec, EngineResourceInfo(device=device, kv_dtype=dtype)).memory_bytes()


def random_config(rng: random.Random) -> RingKVConfig:
    layers = []
    for _ in range(rng.randint(1, 4)):
        frames = rng.randint(1, 7)
        buckets = rng.randint(1, frames)
        layers.append(RingKVLayerConfig(ring_frames=frames, ring_buckets=buckets, pinned_dilation=rng.randint(1, 5)))
    heads = rng.randint(1, 3)
    return ring_config(
        layers,
        num_kv_heads=heads,
        num_qo_heads=heads * rng.randint(1, 3),
        head_dim=rng.choice([2, 3, 8, 24]),
        tokens_per_frame=rng.randint(1, 9),
        num_sessions=rng.randint(1, 5),
        padding_session=rng.random() < 0.5,
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_prediction_equals_what_is_held_to_the_byte(device: str) -> None:
    rng = random.Random(7)
    for _ in range(60):
        config = random_config(rng)
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
        assert bytes_ahead.storage_bytes(config, dtype) == measured(config, dtype, device), config
        assert bytes_ahead.storage_bytes(config, str(dtype).removeprefix("torch.")) == measured(config, dtype, "meta")


def test_a_session_is_an_equal_part_of_the_pool() -> None:
    rng = random.Random(8)
    for _ in range(20):
        config = random_config(rng)
        sessions = config.num_sessions + config.padding_session
        assert bytes_ahead.allocated_sessions(config) == sessions
        per_session = bytes_ahead.session_bytes(config, torch.bfloat16)
        assert sessions * per_session == measured(config, torch.bfloat16, "cpu")
        frames = sum(layer.ring_frames + 1 for layer in config.layers)
        assert per_session == frames * bytes_ahead.frame_bytes(config, "bfloat16")


def test_a_token_and_a_frame_of_the_published_geometry() -> None:
    config = waypoint()
    assert bytes_ahead.token_bytes(config, torch.bfloat16) == 2 * 16 * 64 * 2 == 4096
    assert bytes_ahead.frame_bytes(config, torch.bfloat16) == 2 * MIB
    assert bytes_ahead.full_context_bytes(config, torch.bfloat16, 1) == 48 * MIB


@pytest.mark.parametrize(
    ("tokens", "compact", "expected"),
    [(512, True, 855_638_016), (512, False, 2160 * MIB), (128, True, 204 * MIB), (128, False, 540 * MIB)],
)
def test_one_session_of_the_published_geometry(tokens: int, compact: bool, expected: int) -> None:
    config = waypoint(tokens, compact)
    assert bytes_ahead.session_bytes(config, "bfloat16") == expected
    assert measured(config, torch.bfloat16, "meta") == expected
    assert measured(waypoint(tokens, compact, num_sessions=3), torch.bfloat16, "meta") == 3 * expected
    assert measured(waypoint(tokens, compact, padding_session=True), torch.bfloat16, "meta") == 2 * expected


def test_full_context_of_the_published_geometry() -> None:
    config = waypoint()
    assert bytes_ahead.full_context_bytes(config, "bfloat16", 512) == 24 * 2**30
    assert bytes_ahead.full_context_bytes(config, "bfloat16", 10_000) == int(468.75 * 2**30)
    assert bytes_ahead.full_context_bytes(config, "bfloat16", 15) == 720 * MIB  # a second of video
    assert bytes_ahead.crossover_frame(config, "bfloat16") == 17


def test_a_shard_holds_its_share() -> None:
    config = waypoint()
    for world in (2, 4, 8, 16):
        shares = [bytes_ahead.session_bytes(config.shard(world, rank), "bfloat16") for rank in range(world)]
        assert set(shares) == {855_638_016 // world}
    replicated = bytes_ahead.session_bytes(config.shard(32, 5), "bfloat16")
    assert replicated == 855_638_016 // 16  # one head is the least a rank can hold


def test_an_override_of_the_number_of_sessions_counts() -> None:
    spec = KVSpec(resource_key="kv", config=waypoint(), overrides={"num_sessions": 4})
    manager = spec.resource_class.build(spec, EngineResourceInfo(device="meta", kv_dtype=torch.bfloat16))
    assert manager.memory_bytes() == 4 * 855_638_016
    assert manager.num_sessions == 4


@pytest.mark.parametrize("dtype", [torch.int8, "int8", "torch.complex64", torch.bool])
def test_a_dtype_that_no_cache_stores_is_refused_by_name(dtype: torch.dtype | str) -> None:
    with pytest.raises(ValueError, match=r"kv_dtype=.*expected one of .*bfloat16"):
        bytes_ahead.session_bytes(waypoint(), dtype)


def test_the_seeds_default_dtype_is_bf16() -> None:
    manager = RingKVManager(ring_config([RingKVLayerConfig(ring_frames=3, ring_buckets=3)]), "kv", "cpu")
    assert manager.dtype == torch.bfloat16
    assert manager.name == "kv"
    assert manager.memory_bytes() == 2 * 8 * 2 * 2
