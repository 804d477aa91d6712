"""How many bytes a geometry takes, without allocating anything. No torch.

``memory_bytes()`` of a built resource equals ``storage_bytes`` of its config to the byte; the planner and admission
answer "how big" from here before anything is allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringkv import horizon
from ringkv.config import CatKVConfig, RingKVConfig, ShiftKVConfig

if TYPE_CHECKING:
    import torch

    from ringkv.config import FullKVConfig, KVConfig, PagedKVConfig, RingKVLayerConfig

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


def window_frames(layer: RingKVLayerConfig) -> int:
    """Frames that a window in frame order takes at most: what a frame sees, and the frame itself.

    A frame off the stride of a dilated layer sees all ``ring_buckets`` kept ones, any other one less.
    """
    return layer.ring_buckets + int(layer.pinned_dilation > 1)


def doubled_frames(frames: int) -> int:
    """Frames allocated by a buffer that starts empty and doubles, once it has taken ``frames`` frames."""
    return 1 << (frames - 1).bit_length() if frames else 0


def session_bytes_at(
    config: RingKVConfig | ShiftKVConfig | CatKVConfig | FullKVConfig, kv_dtype: torch.dtype | str, frames: int
) -> int:
    """Bytes that one session takes over all layers once its first ``frames`` frames are committed."""
    if isinstance(config, RingKVConfig):
        held = [session_frames(layer) for layer in config.layers]
    elif isinstance(config, ShiftKVConfig):
        held = [window_frames(layer) for layer in config.layers]
    elif isinstance(config, CatKVConfig):
        # The concatenation of the last kept frame, with the oldest frame of a full window still in it.
        held = [len(horizon.held_frames(layer, frames - 1 if frames else None)) for layer in config.layers]
    else:
        held = [config.max_frames or doubled_frames(frames)] * config.num_layers
    return sum(held) * frame_bytes(config, kv_dtype)


def full_context_bytes(config: KVConfig, kv_dtype: torch.dtype | str, frames: int) -> int:
    """Bytes of one session that keeps every one of ``frames`` frames in every layer."""
    return frames * config.num_layers * frame_bytes(config, kv_dtype)


def crossover_frame(config: RingKVConfig, kv_dtype: torch.dtype | str) -> int:
    """Smallest number of frames at which full context takes at least as many bytes as one ring session."""
    per_frame = full_context_bytes(config, kv_dtype, 1)
    return -(-session_bytes(config, kv_dtype) // per_frame)


def padding_pages(config: PagedKVConfig) -> int:
    """Pages of a layer that belong to the padding session, besides ``num_pages``: what one frame takes."""
    return -(-config.tokens_per_frame // config.page_tokens) if config.padding_session else 0


def session_pages(config: PagedKVConfig, window: RingKVLayerConfig | None, frame_pos: int) -> int:
    """Pages of a layer that one session owns while it generates frame ``frame_pos``; ``window=None``: full context.

    Those of the frames that it sees and, if the layer keeps it, of the frame itself; a frame may straddle pages.
    """
    first, end = 0, frame_pos + 1
    if window is not None:
        end = -(-frame_pos // window.pinned_dilation)
        first = end - len(horizon.visible_frames(window, frame_pos))
        end += horizon.is_kept(window, frame_pos)
    return -(-end * config.tokens_per_frame // config.page_tokens) - (
        first * config.tokens_per_frame // config.page_tokens
    )


def max_session_pages(config: PagedKVConfig, window: RingKVLayerConfig | None) -> int:
    """Pages of a layer that one session can own at most, over a rollout of any length."""
    if window is None:
        return config.num_pages
    span = window.ring_buckets * config.tokens_per_frame
    # A span that begins on the last token of a page touches one page more than its length asks for.
    return min(config.num_pages, (span + config.page_tokens - 2) // config.page_tokens + 1)


def staging_tokens(config: PagedKVConfig, window: RingKVLayerConfig | None) -> int:
    """Tokens of a layer's staging area: the histories of all sessions, and one frame each.

    Histories cannot exceed the pool that they are gathered from.
    """
    history = config.num_pages * config.page_tokens
    if window is not None:
        # A frame that the layer does not keep hides none of its slots.
        visible = window.ring_buckets - (window.pinned_dilation == 1)
        history = min(history, config.num_sessions * visible * config.tokens_per_frame)
    return history + allocated_sessions(config) * config.tokens_per_frame


def page_pool_bytes(config: PagedKVConfig, kv_dtype: torch.dtype | str) -> int:
    """Bytes of all pages of all layers, the padding session's included."""
    pages = config.num_layers * (config.num_pages + padding_pages(config))
    return pages * config.page_tokens * token_bytes(config, kv_dtype)


def paged_storage_bytes(config: PagedKVConfig, kv_dtype: torch.dtype | str) -> int:
    """Bytes of the pages and of the staging areas; what a paged resource's ``memory_bytes()`` measures."""
    windows = config.layers if config.layers is not None else (None,) * config.num_layers
    staging = sum(staging_tokens(config, window) for window in windows)
    return page_pool_bytes(config, kv_dtype) + staging * token_bytes(config, kv_dtype)
