"""What a rollout is asked to be, where it stands, and what it needs to go on. Plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ringkv import statefile

if TYPE_CHECKING:
    from ringkv.resource import RestoreReport, State

Phase = Literal["context", "generated"]


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
    """Where one request of a runner stands.

    state: what it begins from once it is seated; foreign: that state may be of another geometry, restored: what became
    of it. deadline: seconds by the runner's clock. last_step: the step that it last took part in. seated_frames: made
    since it got its seat. failed: set aside by an exception. held: parked until it is asked for.
    """

    request: RolloutRequest
    state: RolloutState | None = None
    foreign: bool = False
    restored: RestoreReport | None = None
    deadline: float = math.inf
    next_frame: int = 0
    action_cursor: int = 0
    last_step: int = -1
    seated_frames: int = 0
    failed: bool = False
    held: bool = False

    @property
    def rid(self) -> str:
        """Its request's."""
        return self.request.rid

    @property
    def phase(self) -> Phase:
        """What its next frame is."""
        return "context" if self.next_frame < len(self.request.context) else "generated"

    @property
    def finished(self) -> bool:
        """Whether all its frames are made."""
        return self.next_frame >= self.request.num_frames
