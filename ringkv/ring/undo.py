"""What the last commits of each session overwrote, so that a wrapped ring can go back.

Letters: H KV heads, S sessions, T tokens per frame, D head dim, d dilation, R buckets.

A kept frame f takes the slot of frame ``g = f - R * d``. So a log of what was overwritten is a log of frames by their
number, and a ring with its log is the last frames of a longer ring: to go back is to put those frames into their slots
again that the earlier clock held.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ringkv import horizon, memory
from ringkv.config import RingKVConfig, RingKVLayerConfig
from ringkv.ring.cache import LayerRingCache
from ringkv.state import check_tensor


class UndoLog:
    """One tensor ``[2, 1, H, S * entries * T, D]`` for each layer, allocated once and never rebound.

    Frame g stands in entry ``(g // d) % entries`` of its session. ``_frames`` says per session and layer which frames
    are there, ``_depth`` how many commits of the session the log goes back.
    """

    def __init__(self, config: RingKVConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._entries = [memory.undo_entries(layer, config.undo_frames) for layer in config.layers]
        self.kv = [
            torch.zeros(
                2,
                1,
                config.num_kv_heads,
                config.num_sessions * entries * config.tokens_per_frame,
                config.head_dim,
                dtype=dtype,
                device=device,
            )
            for entries in self._entries
        ]
        self._frames: list[list[set[int]]] = [[set() for _ in config.layers] for _ in range(config.num_sessions)]
        self._depth = [0] * config.num_sessions

    @property
    def nbytes(self) -> int:
        """Bytes of all logs."""
        return sum(kv.nbytes for kv in self.kv)

    def depth(self, session: int) -> int:
        """How many frames the session can be taken back."""
        return self._depth[session]

    def record(
        self, session: int, clock: int, caches: Sequence[LayerRingCache], holes: Sequence[Collection[int]]
    ) -> None:
        """Save what the frame at ``clock``, of which no pass has run, is about to overwrite.

        holes: slots of each layer that hold nothing. What was saved before an abort killed such a slot stays.
        """
        for index, (layer, cache) in enumerate(zip(self._config.layers, caches, strict=True)):
            old = clock - horizon.horizon_frames(layer)
            if old < 0 or not horizon.is_kept(layer, clock):
                continue
            slot = horizon.slot_of(layer, clock)
            if slot not in holes[index]:
                lo, hi = cache.slot_span(session, slot)
                self._save(session, index, old, cache.kv[:, :, :, lo:hi])

    def committed(self, session: int) -> None:
        """A frame that was recorded is committed."""
        self._depth[session] = min(self._depth[session] + 1, self._config.undo_frames)

    def find(self, session: int, layer_idx: int, frame: int) -> torch.Tensor | None:
        """``[2, 1, H, T, D]`` view of a frame in the log, or None."""
        return self._entry(session, layer_idx, frame) if frame in self._frames[session][layer_idx] else None

    def rewound(self, session: int, frames: int, clock: int | None) -> None:
        """The session went ``frames`` back to ``clock``: forget what it holds again and what has not happened yet."""
        self._depth[session] -= frames
        for layer, saved in zip(self._config.layers, self._frames[session], strict=True):
            held = horizon.held_frames(layer, clock)
            saved -= {frame for frame in saved if not held or frame >= held[0]}

    def clear(self, session: int) -> None:
        """Empty a session's log in place."""
        self._depth[session] = 0
        for index, saved in enumerate(self._frames[session]):
            self._span(session, index).zero_()
            saved.clear()

    def is_empty(self, session: int) -> bool:
        """Whether nothing of any request is left in a session's log."""
        return not any(self._span(session, index).any() for index in range(len(self.kv)))

    # -- as a state has it -----------------------------------------------------------------------------------------

    def export(self, session: int, clock: int | None, killed: Sequence[int | None]) -> dict[str, Any]:
        """A copy of what the session needs to be taken back, and of the frame of each layer that an abort killed."""
        depth, layers = self._depth[session], []
        for index, layer in enumerate(self._config.layers):
            wanted = [*horizon.overwritten_frames(layer, clock, depth), killed[index]]
            frames = [frame for frame in wanted if frame in self._frames[session][index]]
            entries = [self._entry(session, index, frame) for frame in frames]
            kv = torch.cat(entries, dim=3) if entries else self.kv[index][:, :, :, :0].clone()
            layers.append((torch.tensor(frames, dtype=torch.int64, device=kv.device), kv))
        return {"depth": depth, "layers": layers}

    def load(self, session: int, undo: Mapping[str, Any], clock: int | None) -> None:
        """Take over a checked log as far back as this one goes."""
        depth = min(undo["depth"], self._config.undo_frames)
        self._depth[session] = depth
        tokens = self._config.tokens_per_frame
        for index, (layer, (frames, kv)) in enumerate(zip(self._config.layers, undo["layers"], strict=True)):
            wanted = {*horizon.overwritten_frames(layer, clock, depth), _next_overwritten(layer, clock)}
            for place, frame in enumerate(frames.tolist()):
                if frame in wanted:
                    self._save(session, index, frame, kv[:, :, :, place * tokens : (place + 1) * tokens])

    def check(self, undo: object, clock: int | None) -> None:
        """Raise ``ValueError`` with one line unless a state at ``clock`` can have this log."""
        config = self._config
        if not isinstance(undo, dict) or undo.keys() != {"depth", "layers"}:
            raise ValueError("state undo: expected its depth and layers")
        depth, layers, most = undo["depth"], undo["layers"], horizon.frame_after(clock)
        if not isinstance(depth, int) or isinstance(depth, bool) or not 0 <= depth <= most:
            raise ValueError(f"state undo depth={depth!r}: expected an integer from 0 to {most}, its frames so far")
        if not isinstance(layers, list | tuple) or len(layers) != config.num_layers:
            raise ValueError(f"state undo layers: expected a list of {config.num_layers} (frames, kv) pairs")
        for index, (layer, entry) in enumerate(zip(config.layers, layers, strict=True)):
            what = f"state undo layers[{index}]"
            if not isinstance(entry, list | tuple) or len(entry) != 2 or not all(torch.is_tensor(t) for t in entry):
                raise ValueError(f"{what}: expected a (frames, kv) pair of tensors")
            frames, kv = entry
            check_tensor(f"{what} frames", frames, (frames.numel(),), torch.int64)
            shape = (2, 1, config.num_kv_heads, frames.numel() * config.tokens_per_frame, config.head_dim)
            check_tensor(f"{what} kv", kv, shape, self.kv[index].dtype)
            numbers = frames.tolist()
            possible = {*horizon.overwritten_frames(layer, clock, depth), _next_overwritten(layer, clock)}
            if sorted(set(numbers)) != numbers or not possible.issuperset(numbers):
                raise ValueError(f"{what} frames={numbers}: not what {depth} frames up to clock {clock} overwrote")

    # -- inside ------------------------------------------------------------------------------------------------

    def _save(self, session: int, layer_idx: int, frame: int, kv: torch.Tensor) -> None:
        dilation, saved = self._config.layers[layer_idx].pinned_dilation, self._frames[session][layer_idx]
        place = frame // dilation % self._entries[layer_idx]
        saved -= {other for other in saved if other // dilation % self._entries[layer_idx] == place}
        self._entry(session, layer_idx, frame).copy_(kv)
        saved.add(frame)

    def _entry(self, session: int, layer_idx: int, frame: int) -> torch.Tensor:
        tokens = self._config.tokens_per_frame
        place = frame // self._config.layers[layer_idx].pinned_dilation % self._entries[layer_idx]
        return self._span(session, layer_idx)[:, :, :, place * tokens : (place + 1) * tokens]

    def _span(self, session: int, layer_idx: int) -> torch.Tensor:
        tokens = self._entries[layer_idx] * self._config.tokens_per_frame
        start = horizon.session_start(session, tokens)
        return self.kv[layer_idx][:, :, :, start : start + tokens]


def _next_overwritten(layer: RingKVLayerConfig, clock: int | None) -> int | None:
    """The frame whose slot the frame after ``clock`` takes, if any: all that an abort can have killed."""
    frame = horizon.frame_after(clock)
    return frame - horizon.horizon_frames(layer) if horizon.is_kept(layer, frame) else None
