"""One attention layer that keeps every frame of a session: frame f at position f of a contiguous buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ringkv import horizon, memory
from ringkv.config import KVConfig, RingKVLayerConfig
from ringkv.ordered_layer import PlacedLayer, Visible


class FullLayer(PlacedLayer):
    """A buffer ``[2, 1, H, capacity * T, D]`` per session, nothing at first, doubled by copying when it is full.

    geometry: what may be seen of it, None for everything. What is visible is one contiguous slice, unless the layer is
    dilated: then the history is gathered once per frame, and every pass appends its own frame to it. (A mask over the
    whole window, or a call per frame, takes longer; so it does at dilation 2 already.)
    """

    def __init__(
        self, config: KVConfig, geometry: RingKVLayerConfig | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, dtype, device)
        self.geometry = geometry
        self._gathered: dict[int, torch.Tensor] = {}
        self._allocate(config)

    def write(self, session: int, clock: int, k: torch.Tensor, v: torch.Tensor, *, commit: bool) -> Visible:
        self._reserve(session, clock + 1)
        self._put(session, k, v, commit)
        return self._visible(session, clock)

    def settle(self, session: int, clock: int) -> None:
        super().settle(session, clock)
        self.held[session] += 1
        self._gathered.pop(session, None)

    def discard(self, session: int) -> None:
        super().discard(session)
        self._gathered.pop(session, None)

    def erase(self, session: int) -> None:
        super().erase(session)
        self._gathered.pop(session, None)
        self._release(session)

    def frames_at(self, clock: int) -> Sequence[int]:
        return [*self._history(clock), clock]

    def restore(self, session: int, history: torch.Tensor) -> None:
        frames = history.shape[3] // self.tokens_per_frame
        self._reserve(session, frames)
        self._frames(session, 0, frames).copy_(history)
        self.held[session] = frames

    def truncate(self, session: int, frames: int) -> None:
        """Forget all but the first ``frames`` frames, and any pass that is not committed."""
        self._sealed.pop(session, None)
        self._gathered.pop(session, None)
        self._cut(session, frames)
        self.held[session] = frames

    def session_bytes(self, session: int) -> int:
        gathered = self._gathered.get(session)
        return super().session_bytes(session) + (0 if gathered is None else gathered.nbytes)

    def expected_held(self, clock: int | None) -> set[int]:
        return {horizon.frame_after(clock)}

    def is_empty(self, session: int) -> bool:
        return self.session_bytes(session) == 0

    # -- the buffers -------------------------------------------------------------------------------------------

    def _allocate(self, config: KVConfig) -> None:
        """Called by build. Padding rows are always at clock 0, so their session has room for one frame and keeps it."""
        self._buffers = [self._zeros(0) for _ in range(self.num_sessions)]
        if config.padding_session:
            self._buffers[-1] = self._zeros(1)

    def _reserve(self, session: int, frames: int) -> None:
        """Make room for ``frames`` frames."""
        if frames > self._capacity(session):
            grown = self._zeros(memory.doubled_frames(frames))
            buffer = self._buffers[session]
            grown[:, :, :, : buffer.shape[3]].copy_(buffer)
            self._buffers[session] = grown

    def _release(self, session: int) -> None:
        self._buffers[session] = self._zeros(0)

    def _cut(self, session: int, frames: int) -> None:
        """Give back what a session of ``frames`` frames would not have grown to."""
        tokens = memory.doubled_frames(frames) * self.tokens_per_frame
        self._buffers[session] = self._buffers[session][:, :, :, :tokens].clone()

    def _capacity(self, session: int) -> int:
        return self._buffers[session].shape[3] // self.tokens_per_frame

    def _tokens(self, session: int, lo: int, hi: int) -> torch.Tensor:
        return self._buffers[session][:, :, :, lo:hi]

    # -- the read ----------------------------------------------------------------------------------------------

    def _history(self, clock: int) -> range:
        """Visible history frames, evenly spaced."""
        if self.geometry is None:
            return range(clock)
        frames = horizon.visible_frames(self.geometry, clock)
        return range(frames[0], clock, self.geometry.pinned_dilation) if frames else range(clock, clock)

    def _visible(self, session: int, clock: int) -> Visible:
        history = self._history(clock)
        if history.step == 1:
            span = self._frames(session, history.start, clock + 1)
        else:
            span = self._gather(session, history)
        keys, values = span.unbind(0)
        return Visible(keys, values, None)

    def _gather(self, session: int, history: range) -> torch.Tensor:
        """``[2, 1, H, (n + 1) * T, D]``: the n frames of ``history``, gathered on the first pass, then the own one."""
        end = len(history) * self.tokens_per_frame
        if session not in self._gathered:
            gathered = self._empty(len(history) + 1)
            by_frame = self._frames(session, 0, history.stop).unflatten(3, (-1, self.tokens_per_frame))
            chosen = by_frame[:, :, :, history.start :: history.step]
            gathered[:, :, :, :end].unflatten(3, (-1, self.tokens_per_frame)).copy_(chosen)
            self._gathered[session] = gathered
        gathered = self._gathered[session]
        gathered[:, :, :, end:].copy_(self._own(session))
        return gathered


class StaticLayer(FullLayer):
    """One buffer ``[2, 1, H, S * max_frames * T, D]``, zero where nothing is written, never rebound: a static cache.

    masked: the read is a masked call over a session's whole span, whatever the clock, so that its shape never changes;
    otherwise it is that of ``FullLayer``.
    """

    def __init__(
        self,
        config: KVConfig,
        geometry: RingKVLayerConfig | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_frames: int,
        masked: bool,
    ) -> None:
        self.max_frames = max_frames
        self.masked = masked
        self._masks: dict[int, tuple[int, torch.Tensor]] = {}
        super().__init__(config, geometry, dtype, device)

    @property
    def flag_bytes(self) -> int:
        return sum(mask.nbytes for _, mask in self._masks.values())

    def erase(self, session: int) -> None:
        super().erase(session)
        self._masks.pop(session, None)

    def frames_at(self, clock: int) -> Sequence[int]:
        return range(self.max_frames) if self.masked else super().frames_at(clock)

    def is_empty(self, session: int) -> bool:
        return not self._frames(session, 0, self.max_frames).any()

    def check(self, clocks: Mapping[int, int | None]) -> None:
        if self.kv.data_ptr() != self._address:
            raise RuntimeError("the buffer moved since build: captured graphs would read stale memory")
        super().check(clocks)

    def _allocate(self, config: KVConfig) -> None:
        self.kv = self._zeros(self.num_sessions * self.max_frames)
        self._address = self.kv.data_ptr()

    def _reserve(self, session: int, frames: int) -> None:
        assert frames <= self.max_frames, "admit and load_state refuse what does not fit"

    def _release(self, session: int) -> None:
        self._frames(session, 0, self.max_frames).zero_()

    def _cut(self, session: int, frames: int) -> None:
        self._frames(session, frames, self.max_frames).zero_()

    def _capacity(self, session: int) -> int:
        return self.max_frames

    def _tokens(self, session: int, lo: int, hi: int) -> torch.Tensor:
        start = horizon.session_start(session, self.max_frames * self.tokens_per_frame)
        return self.kv[:, :, :, start + lo : start + hi]

    def _visible(self, session: int, clock: int) -> Visible:
        if not self.masked:
            return super()._visible(session, clock)
        if session not in self._masks or self._masks[session][0] != clock:
            self._masks[session] = (clock, self._mask(clock))
        keys, values = self._frames(session, 0, self.max_frames).unbind(0)
        return Visible(keys, values, self._masks[session][1])

    def _mask(self, clock: int) -> torch.Tensor:
        """``[max_frames * T]`` bool: the history at ``clock`` and the own frame."""
        history = self._history(clock)
        frames = torch.zeros(self.max_frames, dtype=torch.bool, device=self.device)
        frames[history.start : clock : history.step] = True
        frames[clock] = True
        return frames.repeat_interleave(self.tokens_per_frame)
