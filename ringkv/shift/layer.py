"""One attention layer whose window is shifted left by one frame when it is full."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ringkv import horizon
from ringkv.config import KVConfig, RingKVLayerConfig
from ringkv.ordered_layer import PlacedLayer, Visible


class ShiftLayer(PlacedLayer):
    """One buffer, a session being one contiguous span, its history left-aligned in frame order::

        kv [2, 1, H, S * capacity, D]          capacity = (R or R + 1) * T

        session 0                                          session 1
        | oldest | ... | newest | own frame | not used yet | oldest | ...

    R buckets hold R - 1 frames of history and the own frame of a layer that keeps every frame. A dilated layer shows a
    frame off its stride all R kept ones, so it takes one frame more. ``kv`` is never rebound.
    """

    def __init__(self, config: KVConfig, geometry: RingKVLayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.geometry = geometry
        self.session_frames = horizon.window_frames(geometry)
        self.kv = self._zeros(self.num_sessions * self.session_frames)
        self._address = self.kv.data_ptr()

    def write(self, session: int, clock: int, k: torch.Tensor, v: torch.Tensor, *, commit: bool) -> Visible:
        # True in the first pass of a frame only: shifting leaves one frame less. An aborted frame has shifted already.
        if self.held[session] == self.geometry.ring_buckets and horizon.is_kept(self.geometry, clock):
            self._shift_left(session)
        self._put(session, k, v, commit)
        keys, values = self._frames(session, 0, self.held[session] + 1).unbind(0)
        return Visible(keys, values, None)

    def settle(self, session: int, clock: int) -> None:
        super().settle(session, clock)
        if horizon.is_kept(self.geometry, clock):
            self.held[session] += 1

    def erase(self, session: int) -> None:
        super().erase(session)
        self._frames(session, 0, self.session_frames).zero_()

    def frames_at(self, clock: int) -> list[int]:
        return [*horizon.visible_frames(self.geometry, clock), clock]

    def restore(self, session: int, history: torch.Tensor) -> None:
        self.held[session] = history.shape[3] // self.tokens_per_frame
        self._frames(session, 0, self.held[session]).copy_(history)

    def expected_held(self, clock: int | None) -> set[int]:
        # A state has what the next frame sees: whether the shift for it is done makes no difference to one.
        shifted = horizon.num_visible(self.geometry, horizon.frame_after(clock))
        return {shifted, len(horizon.held_frames(self.geometry, clock))}

    def is_empty(self, session: int) -> bool:
        return not self._frames(session, 0, self.session_frames).any()

    def check(self, clocks: Mapping[int, int | None]) -> None:
        if self.kv.data_ptr() != self._address:
            raise RuntimeError("the buffer moved since build: captured graphs would read stale memory")
        super().check(clocks)

    def _shift_left(self, session: int) -> None:
        """Drop the oldest frame. Through a temporary: source and destination overlap."""
        moved = self._frames(session, 1, self.held[session]).clone()
        self._frames(session, 0, self.held[session] - 1).copy_(moved)
        self.held[session] -= 1

    def _tokens(self, session: int, lo: int, hi: int) -> torch.Tensor:
        start = horizon.session_start(session, self.session_frames * self.tokens_per_frame)
        return self.kv[:, :, :, start + lo : start + hi]

    def _capacity(self, session: int) -> int:
        return self.session_frames
