"""What configs refuse, and that a refusal names the field, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringkv import EngineResourceInfo, KVConfig, KVSpec, RingKVConfig, RingKVLayerConfig, RingKVManager
from tests.ring_tools import build_layer, build_manager, ring, ring_config

GEOMETRY: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 2,
    "head_dim": 4,
    "num_qo_heads": 4,
    "tokens_per_frame": 2,
    "num_sessions": 1,
}


def refused(call: Callable[[], object], *mentions: object) -> None:
    """``call`` raises a ``ValueError`` of one line that mentions each of ``mentions``."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for mention in mentions:
        assert str(mention) in message, message


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, "3", None, True])
@pytest.mark.parametrize("name", ["ring_frames", "ring_buckets", "pinned_dilation"])
def test_a_layer_geometry_is_made_of_positive_integers(name: str, value: Any) -> None:
    values: dict[str, Any] = {"ring_frames": 4, "ring_buckets": 2, "pinned_dilation": 1} | {name: value}
    refused(lambda: RingKVLayerConfig(**values), "RingKVLayerConfig", name, repr(value), ">= 1")


def test_a_layer_cannot_address_more_slots_than_it_allocates() -> None:
    refused(lambda: RingKVLayerConfig(ring_frames=8, ring_buckets=9), "ring_buckets=9", "ring_frames=8")
    assert RingKVLayerConfig(ring_frames=8, ring_buckets=8).pinned_dilation == 1


@pytest.mark.parametrize("value", [0, -1, 1.0, "3", None, True])
@pytest.mark.parametrize("name", sorted(GEOMETRY))
def test_a_config_is_made_of_positive_integers(name: str, value: Any) -> None:
    refused(lambda: KVConfig(**GEOMETRY | {name: value}), f"KVConfig.{name}", repr(value), ">= 1")


def test_query_heads_are_a_multiple_of_kv_heads() -> None:
    refused(lambda: KVConfig(**GEOMETRY | {"num_qo_heads": 5}), "num_qo_heads=5", "num_kv_heads=2")
    refused(lambda: KVConfig(**GEOMETRY | {"num_qo_heads": 1}), "num_qo_heads=1", "num_kv_heads=2")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_ring_config_has_one_geometry_for_each_layer(count: int) -> None:
    layers = (ring(3),) * count
    refused(lambda: RingKVConfig(**GEOMETRY | {"num_layers": 2}, layers=layers), "layers", count, "num_layers=2")


def test_configs_are_values() -> None:
    config = ring_config([ring(3), ring(2, 4)])
    assert config == ring_config([ring(3), ring(2, 4)])
    assert hash(config) == hash(ring_config([ring(3), ring(2, 4)]))
    assert isinstance(dataclasses.replace(config, layers=[ring(3), ring(2)]).layers, tuple)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_sessions = 2  # type: ignore[misc]
    refused(lambda: dataclasses.replace(config, num_layers=3), "num_layers=3")


# -- deployment ----------------------------------------------------------------------------------------------


def test_a_deployment_may_change_the_number_of_sessions_and_nothing_else() -> None:
    spec = KVSpec(resource_key="kv", config=ring_config([ring(3)]), overrides={"num_sessions": 5})
    manager = spec.resource_class.build(spec, EngineResourceInfo(device="cpu", kv_dtype=torch.float32))
    assert manager.num_sessions == manager.num_free_sessions == manager.config.num_sessions == 5
    assert manager.name == "kv"
    assert spec.config.num_sessions == 1
    names = [field.name for field in dataclasses.fields(RingKVConfig)] + ["ring_frames", "nonsense"]
    for name in set(names) - {"num_sessions"}:
        declare = functools.partial(KVSpec, resource_key="kv", config=ring_config([ring(3)]), overrides={name: 7})
        refused(declare, name, 7, "num_sessions")


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", None, True])
def test_a_bad_number_of_sessions_is_refused_when_it_is_declared(value: Any) -> None:
    overrides = {"num_sessions": value}
    refused(
        lambda: KVSpec(resource_key="kv", config=ring_config([ring(3)]), overrides=overrides),
        "num_sessions",
        repr(value),
    )


def test_the_class_follows_from_the_type_of_the_config() -> None:
    spec = KVSpec(resource_key="kv", config=ring_config([ring(3)]))
    assert spec.resource_class is RingKVManager
    assert isinstance(build_manager([ring(3)]), RingKVManager)


def test_a_config_that_no_strategy_serves_is_refused_by_name() -> None:
    spec = KVSpec(resource_key="kv", config=KVConfig(**GEOMETRY))
    refused(lambda: spec.resource_class, "KVConfig")


def test_an_unknown_read_path_is_refused_by_name() -> None:
    choices: tuple[Any, ...] = ("fast", "", None)
    for attention in choices:
        info = functools.partial(EngineResourceInfo, device="cpu", kv_dtype=torch.float32, attention=attention)
        refused(info, "attention", repr(attention), "canonical")


@pytest.mark.parametrize("attention", ["auto", "canonical", "sdpa", "segments", "lent"])
def test_every_read_path_of_the_ring_can_be_asked_for(attention: str) -> None:
    assert build_manager([ring(3)], attention=attention).num_free_sessions == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_cache_stores_floating_point(dtype: torch.dtype) -> None:
    refused(lambda: build_manager([ring(3)], dtype=dtype), str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(
    "change",
    [{"sessions": 0}, {"heads": 0}, {"head_dim": 0}, {"tokens": 0}, {"frames": 2}, {"dilation": 0}, {"buckets": 0}],
    ids=str,
)
def test_a_layer_cache_refuses_a_geometry_that_cannot_be(change: dict[str, int]) -> None:
    values: dict[str, Any] = {"buckets": 3} | change
    refused(lambda: build_layer(**values))


# -- tensor-parallel shards ----------------------------------------------------------------------------------


def sharded(num_kv_heads: int, world: int, group: int = 24) -> list[RingKVConfig]:
    config = ring_config([ring(3)], num_kv_heads=num_kv_heads, num_qo_heads=num_kv_heads * group)
    return [config.shard(world, rank) for rank in range(world)]


@pytest.mark.parametrize(
    ("num_kv_heads", "world", "expected"),
    [
        (2, 1, [(0, 1)]),
        (2, 2, [(0,), (1,)]),
        (2, 4, [(0,), (0,), (1,), (1,)]),
        (4, 8, [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]),
        (8, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (1, 3, [(0,), (0,), (0,)]),
    ],
)
def test_every_rank_has_its_own_heads_and_never_less_than_one(
    num_kv_heads: int, world: int, expected: list[tuple[int, ...]]
) -> None:
    """heads // ranks became 0; or as many heads as ranks was treated as replicated."""
    shards = sharded(num_kv_heads, world)
    assert [shard.local_kv_heads for shard in shards] == expected
    assert [shard.num_kv_heads for shard in shards] == [len(heads) for heads in expected]
    assert {shard.num_qo_heads for shard in shards} == {num_kv_heads * 24 // world}


@pytest.mark.parametrize(("num_kv_heads", "world"), [(2, 3), (6, 4), (4, 6)])
def test_heads_that_do_not_split_evenly_are_refused(num_kv_heads: int, world: int) -> None:
    refused(lambda: sharded(num_kv_heads, world), f"world={world}", f"num_kv_heads={num_kv_heads}")


def test_query_heads_that_do_not_split_are_refused() -> None:
    refused(lambda: sharded(2, 4, group=1), "world=4", "num_qo_heads=2")


@pytest.mark.parametrize(("world", "rank"), [(2, 2), (2, -1), (0, 0), (2, 1.0), (2.0, 0), (-1, 0)])
def test_a_rank_that_does_not_exist_is_refused(world: Any, rank: Any) -> None:
    refused(lambda: ring_config([ring(3)], num_kv_heads=2, num_qo_heads=4).shard(world, rank), "shard")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sharding_a_shard_the_same_way_changes_nothing_and_another_way_is_refused(world: int) -> None:
    for rank, shard in enumerate(sharded(2, world)):
        assert shard.shard(world, rank) == shard
        assert isinstance(shard, RingKVConfig)
        assert shard.layers == (ring(3),)
    if world > 1:
        refused(lambda: sharded(2, world)[0].shard(world, 1), "shard")
        refused(lambda: sharded(2, world)[0].shard(8, 0), "shard")


def test_every_query_head_of_a_shard_reads_the_kv_head_that_it_read_before() -> None:
    for num_kv_heads, world in ((2, 1), (2, 2), (2, 4), (4, 8), (8, 4)):
        group = 8
        config = ring_config([ring(3)], num_kv_heads=num_kv_heads, num_qo_heads=num_kv_heads * group)
        read = []
        for rank in range(world):
            shard = config.shard(world, rank)
            local_group = shard.num_qo_heads // shard.num_kv_heads
            read += [shard.local_kv_heads[head // local_group] for head in range(shard.num_qo_heads)]
        assert read == [head // group for head in range(config.num_qo_heads)]


def test_a_shard_is_built_with_its_own_heads() -> None:
    shard = sharded(4, 2)[1]
    spec = KVSpec(resource_key="kv", config=shard)
    manager = spec.resource_class.build(spec, EngineResourceInfo(device="cpu", kv_dtype=torch.float32))
    assert manager.layers[0].kv.shape[2] == 2


def test_refusals_read_like_a_sentence() -> None:
    with pytest.raises(ValueError, match=re.escape("RingKVLayerConfig.ring_frames=0: expected an integer >= 1")):
        RingKVLayerConfig(ring_frames=0, ring_buckets=1)
