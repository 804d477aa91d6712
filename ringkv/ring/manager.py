"""Per-layer rings behind the ``AttentionResource`` contract. What the methods owe is documented there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ringkv import horizon, memory
from ringkv.config import RingKVConfig, RingKVLayerConfig
from ringkv.lifecycle import LifecycleResource, Plan
from ringkv.resource import MemoryReport, State
from ringkv.ring.cache import LayerRingCache
from ringkv.ring.flex import FlexReader
from ringkv.ring.undo import UndoLog
from ringkv.ring.view import LayerPass, RingView, lockstep
from ringkv.staging import RowStaging
from ringkv.state import Layers

RingPlan = Plan
"""The host copy of a staged step: request ids, session indices, clocks."""


class RingKVManager(LifecycleResource):
    """One ``LayerRingCache`` per layer, holding ``num_sessions`` sessions and, if asked for, one for padding rows.

    Everything a step touches is allocated here and never moves: reset, load and reuse write in place. ``_missing`` has,
    per session and layer, the slots that hold nothing although the clock says they do; it is empty in ordinary use.
    """

    config_class = RingKVConfig
    read_paths = ("auto", "canonical", "sdpa", "segments", "lent", "flex")
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
        self._staging = RowStaging(2, self._max_rows, self.device)
        self._staged_sessions, self._staged_clocks = self._staging.values
        self._flex: FlexReader | None = None
        if self.attention == "flex":
            self.reads_in_graph = self.device.type != "cpu"
            sessions = memory.allocated_sessions(config)
            self._flex = FlexReader(config, sessions, self._max_rows, self.device, over_pool=self.reads_in_graph)
        self._undo = UndoLog(config, dtype, self.device) if config.undo_frames else None
        self._addresses = self._buffer_addresses()
        self._missing: dict[int, list[set[int]]] = {}
        self._views: dict[tuple[RingKVLayerConfig, int, frozenset[int]], RingView] = {}
        self._passes: dict[int, list[LayerPass]] = {}

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
        return sum(cache.memory_bytes for cache in self.layers) + self._undo_bytes

    def memory_report(self) -> MemoryReport:
        frames = sum(
            len(self._held_slots(rid, index)) + 1 for rid in self._table.holders for index in range(len(self.layers))
        )
        flags = sum(cache.written.nbytes + cache.commits.nbytes for cache in self.layers)
        lists = 0 if self._flex is None else self._flex.nbytes
        return {
            "resident": self.memory_bytes(),
            "in_use": frames * memory.frame_bytes(self.config, self.dtype),
            "padding": memory.session_bytes(self.config, self.dtype) if self.config.padding_session else 0,
            "undo": self._undo_bytes,
            "flags": flags + lists + self._staging.values.nbytes,
            "parked": self._parking.nbytes,
        }

    def cleanup(self) -> None:
        super().cleanup()
        self._undo = None
        self._views, self._passes = {}, {}

    # -- what the lifecycle asks for ---------------------------------------------------------------------------

    def _stage(self, plan: Plan) -> None:
        if self._undo is not None:
            for session, clock in zip(plan.session_indices[: plan.num_real], plan.clocks, strict=False):
                self._undo.record(session, clock, self.layers, self._missing.get(session, [()] * len(self.layers)))
        rows = len(plan.clocks)
        self._staging.put(plan.session_indices, plan.clocks)
        if self._flex is not None:
            self._flex.stage(self._staged_sessions[:rows], self._staged_clocks[:rows])
        self._views, self._passes = {}, {}

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_idx: int, frame_pos: torch.Tensor, commit: bool
    ) -> torch.Tensor:
        layer = self.layers[layer_idx]
        if self._flex is not None:
            sessions = self._staged_sessions[: q.shape[0]]
            layer.write(k, v, frame_pos, sessions, commit=commit)
            if self._flex.over_pool:
                return self._flex.read_pool(q, layer, frame_pos, sessions)
            return self._flex.read_rows(q, layer, frame_pos, sessions, self._require_plan().session_indices)
        # From here on the host's plan says where; ``attend`` has held ``frame_pos`` to it where it can be read.
        if layer_idx not in self._passes:
            self._passes[layer_idx] = self._plan_passes(layer_idx)
        passes = self._passes[layer_idx]
        layer.put(passes, k, v, commit=commit)
        if len(passes) == 1:
            return passes[0].read(q, commit=commit)
        return torch.cat([each.read(q[each.rows], commit=commit) for each in passes])

    def _plan_passes(self, layer_idx: int) -> list[LayerPass]:
        """The passes of one layer for all rows of the pending plan, in their order."""
        plan, cache, config = self._require_plan(), self.layers[layer_idx], self.config
        views = []
        for session, clock in zip(plan.session_indices, plan.clocks, strict=True):
            missing = self._missing[session][layer_idx] if session in self._missing else ()
            key = (cache.geometry, clock, frozenset(missing))
            if key not in self._views:
                self._views[key] = RingView(cache.geometry, clock, config.tokens_per_frame, key[2])
            views.append(self._views[key])
        groups = [(slice(row, row + 1), slice(s, s + 1)) for row, s in enumerate(plan.session_indices)]
        if self.attention != "canonical":  # which is beyond doubt because it does one thing at a time
            groups = lockstep(views, plan.session_indices)
        return [
            LayerPass(
                rows,
                views[rows.start],
                cache.sessions(which),
                cache.flags(which),
                query_heads=config.num_qo_heads,
                tokens_per_frame=config.tokens_per_frame,
                attention=self.attention,
            )
            for rows, which in groups
        ]

    def _count_replay(self) -> None:
        for cache in self.layers:
            cache.commits.add_(1)

    def _committed(self, session: int, frame: int) -> None:
        if self._undo is not None:
            self._undo.committed(session)
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
        if self._undo is not None:
            self._undo.clear(session)

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

    def _import(self, session: int, layers: Layers, clock: int | None, holes: Sequence[set[int]]) -> None:
        missing = []
        for layer, cache, (kv, _), absent in zip(self.config.layers, self.layers, layers, holes, strict=True):
            lo, _ = cache.session_span(session)
            # Slot by slot: scratch and unwritten slots stay zero, whatever the state carries there.
            for frame in horizon.held_frames(layer, clock):
                if frame not in absent:
                    first, last = cache.slot_span(session, horizon.slot_of(layer, frame))
                    cache.kv[:, :, :, first:last].copy_(kv[:, :, :, first - lo : last - lo])
                    cache.written[first:last] = True
            missing.append({horizon.slot_of(layer, frame) for frame in absent})
        if any(missing):
            self._missing[session] = missing

    def _lacks(self) -> Mapping[str, str]:
        return {} if self.config.undo_frames else {"rewind": "its config has undo_frames=0, so it keeps no log"}

    def _export_undo(self, rid: str, session: int) -> dict[str, Any] | None:
        if self._undo is None:
            return None
        clock, aborted, killed = self._next_clock(rid), self._is_aborted(rid), []
        for index, layer in enumerate(self.config.layers):
            slot = horizon.hidden_slot(layer, clock)
            gone = slot is not None and (aborted or slot not in self._held_slots(rid, index))
            killed.append(clock - horizon.horizon_frames(layer) if gone else None)
        return self._undo.export(session, self._table.clock_of(rid), killed)

    def _check_extra(self, state: State) -> None:
        if self._undo is not None and "undo" in state:
            self._undo.check(state["undo"], state["clock"])

    def _import_undo(self, session: int, undo: dict[str, Any], clock: int | None) -> None:
        if self._undo is not None:
            self._undo.load(session, undo, clock)

    def _rewindable(self, rid: str, session: int) -> int:
        return 0 if self._undo is None else self._undo.depth(session)

    def _rewind(self, rid: str, session: int, clock: int | None) -> None:
        assert self._undo is not None
        missing: list[set[int]] = []
        for index, (layer, cache) in enumerate(zip(self.config.layers, self.layers, strict=True)):
            wanted = {horizon.slot_of(layer, frame): frame for frame in horizon.held_frames(layer, clock)}
            intact = self._held_slots(rid, index) - {self._aborted_slot(rid, index)}
            newest = horizon.held_frames(layer, self._table.clock_of(rid))
            there = {horizon.slot_of(layer, frame): frame for frame in newest}
            missing.append(set())
            for slot in range(layer.ring_buckets):
                frame = wanted.get(slot)
                if frame is not None and slot in intact and there[slot] == frame:
                    continue
                saved = None if frame is None else self._undo.find(session, index, frame)
                if saved is not None:
                    first, last = cache.slot_span(session, slot)
                    cache.kv[:, :, :, first:last].copy_(saved)
                    cache.written[first:last] = True
                    continue
                cache.clear_slot(session, slot)
                if frame is not None:
                    missing[-1].add(slot)
        self._missing.pop(session, None)
        if any(missing):
            self._missing[session] = missing
        self._undo.rewound(session, self._next_clock(rid) - horizon.frame_after(clock), clock)

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
        for session in set(range(self.num_sessions)) - set(holders.values()):
            if self._undo is not None and not self._undo.is_empty(session):
                raise RuntimeError(f"the undo log of session {session} is not empty, and the session is free")

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

    @property
    def _undo_bytes(self) -> int:
        return 0 if self._undo is None else self._undo.nbytes

    def _buffer_addresses(self) -> list[int]:
        if self.device.type == "meta":
            return []
        buffers = [self._staging.values, *(t for cache in self.layers for t in (cache.kv, cache.written))]
        buffers += [] if self._undo is None else self._undo.kv
        buffers += [] if self._flex is None else self._flex.buffers
        return [buffer.data_ptr() for buffer in buffers]
