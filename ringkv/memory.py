"""How many bytes a geometry takes, without allocating anything. No torch.

``memory_bytes()`` of a built resource equals ``storage_bytes`` of its config to the byte; the planner and admission
answer "how big" from here before anything is allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringkv import horizon, layout
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
    """Bytes of one session over all layers, its undo log apart."""
    return sum(session_frames(layer) for layer in config.layers) * frame_bytes(config, kv_dtype)


def allocated_sessions(config: KVConfig) -> int:
    """Sessions that are allocated, the padding session included."""
    return config.num_sessions + int(config.padding_session)


def undo_entries(layer: RingKVLayerConfig, undo_frames: int) -> int:
    """Frames that a layer's undo log has room for in each session.

    To go back ``undo_frames`` frames takes what they overwrote and what the frame being made is about to overwrite:
    that many frames and one, of which the layer keeps every d-th.
    """
    return -(-(undo_frames + 1) // layer.pinned_dilation) if undo_frames else 0


def undo_bytes(config: RingKVConfig, kv_dtype: torch.dtype | str) -> int:
    """Bytes of one session's undo log over all layers."""
    entries = sum(undo_entries(layer, config.undo_frames) for layer in config.layers)
    return entries * frame_bytes(config, kv_dtype)


def storage_bytes(config: RingKVConfig, kv_dtype: torch.dtype | str) -> int:
    """Bytes of KV storage of the whole pool, padding and undo logs included; what ``memory_bytes()`` measures.

    The padding session has no undo log.
    """
    logs = config.num_sessions * undo_bytes(config, kv_dtype)
    return allocated_sessions(config) * session_bytes(config, kv_dtype) + logs


def parked_bytes(config: KVConfig, kv_dtype: torch.dtype | str, clock: int | None, undo_depth: int = 0) -> int:
    """Bytes that a session parked at ``clock`` (None: nothing committed) takes off the device: K, V and flags.

    undo_depth: frames that a ring's session could be taken back then, each layer's log being parked with it.
    """
    geometry = layout.geometry_of(config)
    rooms = sum(layout.room(geometry, index, clock) for index in range(config.num_layers))
    flags = rooms * config.tokens_per_frame
    logged = 0
    if isinstance(config, RingKVConfig):
        logged = sum(len(horizon.overwritten_frames(layer, clock, undo_depth)) for layer in config.layers)
    return (rooms + logged) * frame_bytes(config, kv_dtype) + flags + logged * 8  # a frame's number, int64


def doubled_frames(frames: int) -> int:
    """Frames allocated by a buffer that starts empty and doubles, once it has taken ``frames`` frames."""
    return 1 << (frames - 1).bit_length() if frames else 0


def session_bytes_at(
    config: RingKVConfig | ShiftKVConfig | CatKVConfig | FullKVConfig, kv_dtype: torch.dtype | str, frames: int
) -> int:
    """Bytes that one session takes over all layers once its first ``frames`` frames are committed."""
    if isinstance(config, RingKVConfig):
        held = [session_frames(layer) + undo_entries(layer, config.undo_frames) for layer in config.layers]
    elif isinstance(config, ShiftKVConfig):
        held = [horizon.window_frames(layer) for layer in config.layers]
    elif isinstance(config, CatKVConfig):
        # The concatenation of the last kept frame, with the oldest frame of a full window still in it.
        held = [len(horizon.held_frames(layer, frames - 1 if frames else None)) for layer in config.layers]
    else:
        held = [config.max_frames or doubled_frames(frames)] * config.num_layers
    return sum(held) * frame_bytes(config, kv_dtype)


def padding_bytes(
    config: RingKVConfig | ShiftKVConfig | CatKVConfig | FullKVConfig, kv_dtype: torch.dtype | str
) -> int:
    """Bytes of the padding session over all layers, 0 without one.

    Its rows are always at clock 0 and never become history, so it has no undo log, needs one frame of a buffer that
    grows, and nothing where a pass leaves nothing behind.
    """
    if not config.padding_session or isinstance(config, CatKVConfig):
        return 0
    if isinstance(config, RingKVConfig):
        return session_bytes(config, kv_dtype)
    return session_bytes_at(config, kv_dtype, 1)


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
