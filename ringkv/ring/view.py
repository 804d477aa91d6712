"""What the rows of a step may see of one ring, as host integers, and the read of it.

Built once per plan from the rows' clocks, then used by every pass, so that an eager read takes exact slices without
asking the device which slots are visible.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ringkv import horizon
from ringkv.attention import paths, rule
from ringkv.config import RingKVLayerConfig

Span = tuple[int, int]
"""Token slots ``[lo, hi)``, counted from the start of a session's own."""


@dataclass(frozen=True, eq=False)
class RingView:
    """Visible token slots of a session at one clock. Layers of one geometry and rows at one clock share it.

    frames: ``[lo, hi)`` of each visible frame in frame order, the frame being generated (scratch) last.
    segments: the same tokens as maximal contiguous runs in address order.
    """

    frames: tuple[Span, ...]
    segments: tuple[Span, ...]
    _biases: dict[tuple[torch.dtype, torch.device], torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def at(
        cls, layer: RingKVLayerConfig, clock: int, tokens_per_frame: int, missing: Set[int] = frozenset()
    ) -> RingView:
        """The view at ``clock``; ``missing`` slots hold nothing although the clock says so."""
        history = [horizon.slot_of(layer, frame) for frame in horizon.visible_frames(layer, clock)]
        slots = [slot for slot in history if slot not in missing] + [layer.ring_frames]
        spans = [(slot * tokens_per_frame, (slot + 1) * tokens_per_frame) for slot in slots]
        runs: list[Span] = []
        for lo, hi in sorted(spans):
            if runs and runs[-1][1] == lo:
                runs[-1] = (runs[-1][0], hi)
            else:
                runs.append((lo, hi))
        return cls(frames=tuple(spans), segments=tuple(runs))

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
            bias = torch.full((hi - lo,), float("-inf"), dtype=dtype, device="cpu")
            for first, last in self.segments:
                bias[first - lo : last - lo] = 0.0
            self._biases[dtype, device] = bias.to(device)
        return self._biases[dtype, device]


class LayerRead:
    """The read of one layer for rows that see the same tokens of their own sessions, by one read path.

    ``rows`` says which of the step's. Slices of the ring are taken here, once for all passes of a plan.
    """

    def __init__(self, rows: slice, view: RingView, kv: torch.Tensor, query_heads: int, attention: str) -> None:
        """kv: ``[2, B, H, capacity, D]``, the whole session of each row, a view of the ring."""
        self.rows, self._view, self._attention = rows, view, attention
        lo, hi = view.span
        if attention == "auto":
            kv_heads, tokens = kv.shape[2], view.frames[0][1] - view.frames[0][0]
            queries = query_heads // kv_heads * tokens
            # Of one row, whatever the batch: how a row is read must not depend on who shares its step.
            split = rule.prefer_segments(kv_heads, queries, hi - lo, view.visible_tokens, len(view.segments))
            self._attention = "segments" if split else "sdpa"
        spans = {"canonical": view.frames, "segments": view.segments}.get(self._attention, ((lo, hi),))
        self._keys, self._values = ([part[:, :, first:last] for first, last in spans] for part in kv.unbind(0))

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        """Attention of q ``[B, H_q, T, D]``, one row for each of ``rows``."""
        if self._attention == "canonical":
            return paths.canonical(q, self._keys, self._values)
        if self._attention == "segments":
            return paths.segments(q, self._keys, self._values)
        (keys,), (values,) = self._keys, self._values
        return paths.masked(q, keys, values, self._view.bias(q.dtype, q.device))


def lockstep(views: Sequence[RingView], sessions: Sequence[int]) -> list[tuple[slice, slice]]:
    """Rows that one call can read: neighbours with one view, in evenly spaced sessions. As (rows, sessions) slices."""
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
