"""Clocks and memory of a run: how long a frame takes, and how many bytes the process held.

A number from here says what it includes. Time is read only after the device has finished its queue; warm-up (where
compilation and allocator growth land) and priming with context are kept apart from the frames that are measured.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil


class StepTime(NamedTuple):
    """One timed step. ms: its latency in milliseconds. warmup: whether it was kept out of the measured frames."""

    ms: float
    warmup: bool


class FrameMeter:
    """Times the steps of a rollout and sums them up per frame.

        meter = FrameMeter(synchronize, warmup=1, target_fps=20)
        meter.mark_start()
        for ...:
            meter.start()
            results = runner.step()
            latency_ms, warmup = meter.stop(frames=generated_rows)

    Every session of a step waits for the whole step, so the latency of a frame is the latency of its step; a step of
    n sessions counts as n frames with that latency. A step that generates nothing (``frames=0``) only primes the
    cache with context and is reported apart, under ``context/``. Of the steps that generate, the first ``warmup`` are
    reported apart, under ``warmup/``. What happens between ``stop`` and the next ``start`` is not timed.

    synchronize: waits until the device has finished what was queued (a no-op on a CPU); called before every reading
    of the clock. warmup: steps, at least 0. target_fps: frames per second and session that a viewer needs, above 0.
    clock: seconds, monotonic. ``ValueError`` for a ``warmup`` or ``target_fps`` outside its range.
    """

    def __init__(
        self,
        synchronize: Callable[[], None],
        *,
        warmup: int,
        target_fps: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
            raise ValueError(f"warmup={warmup!r}: expected an integer >= 0")
        if not (math.isfinite(target_fps) and target_fps > 0):
            raise ValueError(f"target_fps={target_fps!r}: expected a number > 0")
        self._synchronize = synchronize
        self._clock = clock
        self._warmup = warmup
        self._budget_ms = 1000.0 / target_fps
        self._origin: float | None = None
        self._started: float | None = None
        self._first_frame_ms: float | None = None
        self._context_ms: list[float] = []
        self._warmup_ms: list[float] = []
        self._step_ms: list[float] = []
        self._step_frames: list[int] = []

    def mark_start(self) -> None:
        """Mark the moment from which ``latency/first_frame_ms`` counts: the arrival of the first request."""
        self._origin = self._now()

    def start(self) -> None:
        """Begin a step. A step that was begun and never stopped (it raised) is dropped."""
        self._started = self._now()

    def stop(self, frames: int = 1) -> StepTime:
        """End the step that ``start`` began; ``frames`` is how many rows it generated, over all sessions, 0 or more.

        ``RuntimeError`` without a ``start``.
        """
        now = self._now()
        if self._started is None:
            raise RuntimeError("FrameMeter.stop() without start()")
        ms = (now - self._started) * 1000.0
        self._started = None
        if frames == 0:
            self._context_ms.append(ms)
            return StepTime(ms, False)
        if self._first_frame_ms is None and self._origin is not None:
            self._first_frame_ms = (now - self._origin) * 1000.0
        if len(self._warmup_ms) < self._warmup:
            self._warmup_ms.append(ms)
            return StepTime(ms, True)
        self._step_ms.append(ms)
        self._step_frames.append(frames)
        return StepTime(ms, False)

    @property
    def first_frame_ms(self) -> float | None:
        """``latency/first_frame_ms`` so far."""
        return self._first_frame_ms

    def restore(self, steps: Iterable[tuple[float, int, bool]], first_frame_ms: float | None) -> None:
        """Go on from what an earlier process measured: (ms, frames, warmup) of its steps, as of ``stop``."""
        self._first_frame_ms = first_frame_ms
        for ms, frames, warmup in steps:
            if frames == 0:
                self._context_ms.append(ms)
            elif warmup:
                self._warmup_ms.append(ms)
            else:
                self._step_ms.append(ms)
                self._step_frames.append(frames)

    def summary(self) -> dict[str, float | int | None]:
        """The run in numbers, None where no frame was measured; ``records.SUMMARY_COLUMNS`` says what each key means.

        Percentiles interpolate linearly. ``latency/jitter_ms`` is the standard deviation of the frame latencies: it
        rests on every frame, whereas p99 - p50 rests on one or two of the few hundred frames of a run.
        """
        frame_ms = np.repeat(np.asarray(self._step_ms, dtype=np.float64), self._step_frames)
        measured_s = sum(self._step_ms) / 1000.0
        p50, p95, p99 = np.percentile(frame_ms, [50, 95, 99]).tolist() if frame_ms.size else (None, None, None)
        return {
            "throughput/frames_per_s": frame_ms.size / measured_s if measured_s > 0 else None,
            "latency/frame_ms_mean": float(frame_ms.mean()) if frame_ms.size else None,
            "latency/frame_ms_p50": p50,
            "latency/frame_ms_p95": p95,
            "latency/frame_ms_p99": p99,
            "latency/jitter_ms": float(frame_ms.std()) if frame_ms.size else None,
            "latency/first_frame_ms": self._first_frame_ms,
            "latency/on_time_fraction": float((frame_ms <= self._budget_ms).mean()) if frame_ms.size else None,
            "steps/measured": len(self._step_ms),
            "frames/measured": int(frame_ms.size),
            "warmup/steps": len(self._warmup_ms),
            "warmup/ms_total": sum(self._warmup_ms),
            "warmup/ms_max": max(self._warmup_ms, default=None),
            "context/steps": len(self._context_ms),
            "context/ms_total": sum(self._context_ms),
        }

    def _now(self) -> float:
        self._synchronize()
        return self._clock()


class PeakRss:
    """Resident memory of this process in bytes, shared libraries (torch) included.

    The peak is the highest resident size since the process began its program: on Linux the kernel's high-water mark
    VmHWM, which misses nothing between two readings and counts pages that were since given back. ``ru_maxrss`` is
    not used there: it survives exec, so a small child of a big supervisor would report its parent's peak. Where
    /proc has no VmHWM, it is ``ru_maxrss``, or the highest reading so far if that is larger.
    """

    def __init__(self, status_file: Path = Path("/proc/self/status")) -> None:
        self._status_file = status_file
        self._process = psutil.Process()
        self._highest_reading = 0
        self.current_bytes()

    def current_bytes(self) -> int:
        """Resident bytes now."""
        reading = int(self._process.memory_info().rss)
        self._highest_reading = max(self._highest_reading, reading)
        return reading

    def peak_bytes(self) -> int:
        """Highest resident bytes since the process began, never below an earlier reading."""
        self.current_bytes()
        return max(self._highest_reading, self._kernel_peak_bytes())

    def _kernel_peak_bytes(self) -> int:
        try:
            for line in self._status_file.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        try:
            import resource
        except ImportError:  # Windows
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
