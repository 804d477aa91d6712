"""What happens to the requests of a runner, as a stream that a caller can watch."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "queued",
    "seated",
    "parked",
    "not parked",
    "woken",
    "frame",
    "rewound",
    "finished",
    "failed",
    "cancelled",
    "deadline",
]
"""``queued``: waits for a seat. ``seated``: has one; a fork at once. ``parked``: its session is off the device, because
it was asked for or to make room; ``not parked``: it could not be, and keeps its seat. ``woken``: has a seat again.
``frame``: one more is made. ``finished``, ``cancelled`` and ``deadline`` end a request, ``failed`` sets it aside."""


@dataclass(frozen=True)
class Event:
    """time: by the runner's clock. frame: the one that was made, for any other kind the next one. reason: one line."""

    kind: Kind
    rid: str
    time: float
    frame: int
    reason: str = ""


class EventStream:
    """The events of a runner since ``watch`` or the last ``take``, in order. It grows until it is taken."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()

    def take(self) -> list[Event]:
        """What has happened since the last call."""
        events = list(self._events)
        self._events.clear()
        return events


class EventSource:
    """Tells every stream that is still referenced. clock: seconds, of any origin."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._streams: weakref.WeakSet[EventStream] = weakref.WeakSet()

    def watch(self) -> EventStream:
        """A new stream, which begins now."""
        stream = EventStream()
        self._streams.add(stream)
        return stream

    def tell(self, kind: Kind, rid: str, frame: int, reason: str = "") -> None:
        """Something has happened."""
        if self._streams:
            event = Event(kind, rid, self._clock(), frame, reason)
            for stream in self._streams:
                stream._events.append(event)
