"""What can be done with a session between frames, in one place for every strategy: states, forks, rewinds, parking.

Each of these checks everything first, then changes; a strategy only says how a session's layers are read out, put back
and emptied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ringkv import layout, memory, statefile
from ringkv.config import KVConfig, require_int
from ringkv.horizon import frame_after
from ringkv.parking import ParkingLot
from ringkv.resource import FEATURES, AttentionResource, NoRoom, RestoreReport, State
from ringkv.sessions import SessionTable
from ringkv.state import STATE_VERSION, Layers, check_fields, check_foreign, check_state, mapped, refit, unmarked_frames
from ringkv.threads import OneThread


class MovableSessions(AttentionResource):
    """``AttentionResource`` from ``get_state`` to ``wake``. ``_dirty`` holds the requests whose commit was aborted."""

    def __init__(self, config: KVConfig, name: str, device: torch.device | str, dtype: torch.dtype) -> None:
        memory.dtype_name(dtype)
        self.config = config
        self.name = name
        self.device = torch.device(device)
        self.dtype = dtype
        self._geometry = layout.geometry_of(config)
        self._table = SessionTable(config.num_sessions)
        self._parking = ParkingLot(None)
        self._dirty: set[str] = set()
        self._thread = OneThread(f"{type(self).__name__} {name!r}")

    # -- what a strategy adds ----------------------------------------------------------------------------------

    @abstractmethod
    def _erase(self, session: int) -> None:
        """Empty one session in place."""

    @abstractmethod
    def _export(self, rid: str, session: int, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies ``(kv, written)`` of one layer of a session, without what an aborted commit left."""

    @abstractmethod
    def _import(self, session: int, layers: Layers, clock: int | None, holes: Sequence[set[int]]) -> None:
        """Put checked layers, which are on this device, into an empty session. holes: frames missing, by layer."""

    def _lacks(self) -> Mapping[str, str]:
        """Why this resource has not all of ``FEATURES``, by the one that is absent."""
        return {"rewind": "frames that have left a window are gone"}

    def _check_room(self, session: int | None, clock: int | None, copies: int = 1) -> None:
        """Raise ``NoRoom`` unless states at ``clock`` have room, that of ``session`` (None: none) included."""

    def _check_extra(self, state: State) -> None:
        """Raise ``ValueError`` with one line for what this strategy alone objects to in a checked state."""

    def _export_undo(self, rid: str, session: int) -> dict[str, Any] | None:
        """A copy of a session's undo log as a state has it, None where there is none."""
        return None

    def _import_undo(self, session: int, undo: dict[str, Any], clock: int | None) -> None:
        """Put a checked undo log into a session that was just imported."""

    def _rewindable(self, rid: str, session: int) -> int:
        """How many frames a session can be taken back."""
        return frame_after(self._table.clock_of(rid))

    def _rewind(self, rid: str, session: int, clock: int | None) -> None:
        """Take a session back to last committed frame ``clock``, which is less than the table says."""
        raise NotImplementedError

    @abstractmethod
    def _void_plan_of(self, rid: str, event: str) -> None:
        """Forget the pending plan if it holds ``rid``."""

    # -- state -------------------------------------------------------------------------------------------------

    def get_state(self, rid: str) -> State:
        self._thread.check()  # read while another thread runs a pass, it would be of two moments
        if self._table.is_parked(rid):
            return mapped(self._parking.read(rid), torch.clone)
        session = self._table.require_session(rid)
        state = {
            "version": STATE_VERSION,
            "clock": self._table.clock_of(rid),
            "geometry": layout.geometry_of(self.config),
            "dtype": memory.dtype_name(self.dtype),
            "layers": [self._export(rid, session, index) for index in range(self.config.num_layers)],
        }
        undo = self._export_undo(rid, session)
        return state if undo is None else {**state, "undo": undo}

    def load_state(self, rid: str, state: State) -> None:
        self._thread.check()
        self._require_awake(rid)
        self._check_own(state)
        self._put(rid, state, "was loaded")

    def save(self, rid: str, path: str | Path) -> None:
        statefile.write_state(path, self.get_state(rid))

    def load(self, rid: str, path: str | Path) -> None:
        self._thread.check()
        self._require_awake(rid)
        state, _ = statefile.read_state(path)
        self.load_state(rid, state)

    def restore(self, rid: str, state: State) -> RestoreReport:
        self._thread.check()
        self._require_feature("restore")
        self._require_awake(rid)
        self._check_clock(check_fields(state, self.dtype)["clock"])
        check_foreign(state, self._geometry, self.dtype)
        self._check_target(rid, state["clock"])
        layers, report = refit(state, self._geometry)
        self._put(rid, {"clock": state["clock"], "layers": layers}, "was restored")
        return report

    # -- copies, and back in time ------------------------------------------------------------------------------

    @property
    def features(self) -> frozenset[str]:
        return FEATURES - self._lacks().keys()

    def fork(self, rid: str, new_rids: Sequence[str]) -> None:
        self._thread.check()
        self._require_feature("fork")
        self._require_awake(rid)
        self._table.require_session(rid)
        if isinstance(new_rids, str):
            raise ValueError(f"new_rids={new_rids!r}: expected a sequence of request ids")
        for index, new in enumerate(new_rids):
            self._require_awake(new)
            if self._table.session_of(new) is not None:
                raise ValueError(f"request {new!r} holds a session: reset it before it becomes a fork of {rid!r}")
            if new in new_rids[:index]:
                raise ValueError(f"request {new!r} stands twice in new_rids={list(new_rids)}")
        if len(new_rids) > self._table.num_free:
            raise NoRoom(
                f"fork of {rid!r} into {len(new_rids)}: {self._table.num_free} of {self._table.num_sessions} sessions "
                "are free; remove or park a request first"
            )
        self._check_room(None, self._table.clock_of(rid), len(new_rids))
        state, made = self.get_state(rid), []
        try:
            for new in new_rids:
                self._put(new, state, "was forked")
                made.append(new)
        except BaseException:
            for new in made:
                self._give_up(new)
            raise

    def rewind(self, rid: str, frames: int) -> None:
        self._thread.check()
        self._require_feature("rewind")
        self._require_awake(rid)
        session = self._table.require_session(rid)
        require_int("rewind", "frames", frames, 1)
        limit, count = self._rewindable(rid, session), frame_after(self._table.clock_of(rid))
        if frames > limit:
            raise ValueError(
                f"request {rid!r} rewind(frames={frames}): it is at frame {count} and can go back {limit} frames"
            )
        clock = count - frames - 1 if count > frames else None
        self._rewind(rid, session, clock)
        self._void_plan_of(rid, "was rewound")
        self._dirty.discard(rid)
        self._table.set_clock(rid, clock)

    # -- parking -----------------------------------------------------------------------------------------------

    def park(self, rid: str) -> None:
        self._thread.check()
        self._require_feature("park")
        self._require_awake(rid)
        clock = self._table.clock_of(rid)
        self._table.require_session(rid)
        self._parking.put(rid, self.get_state(rid))
        self._void_plan_of(rid, "was parked")
        self._give_up(rid)
        self._table.mark_parked(rid, clock)

    def wake(self, rid: str) -> None:
        self._thread.check()
        self._require_feature("park")
        self._table.require_registered(rid)
        if not self._table.is_parked(rid):
            raise ValueError(f"request {rid!r} is not parked: nothing to wake")
        clock = self._table.clock_of(rid)
        self._check_target(rid, clock)
        state = self._parking.read(rid)
        self._check_own(state)
        if state["clock"] != clock:
            raise ValueError(f"request {rid!r} was parked at clock {clock}: its copy is at {state['clock']}")
        self._put(rid, state, "was woken")
        self._table.unmark_parked(rid)
        self._parking.drop(rid)

    def is_parked(self, rid: str) -> bool:
        return self._table.is_parked(rid)

    @property
    def num_parked(self) -> int:
        """Requests whose session is parked."""
        return len(self._parking)

    # -- inside ------------------------------------------------------------------------------------------------

    def _require_feature(self, feature: str) -> None:
        if feature not in self.features:
            raise ValueError(f"{type(self).__name__} has no {feature}: {self._lacks()[feature]}")

    def _require_awake(self, rid: str) -> None:
        self._table.require_registered(rid)
        if self._table.is_parked(rid):
            raise ValueError(f"request {rid!r} is parked: wake or reset it first")

    def _check_own(self, state: State) -> None:
        """Raise ``ValueError`` with one line unless ``state`` is one that this resource could have taken."""
        self._check_clock(check_fields(state, self.dtype)["clock"])
        check_state(state, self._geometry, self.dtype)
        self._check_extra(state)

    def _check_clock(self, clock: int | None) -> None:
        """Raise ``ValueError`` for a clock that this resource can never be at."""

    def _check_target(self, rid: str, clock: int | None) -> None:
        """Raise ``NoRoom`` unless a state at ``clock`` can go into the session of ``rid``, or a free one."""
        session = self._table.session_of(rid)
        if session is None and not self._table.num_free:
            raise NoRoom(
                f"request {rid!r}: the pool is full, none of {self._table.num_sessions} sessions is free to load into; "
                "remove or park a request first"
            )
        self._check_room(session, clock)

    def _put(self, rid: str, state: State, event: str) -> None:
        """Put a checked state into the session of ``rid``, claiming one if it holds none."""
        clock = state["clock"]
        self._check_target(rid, clock)
        holes = [  # before the state is on its way to the device, which this would have to wait for
            unmarked_frames(layout.places(self._geometry, index, clock), written, self.config.tokens_per_frame)
            for index, (_, written) in enumerate(state["layers"])
        ]
        state = mapped(state, lambda tensor: tensor.to(self.device, non_blocking=True))
        session = self._table.session_of(rid)
        held = session is not None
        if session is None:
            session = self._table.claim(rid)
        else:
            self._void_plan_of(rid, event)
            self._erase(session)
            self._dirty.discard(rid)
            self._table.set_clock(rid, None)
        try:
            self._import(session, state["layers"], clock, holes)
            if "undo" in state:
                self._import_undo(session, state["undo"], clock)
        except BaseException:
            self._erase(session)
            if not held:
                self._table.release(rid)
            raise
        self._table.set_clock(rid, clock)

    def _give_up(self, rid: str) -> None:
        """Empty the session of ``rid`` and release it."""
        self._erase(self._table.require_session(rid))
        self._dirty.discard(rid)
        self._table.release(rid)
