"""Per-layer page pools behind the ``AttentionResource`` contract. What the methods owe is documented there."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ringkv import horizon, memory
from ringkv.config import PagedKVConfig
from ringkv.lifecycle import LifecycleResource, Plan
from ringkv.paged.cache import LayerPagedCache
from ringkv.resource import MemoryReport
from ringkv.state import check_tensor
from ringkv.step import AdmitOutcome, FrameStep, StepContext


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

    def admit(self, step: FrameStep, ctx: StepContext) -> AdmitOutcome:
        refusal = self._table.refusal(step, ctx) or self._page_refusal(step)
        if refusal is not None:
            return refusal
        outcome = self._table.admit(step, ctx)
        if outcome.ok:
            for rid, frame in step.frames:
                session = self._table.require_session(rid)
                for layer in self.layers:
                    layer.table.grow(session, layer.own(frame))
        return outcome

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
            "flags": sum(layer.table.entries.nbytes for layer in self.layers),
        }

    # -- what the lifecycle asks for ---------------------------------------------------------------------------

    def _stage(self, plan: Plan) -> None:
        for layer in self.layers:
            layer.stage(plan.session_indices, plan.clocks)

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

    def _clear_aborted(self, rid: str, session: int) -> None:
        for layer in self.layers:
            layer.zero(session, layer.own(self._next_clock(rid)))

    def _erase(self, session: int) -> None:
        for layer in self.layers:
            layer.erase(session)

    def _geometry(self) -> dict[str, Any]:
        config = self.config
        windows = None
        if config.layers is not None:
            windows = [[layer.ring_buckets, layer.pinned_dilation] for layer in config.layers]
        return {
            "strategy": "paged",
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "tokens_per_frame": config.tokens_per_frame,
            "layers": windows,
        }

    def _export(self, rid: str, session: int, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        lo, hi = layer.history(self._next_clock(rid))
        capacity = hi - lo + layer.tokens_per_frame
        kv = layer.kv.new_zeros(2, 1, self.config.num_kv_heads, capacity, self.config.head_dim)
        layer.gather(session, (lo, hi), kv)
        return kv, torch.ones(capacity, dtype=torch.bool, device=self.device)

    def _check_layer(self, layer_idx: int, kv: torch.Tensor, written: torch.Tensor, clock: int | None) -> None:
        config = self.config
        lo, hi = self.layers[layer_idx].history(horizon.frame_after(clock))
        capacity = hi - lo + config.tokens_per_frame
        shape = (2, 1, config.num_kv_heads, capacity, config.head_dim)
        check_tensor(f"state layers[{layer_idx}] kv", kv, shape, self.dtype)
        check_tensor(f"state layers[{layer_idx}] written", written, (capacity,), torch.bool)
        if not written.all():
            raise ValueError(
                f"state layers[{layer_idx}] written is False on {int((~written).sum())} of {capacity} tokens: "
                f"a paged state at clock {clock} holds every frame it marks"
            )

    def _check_room(self, session: int | None, clock: int | None) -> None:
        for index, layer in enumerate(self.layers):
            room = layer.table.pool.num_free + (layer.table.num_owned(session) if session is not None else 0)
            wanted = layer.table.missing(None, layer.history(horizon.frame_after(clock)))
            if wanted > room:
                raise RuntimeError(
                    f"a state at clock {clock} needs {wanted} pages of layer {index}, {room} of "
                    f"{self.config.num_pages} are free: {wanted - room} short; remove a request first"
                )

    def _import(self, session: int, layers: list[tuple[torch.Tensor, torch.Tensor]], clock: int | None) -> None:
        for layer, (kv, _) in zip(self.layers, layers, strict=True):
            history = layer.history(horizon.frame_after(clock))
            layer.table.grow(session, history)
            layer.scatter(session, history, kv)

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

    def _page_refusal(self, step: FrameStep) -> AdmitOutcome | None:
        """Why the pools cannot take this well-formed step, None if they can. Reads only."""
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
