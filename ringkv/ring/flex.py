"""FlexAttention over the rings of a manager: block lists staged by ``plan``, masks computed in the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringkv.attention.flex import attend
from ringkv.config import RingKVConfig, RingKVLayerConfig
from ringkv.ring.cache import LayerRingCache
from ringkv.ring.tables import BlockTable


class FlexReader:
    """Reads for the rows of a planned step; layers of one geometry share their lists.

    On an accelerator all rows are one call over the pool: each row's lists keep it to the blocks of its own session,
    and its mask to what it may see of them. On the CPU a row is handed its own session as the whole pool, because there
    what is masked is still read, and a NaN in another session must not reach it.
    """

    def __init__(
        self, config: RingKVConfig, num_sessions: int, max_rows: int, device: torch.device, *, over_pool: bool
    ) -> None:
        """num_sessions: those of the pool, padding included. over_pool: for ``read_pool``, else for ``read_rows``."""
        self.over_pool = over_pool
        self._tables = {
            layer: BlockTable(layer, config.tokens_per_frame, num_sessions if over_pool else 1, device)
            for layer in dict.fromkeys(config.layers)
        }
        self._num_blocks = {layer: torch.zeros(max_rows, dtype=torch.int32, device=device) for layer in self._tables}
        self._blocks = {
            layer: torch.zeros(max_rows, table.width, dtype=torch.int32, device=device)
            for layer, table in self._tables.items()
        }

    @property
    def buffers(self) -> list[torch.Tensor]:
        """What a captured graph reads: staged in place, never moved."""
        return [*self._num_blocks.values(), *self._blocks.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of tables and lists."""
        return sum(t.nbytes for t in self.buffers) + sum(table.nbytes for table in self._tables.values())

    def stage(self, session_idx: torch.Tensor, clocks: torch.Tensor) -> None:
        """Stage the lists of a step, by tensors alone. session_idx, clocks: ``[B]`` int64."""
        rows = len(clocks)
        session_idx = session_idx if self.over_pool else torch.zeros_like(session_idx)
        for layer, table in self._tables.items():
            num_blocks, blocks = table.look_up(session_idx, clocks)
            self._num_blocks[layer][:rows].copy_(num_blocks)
            self._blocks[layer][:rows].copy_(blocks)

    def read_pool(
        self, q: torch.Tensor, cache: LayerRingCache, frame_pos: torch.Tensor, session_idx: torch.Tensor
    ) -> torch.Tensor:
        """Attention of q ``[B, H_q, T, D]`` for all rows at once. No host decision, so a graph can hold it."""
        keys, values = cache.kv.unbind(0)
        start, visible = session_idx * cache.capacity, cache.span_visibility(frame_pos, session_idx)
        num_blocks, blocks = self._lists(cache.geometry, 0, len(q))
        return attend(q, keys, values, start, visible, num_blocks, blocks)

    def read_rows(
        self,
        q: torch.Tensor,
        cache: LayerRingCache,
        frame_pos: torch.Tensor,
        session_idx: torch.Tensor,
        sessions: Sequence[int],
    ) -> torch.Tensor:
        """The same a row at a time, over the row's session alone; ``sessions`` is ``session_idx`` on the host."""
        visible, start = cache.span_visibility(frame_pos, session_idx), torch.zeros_like(session_idx)
        outputs = []
        for row, session in enumerate(sessions):
            one, (lo, hi) = slice(row, row + 1), cache.session_span(session)
            keys, values = cache.kv[:, :, :, lo:hi].unbind(0)
            num_blocks, blocks = self._lists(cache.geometry, row, row + 1)
            outputs.append(attend(q[one], keys, values, start[one], visible[one], num_blocks, blocks))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _lists(self, layer: RingKVLayerConfig, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._num_blocks[layer][first:last], self._blocks[layer][first:last]
