"""Row data from the host into a device buffer that never moves, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a device's queue."""

    def record(self) -> Any:
        """Put the point at the end of the queue."""

    def synchronize(self) -> Any:
        """Wait until the device has passed it; at once if it was never recorded."""


class RowStaging:
    """``values`` ``[N, max_rows]`` int64 on ``device``: N integers for each row of a step, staged in place.

    A copy to an accelerator reads its host memory after the call has returned. So the host writes into ``depth`` pinned
    buffers in turn, and waits for a buffer's last copy before it fills it again: with a device that is ``depth`` steps
    behind it waits, and otherwise never. new_event: replaces the device's events in a test without one.
    """

    def __init__(
        self,
        num_values: int,
        max_rows: int,
        device: torch.device,
        *,
        depth: int = 4,
        new_event: Callable[[], Event] | None = None,
    ) -> None:
        self.values = torch.zeros(num_values, max_rows, dtype=torch.int64, device=device)
        cuda = device.type == "cuda"
        if cuda and new_event is None:
            new_event = torch.cuda.Event
        self._buffers: list[tuple[torch.Tensor, Event]] = []
        if new_event is not None:
            self._buffers = [
                (torch.zeros(num_values, max_rows, dtype=torch.int64, device="cpu", pin_memory=cuda), new_event())
                for _ in range(depth)
            ]
        self._puts = 0

    def put(self, *values: Sequence[int]) -> None:
        """Stage ``values[n][b]`` as value n of row b."""
        rows = torch.tensor(values, dtype=torch.int64, device="cpu")
        if not self._buffers:
            self.values[:, : rows.shape[1]].copy_(rows)
            return
        buffer, consumed = self._buffers[self._puts % len(self._buffers)]
        self._puts += 1
        consumed.synchronize()
        buffer[:, : rows.shape[1]] = rows
        # Whole, because a part of each line is not contiguous and would be copied through pageable memory.
        self.values.copy_(buffer, non_blocking=True)
        consumed.record()
