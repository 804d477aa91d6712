"""What the rows of a step may see of one ring, as host integers, and a pass over it: the write, then the read.

Built once per plan from the rows' clocks, then used by every pass, so that an eager pass takes exact slices without
asking the device which slots are visible.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cached_property
from itertools import pairwise

import torch

from ringkv import horizon
from ringkv.attention import paths, rule
from ringkv.config import RingKVLayerConfig

Span = tuple[int, int]
"""Token slots ``[lo, hi)``, counted from the start of a session's own."""


class RingView:
    """Visible token slots of a session at one clock. Layers of one geometry and rows at one clock share it.

    segments: the visible tokens as maximal contiguous runs in address order. is_kept: whether a commit takes a slot.
    """

    def __init__(
        self, layer: RingKVLayerConfig, clock: int, tokens_per_frame: int, missing: Set[int] = frozenset()
    ) -> None:
        """The view at ``clock``; ``missing`` slots hold nothing although the clock says so."""
        self._layer, self._clock, self._tokens = layer, clock, tokens_per_frame
        self._missing = missing - {horizon.hidden_slot(layer, clock)}  # hidden either way
        self._biases: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        runs = _runs(self._slots()) if self._missing else _slot_runs(layer, clock)
        self.segments = tuple((first * tokens_per_frame, last * tokens_per_frame) for first, last in runs)
        self.is_kept = horizon.is_kept(layer, clock)

    @cached_property
    def frames(self) -> tuple[Span, ...]:
        """``[lo, hi)`` of each visible frame in frame order, the frame being generated (scratch) last."""
        return tuple((slot * self._tokens, (slot + 1) * self._tokens) for slot in self._slots())

    @cached_property
    def home(self) -> Span:
        """``[lo, hi)`` of the slot that the frame being generated will take; off the stride, of the one behind history.

        With the frame in it, what a row of a ring without holes sees is the first ``visible_tokens`` of its session,
        whatever the clock.
        """
        slot = horizon.hidden_slot(self._layer, self._clock)
        if slot is None:
            slot = horizon.num_visible(self._layer, self._clock)
        return slot * self._tokens, (slot + 1) * self._tokens

    @property
    def has_holes(self) -> bool:
        """Whether a slot that the clock says is visible holds nothing."""
        return bool(self._missing)

    @property
    def span(self) -> Span:
        """``[lo, hi)`` from the first visible token to the last."""
        return self.segments[0][0], self.segments[-1][1]

    @cached_property
    def visible_tokens(self) -> int:
        """How many tokens a row attends to, its own included."""
        return sum(hi - lo for lo, hi in self.segments)

    def bias(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """``[hi - lo]`` over ``span``, to be added to scores: 0 or minus infinity; None when all of it is visible."""
        if len(self.segments) == 1:
            return None
        if (dtype, device) not in self._biases:
            lo, hi = self.span
            bias = torch.zeros(hi - lo, dtype=dtype, device="cpu")
            for (_, end), (start, _) in pairwise(self.segments):
                bias[end - lo : start - lo] = float("-inf")
            self._biases[dtype, device] = bias.to(device)
        return self._biases[dtype, device]

    def _slots(self) -> list[int]:
        """Visible slots in frame order, scratch last."""
        history = [horizon.slot_of(self._layer, frame) for frame in horizon.visible_frames(self._layer, self._clock)]
        return [slot for slot in history if slot not in self._missing] + [self._layer.ring_frames]


def _runs(slots: Sequence[int]) -> list[Span]:
    """Maximal runs ``[first, last)`` of neighbouring slots."""
    runs: list[Span] = []
    for slot in sorted(slots):
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs


def _slot_runs(layer: RingKVLayerConfig, clock: int) -> list[Span]:
    """The runs of a ring without missing slots, without looking at each: its history is one run modulo the buckets."""
    buckets, count = layer.ring_buckets, horizon.num_visible(layer, clock)
    first = 0 if count == buckets else (-(-clock // layer.pinned_dilation) - count) % buckets
    over = first + count - buckets
    runs = [(0, over), (first, buckets)] if over > 0 else [(first, first + count)] if count else []
    if runs and runs[-1][1] == layer.ring_frames:
        return [*runs[:-1], (runs[-1][0], layer.ring_frames + 1)]
    return [*runs, (layer.ring_frames, layer.ring_frames + 1)]


class LayerPass:
    """The passes of one layer for rows that see the same tokens of their own sessions, by one read path.

    ``rows`` says which of the step's. Slices of the ring are taken here, once for all passes of a plan.

    ``lent``: where something is hidden between what is visible, the frame is lent its slot. It stands there while it is
    read, and what the slot holds is back before the call returns, because a rewind, a state or a cancelled frame still
    needs it. So all that is visible is one run, which one call reads without a mask.
    """

    def __init__(
        self,
        rows: slice,
        view: RingView,
        kv: torch.Tensor,
        written: torch.Tensor,
        *,
        query_heads: int,
        tokens_per_frame: int,
        attention: str,
    ) -> None:
        """kv: ``[2, B, H, capacity, D]``, written: ``[B, capacity]``, the whole session of each row, views of them."""
        self.rows, self._view = rows, view
        lo, hi = view.span
        if attention == "auto":
            kv_heads = kv.shape[2]
            queries = query_heads // kv_heads * tokens_per_frame
            # Of one row, whatever the batch: how a row is read must not depend on who shares its step.
            lends = rule.prefer_lent(kv_heads, queries, hi - lo, view.visible_tokens)
            attention = "lent" if lends else "sdpa"
        if attention == "lent" and (len(view.segments) == 1 or view.has_holes):
            attention = "sdpa"
        spans: Sequence[Span] = ((lo, hi),)
        if attention == "canonical":
            spans = view.frames
        elif attention == "segments":
            spans = view.segments
        elif attention == "lent":
            spans = ((0, view.visible_tokens),)
        self._attention = attention
        self._keys, self._values = ([part[:, :, first:last] for first, last in spans] for part in kv.unbind(0))
        self._scratch = kv[:, :, :, -tokens_per_frame:]
        self._scratch_kv = self._scratch.unbind(0)
        home = slice(*view.home)
        self._slot, self._flags = kv[:, :, :, home], written[:, home]

    def write(self, k: torch.Tensor, v: torch.Tensor, *, commit: bool) -> None:
        """Put the frames k and v ``[B, H, T, D]`` of ``rows`` into scratch, a commit's also into the slot they take.

        What the registered operator of ``ops`` does to the same rows, without looking for their places again.
        """
        keys, values = self._scratch_kv
        keys.copy_(k)
        values.copy_(v)
        if commit and self._view.is_kept:
            self._flags.fill_(True)
            keys, values = self._slot.unbind(0)
            keys.copy_(k)
            values.copy_(v)

    def read(self, q: torch.Tensor, *, commit: bool) -> torch.Tensor:
        """Attention of q ``[B, H_q, T, D]`` of ``rows``, after the write of the pass."""
        if self._attention == "canonical":
            return paths.canonical(q, self._keys, self._values)
        if self._attention == "segments":
            return paths.segments(q, self._keys, self._values)
        (keys,), (values,) = self._keys, self._values
        if self._attention == "sdpa":
            return paths.masked(q, keys, values, self._view.bias(q.dtype, q.device))
        if commit and self._view.is_kept:  # it has just taken its slot for good
            return paths.masked(q, keys, values, None)
        held = self._slot.clone()
        try:  # from the first byte on, for an interrupt can come at any
            self._slot.copy_(self._scratch)
            if q.requires_grad and torch.is_grad_enabled():  # a gradient is taken after the slot has been given back
                keys, values = keys.clone(), values.clone()
            return paths.masked(q, keys, values, None)
        finally:
            self._slot.copy_(held)


def lockstep(views: Sequence[RingView], sessions: Sequence[int]) -> list[tuple[slice, slice]]:
    """Rows that one call can serve: neighbours with one view, in evenly spaced sessions. As (rows, sessions) slices."""
    groups: list[tuple[slice, slice]] = []
    first = 0
    while first < len(views):
        last, step = first + 1, 1
        if last < len(views):
            step = max(1, sessions[last] - sessions[first])
        while last < len(views) and views[last] is views[first] and sessions[last] - sessions[last - 1] == step:
            last += 1
        groups.append((slice(first, last), slice(sessions[first], sessions[last - 1] + 1, step)))
        first = last
    return groups
