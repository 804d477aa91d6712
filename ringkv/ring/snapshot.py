"""What a ring session's state looks like, and whether a given one fits. Pure checks and plain data.

A state is ``{"version", "clock", "geometry", "dtype", "layers"}`` as ``AttentionResource.get_state`` documents it.
"""

from __future__ import annotations

from typing import Any

import torch

from ringkv import horizon
from ringkv.config import RingKVConfig
from ringkv.memory import dtype_name
from ringkv.resource import State

STATE_VERSION = 1


def geometry_of(config: RingKVConfig) -> dict[str, Any]:
    """What two configs must share for a state to move between them, as plain JSON-ready data."""
    return {
        "strategy": "ring",
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tokens_per_frame": config.tokens_per_frame,
        "layers": [[layer.ring_frames, layer.ring_buckets, layer.pinned_dilation] for layer in config.layers],
    }


def check_state(state: State, config: RingKVConfig, dtype: torch.dtype) -> list[set[int]]:
    """Raise ``ValueError`` with one line unless ``state`` fits; return each layer's missing slots.

    A missing slot is one that the clock says is held and the flags say is not: the mark of an aborted commit, or of a
    state restored from a shorter ring.
    """
    if not isinstance(state, dict):
        raise ValueError(f"state is a {type(state).__name__}: expected the dict that get_state returns")
    absent = [key for key in ("version", "clock", "geometry", "dtype", "layers") if key not in state]
    if absent:
        raise ValueError(f"state lacks {', '.join(absent)}: expected the dict that get_state returns")
    if state["version"] != STATE_VERSION:
        raise ValueError(f"state version={state['version']!r}: this release reads version {STATE_VERSION}")
    clock = state["clock"]
    if clock is not None and (not isinstance(clock, int) or isinstance(clock, bool) or clock < 0):
        raise ValueError(f"state clock={clock!r}: expected None or an integer >= 0")
    _check_geometry(state["geometry"], geometry_of(config))
    if state["dtype"] != dtype_name(dtype):
        raise ValueError(f"state dtype={state['dtype']!r}: this cache stores {dtype_name(dtype)!r}")
    layers = state["layers"]
    if not isinstance(layers, list | tuple) or len(layers) != config.num_layers:
        raise ValueError(f"state layers: expected a list of {config.num_layers} (kv, written) pairs")
    return [_check_layer(i, entry, clock, config, dtype) for i, entry in enumerate(layers)]


def _check_geometry(found: object, expected: dict[str, Any]) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"state geometry={found!r}: expected {expected}")
    for key in sorted(expected.keys() | found.keys()):
        if found.get(key) != expected.get(key):
            raise ValueError(f"state geometry {key}={found.get(key)!r}: this cache has {key}={expected.get(key)!r}")


def _check_layer(index: int, entry: object, clock: int | None, config: RingKVConfig, dtype: torch.dtype) -> set[int]:
    layer, tokens = config.layers[index], config.tokens_per_frame
    capacity = (layer.ring_frames + 1) * tokens
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not all(torch.is_tensor(t) for t in entry):
        raise ValueError(f"state layers[{index}]: expected a (kv, written) pair of tensors")
    kv, written = entry
    shape = (2, 1, config.num_kv_heads, capacity, config.head_dim)
    if tuple(kv.shape) != shape or kv.dtype != dtype:
        raise ValueError(
            f"state layers[{index}] kv is {kv.dtype} {list(kv.shape)}: this cache holds {dtype} {list(shape)}"
        )
    if tuple(written.shape) != (capacity,) or written.dtype != torch.bool:
        raise ValueError(
            f"state layers[{index}] written is {written.dtype} {list(written.shape)}: expected bool [{capacity}]"
        )
    by_slot = written.cpu().view(layer.ring_frames + 1, tokens)
    flags = by_slot.all(dim=1).tolist()
    if flags != by_slot.any(dim=1).tolist():
        raise ValueError(f"state layers[{index}] written marks part of a frame: a frame is written whole")
    if not flags.pop():
        raise ValueError(f"state layers[{index}] written is False on scratch: it must be True there")
    held = {horizon.slot_of(layer, frame) for frame in horizon.held_frames(layer, clock)}
    marked = {slot for slot, flag in enumerate(flags) if flag}
    if not marked <= held:
        raise ValueError(
            f"state layers[{index}] written marks slots {sorted(marked - held)}, which hold nothing at clock {clock}"
        )
    return held - marked
