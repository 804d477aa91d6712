"""What happens when more requests come than there are sessions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ringkv.config import require_int

if TYPE_CHECKING:
    from ringkv.rollout import Run


class NoSeat(RuntimeError):
    """A request was refused because no seat is free; it was not queued."""


class Policy(Protocol):
    """How a runner gives out its seats. In every policy that queues, nobody overtakes one who wants a frame too."""

    name: str
    queues: bool
    """Whether a request that finds no seat waits for one; otherwise ``submit`` raises ``NoSeat``."""
    parks: bool
    """Whether ``victim`` may name somebody, which takes a resource that can park."""

    def victim(self, seated: Iterable[Run], ready: Collection[str] | None) -> Run | None:
        """Who gives up a seat to the one that waits longest, None for nobody.

        ready: requests that want a frame in this step, None for all.
        """


@dataclass(frozen=True)
class Refuse:
    """No queue: who finds no seat is told so at once."""

    name = "refuse"
    queues = False
    parks = False

    def victim(self, seated: Iterable[Run], ready: Collection[str] | None) -> Run | None:
        return None


@dataclass(frozen=True)
class Fifo:
    """One queue, and a seat is kept until the request ends."""

    name = "fifo"
    queues = True
    parks = False

    def victim(self, seated: Iterable[Run], ready: Collection[str] | None) -> Run | None:
        return None


@dataclass(frozen=True)
class LruPark:
    """One queue, and a seat is given up to whoever waits by the one that has been driven least recently.

    It must have failed, not want a frame now, or have made ``quantum_frames`` of them since it was seated; then it goes
    to the end of the line. So a seat comes free after that many frames at the latest, and nobody waits for ever.
    """

    quantum_frames: int = 16

    name = "lru_park"
    queues = True
    parks = True

    def __post_init__(self) -> None:
        require_int("LruPark", "quantum_frames", self.quantum_frames, 1)

    def victim(self, seated: Iterable[Run], ready: Collection[str] | None) -> Run | None:
        def can_go(run: Run) -> bool:
            idle = ready is not None and run.request.rid not in ready
            return idle or run.failed or run.seated_frames >= self.quantum_frames

        return min(filter(can_go, seated), key=lambda run: run.last_step, default=None)


POLICIES: dict[str, type[Refuse | Fifo | LruPark]] = {"refuse": Refuse, "fifo": Fifo, "lru_park": LruPark}


def policy_of(policy: str | Policy) -> Policy:
    """The policy of that name with its defaults, or ``policy`` itself."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
    return POLICIES[policy]()
