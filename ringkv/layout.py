"""Where the frames of a state lie, for every strategy, in plain Python integers. No torch.

A state names its *geometry*: what two resources must share for it to move between them as it is. From geometry and
clock alone follows which frames a session of that strategy keeps and at which place of a layer's tensors each one
stands. So a state is checked, measured and taken apart in one way, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringkv import horizon
from ringkv.config import FullKVConfig, KVConfig, PagedKVConfig, RingKVConfig, RingKVLayerConfig, WindowedKVConfig

SHARED = ("num_layers", "num_kv_heads", "head_dim", "tokens_per_frame")
"""What even a state of another geometry must agree in, or its frames are of another model."""

STRATEGIES = ("ring", "shift", "cat", "full", "paged", "hf_sliding")


def geometry_of(config: KVConfig) -> dict[str, Any]:
    """The geometry of a resource with this config, as plain JSON-ready data.

    ``layers`` has ``[ring_buckets, pinned_dilation]`` of each layer, before them ``ring_frames`` where slots are
    allocated by it; None when every frame is seen.
    """
    assert isinstance(config, WindowedKVConfig | FullKVConfig | PagedKVConfig), f"{config}: no strategy serves it"
    layers = None
    if config.layers is not None:
        allocated = [[window.ring_frames] if isinstance(config, RingKVConfig) else [] for window in config.layers]
        layers = [
            [*first, window.ring_buckets, window.pinned_dilation]
            for first, window in zip(allocated, config.layers, strict=True)
        ]
    return {"strategy": config.strategy, **{key: getattr(config, key) for key in SHARED}, "layers": layers}


def check_geometry(geometry: object) -> None:
    """Raise ``ValueError`` with one line unless this is what ``geometry_of`` returns for some config."""
    if not isinstance(geometry, dict) or geometry.keys() != {"strategy", *SHARED, "layers"}:
        raise ValueError(f"state geometry={geometry!r}: expected strategy, {', '.join(SHARED)} and layers")
    if geometry["strategy"] not in STRATEGIES:
        raise ValueError(f"state geometry strategy={geometry['strategy']!r}: expected one of {', '.join(STRATEGIES)}")
    for key in SHARED:
        value = geometry[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"state geometry {key}={value!r}: expected an integer >= 1")
    layers = geometry["layers"]
    if layers is None and geometry["strategy"] in ("full", "paged"):
        return
    if not isinstance(layers, list) or len(layers) != geometry["num_layers"]:
        raise ValueError(f"state geometry layers={layers!r}: expected a list of {geometry['num_layers']}")
    for index in range(len(layers)):
        try:
            _window(geometry, index)
        except (TypeError, ValueError) as error:
            raise ValueError(f"state geometry layers[{index}]={layers[index]!r}: not a window ({error})") from error


def room(geometry: Mapping[str, Any], layer_idx: int, clock: int | None) -> int:
    """Frames that one layer's tensors have room for in a state at ``clock``, scratch (the last) included."""
    strategy, window, frame_pos = geometry["strategy"], _window(geometry, layer_idx), horizon.frame_after(clock)
    if strategy == "full" or window is None:
        return frame_pos + 1
    if strategy == "ring":
        return window.ring_frames + 1
    return horizon.num_visible(window, frame_pos) + 1 if strategy == "paged" else horizon.window_frames(window)


def places(geometry: Mapping[str, Any], layer_idx: int, clock: int | None) -> dict[int, int]:
    """Where each frame that a layer keeps stands in a state at ``clock``, counted in frames, by ascending frame."""
    strategy, window, frame_pos = geometry["strategy"], _window(geometry, layer_idx), horizon.frame_after(clock)
    if strategy == "full" or window is None:
        return {frame: frame for frame in range(frame_pos)}
    if strategy == "ring":
        return {frame: horizon.slot_of(window, frame) for frame in horizon.held_frames(window, clock)}
    # What the next frame sees, in frame order from the left.
    return {frame: place for place, frame in enumerate(horizon.visible_frames(window, frame_pos))}


def _window(geometry: Mapping[str, Any], layer_idx: int) -> RingKVLayerConfig | None:
    """The window of one layer, None when it sees everything."""
    if geometry["layers"] is None:
        return None
    *allocated, buckets, dilation = geometry["layers"][layer_idx]
    if len(allocated) != (geometry["strategy"] == "ring"):
        raise ValueError(f"{len(allocated) + 2} numbers")
    return RingKVLayerConfig(
        ring_frames=allocated[0] if allocated else buckets, ring_buckets=buckets, pinned_dilation=dilation
    )
