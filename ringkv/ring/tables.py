"""Which blocks of a ring's pool hold what a row may see, as tables for every clock.

What a ring shows settles once it is full: from then on it depends on the clock modulo one period, ``ring_buckets *
pinned_dilation`` frames. So two periods of rows, the filling one and a full one, cover every clock, and a lookup by
tensors replaces every decision that a host would take from a clock.

Letters: B rows, T tokens per frame.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ringkv import horizon
from ringkv.attention.flex import KV_BLOCK
from ringkv.config import RingKVLayerConfig


def table_row(layer: RingKVLayerConfig, clock: torch.Tensor) -> torch.Tensor:
    """Row of a table of two periods that stands for each clock, int64 of any shape."""
    period = horizon.horizon_frames(layer)
    return torch.where(clock < period, clock, period + clock % period)


def slot_table(layer: RingKVLayerConfig) -> torch.Tensor:
    """``[2 * period, ring_frames + 1]`` bool on the CPU: the slots that each clock sees, scratch last."""
    clocks = range(2 * horizon.horizon_frames(layer))
    table = torch.zeros(len(clocks), layer.ring_frames + 1, dtype=torch.bool, device="cpu")
    table[:, -1] = True
    for clock in clocks:
        table[clock, [horizon.slot_of(layer, frame) for frame in horizon.visible_frames(layer, clock)]] = True
    return table


class BlockTable:
    """Blocks of ``KV_BLOCK`` tokens that hold a visible token, for every clock of every session of a pool.

    Sessions lie end to end and need not begin on a block's edge, so there is a table for each offset into a block that
    a session begins at. An unwritten slot is in no list, and no list knows of holes in a restored session: which tokens
    count is the mask's to say. Everything is on ``device`` and never moves.
    """

    def __init__(
        self, layer: RingKVLayerConfig, tokens_per_frame: int, num_sessions: int, device: torch.device
    ) -> None:
        self.layer = layer
        capacity = (layer.ring_frames + 1) * tokens_per_frame
        starts = [horizon.session_start(session, capacity) for session in range(num_sessions)]
        offsets = sorted({start % KV_BLOCK for start in starts})
        tokens = slot_table(layer).repeat_interleave(tokens_per_frame, dim=1)
        width = max(-(-(offset + capacity) // KV_BLOCK) for offset in offsets)
        by_block = torch.stack(
            [F.pad(tokens, (offset, width * KV_BLOCK - offset - capacity)) for offset in offsets]
        ).unflatten(-1, (width, KV_BLOCK))
        seen = by_block.any(dim=-1)
        counts = seen.sum(dim=-1)
        # The visible blocks first, in order. What follows is block 0, so that every entry is a block of the session.
        blocks = torch.argsort(~seen, dim=-1, stable=True)
        blocks = torch.where(torch.arange(width, device="cpu") < counts[..., None], blocks, 0)
        self._counts = counts.to(device=device, dtype=torch.int32)
        self._blocks = blocks.to(device=device, dtype=torch.int32)
        self._offset_of = torch.tensor([offsets.index(start % KV_BLOCK) for start in starts], device="cpu").to(device)
        self._first = torch.tensor([start // KV_BLOCK for start in starts], dtype=torch.int32, device="cpu").to(device)

    @property
    def width(self) -> int:
        """Entries of a list: the most blocks that one session touches."""
        return self._blocks.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(t.nbytes for t in (self._counts, self._blocks, self._offset_of, self._first))

    def look_up(self, session_idx: torch.Tensor, clocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B]`` int32 numbers of blocks and ``[B, width]`` int32 blocks of the pool. By tensors alone.

        session_idx, clocks: ``[B]`` int64.
        """
        offset, row = self._offset_of[session_idx], table_row(self.layer, clocks)
        return self._counts[offset, row], self._blocks[offset, row] + self._first[session_idx][:, None]
