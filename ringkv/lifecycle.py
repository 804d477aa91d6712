"""The part of the contract that does not depend on how frames are stored: registration, plans, passes, commits.

A strategy derives from ``LifecycleResource`` and says only how a pass is written and read, what a session's layer looks
like as a state, and how a session is emptied. Order of calls, voided plans, aborted commits and the checks before a
change are here, once, and so the same for every strategy; what moves whole sessions is in ``movable``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, SupportsInt

import torch

from ringkv.config import EngineResourceInfo, KVConfig, KVSpec
from ringkv.horizon import frame_after
from ringkv.movable import MovableSessions
from ringkv.parking import ParkingLot
from ringkv.sessions import SessionTable
from ringkv.step import AdmitOutcome, FrameStep, StepContext


@dataclass(frozen=True)
class Plan:
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


class LayerStore(Protocol):
    """What a layer's storage must count: the committing passes it has begun, for ever."""

    @property
    def commits(self) -> SupportsInt:
        """Number of committing passes so far."""


class LifecycleResource(MovableSessions):
    """``AttentionResource`` without the storage.

    A strategy names the ``config_class`` it serves and its ``read_paths``; any other ``attention`` raises
    ``ValueError``.
    """

    config_class: ClassVar[type[KVConfig]]
    read_paths: ClassVar[tuple[str, ...]] = ("auto", "canonical", "sdpa")
    layers: Sequence[LayerStore]

    def __init__(
        self,
        config: KVConfig,
        name: str,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        attention: str = "auto",
    ) -> None:
        if attention not in self.read_paths:
            raise ValueError(f"attention={attention!r}: {type(self).__name__} has {', '.join(self.read_paths)}")
        super().__init__(config, name, device, dtype)
        self.attention = attention
        self._padding_session = config.num_sessions if config.padding_session else None
        # A padded batch is at most the power of two above num_sessions; 64 leaves room in a small pool.
        self._max_rows = max(64, 2 * config.num_sessions) if config.padding_session else config.num_sessions
        self._plan: Plan | None = None
        self._no_plan_because = "nothing is planned: call plan first"
        self._commits_at_plan: list[int] = []

    @classmethod
    def build(cls, spec: KVSpec, info: EngineResourceInfo) -> Self:
        config = spec.deployed_config()
        if not isinstance(config, cls.config_class):
            raise ValueError(
                f"KVSpec.config is a {type(config).__name__}: {cls.__name__} needs a {cls.config_class.__name__}"
            )
        resource = cls(config, spec.resource_key, info.device, info.kv_dtype, info.attention)
        resource._parking = ParkingLot(info.parking_dir)
        return resource

    # -- what a strategy adds ----------------------------------------------------------------------------------

    @abstractmethod
    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_idx: int, frame_pos: torch.Tensor, commit: bool
    ) -> torch.Tensor:
        """Write and read one checked pass of the pending plan."""

    @abstractmethod
    def _clear_aborted(self, rid: str, session: int) -> None:
        """Remove in place, in every layer, whatever an aborted commit at the request's next clock may have left."""

    @abstractmethod
    def _check_storage(self) -> None:
        """The strategy's part of ``check_integrity``."""

    def _stage(self, plan: Plan) -> None:
        """Called when ``plan`` has been checked, before it takes effect."""

    def _count_replay(self) -> None:
        """Count a committing pass in every layer, where ``reads_in_graph``."""
        raise NotImplementedError

    def _committed(self, session: int, frame: int) -> None:
        """Called for each real row when its frame is committed, before the clock moves."""

    def _room_refusal(self, step: FrameStep) -> AdmitOutcome | None:
        """Why a well-formed step has no room beyond sessions, None if it has. Reads only."""
        return None

    def _admitted(self, step: FrameStep) -> None:
        """Called when a step has been admitted."""

    # -- a request's life --------------------------------------------------------------------------------------

    def ingest_request(self, rid: str, overrides: Mapping[str, Any] | None = None) -> None:
        self._thread.check()
        if overrides:
            raise ValueError(f"request {rid!r} overrides {', '.join(sorted(overrides))}: a request has none to set")
        if not isinstance(rid, str):
            raise ValueError(f"request id {rid!r}: expected a string")
        self._table.register(rid)

    def admit(self, step: FrameStep, ctx: StepContext) -> AdmitOutcome:
        self._thread.check()
        refusal = self._table.refusal(step, ctx) or self._room_refusal(step)
        if refusal is not None:
            return refusal
        outcome = self._table.admit(step, ctx)
        if outcome.ok:
            self._admitted(step)
        return outcome

    def plan(self, step: FrameStep, ctx: StepContext) -> Plan:
        self._thread.check()
        refusal = self._table.refusal(step, ctx)
        if refusal is not None:
            raise RuntimeError(f"plan of a step that admit refuses: {refusal.reason}")
        frames = dict(step.frames)
        rows, real = ctx.row_ids, tuple(ctx.request_ids)
        self._check_padding(rows, real)
        for rid, frame in frames.items():
            if self._table.admitted_frame(rid) != frame:
                raise RuntimeError(f"request {rid!r} was not admitted at frame {frame}: call admit first")
        self._drop_plan("")
        sessions = [self._table.require_session(rid) for rid in real]
        for rid, session in zip(real, sessions, strict=True):
            if rid in self._dirty:
                self._clear_aborted(rid, session)
                self._dirty.discard(rid)
        padding = len(rows) - len(real)
        if padding:
            assert self._padding_session is not None
            sessions += [self._padding_session] * padding
        plan = Plan(
            request_ids=rows,
            session_indices=tuple(sessions),
            clocks=(*(frames[rid] for rid in real), *([0] * padding)),
            num_real=len(real),
        )
        self._stage(plan)
        self._commits_at_plan = self._commit_counts()
        self._plan = plan
        return plan

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
        if torch.compiler.is_compiling() and not self.reads_in_graph:
            # Reads take exact slices, which the host picks anew at every clock: a compiled model breaks its graph here.
            # Not a decorator, because that would load the compiler in every process that never compiles.
            return torch.compiler.disable(self.attend)(q, k, v, layer_idx, frame_pos, commit=commit)
        config, rows = self.config, len(self._require_plan().request_ids)
        expected = (rows, config.num_qo_heads, config.tokens_per_frame, config.head_dim)
        if tuple(q.shape) != expected or not q.is_floating_point():
            raise ValueError(f"q is {q.dtype} {list(q.shape)}: expected floating {list(expected)}")
        self._check_pass(k, v, layer_idx, frame_pos)
        return self._attend(q, k, v, layer_idx, frame_pos, commit)

    def begin_replay(self, clocks: Sequence[int]) -> None:
        self._thread.check()
        if not self.reads_in_graph:
            raise RuntimeError(f"attention={self.attention!r} on {self.device.type} is not one that a graph can hold")
        plan = self._require_plan()
        if tuple(clocks) != plan.clocks:
            raise ValueError(f"replay at clocks {list(clocks)}: the plan has clocks {list(plan.clocks)}")
        self._count_replay()

    def commit(self, step: FrameStep, ctx: StepContext) -> None:
        self._thread.check()
        plan, frames = self._require_plan(), dict(step.frames)
        if ctx.row_ids != plan.request_ids or frames != plan.frames:
            raise RuntimeError(f"commit of {frames} for rows {list(ctx.row_ids)}: the pending plan is {plan}")
        silent = [i for i, wrote in enumerate(self._wrote_since_plan()) if not wrote]
        if silent:
            raise RuntimeError(f"commit of {frames}: layers {silent} saw no committing pass since plan")
        for rid, frame in frames.items():
            self._committed(self._table.require_session(rid), frame)
            self._table.set_clock(rid, frame)
        self._plan = None
        self._no_plan_because = "the planned step is committed: plan the next one"

    def reset_request(self, rid: str, free: bool = False) -> None:
        self._thread.check()
        self._table.require_registered(rid)
        self._table.unmark_parked(rid)
        self._parking.drop(rid)
        if self._table.session_of(rid) is not None:
            self._void_plan_of(rid, "was reset")
            self._give_up(rid)

    def remove_request(self, rid: str) -> None:
        self._thread.check()
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

    # -- health ------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        sessions = list(self._table.holders.values())
        if len(set(sessions)) != len(sessions) or len(sessions) + self._table.num_free != self._table.num_sessions:
            raise RuntimeError(
                f"{len(sessions)} claims on {len(set(sessions))} sessions and {self._table.num_free} free: expected "
                f"{self._table.num_sessions} in all"
            )
        if set(self._table.parked) & self._table.holders.keys() or len(self._table.parked) != self.num_parked:
            raise RuntimeError(
                f"{self.num_parked} parked copies for {list(self._table.parked)}, sessions are held by "
                f"{list(self._table.holders)}: a request has one or the other"
            )
        self._check_storage()

    def build_accelerator_graph_buffers(self, slots: int, max_bs: int, max_seq_len: int) -> None:
        """No-op: every buffer that a replay touches was allocated by ``build``."""

    def post_warmup_validate(self) -> None:
        left = sorted((*self._table.holders, *self._table.parked))
        if left:
            raise RuntimeError(f"warm-up left requests resident or parked: {', '.join(left)}")
        self.check_integrity()

    def cleanup(self) -> None:
        self._thread.check()
        for rid in self._table.rids:
            self.remove_request(rid)
        self._drop_plan("the resource was cleaned up")
        self._table = SessionTable(0)
        self.layers = []

    # -- inside ------------------------------------------------------------------------------------------------

    def _check_pass(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, frame_pos: torch.Tensor) -> None:
        """Raise unless a pass fits the pending plan."""
        if not torch.compiler.is_compiling():
            self._thread.check()
        plan, config = self._require_plan(), self.config
        rows = len(plan.request_ids)
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

    def _check_padding(self, rows: tuple[str, ...], real: tuple[str, ...]) -> None:
        if rows[: len(real)] != real:
            raise ValueError(f"padded_request_ids={list(rows)}: expected it to begin with request_ids={list(real)}")
        dummies = rows[len(real) :]
        if dummies and self._padding_session is None:
            raise ValueError(f"padded_request_ids={list(rows)}: padding needs a config with padding_session=True")
        if set(dummies) & set(real):
            raise ValueError(f"padded_request_ids={list(rows)}: a dummy row repeats a real one")
        if len(rows) > self._max_rows:
            raise ValueError(f"{len(rows)} rows in a step: expected at most {self._max_rows}")

    def _next_clock(self, rid: str) -> int:
        return frame_after(self._table.clock_of(rid))

    def _require_plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError(self._no_plan_because)
        return self._plan

    def _commit_counts(self) -> list[int]:
        return [int(layer.commits) for layer in self.layers]

    def _wrote_since_plan(self) -> list[bool]:
        """Per layer, whether a committing pass ran under the pending plan."""
        return [now > before for now, before in zip(self._commit_counts(), self._commits_at_plan, strict=True)]

    def _is_aborted(self, rid: str) -> bool:
        """Whether a committing pass ran for ``rid`` without the commit that follows it (or before it did)."""
        if rid in self._dirty:
            return True
        return self._plan is not None and rid in self._plan.real_ids and any(self._wrote_since_plan())

    def _drop_plan(self, because: str) -> None:
        """Forget the pending plan, remembering whose commit it leaves half done."""
        if self._plan is not None:
            if any(self._wrote_since_plan()):
                self._dirty.update(self._plan.real_ids)
            self._plan = None
        self._no_plan_because = because

    def _void_plan_of(self, rid: str, event: str) -> None:
        if self._plan is not None and rid in self._plan.real_ids:
            self._drop_plan(f"the pending plan is void: request {rid!r} {event}; plan again")
