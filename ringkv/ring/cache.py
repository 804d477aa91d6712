"""One attention layer's ring.

Letters: B rows, S sessions, H KV heads, R ring_frames, T tokens per frame, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringkv import horizon
from ringkv.config import RingKVLayerConfig, require_int
from ringkv.ring.ops import ring_write
from ringkv.ring.view import LayerPass


class LayerRingCache:
    """``ring_frames`` frame slots of history and one scratch frame, times ``num_sessions`` resident sessions.

    One tensor, so that a session is one contiguous span and the read is two views::

        kv [2, 1, H, S * capacity, D]          capacity = (ring_frames + 1) * tokens_per_frame

        session 0                                   session 1
        | slot 0 | slot 1 | ... | slot R-1 | scratch | slot 0 | ... | slot R-1 | scratch | ...

    ``written`` ``[S * capacity]`` bool says which token slots hold something: scratch always, a slot once a committing
    pass has written it. Both are public and are never rebound. ``commits`` is an int64 counter on the host, raised by
    every committing pass; the manager reads it to know which layers took part in a commit.

    dtype: any floating dtype. padding_session: the last session is shared by all padding rows of a batch, the only one
    that may stand in several rows.
    """

    def __init__(
        self,
        num_sessions: int,
        n_kv_heads: int,
        ring_frames: int,
        ring_buckets: int,
        d_head: int,
        tokens_per_frame: int,
        pinned_dilation: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        padding_session: bool = False,
    ) -> None:
        self.geometry = RingKVLayerConfig(
            ring_frames=ring_frames, ring_buckets=ring_buckets, pinned_dilation=pinned_dilation
        )
        for name, value in (
            ("num_sessions", num_sessions),
            ("n_kv_heads", n_kv_heads),
            ("d_head", d_head),
            ("tokens_per_frame", tokens_per_frame),
        ):
            require_int("LayerRingCache", name, value, 1)
        if not dtype.is_floating_point:
            raise ValueError(f"LayerRingCache.dtype={dtype}: expected a floating dtype")
        self.num_sessions = num_sessions
        self.tokens_per_frame = tokens_per_frame
        self.capacity = (ring_frames + 1) * tokens_per_frame
        self.total_slots = num_sessions * self.capacity
        self.padding_session = num_sessions - 1 if padding_session else None
        self.kv = torch.zeros(2, 1, n_kv_heads, self.total_slots, d_head, dtype=dtype, device=device)
        self.written = torch.zeros(self.total_slots, dtype=torch.bool, device=device)
        self.written.view(num_sessions, self.capacity)[:, -tokens_per_frame:] = True
        self.commits = torch.zeros(1, dtype=torch.int64, device="cpu")

    @property
    def memory_bytes(self) -> int:
        """Bytes of KV storage of all sessions; flags are not counted."""
        return self.kv.numel() * self.kv.element_size()

    def session_span(self, session_idx: int) -> tuple[int, int]:
        """Token slots ``[lo, hi)`` of one session, host integers; ``ValueError`` for a session that does not exist."""
        if not 0 <= session_idx < self.num_sessions:
            raise ValueError(f"session_idx={session_idx}: expected 0 to {self.num_sessions - 1}")
        start = horizon.session_start(session_idx, self.capacity)
        return start, start + self.capacity

    def slot_span(self, session_idx: int, slot: int) -> tuple[int, int]:
        """Token slots ``[lo, hi)`` of one frame slot of a session; slot ``ring_frames`` is scratch."""
        lo, _ = self.session_span(session_idx)
        assert 0 <= slot <= self.geometry.ring_frames
        return lo + slot * self.tokens_per_frame, lo + (slot + 1) * self.tokens_per_frame

    def sessions(self, which: slice) -> torch.Tensor:
        """``[2, n, H, capacity, D]``, a view: the spans of the sessions that ``which`` names."""
        if which.stop - which.start == 1:
            lo, hi = self.session_span(which.start)
            return self.kv[:, :, :, lo:hi]
        by_session = self.kv[:, 0].unflatten(2, (self.num_sessions, self.capacity))
        return by_session[:, :, which].transpose(1, 2)

    def flags(self, which: slice) -> torch.Tensor:
        """``[n, capacity]``, a view of ``written``: the flags of the sessions that ``which`` names."""
        return self.written.unflatten(0, (self.num_sessions, self.capacity))[which]

    def reset(self, session_idx: int) -> None:
        """Zero one session in place and re-arm its scratch."""
        lo, hi = self.session_span(session_idx)
        self.kv[:, :, :, lo:hi].zero_()
        self.written[lo : hi - self.tokens_per_frame] = False
        self.written[hi - self.tokens_per_frame : hi] = True

    def clear_slot(self, session_idx: int, slot: int) -> None:
        """Zero one frame slot in place and mark it unwritten."""
        assert slot < self.geometry.ring_frames, "scratch is always armed"
        lo, hi = self.slot_span(session_idx, slot)
        self.kv[:, :, :, lo:hi].zero_()
        self.written[lo:hi] = False

    def upsert(
        self,
        kv: torch.Tensor,
        frame_pos: torch.Tensor,
        commit: bool,
        session_idx: torch.Tensor,
        *,
        build_visibility: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Write one frame for each of B sessions and return what to attend to.

        kv: ``[2, 1, H, B * T, D]`` floating, row b's tokens at ``b * T``, any strides; rounded to the cache's dtype (an
        fp16 overflow becomes inf). frame_pos: ``[B]`` int64 clocks, each deciding its row's slot and visibility.
        session_idx: ``[B]`` int64, no session twice. The frame always lands in its session's scratch; ``commit`` also
        writes its ring slot when ``frame_pos`` is on the dilation's stride.

        Returns ``(k, v, visible)``: k and v ``[1, H, total_slots, D]``, views of the whole buffer; visible bool
        ``[total_slots]`` for one row, ``[B, total_slots]`` for several, freshly allocated, False outside the row's own
        session. With ``build_visibility=False`` visible is empty. Raises ``ValueError`` before any write; values of
        device tensors are not checked, since that would wait for the device.
        """
        rows = frame_pos.shape[0] if frame_pos.dim() == 1 else 0
        _, _, heads, _, head_dim = self.kv.shape
        if rows < 1 or tuple(kv.shape) != (2, 1, heads, rows * self.tokens_per_frame, head_dim):
            raise ValueError(
                f"kv has shape {list(kv.shape)} with frame_pos {list(frame_pos.shape)}: expected "
                f"[2, 1, {heads}, B * {self.tokens_per_frame}, {head_dim}] with frame_pos [B], B >= 1"
            )
        if not kv.is_floating_point():
            raise ValueError(f"kv has dtype {kv.dtype}: expected a floating dtype")
        for name, index in (("frame_pos", frame_pos), ("session_idx", session_idx)):
            if index.dtype != torch.int64 or tuple(index.shape) != (rows,):
                raise ValueError(f"{name} is {index.dtype} {list(index.shape)}: expected int64 [{rows}]")
        if not torch.compiler.is_compiling() and frame_pos.is_cpu and session_idx.is_cpu:
            self._check_rows(frame_pos.tolist(), session_idx.tolist())
        k, v = kv[:, 0].unflatten(2, (rows, self.tokens_per_frame)).transpose(1, 2).unbind(0)
        self.write(k, v, frame_pos, session_idx, commit=commit)
        return self.view(frame_pos, session_idx, build_visibility=build_visibility)

    def write(
        self, k: torch.Tensor, v: torch.Tensor, frame_pos: torch.Tensor, session_idx: torch.Tensor, *, commit: bool
    ) -> None:
        """The write of ``upsert`` for k and v ``[B, H, T, D]`` apart, unchecked: the caller has checked the rows."""
        layer = self.geometry
        if k.requires_grad or v.requires_grad:  # else the pool would join the caller's graph and keep it alive
            k, v = k.detach(), v.detach()
        ring_write(
            self.kv,
            self.written,
            self.commits,
            k,
            v,
            frame_pos,
            session_idx,
            commit,
            layer.ring_frames,
            layer.ring_buckets,
            layer.pinned_dilation,
        )

    def put(self, passes: Sequence[LayerPass], k: torch.Tensor, v: torch.Tensor, *, commit: bool) -> None:
        """``write`` of a step whose rows' places have been looked up: ``passes`` has them."""
        if commit:
            self.commits.add_(1)  # before the write: a write that fails half-way still counts as begun
        if k.requires_grad or v.requires_grad:
            k, v = k.detach(), v.detach()
        if len(passes) == 1:
            passes[0].write(k, v, commit=commit)
            return
        for each in passes:
            each.write(k[each.rows], v[each.rows], commit=commit)

    def view(
        self, frame_pos: torch.Tensor, session_idx: torch.Tensor, *, build_visibility: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What ``upsert`` returns: K, V and the visibility of each row."""
        keys, values = self.kv.unbind(0)
        if not build_visibility:
            return keys, values, self.written.new_empty(0)
        visible = self.visibility(frame_pos, session_idx)
        return keys, values, visible[0] if visible.shape[0] == 1 else visible

    def visibility(self, frame_pos: torch.Tensor, session_idx: torch.Tensor) -> torch.Tensor:
        """``[B, total_slots]`` bool: what each row may see. ``horizon.visible_frames`` in tensor form.

        Computed on the session's own span and scattered into the row, so that only the row itself grows with the pool.
        """
        own = self.span_visibility(frame_pos, session_idx)
        row = torch.zeros(own.shape[0], self.total_slots, dtype=torch.bool, device=own.device)
        return row.scatter_(1, self._span_tokens(session_idx), own)

    def span_visibility(self, frame_pos: torch.Tensor, session_idx: torch.Tensor) -> torch.Tensor:
        """``[B, capacity]`` bool: what each row may see of its session's own span."""
        layer = self.geometry
        slot = torch.div(frame_pos, layer.pinned_dilation, rounding_mode="floor") % layer.ring_buckets
        hidden = torch.where(frame_pos % layer.pinned_dilation == 0, slot, -1)
        slots = torch.arange(self.capacity, device=self.kv.device) // self.tokens_per_frame
        return self.written[self._span_tokens(session_idx)] & (slots != hidden[:, None])

    def _span_tokens(self, session_idx: torch.Tensor) -> torch.Tensor:
        """``[B, capacity]`` int64: the token slots of each row's session."""
        return session_idx[:, None] * self.capacity + torch.arange(self.capacity, device=self.kv.device)

    def _check_rows(self, clocks: list[int], sessions: list[int]) -> None:
        seen = set()
        for clock, session in zip(clocks, sessions, strict=True):
            self.session_span(session)
            if clock < 0:
                raise ValueError(f"frame_pos={clock}: expected a clock >= 0")
            if session in seen and session != self.padding_session:
                raise ValueError(f"session_idx={session} stands in two rows: two frames would write one session")
            seen.add(session)
