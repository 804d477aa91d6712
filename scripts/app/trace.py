"""A Chrome trace of a few steps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

TRACE_FILE = "trace.json"
TRACED_STEPS = 8


class StepTrace:
    """Profiles ``TRACED_STEPS`` steps from step ``first`` on, fewer if the run ends before; writes them to ``path``.

    A few steps, because a trace takes about a megabyte for each, and profiling slows what it watches: the latencies of
    those steps are not those of other steps.
    """

    def __init__(self, path: Path, first: int, device: torch.device) -> None:
        self._path = path
        self._first, self._last = first, first + TRACED_STEPS - 1
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = profile(activities=activities)
        self._running = False

    def before_step(self, step: int) -> None:
        """Start if this is the first step to watch."""
        if step == self._first and self._profile is not None:
            self._profile.start()
            self._running = True

    def after_step(self, step: int) -> None:
        """Stop and write if this was the last one."""
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """Stop and write what was watched. Idempotent."""
        finished, self._profile = self._profile, None
        if finished is not None and self._running:
            finished.stop()
            finished.export_chrome_trace(str(self._path))
