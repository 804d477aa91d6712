"""Which rows of a step one operator can serve."""

from __future__ import annotations

from collections.abc import Sequence


def lockstep(views: Sequence[object], sessions: Sequence[int]) -> list[tuple[slice, slice]]:
    """Neighbours with equal ``views``, in evenly spaced sessions, as (rows, sessions) slices."""
    groups: list[tuple[slice, slice]] = []
    first = 0
    while first < len(views):
        last, step = first + 1, 1
        if last < len(views):
            step = max(1, sessions[last] - sessions[first])
        while last < len(views) and views[last] == views[first] and sessions[last] - sessions[last - 1] == step:
            last += 1
        groups.append((slice(first, last), slice(sessions[first], sessions[last - 1] + 1, step)))
        first = last
    return groups
