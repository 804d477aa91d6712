"""Per-layer rings behind the ``AttentionResource`` contract. What the methods owe is documented there."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ringkv import horizon, memory
from ringkv.config import RingKVConfig, RingKVLayerConfig
from ringkv.lifecycle import LifecycleResource, Plan
from ringkv.resource import MemoryReport
from ringkv.ring import snapshot
from ringkv.ring.cache import LayerRingCache
from ringkv.ring.view import RowView

RingPlan = Plan
"""The host copy of a staged step: request ids, session indices, clocks."""


class RingKVManager(LifecycleResource):
    """One ``LayerRingCache`` per layer, holding ``num_sessions`` sessions and, if asked for, one for padding rows.

    Everything a step touches is allocated here and never moves: reset, load and reuse write in place. ``_missing`` has,
    per session and layer, the slots that hold nothing although the clock says they do; it is empty in ordinary use.
    """

    config_class = RingKVConfig
    read_paths = ("auto", "canonical", "sdpa", "segments")
    fixed_addresses: ClassVar[bool] = True
    config: RingKVConfig
    layers: list[LayerRingCache]

    def __init__(
        self,
        config: RingKVConfig,
        name: str,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        attention: str = "auto",
    ) -> None:
        super().__init__(config, name, device, dtype, attention)
        if self.device.type not in ("cpu", "meta"):
            if attention == "segments":
                raise ValueError(f"attention='segments' on {self.device.type}: its kernel is the CPU's; take sdpa")
            if attention == "auto":
                self.attention = "sdpa"
        self.layers = [
            LayerRingCache(
                memory.allocated_sessions(config),
                config.num_kv_heads,
                layer.ring_frames,
                layer.ring_buckets,
                config.head_dim,
                config.tokens_per_frame,
                layer.pinned_dilation,
                dtype,
                device,
                padding_session=config.padding_session,
            )
            for layer in config.layers
        ]
        self._staged_sessions = torch.zeros(self._max_rows, dtype=torch.int64, device=device)
        self._addresses = self._buffer_addresses()
        self._missing: dict[int, list[set[int]]] = {}
        self._views: dict[tuple[int, RingKVLayerConfig | int], RowView] = {}

    def upsert(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_idx: int,
        frame_pos: torch.Tensor,
        *,
        commit: bool,
        build_visibility: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Write the planned step's K and V for one layer and return what to attend to.

        k, v: ``[B, H_kv, T, D]``, a row for each planned row, any strides; rounded to the cache's dtype. frame_pos:
        ``[B]`` int64 clocks. Returns ``(k_all, v_all, visible)`` as ``LayerRingCache.upsert`` does.
        """
        self._check_pass(k, v, layer_idx, frame_pos)
        layer, sessions = self.layers[layer_idx], self._staged_sessions[: frame_pos.shape[0]]
        layer.write(k, v, frame_pos, sessions, commit=commit)
        return layer.view(frame_pos, sessions, build_visibility=build_visibility)

    def capacity(self, layer_idx: int) -> int:
        """Token slots that one session owns in a layer, scratch included."""
        return self.layers[layer_idx].capacity

    def total_slots(self, layer_idx: int) -> int:
        """Token slots of a layer's buffer over all sessions: the length of the views and rows that upsert returns."""
        return self.layers[layer_idx].total_slots

    def memory_bytes(self) -> int:
        return sum(cache.memory_bytes for cache in self.layers)

    def memory_report(self) -> MemoryReport:
        frames = sum(
            len(self._held_slots(rid, index)) + 1 for rid in self._table.holders for index in range(len(self.layers))
        )
        flags = sum(cache.written.nbytes + cache.commits.nbytes for cache in self.layers)
        return {
            "resident": self.memory_bytes(),
            "in_use": frames * memory.frame_bytes(self.config, self.dtype),
            "padding": memory.session_bytes(self.config, self.dtype) if self.config.padding_session else 0,
            "flags": flags + self._staged_sessions.nbytes,
        }

    # -- what the lifecycle asks for ---------------------------------------------------------------------------

    def _stage(self, plan: Plan) -> None:
        sessions = torch.tensor(plan.session_indices, dtype=torch.int64, device="cpu")
        self._staged_sessions[: len(sessions)].copy_(sessions)
        self._views = {}

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_idx: int, frame_pos: torch.Tensor, commit: bool
    ) -> torch.Tensor:
        rows, layer = q.shape[0], self.layers[layer_idx]
        layer.write(k, v, frame_pos, self._staged_sessions[:rows], commit=commit)
        keys, values = layer.kv.unbind(0)
        outputs = [
            self._view(row, layer_idx).read(q[row : row + 1], keys, values, self.attention) for row in range(rows)
        ]
        return outputs[0] if rows == 1 else torch.cat(outputs)

    def _view(self, row: int, layer_idx: int) -> RowView:
        """What a row of the pending plan sees in a layer; layers of one geometry share it unless slots are missing."""
        plan = self._require_plan()
        layer, session = self.config.layers[layer_idx], plan.session_indices[row]
        holes = self._missing[session][layer_idx] if session in self._missing else frozenset()
        key = (row, layer_idx if holes else layer)
        if key not in self._views:
            self._views[key] = RowView.at(layer, plan.clocks[row], session, self.config.tokens_per_frame, holes)
        return self._views[key]

    def _committed(self, session: int, frame: int) -> None:
        if session not in self._missing:
            return
        for layer, holes in zip(self.config.layers, self._missing[session], strict=True):
            if horizon.is_kept(layer, frame):
                holes.discard(horizon.slot_of(layer, frame))
        if not any(self._missing[session]):
            del self._missing[session]

    def _clear_aborted(self, rid: str, session: int) -> None:
        slots = [self._aborted_slot(rid, index) for index in range(len(self.layers))]
        missing = self._missing.setdefault(session, [set() for _ in self.layers])
        for cache, slot, holes in zip(self.layers, slots, missing, strict=True):
            if slot is not None:
                cache.clear_slot(session, slot)
                holes.add(slot)

    def _erase(self, session: int) -> None:
        for cache in self.layers:
            cache.reset(session)
        self._missing.pop(session, None)

    def _geometry(self) -> dict[str, Any]:
        return snapshot.geometry_of(self.config)

    def _export(self, rid: str, session: int, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self.layers[layer_idx]
        tokens = cache.tokens_per_frame
        lo, hi = cache.session_span(session)
        kv, written = cache.kv[:, :, :, lo:hi].clone(), cache.written[lo:hi].clone()
        kv[:, :, :, -tokens:] = 0  # scratch is rewritten by every pass, so a state has none
        slot = self._aborted_slot(rid, layer_idx)
        if slot is not None:
            kv[:, :, :, slot * tokens : (slot + 1) * tokens] = 0
            written[slot * tokens : (slot + 1) * tokens] = False
        return kv, written

    def _check_layer(self, layer_idx: int, kv: torch.Tensor, written: torch.Tensor, clock: int | None) -> None:
        snapshot.check_layer(layer_idx, kv, written, clock, self.config, self.dtype)

    def _import(self, session: int, layers: list[tuple[torch.Tensor, torch.Tensor]], clock: int | None) -> None:
        missing = []
        for layer, cache, (kv, written) in zip(self.config.layers, self.layers, layers, strict=True):
            held = {horizon.slot_of(layer, frame) for frame in horizon.held_frames(layer, clock)}
            marked = {slot for slot in held if written[slot * cache.tokens_per_frame]}
            lo, _ = cache.session_span(session)
            # Slot by slot: scratch and unwritten slots stay zero, whatever the state carries there.
            for slot in marked:
                first, last = cache.slot_span(session, slot)
                cache.kv[:, :, :, first:last].copy_(kv[:, :, :, first - lo : last - lo])
                cache.written[first:last] = True
            missing.append(held - marked)
        if any(missing):
            self._missing[session] = missing

    def _check_storage(self) -> None:
        if self._buffer_addresses() != self._addresses:
            raise RuntimeError("a buffer moved since build: captured graphs would read stale memory")
        holders = self._table.holders
        for index, (layer, cache) in enumerate(zip(self.config.layers, self.layers, strict=True)):
            flags = cache.written.cpu().view(-1, layer.ring_frames + 1, cache.tokens_per_frame)
            if not flags[:, -1].all():
                raise RuntimeError(f"layer {index}: the scratch of a session is not armed")
            for rid, session in holders.items():
                held, aborted = self._held_slots(rid, index), self._aborted_slot(rid, index)
                for slot, tokens in enumerate(flags[session, :-1].tolist()):
                    if slot != aborted and tokens != [slot in held] * cache.tokens_per_frame:
                        raise RuntimeError(
                            f"layer {index} session {session} ({rid!r}, next clock {self._next_clock(rid)}): "
                            f"slot {slot} is flagged {tokens}, held slots are {sorted(held)}"
                        )
            for session in set(range(self.num_sessions)) - set(holders.values()):
                lo, hi = cache.session_span(session)
                if flags[session, :-1].any() or cache.kv[:, :, :, lo:hi].any():
                    raise RuntimeError(f"layer {index}: session {session} is free and not empty")

    def _held_slots(self, rid: str, layer_idx: int) -> set[int]:
        """Slots of a layer that hold a committed frame of ``rid``."""
        layer, session = self.config.layers[layer_idx], self._table.require_session(rid)
        held = {horizon.slot_of(layer, frame) for frame in horizon.held_frames(layer, self._table.clock_of(rid))}
        return held - self._missing[session][layer_idx] if session in self._missing else held

    def _aborted_slot(self, rid: str, layer_idx: int) -> int | None:
        """Slot of a layer that an uncommitted committing pass of ``rid`` may have overwritten, or None."""
        if not self._is_aborted(rid):
            return None
        return horizon.hidden_slot(self.config.layers[layer_idx], self._next_clock(rid))

    def _buffer_addresses(self) -> list[int]:
        if self.device.type == "meta":
            return []
        buffers = [self._staged_sessions, *(t for cache in self.layers for t in (cache.kv, cache.written))]
        return [buffer.data_ptr() for buffer in buffers]
