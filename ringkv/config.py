"""What a model declares about its KV cache, and which class serves it. No torch at module level.

A config is frozen and checks itself: a bad value raises ``ValueError`` with one line that names the field, the
value and what is allowed. Each config names the class that serves it by import path, so that a process which uses
one storage strategy never imports another.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ringkv.resource import AttentionResource

ATTENTION_CHOICES = ("auto", "canonical", "sdpa", "segments", "lent", "flex")
"""Read paths a deployment may ask for; a strategy that lacks one refuses it by name when it is built."""

DEPLOYMENT_OVERRIDES = ("num_sessions",)
"""What a deployment may change. Everything else is the model's geometry: its weights were trained with it."""


def require_int(owner: str, name: str, value: object, minimum: int) -> None:
    """Raise ``ValueError`` unless ``value`` is an int (not a bool) of at least ``minimum``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{owner}.{name}={value!r}: expected an integer >= {minimum}")


@dataclass(frozen=True, kw_only=True)
class RingKVLayerConfig:
    """Ring geometry of one attention layer.

    ring_frames: frame slots allocated, besides the scratch frame.
    ring_buckets: slots addressed, at most ``ring_frames``; an uncompacted dilated layer allocates more than it uses.
    pinned_dilation: the layer keeps every d-th frame, so its horizon is ``ring_buckets * pinned_dilation`` frames.
    """

    ring_frames: int
    ring_buckets: int
    pinned_dilation: int = 1

    def __post_init__(self) -> None:
        require_int("RingKVLayerConfig", "ring_frames", self.ring_frames, 1)
        require_int("RingKVLayerConfig", "ring_buckets", self.ring_buckets, 1)
        require_int("RingKVLayerConfig", "pinned_dilation", self.pinned_dilation, 1)
        if self.ring_buckets > self.ring_frames:
            raise ValueError(
                f"RingKVLayerConfig.ring_buckets={self.ring_buckets}: expected at most ring_frames={self.ring_frames}"
            )


@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """Geometry that every storage strategy shares.

    num_layers: attention layers. num_kv_heads, num_qo_heads: heads on this rank; query head h reads KV head
    ``h // (num_qo_heads // num_kv_heads)``. head_dim: elements per head. tokens_per_frame: tokens of one frame.
    num_sessions: requests that can hold a session at once. padding_session: whether one more session is allocated
    for the padding rows of a captured batch. shard_world, shard_rank: the tensor-parallel split that ``shard`` made.
    """

    resource_path: ClassVar[str] = ""
    strategy: ClassVar[str] = ""
    """What a state's geometry calls the way of keeping frames."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_qo_heads: int
    tokens_per_frame: int
    num_sessions: int
    padding_session: bool = False
    shard_world: int = 1
    shard_rank: int = 0
    local_kv_heads: tuple[int, ...] = ()
    """Which of the unsharded model's KV heads live here, by index. Filled in when left empty."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in ("num_layers", "num_kv_heads", "head_dim", "num_qo_heads", "tokens_per_frame", "num_sessions"):
            require_int(owner, name, getattr(self, name), 1)
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"{owner}.num_qo_heads={self.num_qo_heads}: expected a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if not self.local_kv_heads:
            object.__setattr__(self, "local_kv_heads", tuple(range(self.num_kv_heads)))

    def shard(self, world: int, rank: int) -> Self:
        """The config of tensor-parallel rank ``rank`` of ``world``: its KV heads and the query heads that read them.

        With fewer KV heads than ranks each head is replicated on ``world // num_kv_heads`` consecutive ranks.
        Idempotent: sharding a shard the same way returns it unchanged; any other way raises ``ValueError``, as does a
        ``world`` that neither divides the KV heads nor is a multiple of them, or does not divide the query heads.
        """
        owner = type(self).__name__
        require_int(owner, "shard(world)", world, 1)
        require_int(owner, "shard(rank)", rank, 0)
        if rank >= world:
            raise ValueError(f"{owner}.shard(rank={rank}): expected a rank below world={world}")
        if self.shard_world != 1:
            if (self.shard_world, self.shard_rank) == (world, rank):
                return self
            raise ValueError(
                f"{owner}.shard(world={world}, rank={rank}): already sharded as rank {self.shard_rank} of "
                f"{self.shard_world}; shard the full config instead"
            )
        heads = self.num_kv_heads
        if heads % world and world % heads:
            raise ValueError(f"{owner}.shard(world={world}): expected a divisor or a multiple of num_kv_heads={heads}")
        if self.num_qo_heads % world:
            raise ValueError(f"{owner}.shard(world={world}): expected a divisor of num_qo_heads={self.num_qo_heads}")
        per_rank = max(1, heads // world)
        first = rank * heads // world
        return dataclasses.replace(
            self,
            num_kv_heads=per_rank,
            num_qo_heads=self.num_qo_heads // world,
            shard_world=world,
            shard_rank=rank,
            local_kv_heads=tuple(range(first, first + per_rank)),
        )


@dataclass(frozen=True, kw_only=True)
class WindowedKVConfig(KVConfig):
    """A strategy whose layers see exactly ``visible_frames``; ``layers`` has a geometry for each of ``num_layers``."""

    layers: tuple[RingKVLayerConfig, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", _one_per_layer(self, self.layers))


@dataclass(frozen=True, kw_only=True)
class RingKVConfig(WindowedKVConfig):
    """A ring per layer: fixed slots, overwritten in place.

    undo_frames: how many frames a session can be taken back by ``rewind``; 0 keeps no log of what commits overwrite.
    """

    resource_path: ClassVar[str] = "ringkv.ring.manager:RingKVManager"
    strategy: ClassVar[str] = "ring"

    undo_frames: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("RingKVConfig", "undo_frames", self.undo_frames, 0)


@dataclass(frozen=True, kw_only=True)
class ShiftKVConfig(WindowedKVConfig):
    """The window kept in frame order by shifting it left through a copy. ``ring_frames`` of a layer is not used."""

    resource_path: ClassVar[str] = "ringkv.shift.manager:ShiftKVManager"
    strategy: ClassVar[str] = "shift"


@dataclass(frozen=True, kw_only=True)
class CatKVConfig(WindowedKVConfig):
    """The window rebuilt by concatenation on every pass. ``ring_frames`` of a layer is not used."""

    resource_path: ClassVar[str] = "ringkv.shift.cat:CatKVManager"
    strategy: ClassVar[str] = "cat"


@dataclass(frozen=True, kw_only=True)
class FullKVConfig(KVConfig):
    """Every frame kept, contiguous.

    layers: what may be seen of it, None for everything. max_frames: frames preallocated per session; None grows by
    doubling.
    """

    resource_path: ClassVar[str] = "ringkv.full.manager:FullKVManager"
    strategy: ClassVar[str] = "full"

    layers: tuple[RingKVLayerConfig, ...] | None = None
    max_frames: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            object.__setattr__(self, "layers", _one_per_layer(self, self.layers))
        if self.max_frames is not None:
            require_int("FullKVConfig", "max_frames", self.max_frames, 1)


@dataclass(frozen=True, kw_only=True)
class PagedKVConfig(KVConfig):
    """Frames in pages of a shared pool, found through a block table per session and layer.

    page_tokens: tokens of a page; a frame may straddle pages. num_pages: pages of one layer's pool. layers: the window
    outside which pages are freed, None for full context.
    """

    resource_path: ClassVar[str] = "ringkv.paged.manager:PagedKVManager"
    strategy: ClassVar[str] = "paged"

    page_tokens: int
    num_pages: int
    layers: tuple[RingKVLayerConfig, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("PagedKVConfig", "page_tokens", self.page_tokens, 1)
        require_int("PagedKVConfig", "num_pages", self.num_pages, 1)
        if self.layers is not None:
            object.__setattr__(self, "layers", _one_per_layer(self, self.layers))


@dataclass(frozen=True, kw_only=True)
class HFSlidingKVConfig(WindowedKVConfig):
    """Hugging Face transformers' sliding cache; ``ring_frames`` of a layer is not used.

    Its window is contiguous, so a dilated layer is refused, and so is a window of one frame.
    """

    resource_path: ClassVar[str] = "ringkv.peers.hf:HFSlidingKVManager"
    strategy: ClassVar[str] = "hf_sliding"

    def __post_init__(self) -> None:
        super().__post_init__()
        for index, layer in enumerate(self.layers):
            where = f"HFSlidingKVConfig.layers[{index}]"
            if layer.pinned_dilation != 1:
                raise ValueError(
                    f"{where}.pinned_dilation={layer.pinned_dilation}: expected 1, the sliding cache has no dilation"
                )
            if layer.ring_buckets == 1:
                raise ValueError(
                    f"{where} ring_frames={layer.ring_frames} ring_buckets=1: expected a window of 2 frames or more, "
                    "since transformers evicts nothing at a window of 1 token"
                )


def _one_per_layer(config: KVConfig, layers: Sequence[RingKVLayerConfig]) -> tuple[RingKVLayerConfig, ...]:
    layers = tuple(layers)
    if len(layers) != config.num_layers:
        raise ValueError(
            f"{type(config).__name__}.layers has {len(layers)} entries: expected num_layers={config.num_layers}"
        )
    return layers


@dataclass(frozen=True, kw_only=True)
class EngineResourceInfo:
    """What the engine decides: where the cache lives, in which dtype, and how it is read.

    device: a torch device or its name. kv_dtype: floating dtype of K and V in storage. attention: one of
    ``ATTENTION_CHOICES``; ``auto`` is the measured rule of ``ringkv.attention.rule``. parking_dir: folder for the
    sessions that ``park`` takes off the device, a file each, made when the first one comes; None keeps them in host
    memory.
    """

    device: torch.device | str
    kv_dtype: torch.dtype
    attention: str = "auto"
    parking_dir: str | Path | None = None

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION_CHOICES:
            raise ValueError(
                f"EngineResourceInfo.attention={self.attention!r}: expected one of {', '.join(ATTENTION_CHOICES)}"
            )


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """A model's declaration of one KV resource, and the deployment's changes to it.

    ``overrides`` may set ``num_sessions``; any other key is geometry and raises ``ValueError`` by name.
    """

    resource_key: str
    config: KVConfig
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.overrides:
            if key not in DEPLOYMENT_OVERRIDES:
                raise ValueError(
                    f"KVSpec.overrides[{key!r}]={self.overrides[key]!r}: a deployment may only override "
                    f"{', '.join(DEPLOYMENT_OVERRIDES)}; the rest is the model's geometry"
                )
        self.deployed_config()  # a bad value is refused here, not when the engine starts

    def deployed_config(self) -> KVConfig:
        """``config`` with the deployment's overrides applied."""
        return dataclasses.replace(self.config, **self.overrides)

    @property
    def resource_class(self) -> type[AttentionResource]:
        """The class that serves ``config``, imported now and not before."""
        module_name, _, class_name = self.config.resource_path.partition(":")
        if not class_name:
            raise ValueError(f"KVSpec.config is a {type(self.config).__name__}: no storage strategy serves it")
        resource_class: type[AttentionResource] = getattr(importlib.import_module(module_name), class_name)
        return resource_class
