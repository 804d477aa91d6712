"""Drives many rollouts through one resource: steps, snapshots, forks, rewinds, parking.

``StepRunner`` knows the lifecycle and nothing about pixels or weights; a model joins by the two methods of
``FrameModel``. Line, seats and failures are ``FrameRunner``'s, which does not know how the past is kept.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ringkv.events import Kind
from ringkv.frame_runner import FrameModel as FrameModel
from ringkv.frame_runner import FrameRunner as FrameRunner
from ringkv.policies import Policy
from ringkv.rollout import FrameResult as FrameResult
from ringkv.rollout import Phase as Phase
from ringkv.rollout import RolloutRequest as RolloutRequest
from ringkv.rollout import RolloutState as RolloutState
from ringkv.rollout import Run as Run
from ringkv.step import FrameStep, StepContext

if TYPE_CHECKING:
    from ringkv.graphs import CapturedSteps
    from ringkv.resource import AttentionResource, RestoreReport


class StepRefused(RuntimeError):
    """``admit`` turned a step down; the message says what is short."""


class StepRunner(FrameRunner):
    """A ``FrameRunner`` over a resource: a seat is a session of its pool, and what a session can do, a rollout can.

    A failed request keeps its session and clock; a finished one its session until the next ``step``, so that its state
    can still be taken.
    """

    def __init__(
        self,
        resource: AttentionResource,
        model: FrameModel,
        captured: CapturedSteps | None = None,
        *,
        policy: str | Policy = "fifo",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """captured: steps of this model over this resource, which every step is padded for and run by."""
        super().__init__(model, policy=policy, clock=clock)
        if captured is not None and (captured.resource is not resource or captured.model is not model):
            raise ValueError("captured steps of another resource or model: expected those of this runner")
        if self.policy.parks and "park" not in resource.features:
            raise ValueError(f"policy={self.policy.name!r}: {type(resource).__name__} cannot park a session")
        self.resource = resource
        self.captured = captured

    def submit(self, request: RolloutRequest, state: RolloutState | None = None, *, deadline: float = math.inf) -> None:
        """Queue a rollout, from frame 0 or from a state that a model with the same weights took.

        deadline: seconds by the runner's clock; the rollout ends then, wherever it is.
        """
        self._check_state(request, state)
        self._enqueue(_run_from(request, state, deadline))

    def restore(self, request: RolloutRequest, state: RolloutState, *, deadline: float = math.inf) -> None:
        """``submit`` from a state of another geometry, as ``AttentionResource.restore`` puts it in.

        ``restore_report`` has what became of its frames once the request is seated.
        """
        self._check_state(request, state)
        self._enqueue(dataclasses.replace(_run_from(request, state, deadline), foreign=True))

    def restore_report(self, rid: str) -> RestoreReport | None:
        """What ``restore`` kept, dropped and missed; None for a request that was not restored or is not seated yet."""
        return self._known(rid).restored

    def state_of(self, rid: str) -> RolloutState:
        """A copy of where ``rid`` stands; ``ValueError`` if it holds no session."""
        run = self._find(rid)
        if run is None or (run.rid not in self._runs and not self.resource.is_parked(rid)):
            raise ValueError(f"request {rid!r} holds no session: no state to take")
        return RolloutState(
            cache=self.resource.get_state(rid),
            seed=run.request.seed,
            stream=run.request.stream,
            next_frame=run.next_frame,
            action_cursor=run.action_cursor,
            fingerprint=self.model.fingerprint,
        )

    # -- what a rollout can do ---------------------------------------------------------------------------------

    def fork(self, rid: str, new_rids: Sequence[str], actions: Sequence[torch.Tensor] | None = None) -> None:
        """Seat copies of ``rid`` at its next frame, all or none. They share its seed and stream, hence its noise.

        actions: ``[num_frames]`` int64 for each fork, equal to the original's up to its next frame; None: the same.
        ``ValueError`` for a request without a seat or a frame made, or that is finished; ``RuntimeError`` if there are
        not enough free seats now.
        """
        self._thread.check()
        self._require_between_steps()
        run = self._seated(rid)
        if run.next_frame == 0 or run.finished:
            raise ValueError(
                f"request {rid!r} is at frame {run.next_frame} of {run.request.num_frames}: nothing to fork"
            )
        if actions is not None and len(actions) != len(new_rids):
            raise ValueError(f"{len(actions)} lists of actions for {len(new_rids)} forks of {rid!r}: expected one each")
        forks = []
        for index, new in enumerate(new_rids):
            self._require_new(new)
            request = dataclasses.replace(
                run.request, rid=new, actions=run.request.actions if actions is None else actions[index]
            )
            done = slice(0, run.action_cursor)
            if not torch.equal(request.actions[done], run.request.actions[done]):
                raise ValueError(
                    f"fork {new!r}: its actions differ from those of {rid!r} before frame {run.next_frame}"
                )
            forks.append(dataclasses.replace(run, request=request, failed=False, deadline=math.inf))
        if len(forks) > self._free_seats():
            raise RuntimeError(f"fork of {rid!r} into {len(forks)}: {self._free_seats()} seats are free")
        for fork in forks:
            self.resource.ingest_request(fork.rid)
        try:
            self.resource.fork(rid, list(new_rids))
        except BaseException:
            for fork in forks:
                self.resource.remove_request(fork.rid)
            raise
        for fork in forks:
            self.ended.pop(fork.rid, None)
            self._runs[fork.rid] = fork
            self._events.tell("seated", fork.rid, fork.next_frame, f"fork of {rid!r}")

    def rewind(self, rid: str, frames: int) -> None:
        """Take a seated rollout back by ``frames``; it makes them again. ``ValueError`` if its session cannot."""
        self._thread.check()
        self._require_between_steps()
        run = self._seated(rid)
        if frames > run.action_cursor:
            raise ValueError(f"request {rid!r} rewind(frames={frames}): it is at action {run.action_cursor}")
        self.resource.rewind(rid, frames)
        run.next_frame -= frames
        run.action_cursor -= frames
        self._events.tell("rewound", rid, run.next_frame, f"by {frames} frames")

    def park(self, rid: str) -> None:
        """Take a rollout off its seat until ``wake``, or until a step's ``ready`` names it."""
        self._thread.check()
        self._require_between_steps()
        run = self._known(rid)
        if rid in self._runs:
            self.resource.park(rid)
            self._leave_seat(run, "parked")
        elif self.resource.is_parked(rid):
            self._line = [other for other in self._line if other is not run]
            self._aside[rid] = run
        else:
            raise ValueError(f"request {rid!r} has no frame yet: nothing to park")
        run.held = True

    def wake(self, rid: str) -> None:
        """Put a parked rollout at the end of the line; it is woken when its turn comes."""
        self._thread.check()
        run = self._known(rid)
        if rid not in self._aside or not self.resource.is_parked(rid):
            raise ValueError(f"request {rid!r} is not parked and out of line: nothing to wake")
        run.held = False
        if not run.failed:
            self._line.append(self._aside.pop(rid))

    # -- how the past is kept ----------------------------------------------------------------------------------

    def _free_seats(self) -> int:
        unclaimed = sum(self.resource.session_of(rid) is None for rid in self._runs)  # claimed at their first admit
        return self.resource.num_free_sessions - unclaimed

    def _seat(self, run: Run) -> None:
        rid = run.rid
        if self.resource.is_parked(rid):
            self.resource.wake(rid)
            return
        self.resource.ingest_request(rid)
        if run.state is None:
            return
        if run.foreign:
            run.restored = self.resource.restore(rid, run.state.cache)
        else:
            self.resource.load_state(rid, run.state.cache)
        run.state = None

    def _release(self, rid: str) -> None:
        self.resource.remove_request(rid)

    def _make_room(self, ready: Collection[str] | None) -> bool:
        run = self.policy.victim(self._runs.values(), ready)
        if run is None:
            return False
        if self.resource.session_of(run.rid) is None:  # it has made no frame yet
            self._leave_seat(run, "queued")
            return True
        try:
            self.resource.park(run.rid)
        except Exception as error:  # no memory, no disk: it keeps its seat, and the others wait on
            self._events.tell("not parked", run.rid, run.next_frame, f"{type(error).__name__}: {error}")
            return False
        self._leave_seat(run, "parked")
        return True

    def _most_rows(self) -> int | None:
        return None if self.captured is None else self.captured.max_rows

    def _leave_seat(self, run: Run, kind: Kind) -> None:
        self._aside[run.rid] = self._runs.pop(run.rid)
        self._events.tell(kind, run.rid, run.next_frame)

    def _seated(self, rid: str) -> Run:
        if rid not in self._runs:
            where = "is parked or in line" if self._find(rid) else "is not known"
            raise ValueError(f"request {rid!r} {where}: expected one that has a seat")
        return self._runs[rid]

    def _check_state(self, request: RolloutRequest, state: RolloutState | None) -> None:
        """Raise ``ValueError`` unless ``request`` can go on from ``state``."""
        rid = request.rid
        self._require_new(rid)
        if state is None:
            return
        if state.fingerprint != self.model.fingerprint:
            raise ValueError(
                f"request {rid!r} state was taken with model {state.fingerprint}: this one is {self.model.fingerprint}"
            )
        if (state.seed, state.stream) != (request.seed, request.stream):
            raise ValueError(
                f"request {rid!r} seed={request.seed} stream={request.stream}: its state has seed={state.seed} "
                f"stream={state.stream}"
            )
        left = request.num_frames - state.next_frame
        if left < 1 or state.action_cursor + left > len(request.actions):
            raise ValueError(
                f"request {rid!r} num_frames={request.num_frames} with {len(request.actions)} actions: its state is at "
                f"frame {state.next_frame}, action {state.action_cursor}"
            )

    def _drive(self, batch: list[Run], phase: Phase) -> torch.Tensor:
        """Admit, plan, run and commit. Padding rows are at clock 0, take action 0 and are cut off the result."""
        resource, captured = self.resource, self.captured
        rids = tuple(run.request.rid for run in batch)
        step = FrameStep(frames=tuple((run.request.rid, run.next_frame) for run in batch))
        ctx = StepContext(request_ids=rids, padded_request_ids=None if captured is None else captured.padded(rids))
        outcome = resource.admit(step, ctx)
        if not outcome.ok:
            raise StepRefused(f"step refused: {outcome.reason}")
        resource.plan(step, ctx)
        model, device = captured or self.model, resource.device
        padding = len(ctx.row_ids) - len(batch)
        clocks = torch.tensor([run.next_frame for run in batch] + [0] * padding, dtype=torch.int64, device="cpu")
        if captured is None:  # else it compares them with the plan, which it could not on the device without waiting
            clocks = clocks.to(device)
        actions = torch.stack([run.request.actions[run.action_cursor] for run in batch])
        actions = F.pad(actions, (0, padding)).to(device)
        if phase == "context":
            frames = torch.stack([run.request.context[run.next_frame] for run in batch]).to(device)
            model.observe(resource, F.pad(frames, (0,) * 7 + (padding,)), actions, clocks)
        else:
            seeds = [run.request.seed for run in batch] + [0] * padding
            streams = [run.request.stream for run in batch] + [0] * padding
            frames = model.generate(resource, seeds, streams, actions, clocks)
        resource.commit(step, ctx)
        return frames[: len(batch)]


def _run_from(request: RolloutRequest, state: RolloutState | None, deadline: float) -> Run:
    """A run that begins where ``state`` stands."""
    if state is None:
        return Run(request, deadline=deadline)
    return Run(request, state, deadline=deadline, next_frame=state.next_frame, action_cursor=state.action_cursor)
