"""How each choice of conf/kv reads the knobs, and how many bytes it will hold. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig
from ringkv import horizon, memory
from ringkv.buckets import needs_padding
from ringkv.config import (
    CatKVConfig,
    FullKVConfig,
    HFSlidingKVConfig,
    KVConfig,
    PagedKVConfig,
    RingKVConfig,
    RingKVLayerConfig,
    ShiftKVConfig,
    WindowedKVConfig,
)
from scripts.app.schema import RolloutConfig

PAGE_TOKENS = 16
POOL_KNOBS = ("page_tokens", "num_pages", "max_frames")

IN_ORDER = ("auto", "canonical", "sdpa")
RING_READS = (*IN_ORDER, "segments", "lent", "flex")


@dataclass(frozen=True)
class Strategy:
    """What a value of ``kv.strategy`` means.

    config: the geometry that it is built with. holds: bytes of KV once all frames of all sessions are made. knobs:
    those of conf/kv that it has. reads: values of ``attention`` that it has. dilates: whether it knows dilated layers.
    size_knob: the knob to turn when it is too big. works_in: bytes that it needs besides while it makes a frame.
    """

    config: Callable[[RolloutConfig, ModelConfig], KVConfig]
    holds: Callable[[RolloutConfig, ModelConfig], int]
    knobs: tuple[str, ...] = ()
    reads: tuple[str, ...] = IN_ORDER
    dilates: bool = True
    size_knob: str = "ring_frames"
    works_in: Callable[[RolloutConfig, ModelConfig], int] = lambda config, model: 0


def kv_config(config: RolloutConfig, model: ModelConfig) -> KVConfig:
    """What the strategy keeps of the past."""
    return STRATEGIES[config.kv.strategy].config(config, model)


def kv_bytes(config: RolloutConfig, model: ModelConfig) -> int:
    """Bytes of KV that the strategy holds at the end of the job. Of recomputation, which keeps none: of the frames."""
    return STRATEGIES[config.kv.strategy].holds(config, model)


def working_bytes(config: RolloutConfig, model: ModelConfig) -> int:
    """Bytes of KV that the strategy needs besides while it makes the last frame, and then gives back."""
    return STRATEGIES[config.kv.strategy].works_in(config, model)


def seen_past(config: RolloutConfig) -> str:
    """What a frame sees of its past, as a family: two strategies of one family must agree.

    ``window``: what a ring shows. ``everything``. ``recomputed``: the ring's window, of frames that saw no more of it.
    """
    if config.kv.strategy == "recompute_window":
        return "recomputed"
    if config.kv.strategy == "full_static" or config.kv.window is False:
        return "everything"
    return "window"


def ring_layers(config: RolloutConfig, model: ModelConfig) -> tuple[RingKVLayerConfig, ...]:
    """A ring of ``ring_frames`` slots in every layer, of which the global layers keep every ``dilation``-th frame."""
    buckets = config.ring_frames if config.ring_buckets is None else config.ring_buckets
    return tuple(
        RingKVLayerConfig(ring_frames=config.ring_frames, ring_buckets=buckets, pinned_dilation=dilation)
        for dilation in model.layer_dilations(config.dilation)
    )


def _shared(config: RolloutConfig, model: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "num_qo_heads": model.num_heads,
        "tokens_per_frame": model.tokens_per_frame,
        "num_sessions": config.num_sessions,
        "padding_session": config.compile and needs_padding(config.num_sessions),
    }


def _windowed(kind: type[WindowedKVConfig]) -> Callable[[RolloutConfig, ModelConfig], KVConfig]:
    return lambda config, model: kind(layers=ring_layers(config, model), **_shared(config, model))


def _ring_uncompacted(config: RolloutConfig, model: ModelConfig) -> RingKVConfig:
    """A dilated layer allocates a slot for every frame of its window, and addresses as many as the compact one."""
    layers = tuple(
        dataclasses.replace(layer, ring_frames=layer.ring_frames * layer.pinned_dilation)
        for layer in ring_layers(config, model)
    )
    return RingKVConfig(layers=layers, **_shared(config, model))


def _paged(config: RolloutConfig, model: ModelConfig) -> PagedKVConfig:
    assert config.num_frames is not None
    page_tokens = config.kv.page_tokens or PAGE_TOKENS
    whole_rollout = -(-config.num_frames * model.tokens_per_frame // page_tokens)
    layers = ring_layers(config, model) if config.kv.window else None
    pool = PagedKVConfig(page_tokens=page_tokens, num_pages=whole_rollout, layers=layers, **_shared(config, model))
    if config.kv.num_pages is not None:
        num_pages = config.kv.num_pages
    else:
        num_pages = config.num_sessions * max(memory.max_session_pages(pool, window) for window in layers or (None,))
    return dataclasses.replace(pool, num_pages=num_pages)


def _full(config: RolloutConfig, model: ModelConfig) -> FullKVConfig:
    layers = ring_layers(config, model) if config.kv.window else None
    return FullKVConfig(layers=layers, **_shared(config, model))


def _full_static(config: RolloutConfig, model: ModelConfig) -> FullKVConfig:
    max_frames = config.num_frames if config.kv.max_frames is None else config.kv.max_frames
    return FullKVConfig(max_frames=max_frames, **_shared(config, model))


def _session_bytes(config: RolloutConfig, model: ModelConfig) -> int:
    assert config.num_frames is not None
    assert config.kv_dtype is not None
    geometry = kv_config(config, model)
    assert isinstance(geometry, RingKVConfig | ShiftKVConfig | CatKVConfig | FullKVConfig)
    sessions = config.num_sessions * memory.session_bytes_at(geometry, config.kv_dtype, config.num_frames)
    return sessions + memory.padding_bytes(geometry, config.kv_dtype)


def _paged_bytes(config: RolloutConfig, model: ModelConfig) -> int:
    assert config.kv_dtype is not None
    return memory.paged_storage_bytes(_paged(config, model), config.kv_dtype)


def _sliding_bytes(config: RolloutConfig, model: ModelConfig) -> int:
    """The storage of the last ``update``: the window and the own frame."""
    assert config.num_frames is not None
    assert config.kv_dtype is not None
    geometry = _windowed(WindowedKVConfig)(config, model)
    frames = sum(min(config.num_frames, layer.ring_buckets) for layer in ring_layers(config, model))
    return config.num_sessions * frames * memory.frame_bytes(geometry, config.kv_dtype)


def _latent_bytes(config: RolloutConfig, model: ModelConfig) -> int:
    """The frames themselves: given ones in fp32, generated ones in at least that."""
    assert config.num_frames is not None
    given = min(config.context_frames, config.num_frames)
    wide = max(memory.DTYPE_BYTES["float32"], memory.DTYPE_BYTES[config.dtype])
    elements = config.num_sessions * model.channels * model.height * model.width
    return elements * (given * memory.DTYPE_BYTES["float32"] + (config.num_frames - given) * wide)


def _replay_bytes(config: RolloutConfig, model: ModelConfig) -> int:
    """Of the inner cache while the last frame is made; a replayed window holds no more frames than it shows."""
    assert config.num_frames is not None
    assert config.kv_dtype is not None
    geometry = _windowed(WindowedKVConfig)(config, model)
    held = [config.num_frames] * model.num_layers
    if config.kv.strategy == "recompute_window":
        held = [min(config.num_frames, horizon.window_frames(layer)) for layer in ring_layers(config, model)]
    frames = sum(memory.doubled_frames(count) for count in held)
    return config.num_sessions * frames * memory.frame_bytes(geometry, config.kv_dtype)


_RECOMPUTED = Strategy(_windowed(WindowedKVConfig), _latent_bytes, size_knob="num_frames", works_in=_replay_bytes)

STRATEGIES: dict[str, Strategy] = {
    "ring": Strategy(_windowed(RingKVConfig), _session_bytes, reads=RING_READS),
    "ring_uncompacted": Strategy(_ring_uncompacted, _session_bytes, reads=RING_READS),
    "paged": Strategy(_paged, _paged_bytes, knobs=("window", "page_tokens", "num_pages"), size_knob="kv.num_pages"),
    "shift": Strategy(_windowed(ShiftKVConfig), _session_bytes),
    "cat": Strategy(_windowed(CatKVConfig), _session_bytes),
    "full": Strategy(_full, _session_bytes, knobs=("window",), size_knob="num_frames"),
    "full_static": Strategy(_full_static, _session_bytes, knobs=("max_frames",), size_knob="kv.max_frames"),
    "hf_sliding": Strategy(_windowed(HFSlidingKVConfig), _sliding_bytes, dilates=False),
    "recompute_all": _RECOMPUTED,
    "recompute_window": _RECOMPUTED,
}
"""Values of ``kv.strategy``."""
