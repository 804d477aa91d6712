"""Per-layer page pools behind the ``AttentionResource`` contract. What the methods owe is documented there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from ringkv import horizon, layout, memory
from ringkv.config import PagedKVConfig
from ringkv.holes import Holes
from ringkv.lifecycle import LifecycleResource, Plan
from ringkv.paged.cache import LayerPagedCache
from ringkv.resource import MemoryReport, NoRoom
from ringkv.state import Layers
from ringkv.step import AdmitOutcome, FrameStep


class PagedKVManager(LifecycleResource):
    """One ``LayerPagedCache`` per layer. A frame gets its pages when it is admitted, in every layer or in none.

    ``admit`` also refuses a step whose frames need more pages than are free (retryable, with the shortfall), and for
    good a frame that a whole pool could not hold. ``commit`` frees pages that no later frame of the window can see. An
    aborted commit costs nothing but itself, since it wrote only pages of its own frame.

    A state holds, per layer, what the next frame sees in frame order and an empty scratch frame, so it fits any pool
    and any page size.
    """

    config_class = PagedKVConfig
    fixed_addresses: ClassVar[bool] = True
    config: PagedKVConfig
    layers: list[LayerPagedCache]

    def __init__(
        self,
        config: PagedKVConfig,
        name: str,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        attention: str = "auto",
    ) -> None:
        super().__init__(config, name, device, dtype, attention)
        self.layers = [LayerPagedCache(config, index, dtype, self.device) for index in range(config.num_layers)]
        self._addresses = self._buffer_addresses()
        self._holes = Holes(self._geometry)

    def memory_bytes(self) -> int:
        return sum(layer.memory_bytes for layer in self.layers)

    def memory_report(self) -> MemoryReport:
        """As the contract says; a session uses the pages it owns, full or not, and one frame of staging per layer."""
        sessions = self._table.holders.values()
        token_bytes = memory.token_bytes(self.config, self.dtype)
        pages = sum(layer.table.num_owned(session) for layer in self.layers for session in sessions)
        frames = len(sessions) * self.config.num_layers
        padding_tokens = memory.padding_pages(self.config) * self.config.page_tokens + self.config.tokens_per_frame
        return {
            "resident": self.memory_bytes(),
            "in_use": (pages * self.config.page_tokens + frames * self.config.tokens_per_frame) * token_bytes,
            "padding": padding_tokens * token_bytes * self.config.num_layers if self.config.padding_session else 0,
            "undo": 0,
            "flags": sum(layer.table.entries.nbytes for layer in self.layers),
            "parked": self._parking.nbytes,
        }

    # -- what the lifecycle asks for ---------------------------------------------------------------------------

    def _admitted(self, step: FrameStep) -> None:
        for rid, frame in step.frames:
            session = self._table.require_session(rid)
            for layer in self.layers:
                layer.table.grow(session, layer.own(frame))

    def _stage(self, plan: Plan) -> None:
        for index, layer in enumerate(self.layers):
            layer.stage(plan.session_indices, plan.clocks, self._holes.by_session(index))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_idx: int, frame_pos: torch.Tensor, commit: bool
    ) -> torch.Tensor:
        rows, layer = q.shape[0], self.layers[layer_idx]
        layer.commits += commit  # before the write: a write that fails half-way still counts as begun
        outputs = []
        for row in range(rows):
            layer.write(row, k[row], v[row], commit=commit)
            outputs.append(layer.read(row, q[row : row + 1], self.attention))
        return outputs[0] if rows == 1 else torch.cat(outputs)

    def _committed(self, session: int, frame: int) -> None:
        for layer in self.layers:
            layer.table.shrink(session, layer.history(frame + 1))
        self._holes.prune(session, frame)

    def _clear_aborted(self, rid: str, session: int) -> None:
        for layer in self.layers:
            layer.zero(session, layer.own(self._next_clock(rid)))

    def _erase(self, session: int) -> None:
        for layer in self.layers:
            layer.erase(session)
        self._holes.drop(session)

    def _export(self, rid: str, session: int, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer, clock = self.layers[layer_idx], self._table.clock_of(rid)
        lo, hi = layer.history(horizon.frame_after(clock))
        capacity, tokens = hi - lo + layer.tokens_per_frame, layer.tokens_per_frame
        kv = layer.kv.new_zeros(2, 1, self.config.num_kv_heads, capacity, self.config.head_dim)
        layer.gather(session, (lo, hi), kv)
        written = torch.ones(capacity, dtype=torch.bool, device=self.device)
        places = layout.places(self._geometry, layer_idx, clock)
        for frame in self._holes.of(session, layer_idx):
            written[places[frame] * tokens : (places[frame] + 1) * tokens] = False
        return kv, written

    def _check_room(self, session: int | None, clock: int | None, copies: int = 1) -> None:
        for index, layer in enumerate(self.layers):
            room = layer.table.pool.num_free + (layer.table.num_owned(session) if session is not None else 0)
            wanted = copies * layer.table.missing(None, layer.history(horizon.frame_after(clock)))
            if wanted > room:
                raise NoRoom(
                    f"{copies} x a state at clock {clock} needs {wanted} pages of layer {index}, {room} of "
                    f"{self.config.num_pages} are free: {wanted - room} short; remove or park a request first"
                )

    def _import(self, session: int, layers: Layers, clock: int | None, holes: Sequence[set[int]]) -> None:
        for layer, (kv, written), absent in zip(self.layers, layers, holes, strict=True):
            history = layer.history(horizon.frame_after(clock))
            layer.table.grow(session, history)
            layer.scatter(session, history, kv.masked_fill(~written[:, None], 0) if absent else kv)
        self._holes.put(session, holes)

    def _lacks(self) -> Mapping[str, str]:
        if self.config.layers is None:
            return {}
        return {"rewind": "the pages of frames that have left the window are freed; full context keeps them"}

    def _rewind(self, rid: str, session: int, clock: int | None) -> None:
        frame_pos = horizon.frame_after(clock)
        for layer in self.layers:
            layer.truncate(session, layer.history(frame_pos))
        self._holes.prune(session, clock)

    def _check_storage(self) -> None:
        if self._buffer_addresses() != self._addresses:
            raise RuntimeError("a buffer moved since build")
        holders = {session: rid for rid, session in self._table.holders.items()}
        for index, layer in enumerate(self.layers):
            layer.table.check()
            for session in range(self.num_sessions):
                tokens = (0, 0)
                if session in holders:
                    rid = holders[session]
                    clock = self._next_clock(rid)
                    admitted = self._table.admitted_frame(rid) is not None
                    tokens = layer.span_at(clock) if admitted else layer.history(clock)
                size = self.config.page_tokens
                expected = -(-tokens[1] // size) - tokens[0] // size if tokens[0] < tokens[1] else 0
                if layer.table.num_owned(session) != expected:
                    raise RuntimeError(
                        f"layer {index} session {session} ({holders.get(session)!r}) owns "
                        f"{layer.table.num_owned(session)} pages: expected {expected} for tokens {tokens}"
                    )

    # -- inside ------------------------------------------------------------------------------------------------

    def _room_refusal(self, step: FrameStep) -> AdmitOutcome | None:
        total = self.config.num_pages
        sessions = {rid: self._table.session_of(rid) for rid, _ in step.frames}
        for index, layer in enumerate(self.layers):
            for rid, frame in step.frames:
                alone = memory.session_pages(self.config, layer.window, frame)
                if alone > total:
                    return AdmitOutcome(
                        ok=False,
                        reason=f"request {rid!r} alone needs {alone} pages of layer {index} at frame {frame}, the pool "
                        f"has {total}: {alone - total} short; raise num_pages",
                        rid=rid,
                    )
        for index, layer in enumerate(self.layers):
            wanted, free, first_short = 0, layer.table.pool.num_free, None
            for rid, frame in step.frames:
                wanted += layer.table.missing(sessions[rid], layer.own(frame))
                if wanted > free and first_short is None:
                    first_short = rid
            if first_short is not None:
                return AdmitOutcome(
                    ok=False,
                    retryable=True,
                    reason=f"the page pool of layer {index} is exhausted: {wanted} pages wanted, {free} of {total} "
                    f"free, {wanted - free} short; retry when a request ends, or raise num_pages",
                    rid=first_short,
                )
        return None

    def _buffer_addresses(self) -> list[int]:
        if self.device.type == "meta":
            return []
        return [t.data_ptr() for layer in self.layers for t in (layer.kv, layer.staging, layer.table.entries)]
