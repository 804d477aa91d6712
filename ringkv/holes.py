"""Frames that a session has a place for and no content: what a restore could not find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from ringkv import layout


class Holes:
    """By session and layer, for strategies that keep frames in frame order. Empty in ordinary use."""

    def __init__(self, geometry: Mapping[str, Any]) -> None:
        self._geometry = geometry
        self._frames: dict[int, list[set[int]]] = {}

    def put(self, session: int, holes: Sequence[Set[int]]) -> None:
        """Set the holes of each layer of a session that has none."""
        if any(holes):
            self._frames[session] = [set(frames) for frames in holes]

    def of(self, session: int, layer_idx: int) -> Set[int]:
        """The holes of one layer of a session."""
        return self._frames[session][layer_idx] if session in self._frames else frozenset()

    def by_session(self, layer_idx: int) -> dict[int, Set[int]]:
        """The holes of one layer, of the sessions that have any in some layer."""
        return {session: layers[layer_idx] for session, layers in self._frames.items()}

    def prune(self, session: int, clock: int | None) -> None:
        """Forget those that have no place any more once ``clock`` is the last committed frame."""
        if session in self._frames:
            for index, frames in enumerate(self._frames[session]):
                frames.intersection_update(layout.places(self._geometry, index, clock))
            if not any(self._frames[session]):
                del self._frames[session]

    def drop(self, session: int) -> None:
        """Forget those of a session."""
        self._frames.pop(session, None)
