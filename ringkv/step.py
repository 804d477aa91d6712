"""What an engine says about one step, and what admission answers. Plain data; no torch.

Nothing is checked here: a malformed step is for ``admit`` to refuse, with a reason and without an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FrameStep:
    """The frame each request is at: ``(rid, frame)`` pairs, real rows only, one per request."""

    frames: Sequence[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The rows of the step batch.

    request_ids: the real rows, in batch order. padded_request_ids: the whole row list when the batch is padded to a
    captured size: ``request_ids`` in order, then dummy ids, which need not be registered; None without padding.
    """

    request_ids: Sequence[str]
    padded_request_ids: Sequence[str] | None = None

    @property
    def row_ids(self) -> tuple[str, ...]:
        """Ids of all rows, padding included."""
        return tuple(self.request_ids if self.padded_request_ids is None else self.padded_request_ids)


@dataclass(frozen=True)
class AdmitOutcome:
    """Whether a step may run.

    retryable: refused for now (the pool is full) and worth asking again; False means never as asked.
    reason: one line for a person, empty when ok. rid: the request that was refused, None when ok or when the step
    as a whole is malformed.
    """

    ok: bool
    retryable: bool = False
    reason: str = ""
    rid: str | None = None
