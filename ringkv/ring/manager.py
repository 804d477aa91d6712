"""Per-layer rings behind the ``AttentionResource`` contract. What the methods owe is documented there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from ringkv import horizon, memory, statefile
from ringkv.config import EngineResourceInfo, KVSpec, RingKVConfig, RingKVLayerConfig
from ringkv.resource import AttentionResource, MemoryReport, State
from ringkv.ring import snapshot
from ringkv.ring.cache import LayerRingCache
from ringkv.ring.view import RowView
from ringkv.sessions import SessionTable
from ringkv.step import AdmitOutcome, FrameStep, StepContext

READ_PATHS = ("auto", "canonical", "sdpa", "segments")


@dataclass(frozen=True)
class RingPlan:
    """Host copy of a staged step, one entry per row, padding rows last at clock 0."""

    request_ids: tuple[str, ...]
    session_indices: tuple[int, ...]
    clocks: tuple[int, ...]
    num_real: int

    @property
    def real_ids(self) -> tuple[str, ...]:
        """The rows that belong to requests."""
        return self.request_ids[: self.num_real]

    @property
    def frames(self) -> dict[str, int]:
        """Clock of each real row."""
        return dict(zip(self.real_ids, self.clocks, strict=False))


class RingKVManager(AttentionResource):
    """One ``LayerRingCache`` per layer, holding ``num_sessions`` sessions and, if asked for, one for padding rows.

    Everything a step touches is allocated here and never moves: reset, load and reuse write in place. Besides the
    session table the host keeps two small facts per session, both empty in ordinary use: ``_missing``, slots that hold
    nothing although the clock says they should, and ``_dirty``, requests whose hidden slot an aborted commit may have
    overwritten.
    """

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
        device = torch.device(device)
        on_host = device.type in ("cpu", "meta")
        if attention not in READ_PATHS or (attention == "segments" and not on_host):
            raise ValueError(
                f"attention={attention!r} on {device.type}: the ring has {', '.join(READ_PATHS)} (segments on the CPU)"
            )
        memory.dtype_name(dtype)
        self.config = config
        self.name = name
        self.dtype = dtype
        self.attention = "sdpa" if attention == "auto" and not on_host else attention
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
        self.device = self.layers[0].kv.device
        # A padded batch is at most the power of two above num_sessions; 64 leaves room for any small pool's tests.
        max_rows = max(64, 2 * config.num_sessions) if config.padding_session else config.num_sessions
        self._staged_sessions = torch.zeros(max_rows, dtype=torch.int64, device=self.device)
        self._addresses = self._buffer_addresses()
        self._table = SessionTable(config.num_sessions)
        self._padding_session = config.num_sessions if config.padding_session else None
        self._missing: dict[int, list[set[int]]] = {}  # session -> per layer
        self._dirty: set[str] = set()
        self._plan: RingPlan | None = None
        self._no_plan_because = "nothing is planned: call plan first"
        self._commits_at_plan: list[int] = []
        self._views: dict[tuple[int, RingKVLayerConfig | int], RowView] = {}

    @classmethod
    def build(cls, spec: KVSpec, info: EngineResourceInfo) -> Self:
        config = spec.deployed_config()
        if not isinstance(config, RingKVConfig):
            raise ValueError(f"KVSpec.config is a {type(config).__name__}: RingKVManager needs a RingKVConfig")
        return cls(config, spec.resource_key, info.device, info.kv_dtype, info.attention)

    # -- a request's life --------------------------------------------------------------------------------------

    def ingest_request(self, rid: str, overrides: Mapping[str, Any] | None = None) -> None:
        if overrides:
            raise ValueError(f"request {rid!r} overrides {', '.join(sorted(overrides))}: a ring has none per request")
        if not isinstance(rid, str):
            raise ValueError(f"request id {rid!r}: expected a string")
        self._table.register(rid)

    def admit(self, step: FrameStep, ctx: StepContext) -> AdmitOutcome:
        return self._table.admit(step, ctx)

    def plan(self, step: FrameStep, ctx: StepContext) -> RingPlan:
        frames = dict(step.frames)
        rows, real = ctx.row_ids, tuple(ctx.request_ids)
        self._check_padding(rows, real)
        if len(frames) != len(step.frames) or len(set(real)) != len(real) or frames.keys() != set(real):
            raise ValueError(f"step names {list(step.frames)} for rows {list(real)}: expected each row once")
        for rid, frame in frames.items():
            if self._table.admitted_frame(rid) != frame:
                raise RuntimeError(f"request {rid!r} was not admitted at frame {frame}: call admit first")
        self._drop_plan("")
        sessions = [self._table.require_session(rid) for rid in real]
        for rid, session in zip(real, sessions, strict=True):
            if rid in self._dirty:
                self._clear_aborted(rid, session)
        padding = len(rows) - len(real)
        if padding:
            assert self._padding_session is not None
            sessions += [self._padding_session] * padding
        plan = RingPlan(
            request_ids=rows,
            session_indices=tuple(sessions),
            clocks=(*(frames[rid] for rid in real), *([0] * padding)),
            num_real=len(real),
        )
        self._staged_sessions[: len(rows)].copy_(torch.tensor(sessions, dtype=torch.int64, device="cpu"))
        self._commits_at_plan = self._commit_counts()
        self._views = {}
        self._plan = plan
        return plan

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
        layer = self._write(k, v, layer_idx, frame_pos, commit=commit)
        keys, values = layer.kv.unbind(0)
        if not build_visibility:
            return keys, values, layer.written.new_empty(0)
        rows = frame_pos.shape[0]
        visible = layer.visibility(frame_pos, self._staged_sessions[:rows])
        return keys, values, visible[0] if rows == 1 else visible

    @torch.compiler.disable
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_idx: int,
        frame_pos: torch.Tensor,
        *,
        commit: bool,
    ) -> torch.Tensor:
        # Eager also inside a compiled model: it takes exact slices, which the host picks anew at every clock.
        config, rows = self.config, len(self._require_plan().request_ids)
        expected = (rows, config.num_qo_heads, config.tokens_per_frame, config.head_dim)
        if tuple(q.shape) != expected or not q.is_floating_point():
            raise ValueError(f"q is {q.dtype} {list(q.shape)}: expected floating {list(expected)}")
        keys, values = self._write(k, v, layer_idx, frame_pos, commit=commit).kv.unbind(0)
        outputs = [
            self._view(row, layer_idx).read(q[row : row + 1], keys, values, self.attention) for row in range(rows)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def commit(self, step: FrameStep, ctx: StepContext) -> None:
        plan = self._require_plan()
        frames = dict(step.frames)
        if ctx.row_ids != plan.request_ids or frames != dict(zip(plan.real_ids, plan.clocks, strict=False)):
            raise RuntimeError(
                f"commit of {frames}: the pending plan is {dict(zip(plan.real_ids, plan.clocks, strict=False))}"
            )
        silent = [i for i, wrote in enumerate(self._wrote_since_plan()) if not wrote]
        if silent:
            raise RuntimeError(f"commit of {frames}: layers {silent} saw no committing pass since plan")
        for rid, frame in frames.items():
            self._fill_holes(self._table.require_session(rid), frame)
            self._table.set_clock(rid, frame)
        self._plan = None
        self._no_plan_because = "the planned step is committed: plan the next one"

    def reset_request(self, rid: str, free: bool = False) -> None:
        self._table.require_registered(rid)
        session = self._table.session_of(rid)
        if session is None:
            return
        self._void_plan_of(rid, "was reset")
        self._erase(rid, session)
        self._table.release(rid)

    def remove_request(self, rid: str) -> None:
        if self._table.is_registered(rid):
            self.reset_request(rid)
            self._table.unregister(rid)

    # -- who holds what ----------------------------------------------------------------------------------------

    def session_of(self, rid: str) -> int | None:
        return self._table.session_of(rid)

    @property
    def num_sessions(self) -> int:
        return self.config.num_sessions

    @property
    def num_free_sessions(self) -> int:
        return self._table.num_free

    @property
    def tokens_per_frame(self) -> int:
        """Tokens of one frame."""
        return self.config.tokens_per_frame

    def capacity(self, layer_idx: int) -> int:
        """Token slots that one session owns in a layer, scratch included."""
        return self.layers[layer_idx].capacity

    def total_slots(self, layer_idx: int) -> int:
        """Token slots of a layer's buffer over all sessions: the length of the views and rows that upsert returns."""
        return self.layers[layer_idx].total_slots

    # -- state -------------------------------------------------------------------------------------------------

    def get_state(self, rid: str) -> State:
        session = self._table.require_session(rid)
        layers = []
        for index, cache in enumerate(self.layers):
            lo, hi = cache.session_span(session)
            kv, written = cache.kv[:, :, :, lo:hi].clone(), cache.written[lo:hi].clone()
            kv[:, :, :, -cache.tokens_per_frame :] = 0
            slot = self._aborted_slot(rid, index)
            if slot is not None:
                dead = slice(slot * cache.tokens_per_frame, (slot + 1) * cache.tokens_per_frame)
                kv[:, :, :, dead] = 0
                written[dead] = False
            layers.append((kv, written))
        return {
            "version": snapshot.STATE_VERSION,
            "clock": self._table.clock_of(rid),
            "geometry": snapshot.geometry_of(self.config),
            "dtype": memory.dtype_name(self.dtype),
            "layers": layers,
        }

    def load_state(self, rid: str, state: State) -> None:
        self._table.require_registered(rid)
        missing = snapshot.check_state(state, self.config, self.dtype)
        session = self._table.session_of(rid)
        if session is None and not self._table.num_free:
            raise RuntimeError(f"request {rid!r}: the pool is full, no session to load into; remove a request first")
        # Everything that can fail for want of memory comes before the first change.
        layers = [(kv.to(self.device), written.to(self.device)) for kv, written in state["layers"]]
        if session is None:
            session = self._table.claim(rid)
        self._void_plan_of(rid, "was loaded")
        self._erase(rid, session)
        for cache, (kv, written) in zip(self.layers, layers, strict=True):
            lo, _ = cache.session_span(session)
            # Slot by slot: scratch and unwritten slots stay zero, whatever the state carries there.
            for slot, held in enumerate(written[:: cache.tokens_per_frame].tolist()[:-1]):
                if held:
                    first, last = cache.slot_span(session, slot)
                    cache.kv[:, :, :, first:last].copy_(kv[:, :, :, first - lo : last - lo])
                    cache.written[first:last] = True
        if any(missing):
            self._missing[session] = missing
        self._table.set_clock(rid, state["clock"])

    def save(self, rid: str, path: str | Path) -> None:
        statefile.write_state(path, self.get_state(rid))

    def load(self, rid: str, path: str | Path) -> None:
        self._table.require_registered(rid)
        state, _ = statefile.read_state(path)
        self.load_state(rid, state)

    # -- size and health ---------------------------------------------------------------------------------------

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

    def check_integrity(self) -> None:
        table = self._table
        holders = table.holders
        sessions = list(holders.values())
        if len(set(sessions)) != len(sessions) or len(sessions) + table.num_free != table.num_sessions:
            raise RuntimeError(
                f"{len(sessions)} claims on {len(set(sessions))} sessions and {table.num_free} free: expected "
                f"{table.num_sessions} in all"
            )
        if self._buffer_addresses() != self._addresses:
            raise RuntimeError("a buffer moved since build: captured graphs would read stale memory")
        for index, (layer, cache) in enumerate(zip(self.config.layers, self.layers, strict=True)):
            flags = cache.written.cpu().view(-1, layer.ring_frames + 1, cache.tokens_per_frame)
            if not flags[:, -1].all():
                raise RuntimeError(f"layer {index}: the scratch of a session is not armed")
            for rid, session in holders.items():
                held = self._held_slots(rid, index)
                aborted = self._aborted_slot(rid, index)
                for slot, tokens in enumerate(flags[session, :-1].tolist()):
                    if slot != aborted and tokens != [slot in held] * cache.tokens_per_frame:
                        raise RuntimeError(
                            f"layer {index} session {session} ({rid!r}, clock {table.clock_of(rid)}): slot {slot} is "
                            f"flagged {tokens}, held slots are {sorted(held)}"
                        )
            for session in set(range(table.num_sessions)) - set(sessions):
                lo, hi = cache.session_span(session)
                if flags[session, :-1].any() or cache.kv[:, :, :, lo:hi].any():
                    raise RuntimeError(f"layer {index}: session {session} is free and not empty")

    # -- captured steps ----------------------------------------------------------------------------------------

    def build_accelerator_graph_buffers(self, slots: int, max_bs: int, max_seq_len: int) -> None:
        """No-op: every buffer that a replay touches was allocated by ``build``, the staged sessions included."""

    def post_warmup_validate(self) -> None:
        if self._table.holders:
            raise RuntimeError(f"warm-up left requests resident: {', '.join(sorted(self._table.holders))}")
        self.check_integrity()

    def cleanup(self) -> None:
        for rid in self._table.rids:
            self.remove_request(rid)
        self._drop_plan("the resource was cleaned up")
        self._table = SessionTable(0)
        self.layers.clear()

    # -- inside ------------------------------------------------------------------------------------------------

    def _write(
        self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, frame_pos: torch.Tensor, *, commit: bool
    ) -> LayerRingCache:
        """Check a pass against the plan, then write it."""
        plan = self._require_plan()
        config, rows = self.config, len(plan.request_ids)
        if not 0 <= layer_idx < config.num_layers:
            raise ValueError(f"layer_idx={layer_idx}: expected 0 to {config.num_layers - 1}")
        expected = (rows, config.num_kv_heads, config.tokens_per_frame, config.head_dim)
        for name, tensor in (("k", k), ("v", v)):
            if tuple(tensor.shape) != expected or not tensor.is_floating_point():
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}: expected floating {list(expected)}")
        if frame_pos.dtype != torch.int64 or tuple(frame_pos.shape) != (rows,):
            raise ValueError(f"frame_pos is {frame_pos.dtype} {list(frame_pos.shape)}: expected int64 [{rows}]")
        if frame_pos.is_cpu and not torch.compiler.is_compiling() and tuple(frame_pos.tolist()) != plan.clocks:
            raise ValueError(f"frame_pos={frame_pos.tolist()}: the plan has clocks {list(plan.clocks)}")
        layer = self.layers[layer_idx]
        layer.write(k, v, frame_pos, self._staged_sessions[:rows], commit=commit)
        return layer

    def _view(self, row: int, layer_idx: int) -> RowView:
        plan = self._require_plan()
        layer, session = self.config.layers[layer_idx], plan.session_indices[row]
        missing = self._missing.get(session)
        key = (row, layer_idx if missing else layer)
        if key not in self._views:
            holes = missing[layer_idx] if missing else frozenset()
            self._views[key] = RowView.at(layer, plan.clocks[row], session, self.config.tokens_per_frame, holes)
        return self._views[key]

    def _check_padding(self, rows: tuple[str, ...], real: tuple[str, ...]) -> None:
        if rows[: len(real)] != real:
            raise ValueError(f"padded_request_ids={list(rows)}: expected it to begin with request_ids={list(real)}")
        dummies = rows[len(real) :]
        if dummies and self._padding_session is None:
            raise ValueError(f"padded_request_ids={list(rows)}: padding needs a config with padding_session=True")
        if set(dummies) & set(real):
            raise ValueError(f"padded_request_ids={list(rows)}: a dummy row repeats a real one")
        if len(rows) > len(self._staged_sessions):
            raise ValueError(f"{len(rows)} rows in a step: expected at most {len(self._staged_sessions)}")

    def _require_plan(self) -> RingPlan:
        if self._plan is None:
            raise RuntimeError(self._no_plan_because)
        return self._plan

    def _commit_counts(self) -> list[int]:
        return [int(cache.commits) for cache in self.layers]

    def _wrote_since_plan(self) -> list[bool]:
        """Per layer, whether a committing pass ran under the pending plan."""
        return [now > before for now, before in zip(self._commit_counts(), self._commits_at_plan, strict=True)]

    def _drop_plan(self, because: str) -> None:
        """Forget the pending plan, remembering whose hidden slot its committing passes may have overwritten."""
        if self._plan is not None:
            if any(self._wrote_since_plan()):
                self._dirty.update(self._plan.real_ids)
            self._plan = None
        self._no_plan_because = because

    def _void_plan_of(self, rid: str, event: str) -> None:
        if self._plan is not None and rid in self._plan.real_ids:
            self._drop_plan(f"the pending plan is void: request {rid!r} {event}; plan again")

    def _aborted_slot(self, rid: str, layer_idx: int) -> int | None:
        """Slot of a layer that an uncommitted committing pass of ``rid`` may have overwritten, or None."""
        pending = self._plan is not None and rid in self._plan.real_ids and any(self._wrote_since_plan())
        if rid not in self._dirty and not pending:
            return None
        clock = self._table.clock_of(rid)
        return horizon.hidden_slot(self.config.layers[layer_idx], 0 if clock is None else clock + 1)

    def _held_slots(self, rid: str, layer_idx: int) -> set[int]:
        """Slots of a layer that hold a committed frame of ``rid``."""
        layer, session = self.config.layers[layer_idx], self._table.require_session(rid)
        held = {horizon.slot_of(layer, frame) for frame in horizon.held_frames(layer, self._table.clock_of(rid))}
        return held - self._missing[session][layer_idx] if session in self._missing else held

    def _fill_holes(self, session: int, frame: int) -> None:
        """Committed ``frame`` has filled its slots: they are missing no more."""
        if session not in self._missing:
            return
        for layer, holes in zip(self.config.layers, self._missing[session], strict=True):
            if horizon.is_kept(layer, frame):
                holes.discard(horizon.slot_of(layer, frame))
        if not any(self._missing[session]):
            del self._missing[session]

    def _clear_aborted(self, rid: str, session: int) -> None:
        """Zero the slot that an aborted commit may have overwritten, in every layer."""
        slots = [self._aborted_slot(rid, index) for index in range(self.config.num_layers)]
        missing = self._missing.setdefault(session, [set() for _ in self.layers])
        for cache, slot, holes in zip(self.layers, slots, missing, strict=True):
            if slot is not None:
                cache.clear_slot(session, slot)
                holes.add(slot)
        self._dirty.discard(rid)

    def _erase(self, rid: str, session: int) -> None:
        for cache in self.layers:
            cache.reset(session)
        self._missing.pop(session, None)
        self._dirty.discard(rid)

    def _buffer_addresses(self) -> list[int]:
        if self.device.type == "meta":
            return []
        buffers = [self._staged_sessions, *(t for cache in self.layers for t in (cache.kv, cache.written))]
        return [buffer.data_ptr() for buffer in buffers]
