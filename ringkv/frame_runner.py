"""Requests in, frames out, step by step, however the past is kept.

``FrameRunner`` has the line, the seats, the steps and what ends a request. Between two steps finished requests leave
and waiting ones enter; a step takes one frame of every ready request that is in the same phase: a context frame takes
one committing pass, a generated one its denoise passes and a committing one, so the two are separate batches.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from ringkv.events import EventSource, EventStream
from ringkv.policies import NoSeat, Policy, policy_of
from ringkv.resource import NoRoom
from ringkv.rollout import FrameResult, Phase, Run
from ringkv.threads import OneThread

if TYPE_CHECKING:
    from ringkv.resource import AttentionResource

ENDED_KEPT = 1024
"""How many ended requests ``FrameRunner.ended`` remembers."""


class FrameModel(Protocol):
    """What a model must do to be driven. B rows, any clocks; ``frame_pos`` ``[B]`` int64, ``actions`` ``[B]`` int64."""

    @property
    def fingerprint(self) -> str:
        """Names the weights: two models with one fingerprint continue each other's rollouts."""

    def observe(
        self, resource: AttentionResource, frames: torch.Tensor, actions: torch.Tensor, frame_pos: torch.Tensor
    ) -> None:
        """Run one committing pass over real frames ``[B, C, H, W]``."""

    def generate(
        self,
        resource: AttentionResource,
        seeds: Sequence[int],
        streams: Sequence[int],
        actions: torch.Tensor,
        frame_pos: torch.Tensor,
    ) -> torch.Tensor:
        """Denoise one frame per row, run the committing pass on the result and return it, ``[B, C, H, W]``."""


class FrameRunner(ABC):
    """Runs requests frame by frame. It belongs to the thread that makes the first call.

    A request waits in line until there is a seat for it; ``policy`` says what happens when there is none. One that
    raises is set aside in ``failed`` with what it has intact, its seat too: ``retry`` drives the same frame again,
    ``cancel`` ends it. A finished one keeps its seat until the next ``step``. ``ended`` says how the last requests
    ended: ``finished``, ``cancelled``, or the deadline that they missed.
    """

    def __init__(
        self, model: FrameModel, *, policy: str | Policy = "fifo", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """policy: a name of ``policies.POLICIES`` or a policy. clock: seconds, for deadlines and events."""
        self.model = model
        self.policy = policy_of(policy)
        self.failed: dict[str, Exception] = {}
        self.ended: dict[str, str] = {}
        self._clock = clock
        self._events = EventSource(clock)
        self._thread = OneThread(type(self).__name__)
        self._line: list[Run] = []  # waiting for a seat, in order
        self._runs: dict[str, Run] = {}  # seated
        self._aside: dict[str, Run] = {}  # neither: parked and not asked for, or failed without a seat
        self._steps = 0
        self._stepping = False
        self._to_cancel: list[str] = []

    # -- who is where ------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Requests that still have frames to make, have not failed and are not held parked."""
        return len(self._line) + len(self._ready()) + sum(self._can_return(run) for run in self._aside.values())

    @property
    def resident(self) -> tuple[str, ...]:
        """Requests that have a seat, in the order they got one."""
        return tuple(self._runs)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Requests that wait for a seat, first come first."""
        return tuple(run.rid for run in self._line)

    def watch(self) -> EventStream:
        """A stream of what happens from now on."""
        return self._events.watch()

    # -- driving -----------------------------------------------------------------------------------------------

    def step(self, ready: Sequence[str] | None = None) -> list[FrameResult]:
        """One frame of every ready request in the phase of the one that has waited longest; [] when none is ready.

        ready: the only requests that want a frame; None: all. Of more than a step can take, those go first that were
        driven least recently. Nobody gives up a seat to a request that wants no frame.
        """
        self._thread.check()
        self._require_between_steps()
        for run in [run for run in self._runs.values() if run.finished]:
            self._end(run, "finished")
        self._end_late()
        wanted = None if ready is None else frozenset(ready)
        self._seat_waiting(wanted)
        able = [run for run in self._ready() if wanted is None or run.rid in wanted]
        if not able:
            return []
        self._steps += 1
        phase = min(able, key=lambda run: run.last_step).phase
        batch = self._of_a_step([run for run in able if run.phase == phase])
        for run in batch:
            run.last_step = self._steps
        self._stepping = True
        try:
            results = self._make(batch, phase)
        finally:
            self._stepping = False
            cancelled, self._to_cancel = self._to_cancel, []
            for rid in cancelled:
                self.cancel(rid)
        return [result for result in results if result.rid not in cancelled]

    def retry(self, rid: str) -> None:
        """Let a failed request drive its frame again, from pass 0; without a seat it goes to the end of the line."""
        self._thread.check()
        if self.failed.pop(rid, None) is None:
            raise ValueError(f"request {rid!r} has not failed: nothing to retry")
        run = self._known(rid)
        run.failed = False
        if rid in self._aside and not run.held:
            self._line.append(self._aside.pop(rid))

    def cancel(self, rid: str) -> None:
        """End a request wherever it is and give its seat back; an unknown rid is a no-op.

        From inside a step it takes effect when the step is over, and what the step made of it is not handed out.
        """
        self._thread.check()
        if self._stepping:
            self._to_cancel.append(rid)
            return
        run = self._find(rid)
        if run is not None:
            self._end(run, "cancelled")

    # -- how the past is kept ----------------------------------------------------------------------------------

    @abstractmethod
    def _free_seats(self) -> int:
        """How many more requests can be seated."""

    @abstractmethod
    def _seat(self, run: Run) -> None:
        """Make ``run`` ready for its next frame. ``NoRoom`` if it has to wait after all."""

    @abstractmethod
    def _release(self, rid: str) -> None:
        """Drop all that is kept for ``rid``, if anything is."""

    @abstractmethod
    def _drive(self, batch: list[Run], phase: Phase) -> torch.Tensor:
        """Make and commit one frame of each run of the batch, ``[B, C, H, W]``; raises with nothing committed."""

    def _make_room(self, ready: Collection[str] | None) -> bool:
        """Free a seat for the one that waits longest, if the policy names somebody to give one up."""
        return False

    def _most_rows(self) -> int | None:
        """Rows of the largest step, None for any number."""
        return None

    # -- inside ------------------------------------------------------------------------------------------------

    def _enqueue(self, run: Run) -> None:
        """Put a new request at the end of the line; ``NoSeat`` if the policy has none and no seat is free."""
        self._thread.check()
        self._require_new(run.rid)
        leaving = sum(other.finished for other in self._runs.values())
        if not self.policy.queues and self._free_seats() + leaving <= len(self._line):
            raise NoSeat(f"request {run.rid!r}: no seat is free; try again when one ends, or take a policy that queues")
        self.ended.pop(run.rid, None)
        self._line.append(run)
        self._events.tell("queued", run.rid, run.next_frame)

    def _require_new(self, rid: str) -> None:
        if self._find(rid) is not None:
            raise ValueError(f"request {rid!r} is already queued or running")

    def _require_between_steps(self) -> None:
        if self._stepping:
            raise RuntimeError("called from inside a step: expected between two steps")

    def _find(self, rid: str) -> Run | None:
        run = self._runs.get(rid) or self._aside.get(rid)
        return run or next((run for run in self._line if run.rid == rid), None)

    def _known(self, rid: str) -> Run:
        run = self._find(rid)
        if run is None:
            raise ValueError(f"request {rid!r} is not known: submit it first")
        return run

    def _ready(self) -> list[Run]:
        return [run for run in self._runs.values() if not run.failed and not run.finished]

    def _of_a_step(self, runs: list[Run]) -> list[Run]:
        """As many of ``runs`` as a step can take: those that were driven least recently, in the order of ``runs``."""
        first = sorted(runs, key=lambda run: run.last_step)[: self._most_rows()]
        return [run for run in runs if run in first]

    def _can_return(self, run: Run) -> bool:
        return not run.failed and not run.held and not run.finished

    def _seat_waiting(self, ready: Collection[str] | None) -> None:
        """Seat those in line until there is no room. Whoever wants a frame is not overtaken by anybody behind."""

        def wants(run: Run) -> bool:
            return ready is None or run.rid in ready

        for run in [run for run in self._aside.values() if wants(run)]:
            run.held = run.held and ready is None
            if self._can_return(run):
                self._line.append(self._aside.pop(run.rid))
        for run in list(self._line):
            if self._free_seats() < 1 and not (wants(run) and self._make_room(ready)):
                if wants(run):
                    return
                continue
            again = run.last_step >= 0
            try:
                self._seat(run)
            except NoRoom:
                return
            except Exception as error:
                self._line.remove(run)
                self._aside[run.rid] = run
                self._set_aside(run, error)
                continue
            self._line.remove(run)
            run.seated_frames = 0
            self._runs[run.rid] = run
            self._events.tell("woken" if again else "seated", run.rid, run.next_frame)

    def _make(self, batch: list[Run], phase: Phase) -> list[FrameResult]:
        """The frames of a batch. If somebody's fails, nothing was committed, and each is driven alone."""
        try:
            return self._advance(batch, phase)
        except Exception as error:
            if len(batch) == 1:
                self._set_aside(batch[0], error)
                return []
        results = []
        for run in batch:
            try:
                results += self._advance([run], phase)
            except Exception as error:
                self._set_aside(run, error)
        return results

    def _advance(self, batch: list[Run], phase: Phase) -> list[FrameResult]:
        results = []
        for run, image in zip(batch, self._drive(batch, phase), strict=True):
            results.append(FrameResult(run.rid, run.next_frame, phase, image))
            self._events.tell("frame", run.rid, run.next_frame)
            run.next_frame += 1
            run.action_cursor += 1
            run.seated_frames += 1
            if run.finished:
                self._events.tell("finished", run.rid, run.next_frame)
        return results

    def _set_aside(self, run: Run, error: Exception) -> None:
        self.failed[run.rid] = error
        run.failed = True
        self._events.tell("failed", run.rid, run.next_frame, f"{type(error).__name__}: {error}")

    def _end_late(self) -> None:
        now = self._clock()
        for run in [*self._runs.values(), *self._line, *self._aside.values()]:
            if run.deadline <= now and not run.finished:
                self._end(run, f"deadline passed {now - run.deadline:.3f} s ago, at frame {run.next_frame}")

    def _end(self, run: Run, reason: str) -> None:
        rid = run.rid
        self._release(rid)
        self._runs.pop(rid, None)
        self._aside.pop(rid, None)
        self._line = [other for other in self._line if other is not run]
        self.failed.pop(rid, None)
        self.ended.pop(rid, None)
        self.ended[rid] = reason
        if len(self.ended) > ENDED_KEPT:
            del self.ended[next(iter(self.ended))]
        if reason == "cancelled":
            self._events.tell("cancelled", rid, run.next_frame)
        elif reason != "finished":  # that was told when the last frame was made
            self._events.tell("deadline", rid, run.next_frame, reason)
