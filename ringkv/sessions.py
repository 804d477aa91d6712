"""Who is registered, who holds which session, and what clock each request is at. Shared by every strategy.

Admission is validate-then-apply: ``SessionTable.admit`` looks at the whole step first and only then claims, so a
refused step leaves no trace. Host-side plain Python: nothing here knows how frames are stored.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from ringkv.horizon import frame_after
from ringkv.step import AdmitOutcome, FrameStep, StepContext


@dataclass
class _Claim:
    session: int
    clock: int | None = None  # last committed frame
    admitted: int | None = None  # frame that plan may stage; cleared by commit and by whatever moves the clock


class SessionTable:
    """Registration, claims and clocks of ``num_sessions`` sessions."""

    def __init__(self, num_sessions: int) -> None:
        self.num_sessions = num_sessions
        self._claims: dict[str, _Claim | None] = {}  # registered rid -> its claim, None without a session
        self._parked: dict[str, int | None] = {}  # registered rid without a session -> the clock it was parked at
        self._free = list(range(num_sessions))  # a heap: the lowest free index is claimed first

    @property
    def num_free(self) -> int:
        """Sessions nobody holds."""
        return len(self._free)

    def register(self, rid: str) -> None:
        """Make ``rid`` known; a known one is left as it is."""
        self._claims.setdefault(rid, None)

    def unregister(self, rid: str) -> None:
        """Forget ``rid``, which must hold no session any more."""
        assert self._claims[rid] is None, f"request {rid!r} still holds a session"
        assert rid not in self._parked, f"request {rid!r} is parked"
        del self._claims[rid]

    def is_registered(self, rid: str) -> bool:
        """Whether ``rid`` was ingested and not removed."""
        return rid in self._claims

    def require_registered(self, rid: str) -> None:
        """Raise ``ValueError`` when ``rid`` is unknown."""
        if rid not in self._claims:
            raise ValueError(f"request {rid!r} is not registered: call ingest_request first")

    @property
    def rids(self) -> tuple[str, ...]:
        """Registered requests, oldest first."""
        return tuple(self._claims)

    @property
    def holders(self) -> dict[str, int]:
        """Session index of every request that holds one."""
        return {rid: claim.session for rid, claim in self._claims.items() if claim is not None}

    def session_of(self, rid: str) -> int | None:
        """Session that ``rid`` holds, or None."""
        claim = self._claims.get(rid)
        return None if claim is None else claim.session

    def require_session(self, rid: str) -> int:
        """Session that ``rid`` holds; ``ValueError`` when it holds none."""
        session = self.session_of(rid)
        if session is None:
            known = "holds no session" if rid in self._claims else "is not registered"
            raise ValueError(f"request {rid!r} {known}: nothing to read")
        return session

    def clock_of(self, rid: str) -> int | None:
        """Last committed frame of ``rid``, parked or not, or None."""
        claim = self._claims.get(rid)
        return self._parked.get(rid) if claim is None else claim.clock

    def admitted_frame(self, rid: str) -> int | None:
        """Frame that ``rid`` was admitted at and has not committed, or None."""
        claim = self._claims.get(rid)
        return None if claim is None else claim.admitted

    def claim(self, rid: str) -> int:
        """Give registered ``rid``, which holds none, the lowest free session. The pool must not be empty."""
        assert self._claims[rid] is None, f"request {rid!r} already holds a session"
        session = heapq.heappop(self._free)
        self._claims[rid] = _Claim(session)
        return session

    def release(self, rid: str) -> None:
        """Take the session of ``rid`` back; it stays registered."""
        claim = self._claims[rid]
        assert claim is not None, f"request {rid!r} holds no session"
        self._claims[rid] = None
        heapq.heappush(self._free, claim.session)

    def is_parked(self, rid: str) -> bool:
        """Whether the session of ``rid`` was taken off the device."""
        return rid in self._parked

    def mark_parked(self, rid: str, clock: int | None) -> None:
        """``rid``, which has just been released, is parked at last committed frame ``clock``."""
        assert self._claims[rid] is None, f"request {rid!r} still holds a session"
        self._parked[rid] = clock

    def unmark_parked(self, rid: str) -> None:
        """``rid`` is parked no longer, if it was."""
        self._parked.pop(rid, None)

    @property
    def parked(self) -> tuple[str, ...]:
        """Parked requests, the one parked longest first."""
        return tuple(self._parked)

    def set_clock(self, rid: str, clock: int | None) -> None:
        """Put the clock of ``rid`` at last committed frame ``clock`` and void its admission."""
        claim = self._claims[rid]
        assert claim is not None, f"request {rid!r} holds no session"
        claim.clock, claim.admitted = clock, None

    def admit(self, step: FrameStep, ctx: StepContext) -> AdmitOutcome:
        """``AttentionResource.admit``: check the whole step, then claim what it needs."""
        refusal = self.refusal(step, ctx)
        if refusal is not None:
            return refusal
        asleep = next((rid for rid, _ in step.frames if rid in self._parked), None)
        if asleep is not None:
            return AdmitOutcome(
                ok=False,
                retryable=True,
                reason=f"request {asleep!r} is parked: wake it before its next frame",
                rid=asleep,
            )
        newcomers = [rid for rid, _ in step.frames if self._claims[rid] is None]
        if len(newcomers) > self.num_free:
            return AdmitOutcome(
                ok=False,
                retryable=True,
                reason=f"the pool is full: {len(newcomers)} new sessions wanted, {self.num_free} of "
                f"{self.num_sessions} free; retry when a request ends, or raise num_sessions",
                rid=newcomers[self.num_free],
            )
        for rid in newcomers:
            self.claim(rid)
        for rid, frame in step.frames:
            claim = self._claims[rid]
            assert claim is not None
            claim.admitted = frame
        return AdmitOutcome(ok=True)

    def refusal(self, step: FrameStep, ctx: StepContext) -> AdmitOutcome | None:
        """Why this step can never run as asked, None if it can once the pool has room. Reads only."""

        def never(reason: str, rid: object = None) -> AdmitOutcome:
            return AdmitOutcome(ok=False, reason=reason, rid=rid if isinstance(rid, str) else None)

        rows = _as_tuple(ctx.request_ids)
        frames = _as_tuple(step.frames)
        if rows is None or frames is None:
            return never("malformed step: frames and request_ids must be sequences")
        if not rows:
            return never("malformed step: no rows")
        seen: dict[str, int] = {}
        for entry in frames:
            pair = _as_tuple(entry)
            if pair is None or len(pair) != 2 or not isinstance(pair[0], str):
                return never(f"malformed step: {entry!r} is not a (rid, frame) pair")
            rid, frame = pair
            if rid in seen:
                return never(f"request {rid!r} stands twice in one step: two rows would write one session", rid)
            if not isinstance(frame, int) or isinstance(frame, bool):
                return never(f"request {rid!r} has no clock: frame {frame!r} is not an integer", rid)
            seen[rid] = frame
        for rid in rows:
            if not isinstance(rid, str):
                return never(f"malformed step: request id {rid!r} is not a string")
            if rid not in self._claims:
                return never(f"request {rid!r} is not registered: call ingest_request first", rid)
            if rid not in seen:
                return never(f"request {rid!r} has no clock: the step names no frame for it", rid)
        if len(set(rows)) != len(rows):
            twice = next(rid for i, rid in enumerate(rows) if rid in rows[:i])
            return never(f"request {twice!r} stands twice in one step: two rows would write one session", twice)
        for rid, frame in seen.items():
            if rid not in rows:
                return never(f"request {rid!r} is in the step but not in its context", rid)
            clock = self.clock_of(rid)
            expected = frame_after(clock)
            if frame != expected:
                return never(f"request {rid!r} is at frame {expected}, not {frame}: a clock advances by one", rid)
        return None


def _as_tuple(value: object) -> tuple | None:
    """``value`` as a tuple, None for what is not a sequence of items (a string, a number)."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return tuple(value)
    return None
