"""Drives many rollouts through one resource: queue, step, isolate failures, snapshot, resume.

``StepRunner`` knows the lifecycle and nothing about pixels or weights; a model joins by the two methods of
``FrameModel``. Each ``step()`` runs one frame of every ready request that is in the same phase: a context frame takes
one committing pass, a generated one its denoise passes and a committing one, so the two are separate batches. Queue,
phases and failures are ``FrameRunner``'s, which does not know how the past is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from ringkv import statefile
from ringkv.step import FrameStep, StepContext

if TYPE_CHECKING:
    from ringkv.resource import AttentionResource, State

Phase = Literal["context", "generated"]


class StepRefused(RuntimeError):
    """``admit`` turned a step down; the message says what is short."""


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


@dataclass(frozen=True, eq=False)
class RolloutRequest:
    """One rollout: frames ``0 .. num_frames - 1``, the first ``len(context)`` of them given.

    context: ``[n, C, H, W]``, n may be 0. actions: ``[num_frames]`` int64, entry f leading to frame f. Noise is drawn
    from (seed, stream), never from the session, the batch row or the rid.
    """

    rid: str
    seed: int
    stream: int
    num_frames: int
    context: torch.Tensor
    actions: torch.Tensor

    def __post_init__(self) -> None:
        if self.num_frames < 1:
            raise ValueError(f"request {self.rid!r} num_frames={self.num_frames}: expected at least 1")
        if self.context.dim() != 4:
            raise ValueError(
                f"request {self.rid!r} context has shape {list(self.context.shape)}: expected [n, C, H, W]"
            )
        if tuple(self.actions.shape) != (self.num_frames,) or self.actions.dtype != torch.int64:
            raise ValueError(
                f"request {self.rid!r} actions is {self.actions.dtype} {list(self.actions.shape)}: expected int64 "
                f"[{self.num_frames}], one for each frame"
            )


@dataclass(frozen=True, eq=False)
class RolloutState:
    """What a rollout needs to go on, taken between frames: an uncommitted frame is driven again from pass 0.

    cache: the resource's state. next_frame: clock of the next frame. action_cursor: index of its action in the
    request's list. fingerprint: of the model that wrote the cache.
    """

    cache: State
    seed: int
    stream: int
    next_frame: int
    action_cursor: int
    fingerprint: str

    _PLAIN = ("seed", "stream", "next_frame", "action_cursor", "fingerprint")

    def save(self, path: str | Path) -> None:
        """Write state and cache into one file, atomically."""
        statefile.write_state(path, self.cache, {"rollout": {name: getattr(self, name) for name in self._PLAIN}})

    @classmethod
    def read(cls, path: str | Path) -> RolloutState:
        """The state that ``save`` wrote. ``FileNotFoundError``, or ``ValueError`` for a file that is none."""
        cache, extra = statefile.read_state(path)
        plain: Any = extra.get("rollout")
        if not isinstance(plain, dict) or plain.keys() != set(cls._PLAIN):
            raise ValueError(f"{path}: a cache state without the rollout that goes with it")
        return cls(cache=cache, **plain)


@dataclass(frozen=True, eq=False)
class FrameResult:
    """One committed frame of one request. image: ``[C, H, W]``; a context frame's is the one that was given."""

    rid: str
    frame: int
    phase: Phase
    image: torch.Tensor


@dataclass(eq=False)
class Run:
    """Where one seated request stands. last_step: the step that it last took part in."""

    request: RolloutRequest
    next_frame: int = 0
    action_cursor: int = 0
    last_step: int = -1

    @property
    def phase(self) -> Phase:
        """What its next frame is."""
        return "context" if self.next_frame < len(self.request.context) else "generated"

    @property
    def finished(self) -> bool:
        """Whether all its frames are made."""
        return self.next_frame >= self.request.num_frames


class FrameRunner(ABC):
    """Runs requests frame by frame, however their past is kept.

    A request waits in a FIFO queue until there is room for it. One that raises is set aside in ``failed`` with what it
    has intact: ``retry`` drives the same frame again, ``cancel`` ends it. A finished one keeps its seat until the next
    ``step``.
    """

    def __init__(self, model: FrameModel) -> None:
        self.model = model
        self.failed: dict[str, Exception] = {}
        self._queue: deque[tuple[RolloutRequest, RolloutState | None]] = deque()
        self._runs: dict[str, Run] = {}
        self._steps = 0

    @property
    def pending(self) -> int:
        """Requests that still have frames to make and have not failed: queued and running."""
        return len(self._queue) + len(self._ready())

    @property
    def resident(self) -> tuple[str, ...]:
        """Requests that have a seat, in the order they got one."""
        return tuple(self._runs)

    def step(self) -> list[FrameResult]:
        """One frame of every ready request in the phase of the one that has waited longest; [] when none is ready."""
        for rid in [rid for rid, run in self._runs.items() if run.finished]:
            self.cancel(rid)
        self._seat_waiting()
        ready = self._ready()
        if not ready:
            return []
        self._steps += 1
        phase = min(ready, key=lambda run: run.last_step).phase
        batch = [run for run in ready if run.phase == phase]
        for run in batch:
            run.last_step = self._steps
        try:
            return self._advance(batch, phase)
        except Exception as error:
            if len(batch) == 1:
                self.failed[batch[0].request.rid] = error
                return []
        # Somebody's frame failed and nothing was committed: drive each alone, so that only the culprit is set aside.
        results = []
        for run in batch:
            try:
                results += self._advance([run], phase)
            except Exception as error:
                self.failed[run.request.rid] = error
        return results

    def retry(self, rid: str) -> None:
        """Let a failed request drive its frame again, from pass 0."""
        if self.failed.pop(rid, None) is None:
            raise ValueError(f"request {rid!r} has not failed: nothing to retry")

    def cancel(self, rid: str) -> None:
        """End a request wherever it is and give its seat back; an unknown rid is a no-op."""
        self._queue = deque(entry for entry in self._queue if entry[0].rid != rid)
        self._runs.pop(rid, None)
        self.failed.pop(rid, None)
        self._release(rid)

    # -- how the past is kept ----------------------------------------------------------------------------------

    @abstractmethod
    def _has_room(self) -> bool:
        """Whether one more request can be seated."""

    @abstractmethod
    def _seat(self, run: Run, state: RolloutState | None) -> None:
        """Make ``run`` ready for its first frame, or the one that ``state`` is at."""

    @abstractmethod
    def _release(self, rid: str) -> None:
        """Drop all that is kept for ``rid``, if anything is."""

    @abstractmethod
    def _drive(self, batch: list[Run], phase: Phase) -> torch.Tensor:
        """Make and commit one frame of each run of the batch, ``[B, C, H, W]``; raises with nothing committed."""

    # -- inside ------------------------------------------------------------------------------------------------

    def _require_new(self, rid: str) -> None:
        if rid in self._runs or any(queued.rid == rid for queued, _ in self._queue):
            raise ValueError(f"request {rid!r} is already queued or running")

    def _ready(self) -> list[Run]:
        return [run for rid, run in self._runs.items() if rid not in self.failed and not run.finished]

    def _seat_waiting(self) -> None:
        """Seat the head of the queue until there is no room. Strictly FIFO: nobody overtakes."""
        while self._queue and self._has_room():
            request, state = self._queue.popleft()
            run = self._runs[request.rid] = Run(request)
            try:
                self._seat(run, state)
            except Exception as error:
                self.failed[request.rid] = error

    def _advance(self, batch: list[Run], phase: Phase) -> list[FrameResult]:
        results = []
        for run, image in zip(batch, self._drive(batch, phase), strict=True):
            results.append(FrameResult(run.request.rid, run.next_frame, phase, image))
            run.next_frame += 1
            run.action_cursor += 1
        return results


class StepRunner(FrameRunner):
    """A ``FrameRunner`` over a resource: a seat is a session of its pool, and a state can be taken and resumed from.

    A failed request keeps its session and clock; a finished one its session until the next ``step``, so that its state
    can still be taken.
    """

    def __init__(self, resource: AttentionResource, model: FrameModel) -> None:
        super().__init__(model)
        self.resource = resource

    def submit(self, request: RolloutRequest, state: RolloutState | None = None) -> None:
        """Queue a rollout, from frame 0 or from a state that a model with the same weights took."""
        rid = request.rid
        self._require_new(rid)
        if state is not None:
            if state.fingerprint != self.model.fingerprint:
                raise ValueError(
                    f"request {rid!r} state was taken with model {state.fingerprint}: this one is "
                    f"{self.model.fingerprint}"
                )
            if (state.seed, state.stream) != (request.seed, request.stream):
                raise ValueError(
                    f"request {rid!r} seed={request.seed} stream={request.stream}: its state has seed={state.seed} "
                    f"stream={state.stream}"
                )
            left = request.num_frames - state.next_frame
            if left < 1 or state.action_cursor + left > len(request.actions):
                raise ValueError(
                    f"request {rid!r} num_frames={request.num_frames} with {len(request.actions)} actions: its state "
                    f"is at frame {state.next_frame}, action {state.action_cursor}"
                )
        self._queue.append((request, state))

    def state_of(self, rid: str) -> RolloutState:
        """A copy of where ``rid`` stands; ``ValueError`` if it holds no session."""
        if rid not in self._runs:
            raise ValueError(f"request {rid!r} holds no session: no state to take")
        run = self._runs[rid]
        return RolloutState(
            cache=self.resource.get_state(rid),
            seed=run.request.seed,
            stream=run.request.stream,
            next_frame=run.next_frame,
            action_cursor=run.action_cursor,
            fingerprint=self.model.fingerprint,
        )

    # -- how the past is kept ----------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        unclaimed = sum(self.resource.session_of(rid) is None for rid in self._runs)  # claimed at their first admit
        return self.resource.num_free_sessions > unclaimed

    def _seat(self, run: Run, state: RolloutState | None) -> None:
        rid = run.request.rid
        self.resource.ingest_request(rid)
        if state is not None:
            self.resource.load_state(rid, state.cache)
            run.next_frame, run.action_cursor = state.next_frame, state.action_cursor

    def _release(self, rid: str) -> None:
        self.resource.remove_request(rid)

    def _drive(self, batch: list[Run], phase: Phase) -> torch.Tensor:
        """Admit, plan, run and commit."""
        resource = self.resource
        step = FrameStep(frames=tuple((run.request.rid, run.next_frame) for run in batch))
        ctx = StepContext(request_ids=tuple(run.request.rid for run in batch))
        outcome = resource.admit(step, ctx)
        if not outcome.ok:
            raise StepRefused(f"step refused: {outcome.reason}")
        resource.plan(step, ctx)
        device = resource.device
        clocks = torch.tensor([run.next_frame for run in batch], dtype=torch.int64, device=device)
        actions = torch.stack([run.request.actions[run.action_cursor] for run in batch]).to(device)
        if phase == "context":
            frames = torch.stack([run.request.context[run.next_frame] for run in batch]).to(device)
            self.model.observe(resource, frames, actions, clocks)
        else:
            seeds, streams = [run.request.seed for run in batch], [run.request.stream for run in batch]
            frames = self.model.generate(resource, seeds, streams, actions, clocks)
        resource.commit(step, ctx)
        return frames
