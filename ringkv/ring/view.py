"""What one batch row may see of one ring, as host integers, and the read of it.

Built once per plan and layer geometry from the row's clock, then used by every pass and layer, so that an eager read
takes exact slices without asking the device which slots are visible.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

import torch

from ringkv import horizon
from ringkv.attention import paths, rule
from ringkv.config import RingKVLayerConfig


@dataclass(frozen=True)
class RowView:
    """Visible token slots of one row.

    frames: ``[lo, hi)`` of each visible frame in frame order, the frame being generated (scratch) last.
    segments: the same tokens as maximal contiguous runs in address order.
    """

    frames: tuple[tuple[int, int], ...]
    segments: tuple[tuple[int, int], ...]

    @classmethod
    def at(
        cls, layer: RingKVLayerConfig, clock: int, session: int, tokens_per_frame: int, missing: Set[int] = frozenset()
    ) -> RowView:
        """The view of ``session`` at ``clock``; ``missing`` slots hold nothing although the clock says so."""
        start = horizon.session_start(session, (layer.ring_frames + 1) * tokens_per_frame)
        history = [horizon.slot_of(layer, frame) for frame in horizon.visible_frames(layer, clock)]
        slots = [slot for slot in history if slot not in missing] + [layer.ring_frames]
        spans = [(start + slot * tokens_per_frame, start + (slot + 1) * tokens_per_frame) for slot in slots]
        runs: list[tuple[int, int]] = []
        for lo, hi in sorted(spans):
            if runs and runs[-1][1] == lo:
                runs[-1] = (runs[-1][0], hi)
            else:
                runs.append((lo, hi))
        return cls(frames=tuple(spans), segments=tuple(runs))

    @property
    def span(self) -> tuple[int, int]:
        """``[lo, hi)`` from the first visible token to the last."""
        return self.segments[0][0], self.segments[-1][1]

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """``[hi - lo]`` bool over ``span`` on the CPU, None when all of it is visible."""
        if len(self.segments) == 1:
            return None
        lo, hi = self.span
        mask = torch.zeros(hi - lo, dtype=torch.bool, device="cpu")
        for first, last in self.segments:
            mask[first - lo : last - lo] = True
        return mask

    @cached_property
    def visible_tokens(self) -> int:
        """How many tokens the row attends to, its own included."""
        return sum(hi - lo for lo, hi in self.segments)

    def read(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: str) -> torch.Tensor:
        """Attention of q ``[1, H_q, T, D]`` over this view of k and v ``[1, H, total_slots, D]``, by one read path."""
        if attention == "canonical":
            return paths.canonical(q, _slices(k, self.frames), _slices(v, self.frames))
        lo, hi = self.span
        if attention == "auto":
            folded = q.shape[1] // k.shape[1] * q.shape[2]
            split = rule.prefer_segments(k.shape[1], folded, hi - lo, self.visible_tokens, len(self.segments))
            attention = "segments" if split else "sdpa"
        if attention == "segments":
            return paths.segments(q, _slices(k, self.segments), _slices(v, self.segments))
        mask = self.mask if self.mask is None else self.mask.to(k.device)
        return paths.masked(q, k[:, :, lo:hi], v[:, :, lo:hi], mask)


def _slices(buffer: torch.Tensor, spans: tuple[tuple[int, int], ...]) -> list[torch.Tensor]:
    return [buffer[:, :, lo:hi] for lo, hi in spans]
