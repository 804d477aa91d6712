"""One attention layer of a strategy that keeps a session's frames in frame order.

Letters: H KV heads, T tokens per frame, D head dim. Sessions and clocks are host integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ringkv import memory
from ringkv.config import KVConfig


class Visible(NamedTuple):
    """What one row attends to: ``keys`` and ``values`` ``[1, H, n, D]`` on the cache's device.

    Frames in frame order, the row's own frame last. ``mask`` ``[n]`` bool says which tokens may be seen, None all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None


class OrderedLayer(ABC):
    """Storage of one layer for all sessions, the padding session last.

    ``commits`` counts the committing passes begun. ``held`` has, per session, the number of committed frames in
    storage, which are the newest of those that the layer keeps.
    """

    def __init__(self, config: KVConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.tokens_per_frame = config.tokens_per_frame
        self.num_sessions = memory.allocated_sessions(config)
        self._claimable = config.num_sessions
        self.frame_bytes = memory.frame_bytes(config, dtype)
        self.dtype = dtype
        self.device = device
        self.commits = 0
        self.held = [0] * self.num_sessions

    @abstractmethod
    def write(self, session: int, clock: int, k: torch.Tensor, v: torch.Tensor, *, commit: bool) -> Visible:
        """Take the frame at ``clock``, k and v ``[H, T, D]`` of any strides, and return what it attends to.

        ``commit`` says that ``settle`` will make this content history, whatever passes follow before it.
        """

    @abstractmethod
    def settle(self, session: int, clock: int) -> None:
        """The frame of the last committing pass is committed at ``clock``."""

    @abstractmethod
    def discard(self, session: int) -> None:
        """Remove what committing passes left that no ``settle`` followed."""

    @abstractmethod
    def erase(self, session: int) -> None:
        """Empty a session."""

    @abstractmethod
    def frames_at(self, clock: int) -> Sequence[int]:
        """The frames whose K and V the frame at ``clock`` is handed by ``write``, in that order, its own among them."""

    @abstractmethod
    def history(self, session: int, frames: int) -> torch.Tensor:
        """``[2, 1, H, frames * T, D]``: the newest ``frames`` committed frames; may share storage with the layer."""

    @abstractmethod
    def restore(self, session: int, history: torch.Tensor) -> None:
        """Copy what ``history`` returned into an empty session."""

    @abstractmethod
    def session_bytes(self, session: int) -> int:
        """Bytes of K and V that are held for a session right now."""

    @abstractmethod
    def in_use_frames(self, session: int) -> int:
        """Frames of those bytes that hold a committed frame or the one being generated."""

    @abstractmethod
    def expected_held(self, clock: int | None) -> set[int]:
        """What ``held`` may be between passes at ``clock``."""

    @abstractmethod
    def is_empty(self, session: int) -> bool:
        """Whether nothing of any request is left in a session."""

    def check(self, clocks: Mapping[int, int | None]) -> None:
        """Raise ``RuntimeError`` if storage contradicts ``clocks``, the last committed frame of each session."""
        for session in range(self._claimable):
            expected = self.expected_held(clocks.get(session))
            if self.held[session] not in expected:
                raise RuntimeError(
                    f"session {session} at clock {clocks.get(session)} holds {self.held[session]} frames: "
                    f"expected {sorted(expected)}"
                )
            if session not in clocks and not self.is_empty(session):
                raise RuntimeError(f"session {session} is free and not empty")

    @property
    def flag_bytes(self) -> int:
        """Bytes of tensors that are not K or V."""
        return 0

    def _empty(self, frames: int) -> torch.Tensor:
        shape = (2, 1, self.num_kv_heads, frames * self.tokens_per_frame, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _zeros(self, frames: int) -> torch.Tensor:
        return self._empty(frames).zero_()


class PlacedLayer(OrderedLayer):
    """A layer whose own frame has its place in the buffer, right after the held ones, and stays there once committed.

    So a denoise pass that came after the committing one would overwrite what is about to become history. ``_sealed``
    has the sessions with a committing pass that is not settled yet, each with a copy of the content to keep once such
    a pass did come.
    """

    def __init__(self, config: KVConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self._sealed: dict[int, torch.Tensor | None] = {}

    @abstractmethod
    def _tokens(self, session: int, lo: int, hi: int) -> torch.Tensor:
        """``[2, 1, H, hi - lo, D]`` view of tokens ``[lo, hi)`` of a session."""

    @abstractmethod
    def _capacity(self, session: int) -> int:
        """Frames for which a session has room now."""

    def settle(self, session: int, clock: int) -> None:
        kept = self._sealed.pop(session)
        if kept is not None:
            self._own(session).copy_(kept)

    def discard(self, session: int) -> None:
        if session in self._sealed:
            del self._sealed[session]
            self._own(session).zero_()

    def erase(self, session: int) -> None:
        self._sealed.pop(session, None)
        self.held[session] = 0

    def history(self, session: int, frames: int) -> torch.Tensor:
        end = self.held[session]
        return self._frames(session, end - frames, end)

    def session_bytes(self, session: int) -> int:
        kept = self._sealed.get(session)
        return self._capacity(session) * self.frame_bytes + (0 if kept is None else kept.nbytes)

    def in_use_frames(self, session: int) -> int:
        # In a full window the oldest frame gives its place to the one being generated.
        return min(self.held[session] + 1, self._capacity(session))

    def _put(self, session: int, k: torch.Tensor, v: torch.Tensor, commit: bool) -> None:
        """Write the own frame."""
        own = self._own(session)
        if commit:
            self._sealed[session] = None
        elif session in self._sealed and self._sealed[session] is None:
            self._sealed[session] = own.clone()
        own[0, 0].copy_(k)
        own[1, 0].copy_(v)

    def _own(self, session: int) -> torch.Tensor:
        return self._frames(session, self.held[session], self.held[session] + 1)

    def _frames(self, session: int, first: int, last: int) -> torch.Tensor:
        return self._tokens(session, first * self.tokens_per_frame, last * self.tokens_per_frame)
