"""One attention layer's pages, and the reads and writes that go through its block table.

Letters: B rows, S sessions, H KV heads, P tokens per page, T tokens per frame, D head dim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ringkv import horizon, memory
from ringkv.attention import paths
from ringkv.config import PagedKVConfig
from ringkv.paged.pool import BlockTable, PagePool, Span


@dataclass
class _StagedRow:
    """A row of the step: its history, and where in staging that is gathered to. Its own frame comes right after."""

    session: int
    clock: int
    history: list[Span]
    start: int
    gathered: bool = False

    @property
    def end(self) -> int:
        """Where in staging its history ends."""
        return self.start + sum(hi - lo for lo, hi in self.history)


class LayerPagedCache:
    """Pages of all sessions, and a staging area in which a step's rows are contiguous.

    ::

        kv      [2, 1, H, (num_pages + padding_pages) * P, D]    | page 0 | page 1 | ... | the padding session's pages |
        staging [2, 1, H, staging_tokens, D]                     | row 0: history, own frame | row 1: ... | ...

    A frame that the layer keeps is the j-th it keeps and has logical positions ``j * T`` to ``(j + 1) * T``, so what a
    frame sees is one logical span, whatever the dilation. A row's history is gathered at its first pass of a plan and
    serves all of them; each pass puts its own frame behind it and reads both in one contiguous unmasked call. Only a
    committing pass writes pages, and only those of its own frame.

    A page is not cleared when a window leaves it behind. Nobody can read what is left: a read takes the tokens of
    committed frames, and its own session wrote every one of them. All buffers are public and never rebound;
    ``commits`` counts committing passes.
    """

    def __init__(self, config: PagedKVConfig, layer_idx: int, dtype: torch.dtype, device: torch.device) -> None:
        self.window = config.layers[layer_idx] if config.layers is not None else None
        self.tokens_per_frame = config.tokens_per_frame
        self.commits = 0
        padding_pages = memory.padding_pages(config)
        self.table = BlockTable(
            PagePool(config.num_pages),
            config.num_sessions,
            memory.max_session_pages(config, self.window),
            config.page_tokens,
            padding_pages,
        )
        self._padding_session = config.num_sessions if config.padding_session else None

        def buffer(tokens: int) -> torch.Tensor:
            return torch.zeros(2, 1, config.num_kv_heads, tokens, config.head_dim, dtype=dtype, device=device)

        self.kv = buffer((config.num_pages + padding_pages) * config.page_tokens)
        self.staging = buffer(memory.staging_tokens(config, self.window))
        self._rows: list[_StagedRow] = []

    @property
    def memory_bytes(self) -> int:
        """Bytes of pages and staging; the block table is not counted."""
        return self.kv.nbytes + self.staging.nbytes

    # -- where frames are ----------------------------------------------------------------------------------------

    def history(self, clock: int) -> Span:
        """Logical positions that the frame at ``clock`` sees, itself not included."""
        if self.window is None:
            return 0, clock * self.tokens_per_frame
        end = -(-clock // self.window.pinned_dilation)
        first = end - len(horizon.visible_frames(self.window, clock))
        return first * self.tokens_per_frame, end * self.tokens_per_frame

    def own(self, clock: int) -> Span:
        """Logical positions of frame ``clock``, empty if the layer does not keep it."""
        _, end = self.history(clock)
        kept = self.window is None or horizon.is_kept(self.window, clock)
        return end, end + kept * self.tokens_per_frame

    def span_at(self, clock: int) -> Span:
        """Logical positions that must be mapped while the frame at ``clock`` is generated: history and itself."""
        return self.history(clock)[0], self.own(clock)[1]

    # -- a step ---------------------------------------------------------------------------------------------------

    def stage(self, sessions: Sequence[int], clocks: Sequence[int], holes: Mapping[int, Collection[int]]) -> None:
        """Lay a plan's rows out in staging; nothing is copied yet. Padding rows share the place of one frame.

        holes: frames of a session that hold nothing, and are left out.
        """
        self._rows = []
        start = 0
        for session, clock in zip(sessions, clocks, strict=True):
            staged = _StagedRow(session, clock, self._spans(self.history(clock), holes.get(session, ())), start)
            self._rows.append(staged)
            if session != self._padding_session:
                start = staged.end + self.tokens_per_frame

    def write(self, row: int, k: torch.Tensor, v: torch.Tensor, *, commit: bool) -> None:
        """Put the frame of a staged row, k and v ``[H, T, D]``, behind its history; ``commit`` also into its pages."""
        staged = self._rows[row]
        if not staged.gathered:
            start = staged.start
            for span in staged.history:
                self.gather(staged.session, span, self.staging, start)
                start += span[1] - span[0]
            staged.gathered = True
        lo, hi = self._own_place(staged)
        own = self.staging[:, 0, :, lo:hi]
        own[0].copy_(k.detach())  # else the buffer would join the caller's graph and keep it alive
        own[1].copy_(v.detach())
        if commit:
            self.scatter(staged.session, self.own(staged.clock), own[:, None])

    def read(self, row: int, q: torch.Tensor, attention: str) -> torch.Tensor:
        """Attention of q ``[1, H_q, T, D]`` over the history of a staged row and the frame last written for it."""
        staged = self._rows[row]
        _, hi = self._own_place(staged)
        keys, values = self.staging[:, :, :, staged.start : hi].unbind(0)
        if attention == "canonical":
            return paths.canonical(
                q, keys.split(self.tokens_per_frame, dim=2), values.split(self.tokens_per_frame, dim=2)
            )
        return paths.masked(q, keys, values, None)

    # -- pages ----------------------------------------------------------------------------------------------------

    def gather(self, session: int, tokens: Span, out: torch.Tensor, start: int = 0) -> None:
        """Copy logical positions ``tokens`` of a session to ``out`` ``[2, 1, H, n, D]``, from ``start`` on."""
        for lo, hi in self.table.runs(session, tokens):
            out[:, :, :, start : start + hi - lo].copy_(self.kv[:, :, :, lo:hi])
            start += hi - lo

    def scatter(self, session: int, tokens: Span, source: torch.Tensor) -> None:
        """Copy ``source`` ``[2, 1, H, n, D]`` to logical positions ``tokens``, its first ``hi - lo`` tokens."""
        start = 0
        for lo, hi in self.table.runs(session, tokens):
            self.kv[:, :, :, lo:hi].copy_(source[:, :, :, start : start + hi - lo])
            start += hi - lo

    def zero(self, session: int, tokens: Span) -> None:
        """Zero logical positions ``tokens`` of a session in place."""
        for lo, hi in self.table.runs(session, tokens):
            self.kv[:, :, :, lo:hi].zero_()

    def erase(self, session: int) -> None:
        """Zero the pages that a session owns, then free them."""
        first, end = self.table.owned(session)
        self.zero(session, (first * self.table.page_tokens, end * self.table.page_tokens))
        self.table.clear(session)

    def truncate(self, session: int, tokens: Span) -> None:
        """Free what a session owns after logical positions ``tokens``, zeroed; all of it if there are none."""
        size = self.table.page_tokens
        first, end = self.table.owned(session)
        self.zero(session, (max(tokens[1], first * size), end * size))
        self.table.truncate(session, tokens)

    def _own_place(self, staged: _StagedRow) -> Span:
        return staged.end, staged.end + self.tokens_per_frame

    def _spans(self, history: Span, holes: Collection[int]) -> list[Span]:
        """The positions ``history`` without those of frames that hold nothing, in order."""
        if not holes:
            return [history]
        dilation = 1 if self.window is None else self.window.pinned_dilation
        without = {frame // dilation for frame in holes}
        lo, hi = (end // self.tokens_per_frame for end in history)
        kept = (frame for frame in range(lo, hi) if frame not in without)
        return [(frame * self.tokens_per_frame, (frame + 1) * self.tokens_per_frame) for frame in kept]
