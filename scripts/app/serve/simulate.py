"""One pool, one policy, one crowd: the real ``StepRunner`` over a real ring, with time that only the model moves.

The ring is a stand-in of one layer and one token, whose sessions are claimed, parked and woken like any; bytes and
seconds are those of the geometry that was asked for. A step takes its rows' arithmetic, and each session that is parked
or woken before it the time of its copy over the link: as if nothing overlapped, so parking is shown at its dearest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ringkv import EngineResourceInfo, KVSpec, RingKVConfig, RingKVLayerConfig, RolloutRequest, StepRunner
from ringkv.events import EventStream
from ringkv.policies import LruPark, NoSeat, Policy, policy_of
from ringkv.resource import AttentionResource
from scripts.app.serve.load import Visit


class VirtualClock:
    """Seconds that pass only by ``advance``."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def advance_to(self, moment: float) -> None:
        """Let time pass until ``moment``, which may be now."""
        self.now = max(self.now, moment)


class StandIn:
    """A ``FrameModel`` without a model: it attends once, commits, and takes ``frame_s`` seconds for each row."""

    fingerprint = "stand-in"

    def __init__(self, clock: VirtualClock, frame_s: float, move_s: float) -> None:
        self.moves = 0
        self._clock, self._frame_s, self._move_s = clock, frame_s, move_s
        self._stream: EventStream | None = None

    def listen(self, stream: EventStream) -> None:
        """Hear of the sessions that are moved before a step."""
        self._stream = stream

    def observe(
        self, resource: AttentionResource, frames: torch.Tensor, actions: torch.Tensor, frame_pos: torch.Tensor
    ) -> None:
        """A frame that was given; no visitor brings one."""
        raise AssertionError("a visitor brings no frames")

    def generate(
        self,
        resource: AttentionResource,
        seeds: Sequence[int],
        streams: Sequence[int],
        actions: torch.Tensor,
        frame_pos: torch.Tensor,
    ) -> torch.Tensor:
        """Empty frames ``[B, 1, 1, 1]``, and the time that real ones take."""
        assert self._stream is not None
        moved = sum(event.kind in ("parked", "woken") for event in self._stream.take())
        self.moves += moved
        self._clock.advance(moved * self._move_s + len(streams) * self._frame_s)
        empty = torch.zeros(len(streams), 1, 1, 1)
        resource.attend(empty, empty, empty, 0, frame_pos, commit=True)
        return empty


@dataclass
class _Stay:
    """A visit in progress. due: when it wants its next frame."""

    visit: Visit
    due: float
    frames: int = 0
    wait_s: float | None = None


@dataclass
class Tally:
    """What happened. late_s: from due to done, of each frame but a visit's first. parked: (seconds, sessions)."""

    requests: int = 0
    refused: int = 0
    missed_deadline: int = 0
    finished: int = 0
    moves: int = 0
    end_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    parked: list[tuple[float, int]] = field(default_factory=list)

    def row(self, *, period_s: float, session_bytes: int) -> dict[str, Any]:
        """The figures of a row of serve_sim.json."""
        seconds = sum(length for length, _ in self.parked)
        mean = sum(length * count for length, count in self.parked) / seconds if seconds else 0.0
        return {
            "requests": self.requests,
            "refused": self.refused,
            "missed_deadline": self.missed_deadline,
            "finished": self.finished,
            "wait_s_p50": _percentile(self.waits_s, 50),
            "wait_s_p95": _percentile(self.waits_s, 95),
            "on_time_fraction": float(np.mean([late <= period_s for late in self.late_s])) if self.late_s else None,
            "frames_per_s": (len(self.late_s) + len(self.waits_s)) / self.end_s if self.end_s else None,
            "parked_bytes_mean": mean * session_bytes,
            "parked_bytes_max": max((count for _, count in self.parked), default=0) * session_bytes,
            "moves": self.moves,
        }


def make_policy(name: str, quantum_frames: int) -> Policy:
    """The runner's policy of that name."""
    return LruPark(quantum_frames) if name == LruPark.name else policy_of(name)


def simulate(
    visits: Sequence[Visit],
    *,
    policy: Policy,
    pool: int,
    period_s: float,
    frame_s: float,
    move_s: float,
    deadline_s: float | None = None,
) -> Tally:
    """Serve all ``visits`` to their end. A visitor who is late wants the next frame at once, not the missed ones."""
    clock = VirtualClock()
    model = StandIn(clock, frame_s, move_s)
    ring = _stand_in_ring(pool)
    runner = StepRunner(ring, model, policy=policy, clock=clock)
    model.listen(runner.watch())
    events = runner.watch()
    tally = Tally(requests=len(visits))
    coming = sorted(visits, key=lambda visit: visit.arrival_s, reverse=True)
    stays: dict[str, _Stay] = {}
    limit = math.inf if deadline_s is None else deadline_s
    while coming or stays:
        while coming and coming[-1].arrival_s <= clock.now:
            visit = coming.pop()
            try:
                runner.submit(_request(visit), deadline=visit.arrival_s + limit)
            except NoSeat:
                tally.refused += 1
            else:
                stays[visit.rid] = _Stay(visit, due=visit.arrival_s)
        began = clock.now
        results = runner.step([rid for rid, stay in stays.items() if stay.due <= began])
        for error in runner.failed.values():
            raise error
        for event in events.take():
            stay = stays.get(event.rid)
            if event.kind == "seated" and stay is not None:
                stay.wait_s = event.time - stay.visit.arrival_s
                tally.waits_s.append(stay.wait_s)
            elif event.kind == "deadline":
                tally.missed_deadline += stays.pop(event.rid, None) is not None
        for result in results:
            _take_frame(stays, result.rid, clock.now, period_s, tally)
        if not results:
            wishes = [stay.due for stay in stays.values() if stay.due > began]
            ends = [stay.visit.arrival_s + limit for stay in stays.values()]
            following = min([*wishes, *ends, *(visit.arrival_s for visit in coming[-1:])], default=began)
            assert math.isfinite(following), "nobody makes a frame, and nothing will change that"
            clock.advance_to(following)
        tally.parked.append((clock.now - began, ring.num_parked))
    runner.step([])  # the finished ones leave
    ring.check_integrity()
    assert ring.num_free_sessions == pool
    tally.moves, tally.end_s = model.moves, clock.now
    return tally


def _take_frame(stays: dict[str, _Stay], rid: str, now: float, period_s: float, tally: Tally) -> None:
    """A frame has come: when the next one is due, or that it was the last."""
    stay = stays[rid]
    if stay.frames:
        tally.late_s.append(now - stay.due)
    pause = stay.visit.pauses.get(stay.frames, 0.0)
    stay.due = max(stay.due + period_s, now) + pause
    stay.frames += 1
    if stay.frames == stay.visit.num_frames:
        del stays[rid]
        tally.finished += 1


def _stand_in_ring(pool: int) -> Any:
    layer = RingKVLayerConfig(ring_frames=2, ring_buckets=2)
    config = RingKVConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        num_qo_heads=1,
        tokens_per_frame=1,
        num_sessions=pool,
        layers=(layer,),
    )
    spec = KVSpec(resource_key="kv", config=config)
    return spec.resource_class.build(spec, EngineResourceInfo(device="cpu", kv_dtype=torch.float32))


def _request(visit: Visit) -> RolloutRequest:
    return RolloutRequest(
        rid=visit.rid,
        seed=0,
        stream=0,
        num_frames=visit.num_frames,
        context=torch.zeros(0, 1, 1, 1),
        actions=torch.zeros(visit.num_frames, dtype=torch.int64),
    )


def _percentile(values: Sequence[float], share: float) -> float | None:
    return float(np.percentile(values, share)) if values else None
