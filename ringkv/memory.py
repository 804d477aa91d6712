"""How many bytes a geometry takes, without allocating anything. No torch.

``memory_bytes()`` of a built resource equals ``storage_bytes`` of its config to the byte; the planner and admission
answer "how big" from here before anything is allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ringkv.config import KVConfig, RingKVConfig, RingKVLayerConfig

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def dtype_name(dtype: torch.dtype | str) -> str:
    """``torch.bfloat16`` or ``"bfloat16"`` as ``"bfloat16"``; ``ValueError`` for what no cache stores."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ValueError(f"kv_dtype={name!r}: expected one of {', '.join(DTYPE_BYTES)}")
    return name


def token_bytes(config: KVConfig, kv_dtype: torch.dtype | str) -> int:
    """Bytes of K and V of one token in one layer."""
    return 2 * config.num_kv_heads * config.head_dim * DTYPE_BYTES[dtype_name(kv_dtype)]


def frame_bytes(config: KVConfig, kv_dtype: torch.dtype | str) -> int:
    """Bytes of K and V of one frame in one layer."""
    return config.tokens_per_frame * token_bytes(config, kv_dtype)


def session_frames(layer: RingKVLayerConfig) -> int:
    """Frames that one session allocates in a layer: its slots and the scratch frame."""
    return layer.ring_frames + 1


def session_bytes(config: RingKVConfig, kv_dtype: torch.dtype | str) -> int:
    """Bytes of one session over all layers."""
    return sum(session_frames(layer) for layer in config.layers) * frame_bytes(config, kv_dtype)


def allocated_sessions(config: KVConfig) -> int:
    """Sessions that are allocated, the padding session included."""
    return config.num_sessions + int(config.padding_session)


def storage_bytes(config: RingKVConfig, kv_dtype: torch.dtype | str) -> int:
    """Bytes of KV storage of the whole pool, padding included; what ``memory_bytes()`` measures."""
    return allocated_sessions(config) * session_bytes(config, kv_dtype)


def full_context_bytes(config: KVConfig, kv_dtype: torch.dtype | str, frames: int) -> int:
    """Bytes of one session that keeps every one of ``frames`` frames in every layer."""
    return frames * config.num_layers * frame_bytes(config, kv_dtype)


def crossover_frame(config: RingKVConfig, kv_dtype: torch.dtype | str) -> int:
    """Smallest number of frames at which full context takes at least as many bytes as one ring session."""
    per_frame = full_context_bytes(config, kv_dtype, 1)
    return -(-session_bytes(config, kv_dtype) // per_frame)
