"""What one layer of a ring session looks like as a state, and whether a given one fits. Pure checks and plain data."""

from __future__ import annotations

from typing import Any

import torch

from ringkv import horizon
from ringkv.config import RingKVConfig
from ringkv.state import check_tensor


def geometry_of(config: RingKVConfig) -> dict[str, Any]:
    """What two rings must share for a state to move between them, as plain JSON-ready data."""
    return {
        "strategy": "ring",
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tokens_per_frame": config.tokens_per_frame,
        "layers": [[layer.ring_frames, layer.ring_buckets, layer.pinned_dilation] for layer in config.layers],
    }


def check_layer(
    index: int, kv: torch.Tensor, written: torch.Tensor, clock: int | None, config: RingKVConfig, dtype: torch.dtype
) -> None:
    """Raise ``ValueError`` with one line unless the pair fits layer ``index`` and does not contradict the clock."""
    layer, tokens = config.layers[index], config.tokens_per_frame
    capacity = (layer.ring_frames + 1) * tokens
    check_tensor(f"state layers[{index}] kv", kv, (2, 1, config.num_kv_heads, capacity, config.head_dim), dtype)
    check_tensor(f"state layers[{index}] written", written, (capacity,), torch.bool)
    by_slot = written.cpu().view(layer.ring_frames + 1, tokens)
    flags = by_slot.all(dim=1).tolist()
    if flags != by_slot.any(dim=1).tolist():
        raise ValueError(f"state layers[{index}] written marks part of a frame: a frame is written whole")
    if not flags.pop():
        raise ValueError(f"state layers[{index}] written is False on scratch: it must be True there")
    held = {horizon.slot_of(layer, frame) for frame in horizon.held_frames(layer, clock)}
    extra = {slot for slot, flag in enumerate(flags) if flag} - held
    if extra:
        raise ValueError(
            f"state layers[{index}] written marks slots {sorted(extra)}, which hold nothing at clock {clock}"
        )
